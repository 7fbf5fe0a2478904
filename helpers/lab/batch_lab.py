"""What the size of a batch does to speed, memory and learning: the real loop, a few seconds at each size."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from helpers.config import TrainConfig, preset
from helpers.devices import pick_device
from helpers.lab.measure import Spread, measure_steps
from helpers.processes import peak_resident_mb
from helpers.train import Trainer


@dataclass(frozen=True)
class BatchSize:
    """Training at one batch size: speed, and the peak of memory (MB, 10^6 bytes) beyond what was in use before."""

    size: int
    images_per_s: Spread
    memory_mb: float


def batch_sizes(config: TrainConfig, sizes: Iterable[int] = (8, 32, 128, 512), steps: int = 5) -> list[BatchSize]:
    """A few real training steps at each size, smallest first. A size that a GPU has no memory for ends the list."""
    config = config.replace(drop_last=True)  # full batches
    cuda = pick_device(config.device).type == "cuda"
    measure_steps(config.replace(batch_size=2), steps=1, warmup=0)  # loads libraries, which stay in memory
    found, idle = [], 0.0 if cuda else resident_mb()
    for size in sizes:
        try:
            total = measure_steps(config.replace(batch_size=size), steps, warmup=2).total()
        except torch.OutOfMemoryError:
            break
        peak = torch.cuda.max_memory_allocated() / 1e6 if cuda else peak_resident_mb(os.getpid())
        speed = Spread(size / total.median, size / total.high, size / total.low)
        found.append(BatchSize(size, speed, max(0.0, peak - idle)))
    return found


def resident_mb() -> float:
    """Memory of this process that is in RAM now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@dataclass(frozen=True)
class Learned:
    """A training run, evaluated after each epoch: accuracy (0 to 1), images seen and seconds of training until then,
    and the optimiser steps of the whole."""

    size: int
    lr: float
    steps: int
    images: list[int]
    seconds: list[float]
    accuracy: list[float]


def learn(size: int, lr: float, epochs: int = 4, **changes) -> Learned:
    """Train the small CNN on the digits at 32 px: the real loop, a minute's worth of learning in a few seconds."""
    config = preset("tuned", image_size=32, shift=2, batch_size=size, lr=lr, epochs=epochs).replace(**changes)
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"run_dir": folder, "tensorboard": False, "progress": False, "keep_memory": False}
        trainer = Trainer(config.replace(**quiet))
        trainer.fit()
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "eval"]
    count = trainer.data.sampler.n
    seconds = np.cumsum([count / row["images_per_s"] for row in rows]).tolist()
    images = [count * (number + 1) for number in range(len(rows))]
    return Learned(size, lr, rows[-1]["step"], images, seconds, [row["accuracy"] for row in rows])
