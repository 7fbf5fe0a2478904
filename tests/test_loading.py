"""Order, workers, the copy ahead and accumulation windows."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch

from helpers.config import TrainConfig, preset
from helpers.data.cache import cached
from helpers.data.sources import Files, ImageDataset, open_data
from helpers.errors import InputError, LoaderDied
from helpers.loading import (
    DevicePrefetch,
    EpochBatches,
    given_batches,
    make_loader,
    open_batches,
    plain_errors,
    windows,
)
from helpers.progress import Progress

CPU = torch.device("cpu")


def order(sampler):
    return np.concatenate([np.asarray(batch) for batch in sampler]) if len(sampler) else np.array([], dtype=int)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 16, 17, 100])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
def test_an_epoch_holds_each_image_once_and_no_batch_of_one(n, batch_size):
    sampler = EpochBatches(n, batch_size, shuffle=True)
    batches = list(sampler)
    assert sorted(order(sampler)) == list(range(n))
    assert len(batches) == len(sampler)
    if batch_size > 1 and n > 1:
        assert min(map(len, batches)) > 1, "batch norm cannot train on one image"


def test_drop_last_drops_only_the_incomplete_batch():
    assert [len(b) for b in EpochBatches(9, 4, drop_last=True)] == [4, 4]
    assert [len(b) for b in EpochBatches(11, 4, drop_last=True)] == [4, 4]
    assert len(EpochBatches(3, 4, drop_last=True)) == 0


def test_order_depends_on_seed_and_epoch_alone():
    def keys(seed, epoch):
        sampler = EpochBatches(50, 8, shuffle=True, seed=seed)
        sampler.epoch = epoch
        return order(sampler)

    assert np.array_equal(keys(3, 2), keys(3, 2))
    assert not np.array_equal(keys(3, 2) % 50, keys(3, 1) % 50)
    assert not np.array_equal(keys(3, 2), keys(4, 2))
    assert set(keys(3, 2) // 50) == {2}, "the key tells the epoch"


@pytest.mark.parametrize("n", [64, 65, 67, 129])
def test_skipping_what_was_used_leaves_exactly_the_rest(n):
    sampler = EpochBatches(n, 16, shuffle=True)
    whole = list(sampler)
    for done in range(len(whole) + 1):
        sampler.skip = sum(map(len, whole[:done]))
        rest = list(sampler)
        assert [b.tolist() for b in rest] == [b.tolist() for b in whole[done:]]


@pytest.fixture
def data(digits):
    return open_data(str(digits), 32, verify=False)


METHODS = ["fork", "forkserver", "spawn"]


@pytest.mark.parametrize(("workers", "method"), [(0, "default"), *((2, m) for m in METHODS)])
def test_every_start_method_gives_the_same_batches(data, workers, method):
    dataset = ImageDataset(data.train)
    config = TrainConfig(workers=workers, start_method=method, persistent_workers=workers > 0)
    sampler = EpochBatches(len(dataset), 50, shuffle=True)
    loader = make_loader(dataset, sampler, config, CPU)
    for epoch in range(2):
        sampler.epoch = epoch
        got = [(images.clone(), labels.clone()) for images, labels in plain_errors(loader)]
        expected = [dataset.__getitems__(keys) for keys in sampler]
        assert len(got) == len(expected) == 3
        for (images, labels), (right_images, right_labels) in zip(got, expected, strict=True):
            assert torch.equal(images, right_images) and torch.equal(labels, right_labels)
            assert images.dtype == torch.uint8 and images.shape[1:] == (3, 32, 32)


def test_starting_an_epoch_leaves_the_global_random_state_alone(data):
    loader = make_loader(ImageDataset(data.train), EpochBatches(len(data.train), 16), TrainConfig(workers=1), CPU)
    before = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(before, torch.get_rng_state())


def test_a_cpu_loader_warns_of_nothing(data, recwarn):
    loader = make_loader(ImageDataset(data.train), EpochBatches(len(data.train), 64), preset("tuned", workers=0), CPU)
    list(loader)
    assert not recwarn.list


def test_automatic_workers_are_none_for_data_in_memory(data, tmp_path):
    config = TrainConfig(workers=-1)
    pixels, _ = cached(data.train, "train", folder=tmp_path)
    assert make_loader(ImageDataset(pixels), EpochBatches(len(pixels), 8), config, CPU).num_workers == 0
    assert make_loader(ImageDataset(data.train), EpochBatches(len(data.train), 8), config, CPU).num_workers >= 1


class Breaks(ImageDataset):
    """A dataset whose item 5 goes wrong in a way of the test's choosing."""

    def __init__(self, source, how):
        super().__init__(source)
        self.how = how

    def __getitems__(self, keys):
        if 5 in keys:
            self.how()
        return super().__getitems__(keys)


def bad_input():
    raise InputError("cat.jpg: truncated")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_input_in_a_worker_arrives_as_its_one_line(data, workers):
    loader = make_loader(Breaks(data.train, bad_input), EpochBatches(40, 4), TrainConfig(workers=workers), CPU)
    with pytest.raises(InputError) as caught:
        list(plain_errors(loader))
    assert str(caught.value) == "cat.jpg: truncated"


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_worker_is_said_in_one_line_and_soon(data, method):
    config = TrainConfig(workers=1, start_method=method)
    loader = make_loader(Breaks(data.train, die), EpochBatches(40, 4), config, CPU)
    start = time.monotonic()
    with pytest.raises(LoaderDied) as caught:
        list(plain_errors(loader))
    assert time.monotonic() - start < 60
    assert "\n" not in str(caught.value) and "--workers 0" in str(caught.value)


