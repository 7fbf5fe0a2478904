"""The same tiny training in four loops: by hand, ours, Lightning Fabric, Accelerate. Each gives µs a step.

A 32-64-10 MLP, AdamW fused, float32, constant learning rate, inputs and labels moved with ``.to``, and one look at
the mean loss every 50 steps: what is left to differ is the loop. Fabric and Accelerate as in the first example of
their documentation.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from helpers.config import TrainConfig
from helpers.train import Trainer

LOG_EVERY = 50
DEVICE = torch.device("cpu")


def _parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)


def _timed(batches, model, optimizer, backward) -> float:
    # Fabric and Accelerate set this. Then each optimiser step, on a CUDA build without a GPU, asks the driver anew
    # (100 µs). That is no part of a loop, so they are measured without.
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    losses = []
    start = time.perf_counter()
    for step, (inputs, labels) in enumerate(batches, start=1):
        inputs, labels = inputs.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)
        loss = F.cross_entropy(model(inputs), labels)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % LOG_EVERY == 0:
            torch.stack(losses).mean().item()
            losses.clear()
    return (time.perf_counter() - start) / len(batches) * 1e6


def bare(batches, work: Path) -> float:
    return _timed(batches, *_parts(), torch.Tensor.backward)


def ours(batches, work: Path) -> float:
    switches = {"optimizer": "adamw", "fused": True, "log_every": LOG_EVERY, "epochs": 1, "device": "cpu"}
    folder = work / f"run-{time.monotonic_ns()}"
    config = TrainConfig(**switches, tensorboard=False, progress=False, run_dir=str(folder))
    trainer = Trainer(config, model=_parts()[0], loaders=(batches, None))
    trainer.fit()
    return trainer.progress.epochs[0][1] / trainer.progress.steps * 1e6


def fabric(batches, work: Path) -> float:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return _timed(batches, *fabric.setup(*_parts()), fabric.backward)


def accelerate(batches, work: Path) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return _timed(batches, *accelerator.prepare(*_parts()), accelerator.backward)


LOOPS = {"bare": bare, "ours": ours, "fabric": fabric, "accelerate": accelerate}
