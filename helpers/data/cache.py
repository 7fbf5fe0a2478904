"""Do once: decode every image of a source into one memory-mapped file of uint8 pixels; remember what was measured
on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from helpers.bars import progress_bar
from helpers.data.sources import Pixels, Source, data_home
from helpers.devices import usable_cpus
from helpers.errors import InputError
from helpers.files import replace_text

VERSION = 1  # part of every name: raise it when the same source would be decoded to other pixels


def cached(source: Source, name: str, *, folder: Path | None = None, progress: bool = False) -> tuple[Pixels, float]:
    """The pixels of ``source`` from its cache file, which is written first if it is not there; and the seconds
    that took (0.0: found).

    The file (uint8, N×S×S×3, ``.npy``) is named for a fingerprint of the source, so changed images get a new one.
    It is complete or not there: written under another name, then renamed. All processes that open it share its
    pages. Raises InputError if it does not fit.
    """
    folder = folder or data_home() / "cache"
    fingerprint = hashlib.sha256(f"{VERSION} {source.fingerprint()}".encode()).hexdigest()[:16]
    path = folder / f"{name}-{source.size}px-{fingerprint}.npy"
    pixels, start = _open(path, source), time.perf_counter()
    if pixels is not None:
        return Pixels(pixels, source.labels), 0.0
    _build(path, source, progress)
    return Pixels(_open(path, source), source.labels), time.perf_counter() - start


def _open(path: Path, source: Source) -> np.ndarray | None:
    try:
        # "c": pages are shared until written to, and nobody writes. "r" would make torch warn that the array is
        # read-only.
        pixels = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return pixels if pixels.shape == (len(source), source.size, source.size, 3) and pixels.dtype == np.uint8 else None


def _build(path: Path, source: Source, progress: bool) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    shape = (len(source), source.size, source.size, 3)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=shape)
        with open(
            partial, "r+b"
        ) as file:  # take the space now: writing to a mapped file on a full disk is a crash (SIGBUS)
            os.posix_fallocate(file.fileno(), 0, os.path.getsize(partial))
        _fill(pixels, source, progress)
        pixels.flush()
        os.replace(partial, path)
    except OSError as error:
        megabytes = np.prod(shape) / 1e6
        raise InputError(
            f"the cache needs {megabytes:.0f} MB at {path.parent} ({error.strerror}); "
            "set COURSE_DATA to a roomier folder or use --no-cache"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _fill(pixels: np.ndarray, source: Source, progress: bool) -> None:
    """Decode in threads: Pillow lets go of the interpreter lock while it decodes and resizes."""

    def fill(index: int) -> None:
        pixels[index] = source.pixels(index)

    pool = ThreadPoolExecutor(usable_cpus())
    try:
        done = pool.map(fill, range(len(source)))
        for _ in progress_bar(done, show=progress, total=len(source), desc="decoding once", unit="image"):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def remembered(question: str, setting: str, measure: Callable[[], str]) -> str:
    """The answer to ``question`` for ``setting``: measured once, then read from ``cache/<question>.json``.

    A measurement can come out differently on a busy machine, and then the same seed would no longer give the same
    run.
    """
    path = data_home() / "cache" / f"{question}.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    if setting not in known:
        known[setting] = measure()
        with contextlib.suppress(OSError):  # nothing to keep it in: measured again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(known, indent=1) + "\n")
    return known[setting]
