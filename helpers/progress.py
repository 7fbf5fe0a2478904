"""Where a run stands: what a checkpoint must remember to go on, and what the summary is made from."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Counters of one run, plain types only."""

    epoch: int = 0
    samples: int = 0  # of this epoch, used by finished optimiser steps
    batches: int = 0  # likewise
    steps: int = 0  # optimiser steps really taken
    skipped: int = 0  # steps that the gradient scaler left out
    logged: int = 0  # the step up to which losses are logged
    pending: list[float] = field(default_factory=list)  # losses since then
    epochs: list[list[float]] = field(
        default_factory=list
    )  # of each epoch: images, seconds, seconds of waiting for the loader
    seconds: float = 0.0
    seconds_to_target: float | None = None
    cache_seconds: float = 0.0
    val_loss: float | None = None
    val_accuracy: float | None = None

    def add_part(self, images: int, seconds: float, waited: float) -> None:
        """Book a part of the current epoch (a resumed epoch has several)."""
        if len(self.epochs) <= self.epoch:
            self.epochs.append([0, 0.0, 0.0])
        for column, value in enumerate((images, seconds, waited)):
            self.epochs[-1][column] += value

    def next_epoch(self) -> None:
        self.epoch, self.samples, self.batches = self.epoch + 1, 0, 0

    def _steady(self) -> list[list[float]]:
        """Epochs after the first, which pays for starting workers, allocation and compilation; the first if there
        is no other."""
        return [e for e in self.epochs[1:] if e[0]] or [e for e in self.epochs if e[0]]

    def images_per_s(self) -> float | None:
        """Median over steady epochs: images ÷ seconds from asking for the first batch to the end of the last
        step."""
        return statistics.median(images / seconds for images, seconds, _ in self._steady()) if self._steady() else None

    def data_wait_share(self) -> float | None:
        """Share of the steady epochs' time in which the loop waited for the loader."""
        return sum(e[2] for e in self._steady()) / sum(e[1] for e in self._steady()) if self._steady() else None
