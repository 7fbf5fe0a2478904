"""Chapter 01, from samples to a batch: images of different sizes side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from helpers.lab.exercises.framework import Mistake, brief, exercise

Samples = list[tuple[Tensor, int]]


@exercise
def pad_collate(answer: Callable) -> str:
    """``answer(samples)`` must give images (uint8 N×3×H×W, zeros at the right and the bottom), mask (bool N×H×W,
    true where the image is) and labels (int64 N)."""
    _examine(answer, _samples((3, 4, 6), (3, 5, 3), (3, 2, 4)))
    for case, samples in {
        "With a grey image (one channel) in the batch": _samples((3, 4, 6), (1, 5, 3)),
        "With a batch of one image": _samples((3, 4, 6)),
    }.items():
        try:
            _examine(answer, samples)
        except Mistake as mistake:
            raise Mistake(f"{case}: {mistake}") from None
        except Exception as error:
            raise Mistake(f"{case} your code raised {brief(error)}") from None
    return "Nothing cut off, nothing rescaled, and the mask knows what is image."


def _samples(*shapes: tuple[int, int, int]) -> Samples:
    """Noise of these shapes, each with a black corner, which is no padding; labels 7, 2, 5."""
    noise = torch.Generator().manual_seed(0)
    images = [torch.randint(1, 256, shape, dtype=torch.uint8, generator=noise) for shape in shapes]
    for image in images:
        image[:, -1, -1] = 0
    return list(zip(images, (7, 2, 5), strict=False))


def _padded(samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
    height, width = (max(image.shape[axis] for image, _ in samples) for axis in (1, 2))
    images = torch.zeros(len(samples), 3, height, width, dtype=torch.uint8)
    mask = torch.zeros(len(samples), height, width, dtype=torch.bool)
    for n, (image, _) in enumerate(samples):
        images[n, :, : image.shape[1], : image.shape[2]] = image
        mask[n, : image.shape[1], : image.shape[2]] = True
    return images, mask, torch.tensor([label for _, label in samples])


def _collate(answer: Callable, samples: Samples) -> tuple:
    """The answer's result, with uninitialised memory filled: what ``torch.empty`` leaves is not zero by chance."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        return answer(samples)
    finally:
        torch.set_deterministic_debug_mode(before)


def _examine(answer: Callable, samples: Samples) -> None:
    untouched = copy.deepcopy(samples)
    result = _collate(answer, samples)
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise Mistake("Return three things: images, mask, labels.")
    images, mask, labels = result
    wanted = _padded(untouched)
    if len(samples) != len(untouched) or not all(
        torch.equal(image, old) for (image, _), (old, _) in zip(samples, untouched, strict=True)
    ):
        raise Mistake("It changes `samples`, which belong to the dataset (that may keep them in memory); make copies.")
    if not isinstance(images, Tensor):
        raise Mistake(f"The images are a {type(images).__name__}; put them into one tensor.")
    if images.shape != wanted[0].shape:
        raise Mistake(_shape_mistake(answer, images, wanted[0], untouched))
    if images.dtype != torch.uint8:
        raise Mistake(
            f"The images are {str(images.dtype)[6:]}; hand on uint8, which is a quarter of the bytes to copy, and scale "
            "on the device."
        )
    if not torch.equal(images, wanted[0]):
        raise Mistake(_pixel_mistake(images, untouched))
    _compare_mask(mask, wanted[1], images)
    _compare_labels(labels, wanted[2])


