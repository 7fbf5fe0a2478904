"""Sources, datasets and the decode-once cache."""

import os

import numpy as np
import pytest
import torch

from helpers.data import cache as cache_module
from helpers.data.cache import cached
from helpers.data.sources import Arrays, ImageDataset, Pixels, data_home, open_data
from helpers.errors import InputError
from helpers.transforms import SampleTransform


@pytest.fixture
def data(digits):
    return open_data(str(digits), 32, verify=False)


def test_digits_open_with_ten_classes_and_the_right_labels(data):
    assert data.classes == tuple("0123456789")
    assert (len(data.train), len(data.val)) == (120, 60)
    for index in (0, 50, 119):
        assert data.train.paths[index].split(os.sep)[-2] == data.classes[data.train.labels[index]]


@pytest.mark.parametrize("as_pixels", [False, True])
def test_a_batch_is_what_its_items_are(data, tmp_path, as_pixels):
    source = cached(data.train, "train", folder=tmp_path)[0] if as_pixels else data.train
    dataset = ImageDataset(source)
    keys = np.array([7, 120 + 7, 3, 240 + 119])
    images, labels = dataset.__getitems__(keys)
    assert images.shape == (4, 3, 32, 32) and images.dtype == torch.uint8
    for image, label, key in zip(images, labels, keys, strict=True):
        one, its_label = dataset[key]
        assert torch.equal(image, one) and label == its_label == data.train.labels[key % 120]
        assert np.array_equal(image.permute(1, 2, 0).numpy(), data.train.pixels(key % 120))


def test_sample_transforms_draw_by_key_in_any_process(data):
    dataset = ImageDataset(data.train, SampleTransform(shift=4, seed=1))
    first, _ = dataset.__getitems__(np.array([5]))
    again, _ = dataset.__getitems__(np.array([5]))
    next_epoch, _ = dataset.__getitems__(np.array([125]))
    assert first.dtype == torch.float32 and torch.equal(first, again) and not torch.equal(first, next_epoch)


def test_cache_is_built_once_and_holds_the_decoded_pixels(data, tmp_path):
    pixels, seconds = cached(data.train, "train", folder=tmp_path)
    assert seconds > 0 and len(list(tmp_path.iterdir())) == 1
    assert all(np.array_equal(pixels.pixels(i), data.train.pixels(i)) for i in (0, 60, 119))
    again, seconds = cached(data.train, "train", folder=tmp_path)
    assert seconds == 0.0 and np.array_equal(again.array, pixels.array)


def test_a_changed_image_gets_a_new_cache(digits, tmp_path):
    data = open_data(str(digits), 32, verify=False)
    cached(data.train, "train", folder=tmp_path)
    path = data.train.paths[0]
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    try:
        assert cached(data.train, "train", folder=tmp_path)[1] > 0
    finally:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cached(open_data(str(digits), 48, verify=False).train, "train", folder=tmp_path)[1] > 0
    assert cached(open_data(str(digits), 32, decoder="scaled", verify=False).train, "train", folder=tmp_path)[1] > 0


def test_a_damaged_cache_file_is_built_anew(data, tmp_path):
    cached(data.train, "train", folder=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    pixels, seconds = cached(data.train, "train", folder=tmp_path)
    assert seconds > 0 and np.array_equal(pixels.pixels(5), data.train.pixels(5))


def test_an_interrupted_build_leaves_nothing(data, tmp_path, monkeypatch):
    real, calls = type(data.train).pixels, []

    def pixels(self, index):
        calls.append(index)
        if len(calls) == 50:
            raise KeyboardInterrupt
        return real(self, index)

    monkeypatch.setattr(type(data.train), "pixels", pixels)
    with pytest.raises(KeyboardInterrupt):
        cached(data.train, "train", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_said_before_anything_is_decoded(data, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module.os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"needs \d+ MB .*No space left.*--no-cache"):
        cached(data.train, "train", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_arrays_of_grey_and_colour_images_become_rgb():
    grey = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28)
    source = Arrays(grey, [1, 0], 32, "x")
    assert source.pixels(0).shape == (32, 32, 3) and source.labels.tolist() == [1, 0]
    same_size = Arrays(grey, [1, 0], 28, "x").pixels(1)
    assert all(np.array_equal(same_size[..., channel], grey[1]) for channel in range(3))


def test_gather_equals_plain_indexing():
    pixels = Pixels(np.random.default_rng(0).integers(0, 256, (9, 4, 4, 3), dtype=np.uint8), torch.arange(9))
    index = torch.tensor([3, 3, 0, 8])
    assert np.array_equal(pixels.gather(index).numpy(), pixels.array[index.numpy()])


def test_data_home_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_DATA", str(tmp_path))
    assert data_home() == tmp_path


def test_a_readers_folder_is_checked_and_its_bad_files_left_out(digits, tmp_path):
    for number, name in enumerate(("cats", "dogs")):
        (tmp_path / "mine" / name).mkdir(parents=True)
        for i in range(8):
            os.link(
                open_data(str(digits), 32, verify=False).train.paths[number * 60 + i],
                tmp_path / "mine" / name / f"{i}.jpg",
            )
    good = (tmp_path / "mine/cats/0.jpg").read_bytes()
    (tmp_path / "mine/dogs/bad.jpg").write_bytes(good[: len(good) // 2])
    data = open_data(str(tmp_path / "mine"), 32)
    assert data.classes == ("cats", "dogs") and len(data.train) + len(data.val) == 16
    assert any("bad.jpg" in note for note in data.notes)


@pytest.mark.parametrize("name", ["nowhere", "./not/here", "cifar100"])
def test_an_unknown_name_says_what_is_known(name):
    with pytest.raises(InputError, match=r"no such folder.*digits.*CIFAR10"):
        open_data(name, 32)


@pytest.mark.parametrize("name", ["CIFAR10", "fashionmnist", "Imagenette"])
def test_without_a_network_a_download_says_so(name, monkeypatch):
    import urllib.error
    import urllib.request

    def offline(*_, **__):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    with pytest.raises(InputError, match=r"could not be downloaded .*--data digits") as caught:
        open_data(name, 32)
    assert "\n" not in str(caught.value)
