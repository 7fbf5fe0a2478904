"""What a loader may use before it is started: shared memory for its batches in flight, and open files.

A worker hands a batch over in shared memory, /dev/shm on Linux. Docker gives a container 64 MB of it, and beyond that
the worker dies of a bus error, or fails where the loop does not hear of it and waits for ever. Each tensor in shared
memory is also an open file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

SHARED_MEMORY = Path("/dev/shm")
ROOM = 0.9  # of what is free: NCCL and others use shared memory too
SPARE_FILES = 20  # for the log, a checkpoint, and what torch and Python open in passing


def batch_bytes(dataset, batch_size: int) -> int:
    """Bytes of one batch: the tensors, arrays and numbers of item 0, which is read for it, times its items.

    0 where there is no item 0 or it cannot be read: the loop comes to it, and says it better.
    """
    try:
        item = dataset.__getitems__([0]) if hasattr(dataset, "__getitems__") else dataset[0]
        return min(batch_size, len(dataset)) * sum(_sizes(item))
    except Exception:
        return 0


def _sizes(item) -> Iterator[int]:
    if isinstance(item, torch.Tensor):
        yield item.numel() * item.element_size()
    elif isinstance(item, np.ndarray | np.generic):
        yield item.nbytes
    elif isinstance(item, int | float):
        yield 8
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _sizes(value)
    elif isinstance(item, tuple | list):
        for value in item:
            yield from _sizes(value)


def shared_memory_free() -> int | None:
    """Bytes free in /dev/shm, divided by the ranks that torchrun started on this machine; None where it is not
    there or has no limit."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if found.f_blocks else None


def open_files() -> tuple[int, int, int]:
    """Open files of this process: (used, soft limit, hard limit). The soft limit is the one that stops it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return len(os.listdir("/proc/self/fd")), soft, hard


def fitting_workers(
    workers: int,
    prefetch: int,
    bytes_per_batch: int,
    free: int | None,
    *,
    files: int | None = None,
    tensors: int = 2,
    held: int = 2,
) -> tuple[int, int, str | None]:
    """(workers, prefetch, reason): what was asked for and None if it fits, else what does and one line that says
    why and what cures it. Prefetch is lowered first, to 1, then workers, to 0, which need neither.

    ``free`` bytes of shared memory and ``files`` that may still be opened; None: no limit. In flight are
    ``workers × prefetch`` batches that torch has asked for, and ``held`` by the loop: the one in use and the one
    just handed over. A batch is ``tensors`` open files. A worker costs four more (its pipes, both ends), twice,
    for training and validation loaders live side by side.
    """

    def needs(workers: int, prefetch: int) -> tuple[int, int]:
        batches = workers * prefetch + held
        return batches * bytes_per_batch, 2 * (4 * workers + 2) + tensors * batches + SPARE_FILES

    def fits(workers: int, prefetch: int) -> bool:
        space, opened = needs(workers, prefetch)
        return workers == 0 or ((free is None or space <= ROOM * free) and (files is None or opened <= files))

    if fits(workers, prefetch):
        return workers, prefetch, None
    smaller = [(workers, p) for p in range(prefetch - 1, 0, -1)] + [(w, 1) for w in range(workers - 1, -1, -1)]
    now = next(pair for pair in smaller if fits(*pair))
    space, opened = needs(workers, prefetch)
    if free is not None and space > ROOM * free:
        need = (
            f"{workers} workers × prefetch {prefetch}, and {held} in use, of batches of {bytes_per_batch / 1e6:.3g} MB "
            f"need {space / 1e6:.0f} MB of shared memory; {SHARED_MEMORY} has {free / 1e6:.0f} MB free"
        )
        cure = f"in Docker, --shm-size={1 << (int(space / ROOM / 2**20)).bit_length()}m gives more"
    else:
        need = f"{workers} workers × prefetch {prefetch} need about {opened} more open files, {max(files, 0)} are left"
        cure = f"ulimit -n {1 << max(10, (opened + 256).bit_length())} allows more"
    using = f"using {now[0]} worker{'s' * (now[0] != 1)}, prefetch {now[1]}" if now[0] else "loading without workers"
    return *now, f"{need}: {using}; {cure}"


def fit_loader(dataset, batch_size: int, workers: int, prefetch: int, **options) -> tuple[int, int, str | None]:
    """``fitting_workers`` for this dataset, on this machine as it is now. Reads one item."""
    if workers == 0:
        return 0, prefetch, None
    used, soft, _ = open_files()
    free = shared_memory_free()
    return fitting_workers(workers, prefetch, batch_bytes(dataset, batch_size), free, files=soft - used, **options)
