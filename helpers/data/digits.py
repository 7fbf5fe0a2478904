"""The course's own data: 1,797 real handwritten digits, rendered once into an image folder a camera could have
filled.

`ensure_digits()` returns the folder `train/0..9/*.jpg`, `val/0..9/*.jpg` and makes it at first use. Every image is
drawn from a generator of its own, keyed by (seed, split, image number), so the bytes do not depend on order or
threads. The folder appears by one rename, when it is complete: an interrupted run leaves nothing that looks
finished.
"""

import contextlib
import errno
import fcntl
import gzip
import io
import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import PIL
from PIL import Image, ImageFilter

from helpers.bars import progress_bar
from helpers.errors import InputError

VERSION = 1  # of the renderer: raise it whenever a seed gives other pictures, so that old folders are made anew
REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "data" / "optdigits.csv.gz"
DEFAULT = (0, 2400, 600)  # seed, train, val of the folder that is simply called "digits"
SPLITS = ("train", "val")

# Calm surfaces: mean colour, strength of the texture, how far it is drawn out along x (wood has a grain, paper has
# none).
SURFACES = (
    ((233, 230, 221), 4, 1),  # white paper
    ((243, 238, 226), 3, 1),  # cream paper
    ((199, 168, 126), 8, 2),  # cardboard
    ((186, 146, 106), 12, 8),  # wooden desk
    ((206, 178, 140), 10, 6),  # light wood
    ((176, 178, 178), 7, 1),  # concrete
    ((240, 224, 132), 4, 1),  # yellow note
    ((236, 184, 190), 4, 1),  # pink note
    ((182, 208, 226), 4, 1),  # blue note
)
PENS = ((26, 28, 34), (30, 46, 118), (142, 28, 36), (20, 80, 52), (76, 42, 26))
BOARDS = (((44, 66, 56), 6, 2), ((48, 52, 60), 5, 1))  # a few images are chalk on a board: light on dark
CHALKS = ((236, 234, 226), (240, 224, 150))
BOARD_SHARE = 0.08
GRID = 40  # the surface and its light are computed on GRID x GRID cells and enlarged: that is what makes it fast


# ---- one picture ----------


