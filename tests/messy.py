"""Small factories of image files and of folders as people have them. Everything is generated."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def picture(width: int = 60, height: int = 40, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A smooth picture with some noise, different in all four corners, so that every turn shows."""
    y, x = np.mgrid[0:height, 0:width]
    wave = [
        128 + 100 * np.sin(x / 9 + y / 13 + seed),
        128 + 100 * np.cos(x / 7 - y / 30),
        (255 * x / width + y) % 256,
    ]
    noise = np.random.default_rng(seed).normal(0, 8, (height, width, 3))
    return Image.fromarray((np.stack(wave, -1) + noise).clip(0, 255).astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, bits: int, colour: int, rows: list[bytes], *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG by hand: what Pillow cannot write (16-bit colour, transparent colours of odd depths)."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    extra = b"".join(chunk(name, data) for name, data in chunks)
    pixels = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + header + extra + pixels + chunk(b"IEND", b"")


def put(path: Path, data: bytes | str) -> Path:
    """Write a file, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def make_folder(path: Path, classes=("cat", "dog"), count: int = 5, seed: int = 0) -> Path:
    """A clean folder: ``count`` different small JPEGs a class."""
    for c, name in enumerate(classes):
        for i in range(count):
            put(path / name / f"{i}.jpg", encoded(picture(24, 16, seed + 100 * c + i)))
    return path


def make_messy_folder(path: Path) -> dict:
    """One folder with ``train`` and ``val`` and all that goes wrong in such folders.

    Returns ``classes``; ``train`` and ``val`` (path to class name) of the usable images; ``problems`` (path to a
    word of the reason); ``ignored`` (reason to count). Paths are from ``path``.
    """
    path, good = Path(path), encoded(picture())
    train, val = {}, {}
    exif = Image.Exif()
    exif[0x0112] = 6
    usable = {
        "train/cat/plain.jpg": good,
        "train/cat/LOUD.JPG": encoded(picture(seed=1)),
        "train/cat/photo.jfif": encoded(picture(seed=2)),
        "train/cat/turned.jpg": encoded(picture(seed=3), exif=exif),
        "train/cat/really_png.jpg": encoded(picture(seed=4), "PNG"),
        "train/cat/no_extension": encoded(picture(seed=5)),
        "train/cat/deep/er/grey16.png": encoded(Image.fromarray(np.full((4, 4), 40000, np.uint16)), "PNG"),
        "train/dog/clear.png": encoded(picture(seed=6, mode="RGBA"), "PNG"),
        "train/dog/cmyk.jpg": encoded(picture(seed=7, mode="CMYK")),
        "train/dog/anim.gif": encoded(picture(seed=8), "GIF", save_all=True, append_images=[picture(seed=9)]),
        "train/dog/photo.webp": encoded(picture(seed=10), "WEBP"),
        "train/dog/odd.download": encoded(picture(seed=11), "PNG"),
        "val/cat/a.jpg": encoded(picture(seed=20)),
        "val/dog/b.jpg": encoded(picture(seed=21)),
        "val/dog/twin_of_train.jpg": good,
    }
    for name, data in usable.items():
        put(path / name, data)
        (train if name.startswith("train") else val)[name] = name.split("/")[1]
    broken = {
        "train/cat/cut.jpg": (good[: len(good) // 2], "cut short"),
        "train/cat/empty.jpg": (b"", "empty"),
        "train/cat/page.jpg": (b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
        "train/dog/zipped.jpg": (gzip.compress(good), "gzip"),
        "val/cat/cut.png": (encoded(picture(seed=22), "PNG")[:300], "cut short"),
    }
    for name, (data, _) in broken.items():
        put(path / name, data)
    problems = {name: reason for name, (_, reason) in broken.items()}
    ignored = {
        "macOS sidecar": ["train/cat/._plain.jpg", "val/dog/._b.jpg"],
        "hidden file": ["train/.DS_Store", ".DS_Store"],
        "system file": ["train/cat/Thumbs.db", "train/dog/desktop.ini"],
        ".txt file": ["train/cat/notes.txt"],
        ".json file": ["train/dog/labels.json"],
        "image outside any class folder": ["train/flat.jpg"],
    }
    for names in ignored.values():
        for name in names:
            put(path / name, good if "flat" in name else b"{}")
    hidden = {
        "hidden folder": ["train/.ipynb_checkpoints", "train/cat/.ipynb_checkpoints", ".git"],
        "system folder": ["train/__MACOSX", "train/dog/@eaDir"],
    }
    for names in hidden.values():
        for name in names:
            put(path / name / "copy.jpg", good)
    counts = {reason: len(names) for reason, names in (ignored | hidden).items()}
    if hasattr(os, "mkfifo"):
        os.mkfifo(path / "train/cat/pipe.jpg")
        counts["not a regular file"] = 1
    if os.name != "nt":
        (path / "train/dog/broken.jpg").symlink_to("nowhere.jpg")
        (path / "train/cat/circle.jpg").symlink_to("circle.jpg")
        (path / "train/cat/loop").symlink_to("..")
        (path / "train/cat/again.jpg").symlink_to("plain.jpg")
        problems |= {"train/dog/broken.jpg": "broken link", "train/cat/circle.jpg": "broken link"}
        counts["folder reached before through a link"] = counts["link to a file that is counted already"] = 1
    return {"classes": ("cat", "dog"), "train": train, "val": val, "problems": problems, "ignored": counts}
