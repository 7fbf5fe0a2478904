"""The training loop, and its command line: ``python -m helpers.train --preset tuned``.

Read ``Trainer.train_epoch`` first: it is the loop in which every chapter turns one switch.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from helpers.checkpoint import (
    check_continuation,
    load_checkpoint,
    machine_facts,
    random_state,
    restore_random_state,
    run_folder_of,
    save_checkpoint,
    seed_everything,
)
from helpers.config import TrainConfig
from helpers.data.cache import remembered
from helpers.devices import autocast_for, fastest_precision, pick_device
from helpers.errors import InputError, NonFinite, Stopped
from helpers.loading import Batches, DevicePrefetch, given_batches, open_batches, windows
from helpers.models import build_model, require_model
from helpers.monitor import RunLog, StepClock, new_run_folder, require_free
from helpers.optim import build_optimizer, lr_at, set_lr
from helpers.processes import StopSignal, peak_resident_mb, reset_peak_resident
from helpers.progress import Progress


class Trainer:
    """One run of ``config``. ``model`` replaces the model it names; ``loaders`` (training batches, validation batches or None)
    replace its data: iterables of (inputs, int64 labels), used as they are.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: nn.Module | None = None,
        loaders: tuple[Iterable, Iterable | None] | None = None,
        clock: StepClock | None = None,
    ):
        self.started = time.perf_counter()
        reset_peak_resident()
        state = load_checkpoint(config.resume) if config.resume else None
        if state:
            check_continuation(config, state)
        if not run_folder_of(config):
            require_free(config)
        if model is None:
            require_model(config.model)  # before anything that takes long
        self.config, self.clock = config, clock or StepClock()
        self.device = pick_device(config.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seed_everything(config.seed)
        self.data: Batches = given_batches(*loaders) if loaders else open_batches(config, self.device)
        if state and state["classes"] != self.data.classes:
            raise InputError(f"--resume {config.resume}: it was trained on other classes than those of --data {config.data}")
        self.model = build_model(config.model, len(self.data.classes)) if model is None else model
        self.model.to(self.device, memory_format=torch.channels_last if config.channels_last else torch.preserve_format)
        self.precision = self._precision(state)
        self.data.use_precision(self.precision)
        self.autocast = autocast_for(self.device, self.precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.optimizer = build_optimizer(self.model, config)
        self.forward = torch.compile(self.model) if config.compile else self.model
        self.total_steps = config.epochs * math.ceil(self.data.per_epoch / config.accumulate)
        self.progress = Progress(**state["progress"]) if state else Progress(cache_seconds=self.data.cache_seconds)
        self.earlier = self.progress.seconds
        if state:
            self._restore(state)
        self.losses: list[torch.Tensor] = []  # of the micro-batches since the last look; they stay on the device
        self.skips = torch.zeros((), device=self.device)
        self.peaks: dict[int, float] = {}
        self.folder = run_folder_of(config) or new_run_folder(config)
        self.continued = state is not None and self.folder == run_folder_of(config)
        self.resumed = state is not None

    def train_epoch(self, stop: StopSignal) -> bool:
        """Train from where ``progress`` stands to the end of the epoch, and say whether it was reached: ``max_steps`` or a
        signal may come first. Nothing in here waits for the device; ``look`` does, every ``log_every`` steps.
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
        """Update the weights and clear the gradients. The scaler leaves out a step whose gradients overflowed: counted on
        the device."""
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
        """Read what has gathered on the device: check every loss, take back skipped steps, log the mean since the last time."""
        progress = self.progress
        values = torch.stack(self.losses).tolist() if self.losses else []
        self.losses.clear()
        for number, value in enumerate(values, start=progress.batches - len(values) + 1):
            if not math.isfinite(value):
                self._non_finite(
                    f"the loss is {value} in epoch {progress.epoch + 1}, batch {number}{self.data.describe(progress, number)}"
                )
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
        for pid in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
            self.peaks[pid] = max(self.peaks.get(pid, 0.0), peak_resident_mb(pid))

    def enough_steps(self) -> bool:
        """Whether ``max_steps`` is reached."""
        if self.config.max_steps is None or self.progress.steps < self.config.max_steps:
            return False
        self.look()  # a scaler may have skipped some of those steps
        return self.progress.steps >= self.config.max_steps

    def fit(self) -> dict:
        """Train to the end and return what is also in summary.json.

        Raises NonFinite, Stopped (a KeyboardInterrupt) or InputError; whichever comes, a checkpoint that loads is in the run
        folder.
        """
        config, progress = self.config, self.progress
        after = progress.steps if self.continued else None
        with RunLog(self.folder, config, total_steps=self.total_steps, after_step=after) as self.log, StopSignal() as stop:
            self._greet()
            if not self.continued:
                self.save()
            while progress.epoch < config.epochs and not self.enough_steps() and not self.reached_target():
                finished = self._timed_epoch(stop)
                if (finished or self.enough_steps()) and not stop:
                    self._validate(stop)
                if finished and not stop:
                    progress.next_epoch()
                self.save()
                if stop:
                    self.log.summary(self._summary())
                    name = signal.Signals(stop.received).name
                    raise Stopped(
                        f"{name}: stopped after step {progress.steps}; continue with --resume {self.folder}", stop.received
                    )
            summary = self._summary()
            self.log.summary(summary)
            return summary

    def reached_target(self) -> bool:
        """Whether an evaluation has reached ``target_accuracy``."""
        target, accuracy = self.config.target_accuracy, self.progress.val_accuracy
        return target is not None and accuracy is not None and accuracy >= target

    def save(self) -> None:
        """Write a checkpoint, unless what it would hold is broken."""
        pause = time.perf_counter()
        self.look()
        if not torch.nn.utils.get_total_norm(self.model.parameters()).isfinite():
            self._non_finite(f"the weights are no longer finite after step {self.progress.steps}")
        self.progress.seconds = self._seconds()
        state = {
            "config": dataclasses.asdict(self.config),
            "progress": dataclasses.asdict(self.progress),
            "classes": self.data.classes,
            "precision": self.precision,
            "machine": machine_facts(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random": random_state(),
        }
        save_checkpoint(self.folder / "checkpoints", state)
        self.clock.start()  # saving is not part of a step
        self.paused = getattr(self, "paused", 0.0) + time.perf_counter() - pause

    def _timed_epoch(self, stop: StopSignal) -> bool:
        progress, waited, samples = self.progress, self.clock.seconds["load"], self.progress.samples
        self.paused, start = 0.0, time.perf_counter()
        finished = self.train_epoch(stop)
        self.look()  # waits for the last step
        seconds = time.perf_counter() - start - self.paused
        progress.add_part(progress.samples - samples, seconds, self.clock.seconds["load"] - waited)
        return finished

    def _validate(self, stop: StopSignal) -> None:
        progress = self.progress
        every = self.config.eval_every
        due = (every and (progress.epoch + 1) % every == 0) or progress.epoch + 1 == self.config.epochs or self.enough_steps()
        if self.data.val is None or not every or not due:
            return
        result = evaluate(self.model, self.data.val, self.device, self.autocast, prepare=self.data.prepare, stop=stop)
        if result is None:
            return
        progress.val_loss, progress.val_accuracy = result
        if self.reached_target() and progress.seconds_to_target is None:
            progress.seconds_to_target = self._seconds()
        images, seconds, waited = progress.epochs[-1]
        rate, wait = (images / seconds, waited / seconds) if seconds else (0.0, 0.0)
        values = {"loss": progress.val_loss, "accuracy": progress.val_accuracy, "images_per_s": rate, "data_wait_share": wait}
        self.log.log("eval", progress.steps, epoch=progress.epoch + 1, **values, memory_mb=self._peak_memory_mb())
        line = f"epoch {progress.epoch + 1}/{self.config.epochs}  step {progress.steps}  loss {progress.val_loss:.3f}"
        self.log.say(f"{line}  accuracy {progress.val_accuracy:.1%}  {rate:.0f} images/s")

    def _precision(self, state: dict | None) -> str:
        if self.config.precision != "auto":
            return self.config.precision
        if state and state["config"]["precision"] == "auto":
            return state["precision"]  # another measurement could choose another, and the run would no longer be the same
        batch = self.data.sample()
        if batch is None:
            return "fp32"
        images, labels = self.data.prepare(batch[0].to(self.device)), batch[1].to(self.device)
        layout = "channels_last" if self.config.channels_last else "contiguous"
        parameters = sum(p.numel() for p in self.model.parameters())
        setting = f"{machine_facts()} {self.device} {type(self.model).__name__} {parameters} {tuple(images.shape)} {layout}"
        return remembered("precision", setting, lambda: fastest_precision(self.model, images, labels))

    def _restore(self, state: dict) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"--resume {self.config.resume}: its weights do not fit this model ({reason}); use the --model it was made with"
            ) from None
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        restore_random_state(state["random"])
        differs = [name for name, value in machine_facts().items() if state["machine"].get(name) != value]
        if differs:
            self.data.notes.append(
                f"the checkpoint is from another setting ({', '.join(differs)}): the run goes on, to other last bits"
            )

    def _greet(self) -> None:
        for note in self.data.notes:
            self.log.say(note)
        if self.progress.steps:
            self.log.say(f"continuing after step {self.progress.steps}, in epoch {self.progress.epoch + 1}")
        if self.precision == "fp16" and self.device.type == "cpu":
            self.log.say("fp16 on a CPU has no fast arithmetic: this will be slow, bf16 or fp32 is what a CPU is good at")
        parameters = sum(p.numel() for p in self.model.parameters())
        self.log.say(f"training on {self.device} in {self.precision}, {parameters:,} parameters; run folder {self.folder}")

    def _seconds(self) -> float:
        return self.earlier + time.perf_counter() - self.started

    def _peak_memory_mb(self) -> float:
        """Of the GPU: the allocated peak. Of a CPU: the resident peaks of this process and of each loader process."""
        return torch.cuda.max_memory_allocated(self.device) / 1e6 if self.device.type == "cuda" else sum(self.peaks.values())

    def _summary(self) -> dict:
        progress, config = self.progress, self.config
        progress.seconds = self._seconds()
        names = ("seconds", "seconds_to_target", "cache_seconds", "val_accuracy", "val_loss", "steps", "skipped")
        return {
            "images_per_s": progress.images_per_s(),
            **{name: getattr(progress, name) for name in names},
            "epochs": progress.epoch,
            "data_wait_share": progress.data_wait_share(),
            "peak_memory_mb": self._peak_memory_mb(),
            "precision": self.precision,
            "device": str(self.device),
            "preset": config.preset,
            "run_dir": str(self.folder),
        }

    def _non_finite(self, what: str) -> None:
        last = self.folder / "checkpoints" / "last.pt"
        raise NonFinite(f"{what}; stopped. Last good checkpoint: {last}. Try a lower --lr, --clip-norm 1, or another --precision")


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable, device: torch.device, autocast, *, prepare=lambda images: images, stop=False
) -> tuple[float, float] | None:
    """Mean cross-entropy and accuracy (0 to 1) over ``batches`` of (inputs, labels), each sample counted once; None if
    ``stop`` came.

    Has an autocast block of its own: weights that autocast casts without gradients must not be reused for training.
    """
    model.eval()
    loss, correct, count = torch.zeros((), device=device), torch.zeros((), device=device), 0
    for images, labels in batches:
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
