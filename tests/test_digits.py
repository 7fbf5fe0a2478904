"""The rendered digits: the same bytes for a seed, nothing half-made, nothing of the reader's touched."""

import errno
import gzip
import hashlib
import io
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.data import digits
from helpers.errors import InputError

SMALL = {"train": 40, "val": 20, "progress": False}
NAME = "digits-s0-40x20"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return digits.ensure_digits(tmp_path_factory.mktemp("data"), train=120, val=50, progress=False)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


# ---- the pictures ----------


def test_the_source_is_the_published_file():
    packed = digits.SOURCE.read_bytes()
    assert hashlib.sha256(packed).hexdigest() == "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
    assert hashlib.sha256(packed).hexdigest() in digits.SOURCE.with_name("README.md").read_text()
    assert len(gzip.decompress(packed).splitlines()) == 1797
    images, labels = digits.load_source()
    assert images.shape == (1797, 8, 8) and images.max() == 16
    assert Counter(labels.tolist()).keys() == set(range(10))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bytes_with_any_number_of_threads(tmp_path, monkeypatch, threads):
    reference = digits.ensure_digits(tmp_path / "reference", **SMALL)
    monkeypatch.setattr(digits, "_threads", lambda: threads)
    assert content(digits.ensure_digits(tmp_path / "again", **SMALL)) == content(reference)


@pytest.mark.parametrize("split", [0, 1])
def test_an_image_depends_on_seed_split_and_number_only(made, split):
    images, labels = digits.load_source()
    files = list(digits.plan(labels, 0, {"train": 120, "val": 50}).items())
    number, (path, (source, name)) = next(
        (n, file) for n, file in enumerate(files) if file[1][1] == digits.SPLITS[split]
    )
    image, quality = digits.paint(images[source], np.random.default_rng([0, split, number]), digits.make_grain(0))
    alone = io.BytesIO()
    image.save(alone, "JPEG", quality=quality)
    assert path.startswith(name) and (made / path).read_bytes() == alone.getvalue()


def test_another_seed_gives_other_pictures_in_a_folder_of_its_own(tmp_path):
    first, second = (digits.ensure_digits(tmp_path, seed=seed, **SMALL) for seed in (0, 1))
    assert left(tmp_path) == [NAME, "digits-s1-40x20"] == [first.name, second.name]
    assert not set(content(first).values()) & set(content(second).values())


def test_no_source_digit_in_both_splits_and_every_label_is_right():
    labels = digits.load_source()[1]
    files = digits.plan(labels, 0, {"train": 2400, "val": 600})
    assert Counter(split for _, split in files.values()) == {"train": 2400, "val": 600}
    sources = {"train": set(), "val": set()}
    for path, (source, split) in files.items():
        folder, label, name = path.split("/")
        assert folder == split and labels[source] == int(label) and name.startswith(f"d{source:04d}_")
        sources[split].add(source)
    assert not sources["train"] & sources["val"]
    assert (len(sources["train"]), len(sources["val"])) == (1438, 359)  # every digit is used
    for split, each in (("train", 240), ("val", 60)):
        assert set(Counter(path.split("/")[1] for path in files if path.startswith(split)).values()) == {each}


def test_the_folder_holds_what_was_planned(made):
    paths = [path for path in content(made) if path.endswith(".jpg")]
    sources = {
        split: {path.split("/d")[1][:4] for path in paths if path.startswith(split)} for split in ("train", "val")
    }
    assert not sources["train"] & sources["val"]
    assert set(paths) == set(digits.plan(digits.load_source()[1], 0, {"train": 120, "val": 50}))


def test_photographs_of_many_sizes(made):
    shapes, sizes = Counter(), []
    for path in made.rglob("*.jpg"):
        with Image.open(path) as image:
            image.load()
            assert (image.format, image.mode) == ("JPEG", "RGB")
            assert min(image.size) >= 160 and max(image.size) <= 500
            shapes[(image.width > image.height) - (image.width < image.height)] += 1
            assert np.asarray(image).std() > 5  # a blank sheet would decode as well
        sizes.append(path.stat().st_size)
    assert min(shapes[shape] for shape in (-1, 0, 1)) >= 15, shapes  # portrait, square, landscape of 170
    assert 12_000 < np.mean(sizes) < 30_000


