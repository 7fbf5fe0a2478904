"""Pixels to model inputs: both ways agree, draws depend on the key alone, and nothing is invented at the
border."""

import numpy as np
import pytest
import torch

from helpers.transforms import MEAN, STD, BatchTransform, SampleTransform

CPU = torch.device("cpu")


@pytest.fixture
def pixels():
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 20, 20, 3), dtype=np.uint8))


def as_batch(pixels):
    return pixels.permute(0, 3, 1, 2)


def undo(images):
    """Normalised float N×3×H×W back to uint8 N×H×W×3."""
    scale, mean = torch.tensor(STD).view(3, 1, 1), torch.tensor(MEAN).view(3, 1, 1)
    return (images.float() * scale + mean).round().to(torch.uint8).permute(0, 2, 3, 1)


def test_without_augmentation_both_ways_give_the_same_floats(pixels):
    one_by_one = torch.stack([SampleTransform()(image, 0) for image in pixels.numpy()])
    batch = BatchTransform(CPU)(as_batch(pixels))
    torch.testing.assert_close(one_by_one, batch, rtol=0, atol=2e-6)
    assert torch.equal(undo(batch), pixels)


@pytest.mark.parametrize("channels_last", [True, False])
def test_layout_and_type_are_as_asked(pixels, channels_last):
    images = BatchTransform(CPU, dtype=torch.bfloat16, channels_last=channels_last)(as_batch(pixels))
    assert images.dtype == torch.bfloat16 and images.shape == (6, 3, 20, 20)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert images.is_contiguous(memory_format=layout)


def expected_shift(image, down, right, flip):
    """The slow, obvious version: mirror the border, cut a window, flip it."""
    padded = np.pad(image, ((9, 9), (9, 9), (0, 0)), mode="reflect")
    window = padded[9 + down : 29 + down, 9 + right : 29 + right]
    return window[:, ::-1] if flip else window


@pytest.mark.parametrize("flip", [False, True])
def test_every_augmented_image_is_a_shift_of_its_own_original(pixels, flip):
    images = undo(BatchTransform(CPU, shift=3, flip=flip, seed=1)(as_batch(pixels), key=(0, 5))).numpy()
    found = []
    for image, original in zip(images, pixels.numpy(), strict=True):
        shifts = [(d, r, f) for d in range(-3, 4) for r in range(-3, 4) for f in {False, flip}]
        found += [s for s in shifts if np.array_equal(image, expected_shift(original, *s))]
    assert len(found) == len(pixels)
    assert len({s[:2] for s in found}) > 2, "images of a batch must not all be shifted alike"


def test_sample_transform_shifts_likewise(pixels):
    image = pixels[0].numpy()
    results = {key: undo(SampleTransform(shift=3)(image, key)[None])[0].numpy() for key in range(6)}
    for result in results.values():
        assert any(
            np.array_equal(result, expected_shift(image, d, r, False)) for d in range(-3, 4) for r in range(-3, 4)
        )
    assert len({r.tobytes() for r in results.values()}) > 2


@pytest.mark.parametrize("make", [lambda seed: BatchTransform(CPU, shift=4, flip=True, seed=seed)])
def test_draws_depend_on_seed_and_key_and_not_on_the_global_state(pixels, make):
    batch = as_batch(pixels)
    torch.manual_seed(1)
    first = make(7)(batch, key=(2, 64))
    torch.manual_seed(2)
    transform = make(7)
    transform(batch, key=(0, 0))
    state = torch.get_rng_state()
    assert torch.equal(first, transform(batch, key=(2, 64)))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, transform(batch, key=(3, 64)))
    assert not torch.equal(first, transform(batch, key=(2, 128)))
    assert not torch.equal(first, make(8)(batch, key=(2, 64)))


def test_validation_is_never_augmented(pixels):
    transform = BatchTransform(CPU, shift=4, flip=True)
    assert torch.equal(undo(transform(as_batch(pixels), None)), pixels)


@pytest.mark.gpu
def test_the_gpu_gives_the_same_pixels_as_the_cpu(pixels):
    there = BatchTransform(torch.device("cuda"))(as_batch(pixels).cuda()).cpu()
    torch.testing.assert_close(there, BatchTransform(CPU)(as_batch(pixels)), rtol=0, atol=2e-6)
    shifted = undo(BatchTransform(torch.device("cuda"), shift=3)(as_batch(pixels).cuda(), key=(0, 0)).cpu()).numpy()
    for image, original in zip(shifted, pixels.numpy(), strict=True):
        assert any(
            np.array_equal(image, expected_shift(original, d, r, False)) for d in range(-3, 4) for r in range(-3, 4)
        )
