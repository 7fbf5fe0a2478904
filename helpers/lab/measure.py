"""Measuring a training step: where its time goes, with the device waited for and the first steps left out."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from helpers.config import TrainConfig
from helpers.devices import pick_device, synchronize
from helpers.monitor import StepClock
from helpers.train import Trainer

PHASES = ("load", "copy", "forward", "backward", "optimizer", "other")


class SyncedClock(StepClock):
    """A StepClock that waits for the device at every mark, so that each phase pays for its own work, and keeps the
    steps apart.

    The waits cost overlap: phases become true, the whole becomes a little slower. On a CPU there is nothing to
    wait for.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.steps: list[dict[str, float]] = []
        self._current = dict.fromkeys(PHASES, 0.0)

    def mark(self, phase: str) -> None:
        synchronize(self.device)
        before = self.last
        super().mark(phase)
        self._current[phase] += self.last - before
        if phase == "other":  # the loop's last mark of a step
            self.steps.append(self._current)
            self._current = dict.fromkeys(PHASES, 0.0)


@dataclass(frozen=True)
class Spread:
    """A median and the middle half of the values around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, median, high = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        )
        return cls(median, low, high)


@dataclass(frozen=True)
class Steps:
    """Measured steps: seconds of each phase for each step, and the images a step takes."""

    name: str
    seconds: list[dict[str, float]]
    images: int
    first: dict[str, float]

    def phase(self, phase: str) -> Spread:
        """Seconds of one phase."""
        return Spread.of([step[phase] for step in self.seconds])

    def total(self) -> Spread:
        """Seconds of a whole step."""
        return Spread.of([sum(step.values()) for step in self.seconds])

    def share(self, phase: str) -> Spread:
        """Percent of a step's time spent in one phase."""
        return Spread.of([100 * step[phase] / sum(step.values()) for step in self.seconds])


def measure_steps(config: TrainConfig, steps: int = 20, warmup: int = 4) -> Steps:
    """Train ``warmup + steps`` optimiser steps of the real loop and return the times of the last ``steps``.

    Uses a run folder that is removed afterwards; nothing is printed. ``first`` keeps the very first step, which is
    not like the others.
    """
    clock = SyncedClock(pick_device(config.device))
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"run_dir": folder, "tensorboard": False, "progress": False, "eval_every": 0}
        Trainer(config.replace(max_steps=warmup + steps, epochs=10_000, **quiet), clock=clock).fit()
    return Steps(config.preset, clock.steps[warmup:], config.batch_size * config.accumulate, clock.steps[0])


def ratio(slow: Steps, fast: Steps) -> Spread:
    """How many times as long ``slow`` takes for an image: the median, and the ratios of the near and far ends of
    the middle halves."""
    one, other = slow.total(), fast.total()
    scale = fast.images / slow.images
    return Spread(scale * one.median / other.median, scale * one.low / other.high, scale * one.high / other.low)