def test_the_ink_is_where_the_digit_is():
    """Each picture shows its own digit: more ink inside the strokes than beside them, whatever the pen."""
    images, grain, seen = digits.load_source()[0], digits.make_grain(0), 0
    for index in range(100):
        image, _ = digits.paint(images[index], np.random.default_rng([0, 0, index]), grain)
        side = min(image.size) * 0.63
        box = [
            (image.width - side) / 2,
            (image.height - side) / 2,
            (image.width + side) / 2,
            (image.height + side) / 2,
        ]
        small = np.asarray(image.convert("L").resize((8, 8), Image.Resampling.BOX, box=box), np.float32)
        seen += (
            abs(np.corrcoef(small.ravel(), images[index].ravel())[0, 1]) > 0.3
        )  # moved and turned: only roughly the same
    assert seen >= 90


# ---- whole or not at all ----------


def test_a_whole_folder_is_left_alone(tmp_path, monkeypatch, capsys):
    folder = digits.ensure_digits(tmp_path, **SMALL)
    assert folder == tmp_path / NAME and left(tmp_path) == [NAME]
    monkeypatch.setattr(digits, "_render", None)
    assert digits.ensure_digits(tmp_path, **SMALL) == folder
    (folder / ".DS_Store").touch()  # a file manager's, not a reason to stop
    assert digits.ensure_digits(tmp_path, **SMALL) == folder
    assert capsys.readouterr() == ("", "")


def test_a_bar_only_when_asked(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    digits.ensure_digits(tmp_path, **SMALL)
    assert capfd.readouterr() == ("", "")
    digits.ensure_digits(tmp_path, **SMALL | {"progress": True, "train": 41})
    said = capfd.readouterr()
    assert said.out == "" and "rendering digits" in said.err


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [delete, truncate])
def test_a_damaged_folder_is_made_anew_and_says_so(tmp_path, capsys, damage):
    folder = digits.ensure_digits(tmp_path, **SMALL)
    whole = content(folder)
    damage(folder / min(path for path in whole if path.startswith("val/3")))
    digits.ensure_digits(tmp_path, **SMALL)
    said = capsys.readouterr()
    assert said.err == "" and said.out.count("\n") == 1 and "1 of 60 images" in said.out and "val/3/d" in said.out
    assert content(folder) == whole and left(tmp_path) == [NAME]


def test_pictures_of_an_older_renderer_are_made_anew(tmp_path, monkeypatch):
    folder = digits.ensure_digits(tmp_path, **SMALL)
    monkeypatch.setattr(digits, "VERSION", digits.VERSION + 1)
    digits.ensure_digits(tmp_path, **SMALL)
    assert json.loads((folder / "manifest.json").read_text())["version"] == digits.VERSION


@pytest.mark.parametrize(
    ("name", "also_damaged"),
    [
        ("train/3/mine.jpg", False),
        ("train/3/mine.jpg", True),
        ("notes.txt", False),
        ("notes.txt", True),
        ("new/.hidden", True),
    ],
)
def test_a_file_of_the_readers_is_never_deleted(tmp_path, name, also_damaged):
    folder = digits.ensure_digits(tmp_path, **SMALL)
    mine = folder / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    if also_damaged:
        next(folder.glob("val/0/*.jpg")).unlink()
    with pytest.raises(InputError, match=f"{name} in .* move it away"):
        digits.ensure_digits(tmp_path, **SMALL)
    assert mine.read_text() == "mine"


def test_a_file_that_comes_while_it_renders_is_not_deleted_either(tmp_path, monkeypatch):
    folder = digits.ensure_digits(tmp_path, **SMALL)
    next(folder.glob("val/0/*.jpg")).unlink()
    real = digits._render

    def meanwhile(*arguments):
        real(*arguments)
        (folder / "notes.txt").write_text("mine")

    monkeypatch.setattr(digits, "_render", meanwhile)
    with pytest.raises(InputError, match=r"notes\.txt in"):
        digits.ensure_digits(tmp_path, **SMALL)
    assert (folder / "notes.txt").read_text() == "mine" and left(tmp_path) == [NAME]


@pytest.mark.parametrize(
    "manifest",
    [
        None,
        "",
        "[]",
        '{"files": {}}',
        '{"version": 1, "seed": 5, "train": 40, "val": 20, "files": {"train/cat.jpg": 5}}',
    ],
)
def test_a_foreign_folder_is_refused(tmp_path, manifest):
    folder = tmp_path / NAME
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "cat.jpg").write_text("a cat")
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    before = content(folder)
    with pytest.raises(InputError, match="move it away"):
        digits.ensure_digits(tmp_path, **SMALL)
    assert content(folder) == before and left(tmp_path) == [NAME]