def load_source() -> tuple[np.ndarray, np.ndarray]:
    """The digits as uint8 [1797, 8, 8] with values 0..16, and their labels."""
    try:
        with gzip.open(SOURCE, "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    except OSError as error:
        raise InputError(
            f"cannot read {SOURCE} ({error}): use the package from a checkout of the repository"
        ) from error
    return table[:, :64].reshape(-1, 8, 8), table[:, 64]


def make_grain(seed: int, side: int = 640) -> np.ndarray:
    """Sensor noise and paper fibre, unit variance: drawn once, each picture cuts its own window (drawing costs 1
    ms each)."""
    noise = np.random.default_rng([seed, 9]).standard_normal((side, side), dtype=np.float32)
    fibre = np.asarray(
        Image.fromarray(noise).resize((side // 2, side // 2)).resize((side, side), Image.Resampling.BICUBIC)
    )
    grain = 0.7 * noise + fibre
    return grain / grain.std()


def _enlarge(field: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(field).resize((GRID, GRID), Image.Resampling.BICUBIC))


def _surface(
    rng: np.random.Generator, colour: tuple, strength: float, stretch: int, size: tuple[int, int]
) -> Image.Image:
    coarse = _enlarge(rng.standard_normal((5, 5), dtype=np.float32))
    fine = _enlarge(rng.standard_normal((GRID, GRID // stretch), dtype=np.float32))
    texture = coarse + 0.8 * fine
    if rng.random() < 0.5:
        texture = texture.T
    y, x = np.mgrid[-1 : 1 : GRID * 1j, -1 : 1 : GRID * 1j].astype(np.float32)
    lamp, edge = rng.uniform(0, 2 * math.pi, 2)
    light = 1 + rng.uniform(0.02, 0.16) * (x * math.cos(lamp) + y * math.sin(lamp))
    light -= rng.uniform(0, 0.12) * (x * x + y * y)  # vignette
    if rng.random() < 0.3:  # somebody stands in the light
        across = x * math.cos(edge) + y * math.sin(edge) - rng.uniform(-0.6, 0.6)
        light -= rng.uniform(0.06, 0.2) / (1 + np.exp(-across / rng.uniform(0.05, 0.3)))
    tint = np.asarray(colour, np.float32) + rng.normal(0, 5, 3).astype(np.float32)
    pixels = (tint + strength * texture[..., None]) * (light * rng.uniform(0.82, 1.04))[..., None]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)


def _stroke(rng: np.random.Generator, digit: np.ndarray, side: float) -> Image.Image:
    """The digit as a mask of ink, `side` pixels for its eight cells: enlarged, turned, sheared, thresholded
    softly."""
    cells = Image.fromarray(np.pad(digit * np.uint8(15), 2)).resize((96, 96), Image.Resampling.BICUBIC)
    cells = cells.filter(
        ImageFilter.UnsharpMask(radius=10, percent=100, threshold=0)
    )  # keeps holes open, thin strokes whole
    box = math.ceil(side * 1.4)
    turn, shear = math.radians(rng.uniform(-14, 14)), rng.uniform(-0.15, 0.15)
    sx, sy = 64 / side * rng.uniform(0.9, 1.12, 2)
    a, b, c, d = sx * math.cos(turn), sx * (math.sin(turn) + shear), -sy * math.sin(turn), sy * math.cos(turn)
    matrix = (a, b, 48 - (a + b) * box / 2, c, d, 48 - (c + d) * box / 2)
    mask = cells.transform((box, box), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    level, soft, opacity = rng.uniform(80, 120), rng.uniform(15, 50), rng.uniform(0.65, 1)
    ramp = ((np.arange(256) - level) / (2 * soft) + 0.5).clip(0, 1)
    return mask.point((ramp * 255 * opacity).astype(np.uint8).tolist())


def paint(digit: np.ndarray, rng: np.random.Generator, grain: np.ndarray) -> tuple[Image.Image, int]:
    """One photograph of one digit, and the JPEG quality to store it with."""
    long = int(rng.integers(200, 501))
    short = max(160, int(long * rng.choice((1, 0.8, 0.75, 0.667, 0.6))))
    width, height = (long, short) if rng.random() < 0.5 else (short, long)
    board = rng.random() < BOARD_SHARE
    grounds, inks = (BOARDS, CHALKS) if board else (SURFACES, PENS)
    image = _surface(rng, *grounds[rng.integers(len(grounds))], (width, height))
    mask = _stroke(rng, digit, short * rng.uniform(0.5, 0.76))
    dx, dy = rng.uniform(-0.08, 0.08, 2)
    corner = int(width * (0.5 + dx) - mask.width / 2), int(height * (0.5 + dy) - mask.height / 2)
    image.paste(inks[rng.integers(len(inks))], corner, mask)
    if rng.random() < 0.4:  # slightly out of focus
        image = image.filter(ImageFilter.BoxBlur(rng.uniform(0.3, 1.2)))
    top, left = rng.integers(0, grain.shape[0] - np.array((height, width)) + 1)
    pixels = np.asarray(image) + rng.uniform(3, 7) * grain[top : top + height, left : left + width, None]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), int(rng.integers(80, 93))


# ---- the folder ----------


def plan(labels: np.ndarray, seed: int, counts: dict[str, int]) -> dict[str, tuple[int, str]]:
    """Relative path -> (source digit, split), in a fixed order. A fifth of each class's sources is kept for val
    alone."""
    files = {}
    for label in range(10):
        sources = np.random.default_rng([seed, 8, label]).permutation(np.flatnonzero(labels == label))
        cut = round(len(sources) / 5)
        for split, own in (("train", sources[cut:]), ("val", sources[:cut])):
            for n in range(counts[split] // 10 + (label < counts[split] % 10)):
                source = int(own[n % len(own)])
                files[f"{split}/{label}/d{source:04d}_{n // len(own)}.jpg"] = (source, split)
    return files


def _threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _render(folder: Path, seed: int, counts: dict[str, int], progress: bool) -> None:
    digits, labels = load_source()
    grain = make_grain(seed)
    files = plan(labels, seed, counts)
    for split in SPLITS:
        for label in range(10):
            (folder / split / str(label)).mkdir(parents=True)

    def write(job: tuple[int, str]) -> int:
        number, path = job
        source, split = files[path]
        image, quality = paint(digits[source], np.random.default_rng([seed, SPLITS.index(split), number]), grain)
        data = (
            io.BytesIO()
        )  # not straight to the file: Pillow does not notice a short write on a full disk, Python does
        image.save(data, "JPEG", quality=quality)
        return (folder / path).write_bytes(data.getbuffer())

    # Threads are enough: numpy and Pillow let go of the interpreter for most of an image (1.75 times as fast on
    # two cores).
    pool = ThreadPoolExecutor(_threads())
    try:
        sizes = pool.map(write, enumerate(files))
        sizes = progress_bar(sizes, show=progress, total=len(files), desc="rendering digits", unit="image")
        made = {"version": VERSION, "seed": seed, **counts, "pillow": PIL.__version__, "numpy": np.__version__}
        made["files"] = dict(zip(files, sizes, strict=True))
    finally:
        pool.shutdown(cancel_futures=True)  # also on Ctrl-C: nobody writes any more when the caller removes the folder
    (folder / "manifest.json").write_text(json.dumps(made, separators=(",", ":")))


def _walk(folder: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry), f"{prefix}{entry.name}/")
            else:
                yield prefix + entry.name, entry.stat(follow_symlinks=False).st_size


def _lacking(folder: Path, settings: dict[str, int]) -> str:
    """Why the folder must be rendered ("" if it is whole). InputError if something in it is not ours to
    replace."""
    if not os.path.lexists(folder):
        return "not there yet"
    try:
        made = json.loads((folder / "manifest.json").read_text())
        files, version = dict(made["files"]), made["version"]
        if any(made[name] != value for name, value in settings.items()):
            raise ValueError("other settings")
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{folder} is not a folder that the course rendered (see its manifest.json): move it away"
        ) from None
    found = dict(_walk(folder))
    wrong = [path for path in files if found.get(path) != files[path]]
    if version != VERSION:
        wrong = list(files)
    # A file manager's hidden files may lie in a whole folder, but nothing that is not ours is deleted with a
    # broken one.
    foreign = [path for path in found.keys() - files.keys() - {"manifest.json"} if wrong or Path(path).name[0] != "."]
    if foreign:
        raise InputError(f"{min(foreign)} in {folder} is not one of the rendered images: move it away")
    return f"{len(wrong)} of {len(files)} images missing, changed or outdated, first {wrong[0]}" if wrong else ""


@contextlib.contextmanager
def _writing(root: Path, lock: str) -> Iterator[None]:
    """One process at a time writes; what the file system refuses becomes one line that says what to do."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with open(root / lock, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process, however that ends
            yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(
                f"no space left in {root}: free some, or set COURSE_DATA to a folder with 100 MB free"
            ) from error
        reason = error.strerror or error
        raise InputError(f"cannot write in {root} ({reason}): set COURSE_DATA to a folder you can write in") from error


def ensure_digits(
    root: Path | None = None, *, seed: int = 0, train: int = 2400, val: int = 600, progress: bool = True
) -> Path:
    """The finished image folder below `root` (COURSE_DATA, or the repository's data folder), rendered if it is not
    there.

    Other settings than the default ones get a folder of their own, named for them.
    """
    if seed < 0 or min(train, val) < 10:
        raise InputError(
            f"seed {seed}, {train} + {val} digits: the seed must not be negative, each split needs 10 images"
        )
    root = Path(root or os.environ.get("COURSE_DATA") or REPOSITORY / "data").expanduser().resolve()
    name = "digits" if (seed, train, val) == DEFAULT else f"digits-s{seed}-{train}x{val}"
    folder, settings = root / name, {"seed": seed, "train": train, "val": val}
    if not _lacking(folder, settings):
        return folder
    with _writing(root, f".{name}.lock"):
        lacking = _lacking(folder, settings)  # again: another process may have finished it while this one waited
        if not lacking:
            return folder
        for stale in root.glob(
            f".{name}.part-*"
        ):  # whoever holds the lock is the only one at work, so their makers are gone
            shutil.rmtree(stale, ignore_errors=True)
        if folder.exists():
            print(f"{folder}: {lacking}; rendering anew")
        part, old = (root / f".{name}.part-{secrets.token_hex(4)}" for _ in range(2))
        try:
            part.mkdir()
            _render(part, seed, {"train": train, "val": val}, progress)
            if folder.exists():
                _lacking(folder, settings)  # again: stops at a file that the reader put there in the meantime
                folder.rename(old)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    return folder


if __name__ == "__main__":
    try:
        print(ensure_digits())
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
