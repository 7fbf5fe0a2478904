"""What a run is made of: data, model, optimiser, run folder; how it is saved and continued, and what it reports."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import time
from collections.abc import Iterable

import torch
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
from helpers.devices import autocast_for, fastest_precision, keep_freed_memory, pick_device
from helpers.errors import InputError, NonFinite
from helpers.loading import Batches, given_batches, open_batches
from helpers.models import build_model, require_fit, require_model
from helpers.monitor import StepClock, new_run_folder, require_free
from helpers.optim import build_optimizer
from helpers.processes import peak_resident_mb, reset_peak_resident
from helpers.progress import Progress


class Run:
    """One run of ``config``. ``model`` replaces the model it names; ``loaders`` (training batches, validation
    batches or None) replace its data: iterables of (inputs, int64 labels), used as they are.
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
        elif config.keep_memory:
            keep_freed_memory()
        seed_everything(config.seed)
        self.data: Batches = given_batches(*loaders) if loaders else open_batches(config, self.device)
        if state and state["classes"] != self.data.classes:
            raise InputError(
                f"--resume {config.resume}: it was trained on other classes than those of --data {config.data}"
            )
        self.model = build_model(config.model, len(self.data.classes)) if model is None else model
        self.model.to(self.device, memory_format=torch.channels_last if config.channels_last else torch.preserve_format)
        # Looking at a reader's own loader starts its workers and moves its random state: only if there is a reason.
        sample = self.data.sample() if self.data.classes or config.precision == "auto" else None
        if sample is not None and self.data.classes:
            sample = [tensor.to(self.device) for tensor in sample]
            require_fit(self.model, self.data.prepare(sample[0][:2]), len(self.data.classes))
        self.precision = self._precision(state, sample)
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
        self.peaks: dict[int, float] = {}  # resident MB by process
        self.watched = -math.inf
        self.folder = run_folder_of(config) or new_run_folder(config)
        self.continued = state is not None and self.folder == run_folder_of(config)
        self.paused = 0.0

    def write_checkpoint(self) -> None:
        """Write what is needed to go on, unless it is broken."""
        if not torch.nn.utils.get_total_norm(self.model.parameters()).isfinite():
            self.non_finite(f"the weights are no longer finite after step {self.progress.steps}")
        self.progress.seconds = self.seconds()
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

    def _precision(self, state: dict | None, sample) -> str:
        if self.config.precision != "auto":
            return self.config.precision
        if state and state["config"]["precision"] == "auto":
            return state["precision"]  # measured again it could come out differently: another run
        if sample is None:
            return "fp32"
        images, labels = self.data.prepare(sample[0].to(self.device)), sample[1].to(self.device)
        layout = "channels_last" if self.config.channels_last else "contiguous"
        parameters = sum(p.numel() for p in self.model.parameters())
        model = f"{type(self.model).__name__} {parameters} {tuple(images.shape)} {layout}"
        setting = f"{machine_facts()} {self.device} {model}"
        return remembered("precision", setting, lambda: fastest_precision(self.model, images, labels))

    def _restore(self, state: dict) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"--resume {self.config.resume}: its weights do not fit this model ({reason}); "
                "use the --model it was made with"
            ) from None
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        restore_random_state(state["random"])
        differs = [name for name, value in machine_facts().items() if state["machine"].get(name) != value]
        if differs:
            self.data.notes.append(
                f"the checkpoint is from another setting ({', '.join(differs)}): the run goes on, to other last bits"
            )

    def greet(self) -> None:
        """Tell the reader what was noticed about the data and the setting."""
        for note in self.data.notes:
            self.log.say(note)
        if self.progress.epoch >= self.config.epochs:
            self.log.say("this run is complete; a larger --epochs with --reschedule goes on")
        elif self.progress.steps:
            self.log.say(f"continuing after step {self.progress.steps}, in epoch {self.progress.epoch + 1}")
        if self.precision == "fp16" and self.device.type == "cpu":
            self.log.say("fp16 on a CPU has no fast arithmetic and will be slow; bf16 or fp32 is what a CPU is good at")
        size = f"{sum(p.numel() for p in self.model.parameters()):,} parameters"
        self.log.say(f"training on {self.device} in {self.precision}, {size}; run folder {self.folder}")

    def watch_memory(self) -> None:
        """Note the resident peak of this process and of each worker while it lives; at most once a second, it reads files."""
        if self.device.type == "cuda" or time.perf_counter() - self.watched < 1:
            return
        self.watched = time.perf_counter()
        for pid in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
            self.peaks[pid] = max(self.peaks.get(pid, 0.0), peak_resident_mb(pid))

    def seconds(self) -> float:
        """Since the call of train(), earlier parts of a resumed run included."""
        return self.earlier + time.perf_counter() - self.started

    def peak_memory_mb(self) -> float:
        """Of the GPU: the allocated peak. Of a CPU: the resident peaks of this process and of each loader process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e6
        return sum(self.peaks.values())

    def summary(self) -> dict:
        """What summary.json holds."""
        progress, config = self.progress, self.config
        progress.seconds = self.seconds()
        names = ("seconds", "seconds_to_target", "cache_seconds", "val_accuracy", "val_loss", "steps", "skipped")
        return {
            "images_per_s": progress.images_per_s(),
            **{name: getattr(progress, name) for name in names},
            "epochs": progress.epoch,
            "data_wait_share": progress.data_wait_share(),
            "peak_memory_mb": self.peak_memory_mb(),
            "precision": self.precision,
            "device": str(self.device),
            "preset": config.preset,
            "run_dir": str(self.folder),
        }

    def non_finite(self, what: str) -> None:
        """Stop: every further step would be wasted, and every further checkpoint broken."""
        last = self.folder / "checkpoints" / "last.pt"
        raise NonFinite(
            f"{what}; stopped. Last good checkpoint: {last}. Try a lower --lr, --clip-norm 1, or another --precision"
        )

    def reached_target(self) -> bool:
        """Whether an evaluation has reached ``target_accuracy``."""
        target, accuracy = self.config.target_accuracy, self.progress.val_accuracy
        return target is not None and accuracy is not None and accuracy >= target
