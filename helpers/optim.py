"""Parameter groups, the optimiser, and the learning rate as a function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from helpers.config import TrainConfig
from helpers.errors import InputError

CLASSES = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Trainable parameters: matrices and kernels decay, biases and norms (one dimension or none) do not.

    Without decay there is one group: an optimiser works group by group, and each costs a call.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise InputError("the model has no trainable parameter; set requires_grad on what should learn")
    if not weight_decay:
        return [{"params": trainable, "weight_decay": 0.0}]
    decayed = [p for p in trainable if p.ndim >= 2]
    plain = [p for p in trainable if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimiser that ``config`` asks for, over the model's trainable parameters."""
    options = {"lr": config.lr, "fused": config.fused}
    if config.optimizer == "sgd":
        options |= {"momentum": 0.9, "nesterov": True}
    return CLASSES[config.optimizer](parameter_groups(model, config.weight_decay), **options)


def lr_at(step: int, total: int, config: TrainConfig) -> float:
    """Learning rate of optimiser step ``step`` (from 0) out of ``total``: a linear warm-up, then constant or half
    a cosine.

    A function of the step alone: nothing to save, nothing to replay, and a step that the gradient scaler skips
    simply does not count.
    """
    warmup = math.ceil(config.warmup * total)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use ``lr`` in every parameter group from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr
