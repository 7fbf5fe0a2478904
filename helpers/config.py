"""Every switch of the training loop in one frozen dataclass, and the three presets of the course."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import Literal

from helpers.errors import InputError


@dataclass(frozen=True)
class TrainConfig:
    """A training run. The defaults are what a first script does; ``preset("tuned")`` turns on what the course
    teaches.

    Raises InputError for a value that cannot work.
    """

    preset: Literal["naive", "seed", "tuned"] = "naive"
    """Recipe the other settings start from."""

    data: str = "digits"
    """'digits' (embedded), a folder of images, or CIFAR10, FashionMNIST, Imagenette (downloaded)."""
    split_seed: int = 0
    """Decides which images of a folder without a val/ are held out."""
    image_size: int = 64
    """Images are resized to this many pixels, squarely."""
    model: str = "small_cnn"
    """small_cnn, first_cnn, or a torchvision model such as resnet18."""

    epochs: int = 12
    """Passes over the training images; the learning-rate schedule is planned over them."""
    max_steps: int | None = None
    """Stop after this many optimiser steps, wherever the schedule is."""
    target_accuracy: float | None = None
    """Stop at the first evaluation that reaches this validation accuracy (0 to 1)."""
    batch_size: int = 32
    """Images in a micro-batch."""
    accumulate: int = 1
    """Micro-batches whose gradients make one optimiser step."""
    shuffle: bool = True
    """A new order each epoch."""
    drop_last: bool = False
    """Leave out an incomplete last batch of training images."""

    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Update rule."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decay of weights with two or more dimensions."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up."""
    warmup: float = 0.0
    """Share of all steps in which the learning rate rises from near zero."""
    clip_norm: float | None = None
    """Gradients are scaled down to this norm if theirs is larger."""
    fused: bool = False
    """Update all parameters in one kernel."""

    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"
    """Autocast type; 'auto' measures on this machine which is fastest."""
    channels_last: bool = False
    """Keep images and convolution weights in N×H×W×C order."""
    keep_memory: bool = False
    """On a CPU: keep freed memory in the process instead of giving it back to the system after each step."""
    compile: bool = False
    """Compile the model with torch.compile."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 …"""

    workers: int = 0
    """Loader processes; -1 takes as many as pay on the usable cores."""
    start_method: Literal["default", "fork", "forkserver", "spawn"] = "default"
    """How loader processes start; 'default' is Python's."""
    loader_prefetch: int = 2
    """Batches each worker keeps ready."""
    in_order: bool = True
    """Deliver batches in the sampler's order; without it as they are ready, and a run cannot be repeated exactly."""
    persistent_workers: bool = False
    """Keep loader processes from one epoch to the next."""
    pin_memory: bool = False
    """Put batches in page-locked memory, where a GPU is."""
    device_prefetch: bool = False
    """Copy the next batch to the GPU, on a stream of its own, while this one computes."""
    decoder: Literal["pillow", "torchcodec", "scaled"] = "pillow"
    """How JPEGs are decoded; 'scaled' decodes only the detail that the image size needs."""
    cache: bool = False
    """Decode every image once, into a memory-mapped file."""
    transforms: Literal["sample", "batch"] = "sample"
    """Normalise and augment one float image at a time, or a uint8 batch on the device."""
    shift: int = 4
    """Augmentation: shifts by up to this many pixels."""
    flip: bool = False
    """Augmentation: mirror left and right (never for digits or text)."""

    seed: int = 0
    """Decides weights, order and augmentation."""
    log_every: int = 1
    """Optimiser steps between two looks at the loss; each look waits for the device."""
    checkpoint_every: int | None = None
    """Optimiser steps between checkpoints, beside the one at each epoch's end."""
    eval_every: int = 1
    """Epochs between two evaluations; 0 never evaluates."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    progress: bool = True
    """Show progress while training."""
    run_dir: str | None = None
    """Folder for everything the run writes; by default a new one under runs/."""
    resume: str | None = None
    """Run folder or checkpoint to continue from."""
    reschedule: bool = False
    """With --resume: accept that changed epochs, batch size or rate plan the learning rate anew."""

    def __post_init__(self):
        for field, hint in typing.get_type_hints(type(self)).items():
            value = getattr(self, field)
            if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
                _bad(field, value, f"is not one of {', '.join(map(str, typing.get_args(hint)))}")
            allowed = typing.get_args(hint) or (hint,)
            if float in allowed and type(value) is int:
                object.__setattr__(self, field, float(value))
            elif typing.get_origin(hint) is not Literal and not isinstance(value, allowed):
                _bad(field, value, f"must be {' or '.join(t.__name__ for t in allowed)}")
            elif isinstance(value, bool) and bool not in allowed:
                _bad(field, value, "must be a number")
        for field in ("epochs", "batch_size", "accumulate", "log_every", "loader_prefetch", "image_size"):
            self._require(field, lambda v: v >= 1, "must be at least 1")
        for field in ("max_steps", "checkpoint_every"):
            self._require(field, lambda v: v is None or v >= 1, "must be at least 1")
        self._require("lr", lambda v: math.isfinite(v) and v > 0, "must be a number above 0")
        self._require("eval_every", lambda v: v >= 0, "must be 0 (never) or more")
        self._require("weight_decay", lambda v: math.isfinite(v) and v >= 0, "must be 0 or more")
        self._require("clip_norm", lambda v: v is None or v > 0, "must be above 0")
        self._require(
            "target_accuracy", lambda v: v is None or 0 < v <= 1, "must be above 0 and at most 1, such as 0.9"
        )
        self._require("warmup", lambda v: 0 <= v < 1, "must be a share of all steps, from 0 to below 1")
        self._require("workers", lambda v: v >= -1, "must be 0 or more, or -1 to choose")
        self._require("shift", lambda v: 0 <= v < self.image_size, "must be 0 or more and less than the image size")
        self._require("seed", lambda v: 0 <= v < 2**63, "must be 0 or more, below 2^63")

    def _require(self, field, holds, message):
        value = getattr(self, field)
        if not holds(value):
            _bad(field, value, message)

    def replace(self, **changes) -> TrainConfig:
        """A copy with some settings changed."""
        unknown = changes.keys() - {f.name for f in dataclasses.fields(self)}
        if unknown:
            raise InputError(f"unknown setting {', '.join(sorted(unknown))}; see python -m helpers.train --help")
        return dataclasses.replace(self, **changes)


def _bad(field: str, value, message: str):
    raise InputError(f"--{field.replace('_', '-')} {value}: {message}")


# What each preset changes of the defaults above.
PRESETS: dict[str, dict] = {
    "naive": {},
    # The article's recipe: four workers, transforms one sample at a time, fixed order, fp16 with a scaler where
    # there is CUDA.
    "seed": {
        "model": "first_cnn",
        "workers": 4,
        "shuffle": False,
        "shift": 0,
        "precision": "fp16",
        "log_every": 50,
    },
    "tuned": {
        "epochs": 8,
        "batch_size": 64,
        "optimizer": "adamw",
        "lr": 3e-3,
        "weight_decay": 0.01,
        "schedule": "cosine",
        "warmup": 0.1,
        "fused": True,
        "precision": "auto",
        "channels_last": True,
        "keep_memory": True,
        "workers": -1,
        "persistent_workers": True,
        "pin_memory": True,
        "device_prefetch": True,
        "decoder": "scaled",
        "cache": True,
        "transforms": "batch",
        "log_every": 50,
    },
}


def preset(name: str, **changes) -> TrainConfig:
    """The configuration of a preset ('naive', 'seed', 'tuned') with ``changes`` on top. Raises InputError for an
    unknown name."""
    if name not in PRESETS:
        raise InputError(f"--preset {name}: is not one of {', '.join(PRESETS)}")
    settings = PRESETS[name]
    if name == "seed" and "precision" not in changes:
        from helpers.devices import pick_device

        if pick_device(changes.get("device", "auto")).type != "cuda":
            settings = {**settings, "precision": "fp32"}
    return TrainConfig(preset=name).replace(**settings).replace(**changes)
