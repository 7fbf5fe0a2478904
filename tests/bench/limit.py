"""`limit`: how near the tuned training comes to its own step in a bare loop, fed from memory, in one process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.nn.functional as F

from helpers.config import preset
from helpers.optim import lr_at, set_lr
from helpers.train import Trainer
from tests.bench.children import answer
from tests.bench.training import fresh_home
from tests.bench.verdict import Row


class Alternating(Trainer):
    """The real training. ``save``, which it calls before the first epoch and after each, writes nothing here: it
    times an epoch of the bare loop, with the same model and optimiser."""

    def __init__(self, config):
        super().__init__(config)
        self.batches = [(images.clone(), labels) for images, labels in self.data.epoch(self.progress)]
        self.limits: list[float] = []

    def save(self) -> None:
        config, progress = self.config, self.progress
        self.model.train()
        start = time.perf_counter()
        for number, (images, labels) in enumerate(self.batches):
            images, labels = images.to(self.device), labels.to(self.device)
            images = self.data.prepare(images, (progress.epoch, number))
            with self.autocast:
                loss = F.cross_entropy(self.forward(images), labels)
            loss.backward()
            set_lr(self.optimizer, lr_at(progress.steps, self.total_steps, config))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        loss.item()
        self.limits.append(sum(len(labels) for _, labels in self.batches) / (time.perf_counter() - start))


def measure(quick: bool, work: Path) -> dict:
    """images/s of each epoch after the first, and of the bare loop before and after it."""
    os.environ["COURSE_DATA"] = str(fresh_home(work))
    fixed = {
        "eval_every": 0,
        "tensorboard": False,
        "progress": False,
        "device": "cpu",
        "run_dir": str(work / "run"),
    }
    trainer = Alternating(preset("tuned", epochs=4 if quick else 13, **fixed))
    trainer.fit()
    tuned, limits = [images / seconds for images, seconds, _ in trainer.progress.epochs], trainer.limits
    rounds = [{"tuned": tuned[n], "before": limits[n], "after": limits[n + 1]} for n in range(1, len(tuned))]
    return {"precision": trainer.precision, "rounds": rounds}


def rows(raw: dict, machine: dict) -> list[Row]:
    """Each epoch against the mean of its neighbours, so that a machine that slows down or speeds up tilts nothing."""
    limits = [(values["before"] + values["after"]) / 2 for values in raw["rounds"]]
    shares = [values["tuned"] / limit for values, limit in zip(raw["rounds"], limits, strict=True)]
    return [
        Row("limit", "tuned ÷ its step fed from memory", "×", shares, at_least=0.9),
        Row("limit", "its step fed from memory", "images/s", limits),
    ]


if __name__ == "__main__":
    answer(measure)
