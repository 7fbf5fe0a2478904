"""One loader, measured for a moment: how fast it is once it runs, how long it takes to start, what it computes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from helpers.devices import synchronize
from helpers.errors import InputError
from helpers.loading import plain_errors


@dataclass(frozen=True)
class Round:
    """What one round has found."""

    rate: float  # images/s
    first: float  # seconds to the first batch, worker start included
    cpu: float  # CPU time of loading, as a share of the usable cores
    waits: bool  # this process computed for less than half the time it was given batches in
    batch: float  # images


def run_round(loader: DataLoader, workers: int, seconds: float, consume: Callable, cores: int) -> Round:
    """Take batches for about ``seconds`` and stop the workers again.

    Workers deliver in waves of one batch each, so the clock starts after the first wave and stops after a whole one.
    """
    others, start = set(multiprocessing.active_children()), time.perf_counter()
    batches = _endless(loader)
    try:
        batch = next(batches)
        first = time.perf_counter() - start
        consume(batch)
        for _ in range(workers - 1):
            consume(next(batches))
        pids = [child.pid for child in multiprocessing.active_children() if child not in others]
        start, before, count, images, waited, own = time.perf_counter(), _cpu_seconds(pids), 0, 0, 0.0, 0.0
        while time.perf_counter() - start < seconds:
            for _ in range(max(workers, 1)):
                asked, cpu = time.perf_counter(), time.process_time()
                batch = next(batches)
                waited, own = waited + time.perf_counter() - asked, own + time.process_time() - cpu
                count, images = count + 1, images + len(next(_tensors(batch), [batch]))
                consume(batch)
        took, cpu = time.perf_counter() - start, own + _cpu_seconds(pids) - before
        return Round(images / took, first, cpu / took / cores, own < waited / 2, images / count)
    except BaseException as error:
        # A notebook keeps the last error, an error keeps its frames, and those would keep the workers alive.
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        raise
    finally:
        batches.close()
        del batches, loader


def _endless(loader: DataLoader) -> Iterator:
    while True:
        empty = True
        for batch in plain_errors(loader):
            yield batch
            empty = False
        if empty:
            raise InputError("the loader gives no batch: is the dataset smaller than a batch, with drop_last?")


def _tensors(batch) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)


def _cpu_seconds(pids: Iterable[int]) -> float:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def others_busy(seconds: float = 0.2) -> float:
    """Share (0 to 1) of this process's cores that something else keeps busy, while this one sleeps; 0 where the
    system does not tell."""

    def counted() -> tuple[int, int]:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        ticks = [list(map(int, line[1:9])) for line in lines if line[0] in mine]
        return sum(map(sum, ticks)), sum(idle + waiting for _, _, _, idle, waiting, *_ in ticks)

    try:
        (before, free), _, (after, still_free) = counted(), time.sleep(seconds), counted()
    except OSError:
        return 0.0
    return max(0.0, 1 - (still_free - free) / max(1, after - before))


def stand_in(kind: str, step_s: float | None, device: torch.device) -> Callable:
    """A consumer of batches in place of a training step: copies each to a GPU, where there is one, and then takes
    ``step_s`` seconds, 'sleep'ing as a program that waits for its GPU, or 'busy' with work on the cores."""
    square = torch.rand(512, 512)

    def compute(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            torch.mm(square, square)
        return time.perf_counter() - start

    # A fixed amount of work, so that it takes longer when workers take the cores away.
    work = max(1, round(step_s * 2 / min(compute(2) for _ in range(10)))) if step_s and kind == "busy" else 0

    def consume(batch) -> None:
        if device.type == "cuda":
            for tensor in _tensors(batch):
                tensor.to(device, non_blocking=True)
            synchronize(device)
        if work:
            compute(work)
        elif step_s:
            time.sleep(step_s)

    return consume
