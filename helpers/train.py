"""The training loop, and its command line: ``python -m helpers.train --preset tuned``.

Read ``Trainer.train_epoch`` first: it is the loop in which every chapter turns one switch.
"""

from __future__ import annotations

if __name__ == "__main__":
    from helpers.processes import end_on_ctrl_c

    end_on_ctrl_c("helpers.train")

import math
import signal
import sys
import time
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from helpers.config import TrainConfig
from helpers.errors import InputError, LoaderDied, Stopped
from helpers.loading import DevicePrefetch, plain_errors, windows
from helpers.monitor import RunLog
from helpers.optim import lr_at, set_lr
from helpers.processes import StopSignal
from helpers.run import Run


class Trainer(Run):
    """A run with its loop. Read ``train_epoch`` first."""

    def train_epoch(self, stop: StopSignal) -> bool:
        """Train from where ``progress`` stands to the end of the epoch, and say whether it was reached:
        ``max_steps`` or a signal may come first. Nothing in here waits for the device; ``look`` does, every
        ``log_every`` steps.
        """
        config, progress, clock, scaler = self.config, self.progress, self.clock, self.scaler
        samples, batches = progress.samples, progress.batches
        ahead = DevicePrefetch(self.data.epoch(progress), self.device, enabled=config.device_prefetch)
        self.model.train()
        clock.start()
        for images, labels, items, last in windows(ahead, config.accumulate):
            clock.mark("load")
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            images = self.data.prepare(images, (progress.epoch, samples))
            clock.mark("copy")
            with self.autocast:
                loss = F.cross_entropy(self.forward(images), labels)
            count = len(labels)
            if items != count:  # its share of the window, so that uneven micro-batches add up to one large batch
                loss = loss * (count / items)
            clock.mark("forward")
            scaler.scale(loss).backward()
            self.losses.append(loss.detach())
            samples, batches = samples + count, batches + 1
            clock.mark("backward")
            if not last:
                continue
            if config.clip_norm is not None:
                scaler.unscale_(self.optimizer)  # first: the norm of scaled gradients means nothing
                nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
            set_lr(self.optimizer, lr_at(progress.steps, self.total_steps, config))
            self.optimizer_step()
            progress.steps, progress.samples, progress.batches = progress.steps + 1, samples, batches
            clock.mark("optimizer")
            if progress.steps - progress.logged >= config.log_every:
                self.look(log=True)
            if config.checkpoint_every and progress.steps % config.checkpoint_every == 0:
                self.save()
            clock.mark("other")
            if stop or self.enough_steps():
                return False
        return True

    def optimizer_step(self) -> None:
        """Update the weights and clear the gradients. The scaler leaves out a step whose gradients overflowed:
        counted on the device."""
        if self.scaler.is_enabled():
            one = torch.ones((), device=self.device)
            before = self.scaler.scale(one)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.skips += self.scaler.scale(one) < before  # it lowers its scale exactly when it skips
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def look(self, log: bool = False) -> None:
        """Read what has gathered on the device: check every loss, take back skipped steps, log the mean since the
        last time."""
        progress = self.progress
        values = torch.stack(self.losses).tolist() if self.losses else []
        self.losses.clear()
        for number, value in enumerate(values, start=progress.batches - len(values) + 1):
            if not math.isfinite(value):
                images = self.data.describe(progress, number)
                self.non_finite(f"the loss is {value} in epoch {progress.epoch + 1}, batch {number}{images}")
        progress.pending += values
        if self.scaler.is_enabled():
            skipped = int(self.skips)
            self.skips.zero_()
            progress.skipped, progress.steps = progress.skipped + skipped, progress.steps - skipped
        steps = progress.steps - progress.logged
        if log and steps > 0:
            lr = self.optimizer.param_groups[0]["lr"]
            self.log.log("train", progress.steps, epoch=progress.epoch + 1, loss=sum(progress.pending) / steps, lr=lr)
            progress.pending, progress.logged = [], progress.steps
        self.watch_memory()

    def enough_steps(self) -> bool:
        """Whether ``max_steps`` is reached."""
        if self.config.max_steps is None or self.progress.steps < self.config.max_steps:
            return False
        self.look()  # a scaler may have skipped some of those steps
        return self.progress.steps >= self.config.max_steps

    def fit(self) -> dict:
        """Train to the end and return what is also in summary.json.

        Raises NonFinite, Stopped (a KeyboardInterrupt) or InputError; whichever comes, a checkpoint that loads is
        in the run folder.
        """
        config, progress = self.config, self.progress
        after = progress.steps if self.continued else None
        with (
            RunLog(self.folder, config, total_steps=self.total_steps, after_step=after) as self.log,
            StopSignal() as stop,
        ):
            self.greet()
            if not self.continued:
                self.save()
            while progress.epoch < config.epochs and not self.enough_steps() and not self.reached_target():
                try:
                    finished = self._timed_epoch(stop)
                    if (finished or self.enough_steps()) and self._validated(stop) and finished:
                        progress.next_epoch()
                except LoaderDied:
                    if not stop:  # a signal to the whole group can reach a worker that is just starting
                        raise
                self.save()
                if stop:
                    self.log.summary(self.summary())
                    name = signal.Signals(stop.received).name
                    raise Stopped(
                        f"{name}: stopped after step {progress.steps}; continue with --resume {self.folder}",
                        stop.received,
                    )
            summary = self.summary()
            self.log.summary(summary)
            return summary

    def save(self) -> None:
        """Write a checkpoint of all that has happened; the time it takes is not part of an epoch's."""
        start = time.perf_counter()
        self.look()
        self.write_checkpoint()
        self.clock.start()
        self.paused += time.perf_counter() - start

    def _timed_epoch(self, stop: StopSignal) -> bool:
        progress, waited, samples = self.progress, self.clock.seconds["load"], self.progress.samples
        self.paused, start = 0.0, time.perf_counter()
        finished = self.train_epoch(stop)
        self.look()  # waits for the last step
        seconds = time.perf_counter() - start - self.paused
        progress.add_part(progress.samples - samples, seconds, self.clock.seconds["load"] - waited)
        return finished

    def _validated(self, stop: StopSignal) -> bool:
        """Evaluate if it is time to, and log it. False if a signal came before the end."""
        config, progress = self.config, self.progress
        last = progress.epoch + 1 == config.epochs or self.enough_steps()
        if (
            self.data.val is None
            or not config.eval_every
            or not (last or (progress.epoch + 1) % config.eval_every == 0)
        ):
            return not stop
        result = evaluate(self.model, self.data.val, self.device, self.autocast, prepare=self.data.prepare, stop=stop)
        if result is None:
            return False
        progress.val_loss, progress.val_accuracy = loss, accuracy = result
        if self.reached_target() and progress.seconds_to_target is None:
            progress.seconds_to_target = self.seconds()
        images, seconds, waited = progress.epochs[-1]
        speed = {"images_per_s": images / seconds, "data_wait_share": waited / seconds} if images else {}
        values = {"loss": loss, "accuracy": accuracy, **speed, "memory_mb": self.peak_memory_mb()}
        self.log.log("eval", progress.steps, epoch=progress.epoch + 1, **values)
        rate = f"  {speed['images_per_s']:.0f} images/s" if speed else ""
        where = f"epoch {progress.epoch + 1}/{config.epochs}  step {progress.steps}"
        self.log.say(f"{where}  loss {loss:.3f}  accuracy {accuracy:.1%}{rate}")
        return True


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable,
    device: torch.device,
    autocast,
    *,
    prepare=lambda images: images,
    stop=False,
) -> tuple[float, float] | None:
    """Mean cross-entropy and accuracy (0 to 1) over ``batches`` of (inputs, labels), each sample counted once;
    None if ``stop`` came.

    Has an autocast block of its own: weights that autocast casts without gradients must not be reused for
    training.
    """
    model.eval()
    loss, correct, count = torch.zeros((), device=device), torch.zeros((), device=device), 0
    for images, labels in plain_errors(batches):
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with autocast:
            logits = model(prepare(images))
        loss += F.cross_entropy(logits.float(), labels, reduction="sum")
        correct += (logits.argmax(1) == labels).sum()
        count += len(labels)
        if stop:
            return None
    if count == 0:
        raise InputError("there is no validation image to evaluate on")
    return loss.item() / count, correct.item() / count


def train(config: TrainConfig, **options) -> dict:
    """Train as ``config`` says and return the summary; ``options`` are those of ``Trainer``."""
    return Trainer(config, **options).fit()


if __name__ == "__main__":
    from helpers.cli import main

    sys.exit(main())
