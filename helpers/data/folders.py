"""A folder of class folders to a list of samples, whatever else lies in it.

``scan`` finds the images, says what it left out and why, and stops with one line that names the cure where the
folder cannot be trained on. There is one class map, taken from train; val is held to it. The result depends
neither on the order in which the file system lists names, nor on where the folder lies.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path

import numpy as np

from helpers.data.images import printable
from helpers.data.samples import Folder, PathList, Problem, Samples, counted, some
from helpers.data.verifying import verified
from helpers.data.walking import Found, Walker, is_folder, unwanted
from helpers.errors import InputError

_VAL_NAMES = ("val", "validation", "valid", "test")  # the first that exists is used


def _in_order(names: list[str]) -> list[str]:
    """By value if all names are numbers, else naturally: class2 before class10."""
    if all(re.fullmatch(r"[+-]?[0-9]+(\.[0-9]+)?", name) for name in names):
        return sorted(names, key=lambda name: (Decimal(name), name))
    parts = {name: re.split(r"([0-9]+)", name.casefold()) for name in names}
    return sorted(names, key=lambda name: ([int(p) if i % 2 else p for i, p in enumerate(parts[name])], name))


def scan(
    root: str | os.PathLike,
    *,
    split_seed: int = 0,
    val_share: float = 0.2,
    verify: bool = True,
    progress: bool = False,
    cache_dir: Path | None = None,
) -> Folder:
    """Find the samples of ``root``, which holds class folders, or ``train`` and ``val`` (valid, validation, test)
    with them.

    Without a val folder, ``val_share`` of each class is split off by ``split_seed`` and the files' names.
    ``verify`` reads every image, under a bar with ``progress``, and leaves bad ones out; good ones are remembered
    in ``cache_dir`` by path, size and time. Raises ``InputError``, in one line, where the folder cannot be trained
    on.
    """
    if not 0 <= val_share < 1:
        raise InputError(f"val_share is {val_share}: give a share of at least 0 and less than 1")
    root, notes = os.path.abspath(os.fsdecode(root)), []
    try:
        os.scandir(root).close()
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or str(e)
        raise InputError(
            f"{printable(root)} cannot be used ({why}): give the folder that holds the class folders"
        ) from None
    walker = Walker(root)
    train_dir, val_dir = _layout(walker, notes)
    names, train = walker.walk(train_dir)
    _require_classes(walker, train_dir, names)
    val_names, val = walker.walk(val_dir) if val_dir else ([], [])
    if unknown := [name for name in _in_order(val_names) if name not in names]:
        has = some(_in_order(names))
        raise InputError(
            f"{val_dir} has class {some(unknown)}, which {train_dir} has not (it has {has}): rename or move it"
        )
    if verify:
        good = verified(walker, train + val, progress, cache_dir)
        train, val = [file for file in train if file in good], [file for file in val if file in good]
    _require_images(walker, train_dir, names, train)
    if val_dir and not val:
        raise InputError(
            f"{printable(walker.full(val_dir))} has no usable image: add some, or remove it to split train instead"
        )
    if not val_dir:
        train, val = _divided(train, split_seed, val_share, len(train_dir))
    classes = tuple(_in_order(names))
    number = {name: i for i, name in enumerate(classes)}
    notes += _notes(walker, classes, train, val, good if verify else {})
    samples = [
        Samples(PathList(root, [f.path for f in part]), np.array([number[f.label] for f in part], dtype=np.int64))
        for part in (train, val)
    ]
    ignored = Counter(reason for _, reason, problem in walker.left if not problem)
    problems = sorted(Problem(walker.full(path), reason) for path, reason, problem in walker.left if problem)
    return Folder(root, classes, *samples, dict(ignored), problems, notes)


def _layout(walker: Walker, notes: list[str]) -> tuple[str, str]:
    """The paths of train and val from root: ("", "") where root itself holds the classes."""
    folders = walker.folders("")
    trains = [name for name in folders if name.lower() == "train"]
    vals = sorted((n for n in folders if n.lower() in _VAL_NAMES), key=lambda name: _VAL_NAMES.index(name.lower()))
    others = [name for name in folders if name not in trains + vals]
    # A class may be called "train" (car, bus, train): then it holds no folders, and has neighbours that are no
    # splits.
    if not trains or (others and not walker.folders(trains[0])):
        return "", ""
    if len(trains) > 1:
        raise InputError(f"{printable(walker.root)} holds {some(trains)}: keep one of them")
    with os.scandir(walker.root) as found:
        for entry in found:
            if reason := unwanted(entry):
                walker.leave(entry.name, reason)
            elif not is_folder(entry) and walker.file(entry, entry.name, "", False):
                walker.leave(entry.name, "image outside any class folder")
    if others + vals[1:]:
        notes.append(f"beside {trains[0]}, not used: {some(others + vals[1:])}")
    if not vals or vals[0].lower() == "test":
        notes.append(f"no val folder: {'test' if vals else 'a share of train'} is used for validation")
    return trains[0], vals[0] if vals else ""


def _require_classes(walker: Walker, split: str, names: list[str]) -> None:
    where = printable(os.path.join(walker.root, split) if split else walker.root)
    if {name.lower() for name in names} <= {*_VAL_NAMES} and names:
        raise InputError(f"{where} holds {some(names)} but no train folder: add one, or give a folder of class folders")
    if len(names) == 1:
        hint = f", or is {where}/{printable(names[0])} the folder you mean?" * bool(
            walker.folders(os.path.join(split, names[0]))
        )
        raise InputError(f"{where} has a single class, {printable(names[0])}: two or more are needed{hint}")
    if not names:
        flat = sum(why == "image outside any class folder" and path.startswith(split) for path, why, _ in walker.left)
        found = f"{flat} images but no class folders" if flat else "no class folders"
        raise InputError(f"{where} holds {found}: put the images of each class in a folder of its own")


def _require_images(walker: Walker, split: str, names: list[str], train: list[Found]) -> None:
    filled = {file.label for file in train}
    for name in (name for name in _in_order(names) if name not in filled):
        inside = os.path.join(split, name)
        left = [entry for entry in walker.left if entry[0] == inside or entry[0].startswith(f"{inside}/")]
        why = Counter(
            f"unreadable {os.path.splitext(path)[1].lower() or 'file'}" if bad else why for path, why, bad in left
        )
        raise InputError(
            f"class {printable(name)} has no usable image in {printable(walker.full(inside))} "
            f"({'skipped: ' + counted(why) if why else 'it is empty'}): add images or remove the folder"
        )


def _divided(files: list[Found], seed: int, share: float, prefix: int) -> tuple[list[Found], list[Found]]:
    """Train and val, stratified. Drawn by a hash of the names, so that a new file hardly moves any other."""
    by_class, val = defaultdict(list), set()
    for file in files:
        drawn = hashlib.blake2b(os.fsencode(f"{seed}/{file.path[prefix:].lstrip('/')}"), digest_size=8).digest()
        by_class[file.label].append((drawn, file))
    for drawn in by_class.values():
        count = min(len(drawn) - 1, max(1, round(share * len(drawn)))) if share else 0
        val.update(file for _, file in sorted(drawn)[:count])
    return [file for file in files if file not in val], [file for file in files if file in val]


def _notes(walker: Walker, classes: tuple[str, ...], train: list[Found], val: list[Found], good: dict) -> list[str]:
    from PIL import Image

    def wrong(file: Found) -> bool:
        kind = walker.known.get(os.path.splitext(file.path)[1].lower())
        read = {"MPO": "JPEG", "DIB": "BMP"}.get(good[file][1], good[file][1]) if good else kind
        return not file.known or {"MPO": "JPEG", "DIB": "BMP"}.get(kind, kind) != read

    limit, here = Image.MAX_IMAGE_PIXELS, {file.label for file in val}
    both = len({file.identity for file in train} & {file.identity for file in val})
    twins = len({good[file][4] for file in train} & {good[file][4] for file in val}) - both if good else 0
    huge = sum(limit is not None and row[2] > limit for row in good.values())
    counts = [
        (sum(map(wrong, train + val)), "files have a wrong extension, or none, and are used"),
        (sum(row[3] != 1 for row in good.values()), "photos carry an EXIF rotation, which is applied"),
        (huge, f"images are above {(limit or 0) / 1e6:.0f} Mpx"),
        (both, "files are in train and in val, through links"),
        (twins, "images of val are also in train, byte for byte"),
    ]
    missing = [name for name in classes if name not in here]
    return [f"{n} {text}" for n, text in counts if n > 0] + [f"val has no image of class {some(missing)}"] * bool(
        missing
    )
