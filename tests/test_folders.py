"""helpers.data.folders: what is found in a folder, what is left out and said, and what stops with one line."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
from messy import encoded, make_folder, make_messy_folder, picture, put

from helpers.data import folders, verifying
from helpers.data.folders import scan
from helpers.data.samples import PathList
from helpers.errors import InputError


def found(samples, folder):
    """Path from the root -> class name."""
    return {samples.paths.relative(i): folder.classes[label] for i, label in enumerate(samples.labels.tolist())}


def refused(root, *words, **options):
    with pytest.raises(InputError) as e:
        scan(root, **options)
    text = str(e.value)
    assert text.isprintable() and all(word in text for word in words), text
    return text


@pytest.fixture(scope="module")
def messy(tmp_path_factory):
    root = tmp_path_factory.mktemp("messy")
    return root, make_messy_folder(root)


def test_a_messy_folder(messy):
    root, expected = messy
    folder = scan(root)
    assert folder.classes == expected["classes"] and folder.root == str(root)
    assert found(folder.train, folder) == expected["train"] and found(folder.val, folder) == expected["val"]
    assert folder.ignored == expected["ignored"]
    problems = {os.path.relpath(path, root): reason for path, reason in folder.problems}
    assert problems.keys() == expected["problems"].keys() and list(problems) == sorted(problems)
    assert all(word in problems[name] for name, word in expected["problems"].items()), problems
    assert folder.notes == [
        "3 files have a wrong extension, or none, and are used",
        "1 photos carry an EXIF rotation, which is applied",
        "1 images of val are also in train, byte for byte",
    ]
    text = folder.describe()
    assert f"{len(expected['train'])} train and {len(expected['val'])} val" in text and "2 x macOS sidecar" in text
    assert all(f"left out: {path}: {reason}" in text for path, reason in folder.problems)
    assert all(line.isprintable() for line in text.splitlines())


def test_without_verify_only_names_are_looked_at(messy, monkeypatch):
    root, expected = messy
    monkeypatch.setattr(verifying, "check_image", lambda path: pytest.fail("read"))
    folder = scan(root, verify=False)
    unread = {name for name, word in expected["problems"].items() if "link" not in word}
    assert found(folder.train, folder).keys() | found(folder.val, folder).keys() == {
        *expected["train"],
        *expected["val"],
        *unread,
    }


def test_all_paths_can_be_read_from_anywhere(messy, monkeypatch, tmp_path):
    root, _ = messy
    monkeypatch.chdir(root.parent)
    folder = scan(root.name)
    monkeypatch.chdir(tmp_path)
    assert all(os.path.isfile(path) for path in [*folder.train.paths, *folder.val.paths])


@pytest.mark.parametrize(
    "names, ordered",
    [
        (["10", "9", "0", "2"], ["0", "2", "9", "10"]),
        (["007", "1", "-3", "2.5"], ["-3", "1", "2.5", "007"]),
        (["class10", "class2", "Class1"], ["Class1", "class2", "class10"]),
        (["10", "9", "x"], ["9", "10", "x"]),
        (["1", "01", "1.0"], ["01", "1", "1.0"]),
        (["B", "a", "ä", "²"], ["a", "B", "²", "ä"]),
    ],
)
def test_class_order(tmp_path, names, ordered):
    for shuffled in itertools.islice(itertools.permutations(names), 4):
        assert folders._in_order(list(shuffled)) == ordered
    assert scan(make_folder(tmp_path, names, 1), verify=False).classes == tuple(ordered)


@pytest.fixture
def backwards(monkeypatch):
    """A file system that lists names in the other order."""
    real = os.scandir

    class Entries(list):
        __enter__, __exit__, close = lambda self: self, lambda *a: None, lambda self: None

    def switch():
        monkeypatch.setattr(os, "scandir", lambda path: Entries(sorted(real(path), key=lambda e: e.name, reverse=True)))

    return switch


def test_the_split_is_stratified_stable_and_free_of_order_and_place(tmp_path, monkeypatch, backwards):
    one, two = make_folder(tmp_path / "one", "abc", 10), tmp_path / "elsewhere/two"
    make_folder(two, "abc", 10)
    first = scan(one)
    backwards()
    second = scan(two)
    monkeypatch.undo()
    for part in ("train", "val"):
        a, b = getattr(first, part), getattr(second, part)
        assert found(a, first) == found(b, second) and np.array_equal(a.labels, b.labels)
    assert np.bincount(first.val.labels).tolist() == [2, 2, 2] and np.bincount(first.train.labels).tolist() == [
        8,
        8,
        8,
    ]
    assert found(scan(one, split_seed=1).val, first) != found(first.val, first)
    assert not found(first.val, first).keys() & found(first.train, first).keys()
    assert len(scan(one, val_share=0).val) == 0
    (tmp_path / "t").mkdir()
    shutil.move(one, tmp_path / "t/train")
    moved = scan(tmp_path / "t")
    assert {path.removeprefix("train/") for path in found(moved.val, moved)} == found(first.val, first).keys()
    assert moved.notes == ["no val folder: a share of train is used for validation"]
    put(tmp_path / "t/train/a/new.jpg", encoded(picture(seed=999)))
    grown = found(scan(tmp_path / "t").val, moved).keys()
    assert len(found(moved.val, moved).keys() - grown) <= 1
    for share in (-0.1, 1, 2):
        refused(one, "val_share", val_share=share)


@pytest.mark.parametrize("count, share, val", [(1, 0.2, 0), (2, 0.2, 1), (3, 0.9, 2), (10, 0.25, 2)])
def test_every_class_keeps_an_image_in_train(tmp_path, count, share, val):
    folder = scan(make_folder(tmp_path, "ab", count), val_share=share, verify=False)
    assert np.bincount(folder.train.labels).tolist() == [count - val] * 2 and len(folder.val) == 2 * val
    assert ("val has no image of class a, b" in folder.notes) == (val == 0)


@pytest.mark.parametrize("train, val, note", [
    ("train", "val", None), ("Train", "VALID", None), ("TRAIN", "Validation", None), ("train", "test", "test is used"),
])  # fmt: skip
def test_names_of_the_splits(tmp_path, train, val, note):
    make_folder(tmp_path / train, "ab", 3)
    make_folder(tmp_path / val, "ab", 2, seed=50)
    make_folder(tmp_path / "scripts", ["old"], 1)
    folder = scan(tmp_path)
    assert (len(folder.train), len(folder.val)) == (6, 4)
    notes = [f"beside {train}, not used: scripts"] + ([f"no val folder: {note} for validation"] if note else [])
    assert folder.notes == notes


def test_a_class_may_be_called_train(tmp_path):
    assert scan(make_folder(tmp_path, ["car", "train", "bus"], 2)).classes == ("bus", "car", "train")


def test_one_class_map_for_train_and_val(tmp_path):
    make_folder(tmp_path / "train", ["0", "2", "10"], 2)
    make_folder(tmp_path / "val", ["10", "2"], 1, seed=77)
    folder = scan(tmp_path)
    assert folder.classes == ("0", "2", "10") and folder.notes == ["val has no image of class 0"]
    assert found(folder.val, folder) == {"val/10/0.jpg": "10", "val/2/0.jpg": "2"}
    make_folder(tmp_path / "val", ["Dog"], 1)
    refused(tmp_path, "Dog", "val", "rename")


def test_folders_that_cannot_be_trained_on(tmp_path):
    refused(tmp_path / "none", "No such file", "give the folder")
    refused(put(tmp_path / "file.txt", b"x"), "Not a directory", "give the folder")
    refused("nul\0", "give the folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no class folders", "folder of its own")
    put(tmp_path / "flat/a.jpg", encoded(picture()))
    refused(tmp_path / "flat", "1 images but no class folders")
    put(tmp_path / "flat/.ipynb_checkpoints/b.jpg", encoded(picture()))
    refused(tmp_path / "flat", "1 images but no class folders")
    put(tmp_path / "flats/logo.jpg", encoded(picture()))
    put(tmp_path / "flats/train/a.jpg", encoded(picture()))
    put(tmp_path / "flats/val/a.jpg", encoded(picture()))
    refused(tmp_path / "flats", f"{tmp_path}/flats/train holds 1 images but no class folders")
    refused(make_folder(tmp_path / "single", ["cat"]), "single class, cat", "two or more")
    make_folder(tmp_path / "wrapped/inner")
    assert f"{tmp_path}/wrapped/inner the folder you mean" in refused(tmp_path / "wrapped", "single class")
    make_folder(tmp_path / "noval/train")
    (tmp_path / "noval/val/cat").mkdir(parents=True)
    refused(tmp_path / "noval", "no usable image", "remove it")
    make_folder(tmp_path / "notrain/val")
    make_folder(tmp_path / "notrain/test")
    refused(tmp_path / "notrain", "no train folder")
    make_folder(tmp_path / "twice/train"), make_folder(tmp_path / "twice/Train")
    if len(os.listdir(tmp_path / "twice")) == 2:
        refused(tmp_path / "twice", "Train, train", "keep one")


def test_a_class_without_a_usable_image_says_what_was_skipped(tmp_path):
    make_folder(tmp_path, ["cat", "dog", "cow"], 2)
    for name in os.listdir(tmp_path / "dog"):
        os.remove(tmp_path / "dog" / name)
    assert "class dog" in refused(tmp_path, "it is empty", "add images or remove")
    for i in range(3):
        put(tmp_path / f"dog/more/{i}.txt", b"no")
    put(tmp_path / "dog/bad.heic", b"\0\0\0\x18ftypheic" + bytes(99))
    put(tmp_path / "dog/bad.jpg", b"")
    text = refused(tmp_path, "class dog", "3 x .txt file", "1 x unreadable .heic", "1 x unreadable .jpg")
    assert "cat" not in text.split("class dog")[1].split("skipped")[1]
    assert scan(tmp_path, verify=False).classes == ("cat", "cow", "dog")


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_links_inside_do_not_move_files(tmp_path, backwards):
    root = make_folder(tmp_path / "root", "abc", 2)
    make_folder(tmp_path, ["shared"], 1, seed=70)
    for name in "abc":
        (root / name / "0_link").symlink_to(tmp_path / "shared")
    (root / "a" / "0_other").symlink_to("../b")
    first = scan(root, val_share=0)
    assert np.bincount(first.train.labels).tolist() == [3, 2, 2] and first.ignored == {
        "folder reached before through a link": 3
    }
    assert list(first.train.paths) == sorted(first.train.paths) and "b/0.jpg" in found(first.train, first)
    backwards()
    assert found(scan(root, val_share=0).train, first) == found(first.train, first)


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_links(tmp_path):
    make_folder(tmp_path / "pool", ["cat", "dog"], 3)
    root = tmp_path / "root"
    root.mkdir()
    for name in ("cat", "dog"):
        (root / name).symlink_to(tmp_path / "pool" / name)
    (root / "dog" / "up").symlink_to(tmp_path / "root")  # a circle through the pool
    folder = scan(root, val_share=0)
    assert np.bincount(folder.train.labels).tolist() == [3, 3]
    assert folder.ignored == {"folder reached before through a link": 1}
    split = tmp_path / "split"
    make_folder(split / "train", ["a", "b"], 2)
    make_folder(split / "val", ["a", "b"], 1, seed=40)
    (split / "train/a/0_alias.jpg").symlink_to("0.jpg")
    os.link(split / "train/a/0.jpg", split / "val/a/leak.jpg")
    folder = scan(split)
    assert "train/a/0.jpg" in found(folder.train, folder) and len(folder.train) == 4  # the file, not the link to it
    assert folder.ignored == {"link to a file that is counted already": 1}
    assert folder.notes == ["1 files are in train and in val, through links"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.timeout(20)
def test_fifos_and_sockets_are_never_opened(tmp_path, monkeypatch):
    make_folder(tmp_path, count=2)
    os.mkfifo(tmp_path / "cat/noext")
    os.mkfifo(tmp_path / "cat/a.png")
    monkeypatch.chdir(tmp_path / "cat")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind("s.jpg")
        assert scan(tmp_path).ignored == {"not a regular file": 3}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path):
    make_folder(tmp_path, count=2)
    make_folder(tmp_path / "cat", ["closed"])
    (tmp_path / "cat/closed").chmod(0)
    (tmp_path / "dog/1.jpg").chmod(0)
    problems = scan(tmp_path).problems
    (tmp_path / "cat/closed").chmod(0o700)
    assert [os.path.basename(p.path) for p in problems] == ["closed", "1.jpg"]
    tmp_path.chmod(0)
    refused(tmp_path, "Permission denied")
    tmp_path.chmod(0o700)


def test_a_folder_that_cannot_be_read_is_a_problem(tmp_path, monkeypatch):
    make_folder(tmp_path, count=2)
    (tmp_path / "cat/closed").mkdir()
    real = os.scandir

    def scandir(path):
        if os.path.basename(path) == "closed":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert scan(tmp_path).problems == [(f"{tmp_path}/cat/closed", "folder cannot be read: Permission denied")]


def test_names_of_any_bytes(tmp_path):
    make_folder(tmp_path, count=2)
    odd = os.path.join(os.fsencode(tmp_path), b"cat", b"\xff\n.jpg")
    with open(odd, "wb") as f:
        f.write(b"<html>")
    folder = scan(tmp_path)
    assert [os.fsencode(p.path) for p in folder.problems] == [odd]
    folder.describe().encode()
    assert "\n.jpg" not in folder.describe()


def test_good_files_are_remembered_and_bad_ones_tried_again(tmp_path, monkeypatch):
    root, cache = make_folder(tmp_path / "root", count=3), tmp_path / "cache/below"
    put(root / "cat/bad.jpg", b"")
    read, real = [], verifying.check_image
    monkeypatch.setattr(verifying, "check_image", lambda path: read.append(os.path.basename(path)) or real(path))
    first = scan(root, cache_dir=cache)
    assert len(read) == 7 and len(os.listdir(cache)) == 1
    read.clear()
    again = scan(root, cache_dir=cache)
    assert read == ["bad.jpg"]
    assert (again.problems, again.notes, again.ignored) == (first.problems, first.notes, first.ignored)
    assert list(again.train.paths) == list(first.train.paths)
    read.clear()
    put(root / "cat/0.jpg", b"changed")
    assert [os.path.basename(p.path) for p in scan(root, cache_dir=cache).problems] == ["0.jpg", "bad.jpg"]
    assert sorted(read) == ["0.jpg", "bad.jpg"]
    (store,) = cache.iterdir()
    for junk in (
        b"",
        b"{",
        b"\xff\xfe",
        b"[1, null, [], [[]]]",
        b'{"a": 1}',
        b"[" * 100_000,
        json.dumps([["k", 1]] * 3).encode(),
    ):
        store.write_bytes(junk)
        assert len(scan(root, cache_dir=cache).problems) == 2
    rows = json.loads(store.read_bytes())
    store.write_text(json.dumps([[row[0], None, "x", [], 5] for row in rows]))
    assert len(scan(root, cache_dir=cache).train) + len(scan(root, cache_dir=cache).val) == 5
    assert [path.name for path in cache.iterdir()] == [store.name]  # no half-written files
    assert (
        len(scan(root, cache_dir=put(tmp_path / "a_file", b"")).problems) == 2
    )  # a cache that cannot be made costs time only


def test_progress_is_silent_unless_wanted(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    make_folder(tmp_path, count=1)
    scan(tmp_path)
    assert capfd.readouterr() == ("", "")
    scan(tmp_path, progress=True)
    assert "reading images" in capfd.readouterr().err


def test_huge_images_are_noted(tmp_path, monkeypatch):
    from PIL import Image

    make_folder(tmp_path, count=2)
    put(tmp_path / "cat/huge.png", encoded(picture(90, 80), "PNG"))
    put(tmp_path / "cat/too_huge.png", encoded(picture(110, 100), "PNG"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5000)
    folder = scan(tmp_path)
    assert folder.notes == ["1 images are above 0 Mpx"]
    assert [os.path.basename(p.path) for p in folder.problems] == ["too_huge.png"]


def test_path_list():
    names = ["a/0.jpg", "", "ü/é.png", os.fsdecode(b"\xff.jpg"), "long/" * 40]
    paths = PathList("/r", names)
    assert list(paths) == [os.path.join("/r", name) for name in names] and len(paths) == 5
    assert paths[-1] == paths[4] and paths[np.int64(2)] == "/r/ü/é.png"
    for i in (5, -6):
        with pytest.raises(IndexError):
            paths[i]
    assert list(paths[1:4:2]) == [paths[1], paths[3]] and list(paths.take(np.array([4, 0, 0]))) == [
        paths[4],
        paths[0],
        paths[0],
    ]
    assert isinstance(paths[:2], PathList) and "/r/a/0.jpg" in paths and list(PathList("/r", [])) == []
    many = PathList("/r", [f"class/{i:06}.jpg" for i in range(10_000)])
    data = pickle.dumps(many)
    assert list(pickle.loads(data))[9_999] == many[9_999] and len(data) < 10_000 * 27


def test_import_is_light():
    code = "import sys, helpers.data.folders; sys.exit(bool({'torch', 'PIL', 'torchcodec', 'tqdm'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