def _shape_mistake(answer: Callable, images: Tensor, wanted: Tensor, samples: Samples) -> str:
    got, want = tuple(images.shape), tuple(wanted.shape)
    if got[-2:] != want[-2:] and len(got) == 4 and got[:2] == want[:2]:
        if got[2:] == tuple(min(image.shape[axis] for image, _ in samples) for axis in (1, 2)):
            return "It crops all images to the smallest; pad them to the largest height and width instead."
        if got[2] == got[3] == max(want[2:]):
            return f"It pads to a square; the largest height is {want[2]} and the largest width {want[3]}."
        others = _collate(answer, _samples((3, 7, 9), (3, 8, 2)))[0]
        if tuple(others.shape[2:]) == got[2:]:
            image = samples[0][0]
            kept = torch.equal(images[0, :, : image.shape[1], : image.shape[2]], image)
            if kept:
                return f"It pads all batches to {got[2]}×{got[3]}; a batch need be no larger than its own images."
            return f"It resizes all images to {got[2]}×{got[3]}; keep their pixels as they are, and pad."
    return f"The images have the shape {got}; with their largest height and width it would be {want}."


def _find(image: Tensor, canvas: Tensor) -> tuple[int, int] | None:
    """(row, column) at which ``image`` lies in ``canvas``, or None."""
    _, height, width = image.shape
    for top in range(canvas.shape[1] - height + 1):
        for left in range(canvas.shape[2] - width + 1):
            if (canvas[:, top : top + height, left : left + width] == image).all():
                return top, left
    return None


def _pixel_mistake(images: Tensor, samples: Samples) -> str:
    places = [_find(image, canvas) for (image, _), canvas in zip(samples, images, strict=True)]
    if None in places:  # first: enlarging may copy rows so that one image seems to have moved
        n = places.index(None)
        image = samples[n][0]
        if any(_find(image, canvas) for canvas in images):
            return "The images come in another order than the samples; keep it."
        if len(image) == 1 and _find(image, images[n, :1]):
            return "Only its first channel is filled; repeat the one it has in all three."
        return "Pixels were changed (resized, perhaps?); copy each image as it is, and fill up with zeros."
    for (image, _), place in zip(samples, places, strict=True):
        if place != (0, 0):
            return (
                f"An image of {image.shape[1]}×{image.shape[2]} starts at row {place[0]}, column {place[1]}; pad on "
                "the right and at the bottom only, so that it starts at 0, 0."
            )
    return "The padding is not zero; make the batch with `torch.zeros`, or pad with the value 0."


def _compare_mask(mask: Tensor, wanted: Tensor, images: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.shape != wanted.shape:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise Mistake(f"The mask is {shape}; it should be {tuple(wanted.shape)}, N×H×W, one truth for each pixel.")
    if mask.dtype != torch.bool:
        raise Mistake(f"The mask is {str(mask.dtype)[6:]}; make it bool, so that `~mask` and `x[mask]` work.")
    if torch.equal(mask, wanted):
        return
    if mask.all():
        raise Mistake("The mask is true everywhere; it should be false where there is only padding.")
    if torch.equal(mask, ~wanted):
        raise Mistake("The mask is the wrong way round; true is where the image is.")
    if torch.equal(mask, (images != 0).any(1)) or torch.equal(mask, (images != 0).all(1)):
        raise Mistake("The mask takes a black pixel for padding; make it from the sizes, not from the values.")
    raise Mistake(
        f"The mask is true at {mask.flatten(1).sum(1).tolist()} pixels of the images, which have "
        f"{wanted.flatten(1).sum(1).tolist()}; image n covers mask[n, :height, :width], rows first."
    )


def _compare_labels(labels: Tensor, wanted: Tensor) -> None:
    if not isinstance(labels, Tensor):
        raise Mistake(f"The labels are a {type(labels).__name__}; make them a tensor, which the loss needs.")
    if labels.shape != wanted.shape:
        raise Mistake(f"The labels have the shape {tuple(labels.shape)}; it should be {tuple(wanted.shape)}.")
    if labels.dtype != torch.int64:
        raise Mistake(f"The labels are {str(labels.dtype)[6:]}; cross-entropy takes class numbers as int64.")
    if not torch.equal(labels, wanted):
        raise Mistake(f"The labels are {labels.tolist()}; in the order of the samples they are {wanted.tolist()}.")
