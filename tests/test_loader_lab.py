"""Chapter 01's laboratory: its data sets do what they say, its experiments measure what they say, and no worker is
left."""

import gc
import multiprocessing
import sys
import time

import numpy as np
import pytest
import torch

from helpers.config import preset
from helpers.data.cache import cached
from helpers.data.sources import Files, ImageDataset, open_data
from helpers.lab import batch_lab, loader_lab
from helpers.lab.batch_lab import batch_sizes, learn, resident_mb
from helpers.lab.loader_lab import (
    Floats,
    PerSample,
    Waiting,
    epochs,
    few,
    first_batches,
    prefetch_effect,
    rates,
    short_epochs,
    three_kinds,
    times,
    transport,
    workers_curve,
)
from helpers.lab.loader_pitfalls import Dice, arrival, drawn, files_held, in_another_process, reseed
from helpers.lab.measure import Spread


@pytest.fixture(autouse=True)
def no_worker_is_left():
    before = set(multiprocessing.active_children())
    yield
    deadline = time.monotonic() + 20
    while (left := set(multiprocessing.active_children()) - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.1)
    assert not left


@pytest.fixture
def small_digits(digits, monkeypatch):
    """The course's digits, but few of them."""
    monkeypatch.setattr(loader_lab, "open_data", lambda name, size, **options: open_data(str(digits), size, **options))
    return open_data(str(digits), 64, verify=False).train


def test_waiting_sleeps_for_its_items_and_longer_for_the_slow(monkeypatch):
    slept = []
    monkeypatch.setattr(loader_lab.time, "sleep", slept.append)
    items = Waiting(10, 2.0, slow=[3], slow_ms=50.0)
    values, indices = items.__getitems__(np.array([12, 13, 4]))  # keys of the second epoch
    assert slept == [pytest.approx(0.054)] and indices.tolist() == [2, 3, 4] and values.shape == (3,)
    assert len(items) == 10


def test_epochs_take_turns_and_leave_out_the_first(monkeypatch):
    order = []

    class Batches:
        def __init__(self, name):
            self.name = name

        def __iter__(self):
            order.append(self.name)
            return iter([1, 2, 3])

    seconds = epochs({"a": Batches("a"), "b": Batches("b")}, rounds=2, step_s=0.001)
    assert order == ["a", "b"] * 3 and [len(values) for values in seconds.values()] == [2, 2]
    assert all(value >= 0.003 for values in seconds.values() for value in values)
    assert 0 < rates({"a": Batches("a")}, 6, rounds=1, step_s=0.001)["a"].median <= 6 / 0.003


def test_few_are_from_all_over_and_keep_their_labels(small_digits):
    some = few(small_digits, 12)
    assert isinstance(some, Files) and len(some) == 12 and len(set(some.labels.tolist())) >= 8
    assert all(f"/{label}/" in path for label, path in zip(some.labels.tolist(), some.paths, strict=True))


def test_times_keeps_the_far_ends():
    assert times(Spread(6, 5, 8), Spread(2, 1, 4)) == Spread(3, 1.25, 8)


def test_three_ways_hand_over_the_same_pictures(small_digits):
    pixels, _ = cached(small_digits, "test")
    images, labels = Floats(pixels).__getitems__(np.array([3, 70]))
    one, label = PerSample(pixels)[70]
    assert torch.equal(images[1], one) and labels[1] == label and one.dtype == torch.float32
    assert torch.equal(ImageDataset(pixels).__getitems__(np.array([70]))[0][0].float() / 255, one)
    ways = transport(rounds=1)
    assert len(ways) == 3 and all(spread.median > 0 for spread in ways.values())


def test_three_kinds_measure_each_number_of_workers(small_digits, monkeypatch):
    seen = {}

    def curve(dataset, batch, rounds):
        seen[type(dataset).__name__, getattr(dataset, "in_memory", None)] = len(dataset)
        return {0: Spread(1, 1, 1)}

    monkeypatch.setattr(loader_lab, "workers_curve", curve)
    assert list(three_kinds()) == ["waiting", "decoding", "in memory"]
    assert seen == {("Waiting", False): 128, ("ImageDataset", False): 256, ("ImageDataset", True): 120}


