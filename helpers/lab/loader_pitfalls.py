"""What goes wrong with worker processes, made to happen in a second or two and without harm."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from helpers.lab.loader_lab import Waiting, loader, without_advice
from helpers.loading import plain_errors


class Dice(Dataset):
    """Augmentation as it is often written: a generator of the data set's own, made once, in ``__init__``."""

    def __init__(self, items: int = 16):
        self.items, self.rng = items, np.random.default_rng(0)

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> tuple[int, int]:
        """(worker that drew, what it drew)"""
        return get_worker_info().id, int(self.rng.integers(1_000_000))


@without_advice()
def drawn(init: Callable[[int], None] | None = None, *, workers: int = 4, method: str | None = None) -> list:
    """What each worker's own generator draws, in two epochs: epochs × workers × draws. ``init`` is the loader's
    worker_init_fn, ``method`` the start method (None: Python's)."""
    options = {"num_workers": workers, "worker_init_fn": init, "multiprocessing_context": method}
    batches = DataLoader(Dice(), 4, collate_fn=list, **options)
    found = []
    for _ in range(2):
        by_worker: dict[int, tuple[int, ...]] = {}
        for batch in batches:
            for worker, number in batch:
                by_worker[worker] = (*by_worker.get(worker, ()), number)
        found.append([by_worker[worker] for worker in sorted(by_worker)])
    return found


def reseed(worker: int) -> None:
    """A worker_init_fn: the data set's generator starts from the worker's own seed, which is new in each epoch."""
    info = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


@without_advice()
def arrival(in_order: bool, batches: int = 8, slow_s: float = 1.0) -> list[int]:
    """The numbers of the batches as they arrive from two workers, when batch 0 takes ``slow_s`` seconds."""
    items = Waiting(batches, 0.0, slow=[0], slow_ms=1e3 * slow_s)
    settings = {"loader_prefetch": 1, "persistent_workers": False, "in_order": in_order}
    return [int(numbers[0]) for _, numbers in plain_errors(loader(items, 1, 2, **settings))]


def files_held(keep: Callable[[torch.Tensor], torch.Tensor], batches: int = 40) -> int:
    """How many files in shared memory are open more while ``keep(tensor)`` of (images, labels) of ``batches`` batches
    from a worker is held; the loader itself has ended when they are counted."""
    before = _shared_files()
    arriving = plain_errors(loader(Waiting(batches, 0.0), 1, 1, persistent_workers=False))
    held = [[keep(tensor) for tensor in batch] for batch in arriving]
    return _shared_files() - before if held else 0


def _shared_files() -> int:
    gc.collect()
    count = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them has gone already
            count += os.readlink(file).startswith("/dev/shm/torch_")
    return count


UNPICKLE = """
import pickle, sys
try:
    pickle.load(sys.stdin.buffer)
except Exception as error:
    print(type(error).__name__)
else:
    print("understood")
"""


def in_another_process(thing: object) -> str:
    """What becomes of ``thing`` in a process that was not forked: 'understood', or the kind of error it ends with."""
    command = [sys.executable, "-c", UNPICKLE]
    done = subprocess.run(command, input=pickle.dumps(thing), capture_output=True, timeout=60, check=True)
    return done.stdout.decode().strip()
