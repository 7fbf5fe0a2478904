"""Reference models: small enough for a laptop CPU, ordinary enough to learn from, and torchvision's by name."""

from __future__ import annotations

import copy

import torch
from torch import nn

from helpers.errors import InputError


class SmallCNN(nn.Module):
    """Four 3×3 convolutions with batch norm and max pooling, then the maximum over positions and one linear layer.

    Input N×3×H×W (H, W ≥ 16), output N×classes. The *maximum* over positions, not the mean: an object that fills a
    small part of the picture should not be averaged away.
    """

    def __init__(self, classes: int, widths: tuple[int, ...] = (32, 64, 128, 256)):
        super().__init__()
        layers, channels = [], 3
        for width in widths:
            layers += [
                nn.Conv2d(channels, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            ]
            channels = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).amax(dim=(2, 3)))


def first_cnn(classes: int) -> nn.Sequential:
    """What a first tutorial builds: one 3→64 convolution, ReLU, 2×2 max pooling, and the least head that makes it
    run."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


OURS = {"small_cnn": SmallCNN, "first_cnn": first_cnn}


def build_model(name: str, classes: int) -> nn.Module:
    """A model by name, with random weights, for N×3×H×W images and ``classes`` outputs.

    Names: small_cnn, first_cnn, and every classification model of torchvision (resnet18, mobilenet_v3_small …).
    Raises InputError for an unknown name.
    """
    require_model(name)
    if name in OURS:
        return OURS[name](classes)
    import torchvision

    return torchvision.models.get_model(name, weights=None, num_classes=classes)


def require_model(name: str) -> None:
    """Raise InputError if there is no model called ``name``."""
    if name in OURS:
        return
    import torchvision  # costs about a second, so only when a model of its own is asked for

    if name not in torchvision.models.list_models(module=torchvision.models):
        raise InputError(
            f"--model {name}: is not known; use small_cnn, first_cnn or a torchvision model such as resnet18"
        )


@torch.no_grad()
def require_fit(model: nn.Module, images: torch.Tensor, classes: int) -> None:
    """Raise InputError if ``model`` cannot make N×``classes`` scores of ``images`` (N×3×H×W float).

    Tried on a copy, in training mode: model and random state stay as they are.
    """
    devices = [images.device] if images.is_cuda else []
    size, name = images.shape[-1], type(model).__name__
    try:
        with torch.random.fork_rng(devices=devices):
            scores = copy.deepcopy(model).train()(images)
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{name} cannot take images of {size} px ({reason}); use another --image-size or --model"
        ) from None
    if not isinstance(scores, torch.Tensor) or scores.shape != (len(images), classes):
        raise InputError(f"{name} does not give one score for each of the {classes} classes; use another --model")