def test_waiting_items_gain_by_workers(recwarn):
    curve = workers_curve(Waiting(32, 3.0), 4, (0, 4), rounds=2)
    assert curve[4].median > 1.5 * curve[0].median
    assert not [warning for warning in recwarn if "worker processes" in str(warning.message)]


def test_a_deep_prefetch_hides_uneven_batches():
    depths = prefetch_effect(rounds=2)
    assert depths["uneven", 8].median > 1.1 * depths["uneven", 1].median


@pytest.mark.slow
def test_start_methods_are_told_apart_and_spawn_is_slow(monkeypatch):
    monkeypatch.setattr(loader_lab, "_served", False)
    starts = first_batches(rounds=2)
    assert list(starts) == ["fork", "forkserver, first", "forkserver, later", "spawn"]
    assert starts["spawn"].median > 2 * starts["fork"].median
    again = first_batches(rounds=1)
    assert list(again) == ["fork", "forkserver, later", "spawn"]


def test_kept_workers_make_short_epochs_faster():
    seconds = short_epochs()
    assert seconds["epoch, workers kept"].median < seconds["epoch, workers new"].median


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_dice_are_copied_with_the_dataset_and_reseeding_cures_it(method):
    first, second = drawn(method=method)
    assert len(first) == 4 and len(set(first)) == 1 and first == second and len(first[0]) == 4
    first, second = drawn(reseed, method=method)
    assert len(set(first)) == 4 and not set(first) & set(second)
    torch.manual_seed(7)
    once = drawn(reseed, method=method)
    torch.manual_seed(7)
    assert once == drawn(reseed, method=method), "a repeated run draws the same"
    assert len(Dice()) == 16


def test_one_slow_batch_holds_up_the_others_only_in_order():
    assert arrival(in_order=True, batches=5, slow_s=0.7) == [0, 1, 2, 3, 4]
    assert arrival(in_order=False, batches=5, slow_s=0.7) == [1, 2, 3, 4, 0]


def test_kept_batches_hold_files_and_copies_do_not():
    assert files_held(lambda tensor: tensor, batches=6) == 12
    assert files_held(lambda tensor: tensor.clone(), batches=6) == 0


def test_what_another_process_understands(monkeypatch):
    cell = type("Cell", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Cell", cell, raising=False)
    assert in_another_process(cell()) == "AttributeError"
    assert in_another_process(Waiting(2, 1.0)) == "understood"


def test_learning_is_the_real_loop(digits):
    run = learn(30, 2e-3, epochs=2, data=str(digits), precision="fp32", device="cpu")
    assert (run.size, run.lr, run.steps, run.images) == (30, 2e-3, 8, [120, 240])
    assert 0 < run.seconds[0] < run.seconds[1] and all(0 <= value <= 1 for value in run.accuracy)


def test_batch_sizes_measure_speed_and_memory(digits):
    config = preset("tuned", data=str(digits), image_size=32, precision="fp32", device="cpu", model="small_cnn")
    found = batch_sizes(config, (4, 16), steps=2)
    assert [one.size for one in found] == [4, 16]
    assert all(one.images_per_s.low <= one.images_per_s.median <= one.images_per_s.high for one in found)
    assert all(one.memory_mb >= 0 for one in found) and resident_mb() > 50


def test_a_size_that_does_not_fit_ends_the_list(monkeypatch):
    class Measured:
        def total(self):
            return Spread(0.5, 0.4, 1.0)

    def measure(config, steps, warmup):
        if config.batch_size > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert config.drop_last, "a ragged last batch would be timed as a full one"
        return Measured()

    monkeypatch.setattr(batch_lab, "measure_steps", measure)
    found = batch_sizes(preset("tuned", device="cpu"), (8, 16, 32, 64))
    assert [one.size for one in found] == [8, 16] and found[0].images_per_s == Spread(16, 8, 20)