def test_the_check_is_quick(tmp_path):
    """3,000 files in well under the time of one training step; the bound leaves room for a busy machine."""
    folder = tmp_path / "digits"
    files = digits.plan(digits.load_source()[1], 0, {"train": 2400, "val": 600})
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    made = {"version": digits.VERSION, "seed": 0, "train": 2400, "val": 600, "files": dict.fromkeys(files, 0)}
    (folder / "manifest.json").write_text(json.dumps(made))
    took = []
    for _ in range(5):
        start = time.perf_counter()
        assert digits.ensure_digits(tmp_path, progress=False) == folder
        took.append(time.perf_counter() - start)
    assert min(took) < 0.15


# ---- accidents ----------


@pytest.mark.parametrize("accident", [KeyboardInterrupt(), RuntimeError("bug"), OSError(errno.ENOSPC, "No space left")])
def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch, accident):
    real, calls = digits.paint, []

    def breaks(*arguments):
        calls.append(arguments)
        if len(calls) == 25:
            raise accident
        time.sleep(0.02)  # the others must be called off, not just finish first
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(digits, "paint", breaks)
        expected = InputError if isinstance(accident, OSError) else type(accident)
        with pytest.raises(expected) as caught:
            digits.ensure_digits(tmp_path, **SMALL)
    assert left(tmp_path) == []
    assert len(calls) < 60 and not [thread for thread in threading.enumerate() if "ThreadPoolExecutor" in thread.name]
    if expected is InputError:
        assert "no space left" in str(caught.value) and "\n" not in str(caught.value)
    assert len(content(digits.ensure_digits(tmp_path, **SMALL))) == 61


def test_an_interrupt_beside_the_pool_calls_the_pool_off(tmp_path, monkeypatch):
    """Ctrl-C may arrive while the bar is drawn, where the pool does not notice it by itself."""
    real, calls = digits.paint, []

    def slow(*arguments):
        calls.append(arguments)
        time.sleep(0.02)
        return real(*arguments)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(digits, "paint", slow)
    monkeypatch.setattr(digits, "zip", interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt):
        digits.ensure_digits(tmp_path, **SMALL)
    assert left(tmp_path) == [] and len(calls) < 40


CHILD = """
import sys, time
from pathlib import Path
from helpers.data import digits
real = digits.paint
def slow(*arguments):
    time.sleep(float(sys.argv[2]))
    return real(*arguments)
digits.paint = slow
print(digits.ensure_digits(Path(sys.argv[1]), train=40, val=20, progress=False), flush=True)
"""


def child(root: Path, delay: float) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), str(delay)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=digits.REPOSITORY,
        start_new_session=True,
    )


def wait_for_images(root: Path, process: subprocess.Popen) -> None:
    end = time.monotonic() + 60
    while not list(root.glob(f".{NAME}.part-*/train/*/*.jpg")):
        assert process.poll() is None and time.monotonic() < end, "the child did not begin"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_process_leaves_nothing_that_looks_finished(tmp_path, number):
    process = child(tmp_path, 0.2)
    try:
        wait_for_images(tmp_path, process)
        process.send_signal(number)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode != 0 and not (tmp_path / NAME).exists()
    if number == signal.SIGINT:
        assert left(tmp_path) == []
    folder = digits.ensure_digits(tmp_path, **SMALL)
    assert len(content(folder)) == 61 and left(tmp_path) == [NAME]  # what the dead process left is gone too


def test_two_processes_at_once(tmp_path):
    first = child(tmp_path, 0.05)
    try:
        wait_for_images(tmp_path, first)
        start = time.monotonic()
        second = child(tmp_path, 5)  # would need minutes if it rendered as well
        try:
            out, err = second.communicate(timeout=60)
        finally:
            second.kill()
        assert (out.strip(), err, second.returncode) == (str(tmp_path / NAME), "", 0)
        assert time.monotonic() - start < 50
        assert first.communicate(timeout=60)[1] == "" and first.returncode == 0
    finally:
        first.kill()
    assert left(tmp_path) == [NAME]


def test_where_it_cannot_write_it_says_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("COURSE_DATA", str(tmp_path / "file" / "data"))
    with pytest.raises(InputError, match=r"cannot write in .*file/data .*COURSE_DATA") as caught:
        digits.ensure_digits(**SMALL)
    assert "\n" not in str(caught.value)


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_DATA", str(tmp_path / "elsewhere"))
    assert digits.ensure_digits(**SMALL) == tmp_path / "elsewhere" / NAME


@pytest.mark.parametrize("bad", [{"seed": -1}, {"train": 9}, {"val": 0}])
def test_impossible_settings_are_told(tmp_path, bad):
    with pytest.raises(InputError, match="10 images"):
        digits.ensure_digits(tmp_path, **SMALL | bad)


def test_it_needs_no_torch():
    code = "import sys, helpers.data.digits; assert not {'torch', 'tqdm'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=digits.REPOSITORY)