def go_wrong():
    raise RuntimeError("the label is a banana")


def test_an_exception_in_a_worker_is_said_itself(data):
    loader = make_loader(Breaks(data.train, go_wrong), EpochBatches(40, 4), TrainConfig(workers=1), CPU)
    with pytest.raises(LoaderDied, match="the label is a banana; --workers 0 shows where") as caught:
        list(plain_errors(loader))
    assert "\n" not in str(caught.value)


def doze():
    time.sleep(2.5)


@pytest.mark.parametrize(("patience", "arrives"), [(60, True), (1, False)])
def test_a_slow_batch_is_waited_for_and_a_hung_worker_is_not(data, monkeypatch, patience, arrives):
    monkeypatch.setattr("helpers.loading.POLL_S", 1)
    monkeypatch.setattr("helpers.loading.WORKER_TIMEOUT_S", patience)
    loader = make_loader(Breaks(data.train, doze), EpochBatches(16, 4), TrainConfig(workers=1), CPU)
    if arrives:
        assert len(list(plain_errors(loader))) == 4
    else:
        with pytest.raises(LoaderDied, match="timed out"):
            list(plain_errors(loader))


def test_an_image_that_vanishes_while_training_is_named(data, tmp_path):
    copies = [shutil.copy(path, tmp_path) for path in data.train.paths[:3]]
    source = Files(tmp_path, copies, np.zeros(3), 32)
    os.unlink(copies[1])
    with pytest.raises(InputError, match=os.path.basename(copies[1])):
        ImageDataset(source).__getitems__(np.array([0, 1]))


ORPHANS = """
import sys, time, torch
from helpers.config import TrainConfig
from helpers.data.sources import Files, ImageDataset, open_data
from helpers.loading import EpochBatches, make_loader, plain_errors
import multiprocessing
if __name__ == "__main__":
    data = open_data(sys.argv[1], 32, verify=False)
    config = TrainConfig(workers=2, start_method=sys.argv[2], persistent_workers=True)
    loader = make_loader(ImageDataset(data.train), EpochBatches(len(data.train), 4), config, torch.device("cpu"))
    batches = iter(plain_errors(loader))
    next(batches)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    time.sleep(60)
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_trainer_leaves_no_worker_within_ten_seconds(digits, tmp_path, method, child_environment):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    trainer = subprocess.Popen(
        [sys.executable, script, digits, method], stdout=subprocess.PIPE, text=True, env=child_environment
    )
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(workers) == 2 and all(map(alive, workers))
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [pid for pid in workers if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def batch(n):
    return torch.zeros(n, 1), torch.zeros(n, dtype=torch.long)


def test_windows_count_their_items_and_mark_their_last():
    found = [(len(labels), items, last) for _, labels, items, last in windows(map(batch, [4, 4, 3, 4, 2]), 2)]
    assert found == [(4, 8, False), (4, 8, True), (3, 7, False), (4, 7, True), (2, 2, True)]
    assert list(windows([], 3)) == []
    assert [last for *_, last in windows(map(batch, [1, 1, 1]), 4)] == [False, False, True], (
        "fewer batches than a window still step"
    )


def test_prefetch_passes_everything_through_on_a_cpu():
    batches = [batch(3), batch(1)]
    for enabled in (True, False):
        assert [b[0] is c[0] for b, c in zip(DevicePrefetch(batches, CPU, enabled=enabled), batches, strict=True)] == [
            True,
            True,
        ]
        assert list(DevicePrefetch([], CPU, enabled=enabled)) == []


@pytest.mark.gpu
def test_prefetched_batches_arrive_whole_and_in_order():
    device = torch.device("cuda")
    batches = [
        [torch.full((64, 3, 128, 128), n, dtype=torch.uint8).pin_memory(), torch.full((64,), n)] for n in range(20)
    ]
    seen = []
    for images, labels in DevicePrefetch(batches, device):
        torch.cuda._sleep(200_000)  # the computing stream lags behind, so that a missing wait would show
        seen.append((images.float().mean(), labels.float().mean()))
    assert [tuple(map(float, pair)) for pair in seen] == [(n, n) for n in range(20)]
    assert list(DevicePrefetch([], device)) == []


def test_given_batches_need_a_length_and_a_batch():
    with pytest.raises(InputError, match="no length"):
        given_batches(iter([batch(2)]))
    with pytest.raises(InputError, match="no batch"):
        given_batches([])


def test_drop_last_with_too_few_images_says_both_numbers(digits):
    with pytest.raises(InputError, match=r"120 .* 128"):
        open_batches(TrainConfig(data=str(digits), batch_size=128, drop_last=True, progress=False), CPU)


def test_a_batch_is_named_by_its_files(digits):
    batches = open_batches(TrainConfig(data=str(digits), batch_size=8, progress=False), CPU)
    progress = Progress(epoch=1)
    said = batches.describe(progress, 3)
    batches.sampler.epoch, batches.sampler.skip = 1, 0
    first = int(list(batches.sampler)[2][0]) % 120
    assert batches.names(first) in said and said.endswith("…)")


def test_resumed_epoch_of_given_batches_skips_what_was_used():
    batches = given_batches([batch(1), batch(2), batch(3)])
    assert [len(y) for _, y in batches.epoch(Progress(batches=2))] == [3]
    assert Counter(len(y) for _, y in batches.epoch(Progress())) == {1: 1, 2: 1, 3: 1}


def test_the_default_start_method_of_this_python_is_left_alone():
    assert multiprocessing.get_start_method(allow_none=True) in (None, "fork", "forkserver")
