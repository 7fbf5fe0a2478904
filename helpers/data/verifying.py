"""Reading every image once before anything trains on it, and remembering which were good."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from helpers.bars import progress_bar
from helpers.data.images import ImageError, check_image
from helpers.data.walking import Found, Walker


def verified(walker: Walker, files: list[Found], progress: bool, cache_dir: Path | None) -> dict[Found, list]:
    """Each file that can be read, with [key, format, pixels, orientation, digest]; the others are left out as
    problems.

    Only good files are remembered: what is wrong with the others may be cured without a trace in the file (a
    plugin, a right).
    """
    name = hashlib.blake2b(os.fsencode(walker.root), digest_size=8).hexdigest()
    store = Path(cache_dir) / f"scan-{name}.json" if cache_dir else None
    known, good = {}, {}
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        known = {
            row[0]: row for row in json.loads(store.read_bytes()) if [type(v) for v in row] == [str, str, int, int, str]
        }

    def check(file: Found) -> list | str:
        key = hashlib.blake2b(os.fsencode(f"{file.size}/{file.mtime}/{file.path}"), digest_size=8).hexdigest()
        if key in known:
            return known[key]
        try:
            info = check_image(walker.full(file.path))
            with open(walker.full(file.path), "rb") as opened:
                digest = hashlib.file_digest(opened, "blake2b").hexdigest()[:16]
        except (ImageError, OSError) as e:
            return getattr(e, "reason", str(e))
        return [key, info.format, info.width * info.height, info.orientation, digest]

    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        results = progress_bar(
            pool.map(check, files), show=progress, total=len(files), desc="reading images", unit="image"
        )
        for file, result in zip(files, results, strict=True):
            if isinstance(result, str):
                walker.leave(file.path, result, problem=True)
            else:
                good[file] = result
    finally:
        pool.shutdown(cancel_futures=True)
    if store and {row[0] for row in good.values()} != set(known):
        with suppress(OSError):  # a cache that cannot be written costs time only
            store.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=store.parent, delete=False) as part:
                json.dump(list(good.values()), part)
            os.replace(part.name, store)
    return good
