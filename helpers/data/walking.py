"""Walking a folder that people have lived in: every real image once, and everything else counted with its
reason."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import NamedTuple

from helpers.data.images import NOT_PHOTOS, looks_like, printable

_SYSTEM = {"__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "@eadir", "$recycle.bin", "lost+found"}
_SYSTEM |= {"system volume information", "__pycache__"}


class Found(NamedTuple):
    """An image file as the walk met it."""

    linked: bool  # first, so that sorting puts a file before the links to it
    path: str  # from root, with "/"
    label: str
    known: bool  # by its extension
    size: int
    mtime: int
    identity: tuple[int, int]


def _extensions() -> dict[str, str]:
    """Extension -> Pillow's format, for all that Pillow opens as a photo, here or with a plugin."""
    from PIL import Image

    Image.init()
    opened = {ext: kind for ext, kind in Image.registered_extensions().items() if kind in {*Image.OPEN} - NOT_PHOTOS}
    return {".heic": "HEIF", ".heif": "HEIF", ".avif": "AVIF"} | opened


def is_folder(entry: os.DirEntry) -> bool:
    """Whether it is a folder or leads to one; a link that leads in a circle does not."""
    with suppress(OSError):  # a link that leads in a circle raises
        return entry.is_dir()
    return False


def unwanted(entry: os.DirEntry) -> str | None:
    """Why an entry is left out for its name alone, or None."""
    kind = "folder" if is_folder(entry) else "file"
    if entry.name.lower() in _SYSTEM:
        return f"system {kind}"
    return "macOS sidecar" if entry.name.startswith("._") else f"hidden {kind}" if entry.name.startswith(".") else None


class Walker:
    """Collects files, and in ``left`` what is left out: (path from root, reason, whether it is a problem)."""

    def __init__(self, root: str):
        self.root, self.known, self.left = root, _extensions(), []

    def full(self, path: str) -> str:
        return os.path.join(self.root, path)

    def leave(self, path: str, reason: str, problem: bool = False) -> None:
        self.left.append((path, reason, problem))

    def folders(self, path: str) -> list[str]:
        """The names of the wanted folders in a folder."""
        with suppress(OSError), os.scandir(self.full(path)) as found:
            return sorted(entry.name for entry in found if is_folder(entry) and not unwanted(entry))
        return []

    def walk(self, split: str) -> tuple[list[str], list[Found]]:
        """The class names and the files below ``split`` (a path from root). Each real file comes once."""
        classes, files, once, visited = [], [], {}, set()
        real, links = [(split, "", False)], []
        while real or links:
            # Links wait until all real folders are done, so that a file counts where it lies, and a loop ends at
            # once.
            path, label, linked = real.pop() if real else links.pop(links.index(min(links)))
            try:
                status = os.stat(self.full(path))
                with os.scandir(self.full(path)) as found:
                    entries = list(found)
            except OSError as e:
                self.leave(path, f"folder cannot be read: {e.strerror}", problem=True)
                continue
            if (status.st_dev, status.st_ino) in visited:
                self.leave(f"{path}/", "folder reached before through a link")
                continue
            visited.add((status.st_dev, status.st_ino))
            for entry in entries:
                below, link = f"{path}/{entry.name}".lstrip("/"), linked or entry.is_symlink()
                if reason := unwanted(entry):
                    self.leave(below, reason)
                elif is_folder(entry):
                    classes += [] if label else [entry.name]
                    (links if entry.is_symlink() else real).append((below, label or entry.name, link))
                elif file := self.file(entry, below, label, link):
                    files.append(file)
        for file in sorted(files):
            if not file.label:
                self.leave(file.path, "image outside any class folder")
            elif once.setdefault(file.identity, file) is not file:
                self.leave(file.path, "link to a file that is counted already")
        return classes, sorted(once.values(), key=lambda file: file.path)

    def file(self, entry: os.DirEntry, path: str, label: str, linked: bool) -> Found | None:
        """The file, if it is an image by its extension or, with any other extension, by its first bytes."""
        suffix = os.path.splitext(entry.name)[1].lower()
        known, other = suffix in self.known, f"{printable(suffix)} file" if suffix else "file without extension"
        try:
            status = entry.stat()
            if not stat.S_ISREG(status.st_mode):  # never opened: a FIFO would wait for ever
                return self.leave(path, "not a regular file")
            if not known:
                with open(entry.path, "rb") as opened:
                    if not (looks_like(opened.read(256)) or ("", False))[1]:
                        return self.leave(path, other)
        except OSError as e:
            if entry.is_symlink():
                return self.leave(path, f"is a broken link ({e.strerror})", problem=True)
            return self.leave(path, f"cannot be read: {e.strerror}" if known else other, problem=known)
        return Found(linked, path, label, known, status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))
