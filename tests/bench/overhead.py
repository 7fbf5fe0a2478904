"""`overhead`: what our loop costs a step beyond a loop written by hand, beside what other people's cost."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import torch

from tests.bench.children import answer
from tests.bench.loops import LOOPS
from tests.bench.verdict import Row, differences


@cache
def _batches(count: int) -> list:
    torch.manual_seed(0)
    return [(torch.randn(32, 32), torch.randint(0, 10, (32,))) for _ in range(count)]


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _round(name: str, steps: int, work: Path) -> float:
    batches = _batches(steps)
    gc.collect()
    return LOOPS[name](batches, work)


def measure(quick: bool, work: Path) -> dict:
    """µs a step of each loop, one thread, in rounds of rotating order. Each lives in a process of its own: what a
    library changes in its process must not slow down or speed up the others."""
    names, rounds, steps = list(LOOPS), [], 1000 if quick else 2000
    context = multiprocessing.get_context("spawn")
    homes = {name: ProcessPoolExecutor(1, context, _quiet) for name in names}
    for number in range(4 if quick else 16):
        turn = number % len(names)
        order = names[turn:] + names[:turn]
        rounds.append({name: homes[name].submit(_round, name, steps, work).result() for name in order})
    for home in homes.values():
        home.shutdown()
    return {"steps": steps, "rounds": rounds[1:]}  # the first pays for imports and first allocations


def rows(raw: dict, machine: dict) -> list[Row]:
    rounds = raw["rounds"]
    return [
        Row("overhead", "ours − bare loop, a step", "µs", differences(rounds, "ours", "bare"), at_most=25),
        Row("overhead", "ours − Fabric", "µs", differences(rounds, "ours", "fabric"), at_most=0),
        Row("overhead", "ours − Accelerate", "µs", differences(rounds, "ours", "accelerate"), at_most=0),
        *(Row("overhead", name, "µs a step", [values[name] for values in rounds]) for name in LOOPS),
    ]


if __name__ == "__main__":
    answer(measure)
