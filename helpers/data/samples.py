"""What a scanned folder comes to: paths that worker processes share without copying, labels, and what was left
out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import NamedTuple

import numpy as np

from helpers.data.images import printable


class PathList(Sequence[str]):
    """Paths below ``root``, in one bytes buffer with int64 offsets; slices and ``take(indices)`` are PathLists.

    A worker process that reads a list of ``str`` writes to each string's reference count, and so comes to own a
    copy of all of them; this buffer stays shared.
    """

    def __init__(self, root: str, relative: Sequence[str]):
        parts = [os.fsencode(path) for path in relative]
        self.root, self._buffer = root, b"".join(parts)
        self._ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, i):
        return self.take(range(len(self))[i]) if isinstance(i, slice) else os.path.join(self.root, self.relative(i))

    def relative(self, i: int) -> str:
        """Path ``i`` as seen from ``root``."""
        i = range(len(self))[index(i)]  # negatives count from the end, IndexError beyond
        return os.fsdecode(self._buffer[self._ends[i] : self._ends[i + 1]])

    def take(self, indices) -> PathList:
        """The paths at ``indices`` (integers, a sequence or an array), in that order."""
        return PathList(self.root, [self.relative(i) for i in indices])


@dataclass(frozen=True)
class Samples:
    """``paths``: N paths. ``labels``: int64 array of N, each an index into the folder's ``classes``."""

    paths: PathList
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.paths)


class Problem(NamedTuple):
    """Something that was left out because it cannot be read."""

    path: str
    reason: str


@dataclass
class Folder:
    """What ``scan`` found. ``ignored``: reason -> count. ``problems``: sorted by path. ``notes``: one line
    each."""

    root: str
    classes: tuple[str, ...]
    train: Samples
    val: Samples
    ignored: dict[str, int]
    problems: list[Problem]
    notes: list[str]

    def describe(self) -> str:
        """Lines for people: the counts, what was ignored, the notes, and every file that cannot be read, with its
        reason."""
        lines = [f"{printable(self.root)}: {len(self.train)} train and {len(self.val)} val images"]
        lines += [f"{len(self.classes)} classes: {some(self.classes)}", *(f"note: {note}" for note in self.notes)]
        lines += [f"ignored: {counted(self.ignored)}"] if self.ignored else []
        return "\n".join(lines + [f"left out: {printable(path)}: {reason}" for path, reason in self.problems])


def some(names: Sequence[str]) -> str:
    """At most five of the names, and how many more there are."""
    return ", ".join(map(printable, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def counted(reasons: dict[str, int]) -> str:
    """Reasons with their counts, in one line."""
    return ", ".join(f"{n} x {reason}" for reason, n in sorted(reasons.items()))
