"""What a loader may use: the arithmetic, and the real thing in 64 MB of shared memory and with few open files."""

import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from helpers import limits
from helpers.config import TrainConfig
from helpers.data.sources import ImageDataset, Pixels
from helpers.limits import batch_bytes, fit_loader, fitting_workers, open_files, shared_memory_free
from helpers.loading import EpochBatches, make_loader, open_batches

CPU = torch.device("cpu")
MB = 2**20


class Items(torch.utils.data.Dataset):
    def __init__(self, item, n=100):
        self.item, self.n = item, n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return self.item


@pytest.mark.parametrize(
    ("item", "size"),
    [
        (torch.zeros(3, 8, 8), 768),
        ((torch.zeros(3, 8, 8, dtype=torch.uint8), 5), 192 + 8),
        ({"image": np.zeros((8, 8), np.float32), "name": "cat", "box": [1.0, 2.0]}, 256 + 16),
        ("text", 0),
        (torch.zeros(1000)[:1], 4),
    ],
)
def test_bytes_of_a_batch_are_those_of_its_tensors(item, size):
    assert batch_bytes(Items(item), 10) == 10 * size
    assert batch_bytes(Items(item, n=4), 10) == 4 * size, "a batch is no larger than the dataset"


def test_an_item_that_cannot_be_read_is_left_to_the_loop():
    class Broken(Items):
        def __getitem__(self, index):
            raise OSError("gone")

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            raise AssertionError("a stream must not be begun")

    assert batch_bytes(Broken(0), 10) == batch_bytes(Items(0, n=0), 10) == batch_bytes(Stream(), 10) == 0


def test_the_estimate_is_what_the_loader_really_delivers():
    source = Pixels(np.zeros((40, 32, 32, 3), np.uint8), torch.zeros(40, dtype=torch.int64))
    for dataset in (ImageDataset(source), ImageDataset(source, lambda image, key: torch.zeros(3, 32, 32))):
        images, labels = dataset.__getitems__(np.arange(16))
        assert batch_bytes(dataset, 16) == images.nbytes + labels.nbytes


@pytest.mark.parametrize("free", [None, 0, MB, 64 * MB, 10**12])
@pytest.mark.parametrize("files", [None, 0, 40, 60, 10**6])
@pytest.mark.parametrize(("workers", "prefetch"), [(0, 2), (1, 1), (2, 2), (4, 8), (16, 2)])
def test_what_is_returned_fits_and_no_larger_choice_would(workers, prefetch, free, files):
    size = 5 * MB
    now, ahead, reason = fitting_workers(workers, prefetch, size, free, files=files)

    def fits(w, p):
        memory = free is None or (w * p + 2) * size <= limits.ROOM * free
        return w == 0 or (memory and (files is None or fitting_workers(w, p, 0, None, files=files)[2] is None))

    assert now <= workers and 1 <= ahead <= prefetch and fits(now, ahead)
    if (now, ahead) == (workers, prefetch):
        assert reason is None
    else:
        assert "\n" not in reason and ("--shm-size" in reason) != ("ulimit -n" in reason)
        assert ahead == 1 or now == workers, "prefetch goes first"
        assert not fits(*((workers, ahead + 1) if now == workers else (now + 1, 1)))


def test_the_line_has_the_numbers_and_the_cure():
    *now, reason = fitting_workers(2, 2, 19_300_000, 64 * MB)
    assert now == [0, 1] or now[0] < 2 or now[1] < 2
    assert all(part in reason for part in ("2 workers", "prefetch 2", "19.3 MB", "116 MB", "67 MB", "--shm-size=128m"))
    *now, reason = fitting_workers(16, 2, 1000, None, files=50)
    assert now[0] < 16 and "16 workers" in reason and "50" in reason and "ulimit -n" in reason


def test_free_shared_memory_is_shared_by_the_ranks_of_a_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(limits, "SHARED_MEMORY", tmp_path)
    alone = shared_memory_free()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert 0 < shared_memory_free() < alone / 100
    monkeypatch.setattr(limits, "SHARED_MEMORY", tmp_path / "none")
    assert shared_memory_free() is None


def test_open_files_are_counted():
    used, soft, hard = open_files()
    with open(os.devnull):
        assert open_files() == (used + 1, soft, hard)
    assert 0 < used < soft


def test_a_loader_that_fits_is_made_as_asked_and_nothing_is_said(recwarn):
    source = Pixels(np.zeros((40, 32, 32, 3), np.uint8), torch.zeros(40, dtype=torch.int64))
    notes, config = [], TrainConfig(workers=2, loader_prefetch=3)
    start = time.perf_counter()
    loader = make_loader(ImageDataset(source), EpochBatches(40, 8), config, CPU, notes)
    assert time.perf_counter() - start < 1, "it reads one image and a few counters"
    assert (loader.num_workers, loader.prefetch_factor, notes) == (2, 3, [])
    assert not recwarn.list


def test_a_loader_that_does_not_fit_is_made_smaller_and_the_run_says_so_once(digits, monkeypatch):
    monkeypatch.setattr(limits, "shared_memory_free", lambda: 2 * MB)
    config = TrainConfig(data=str(digits), workers=2, loader_prefetch=4, batch_size=16, progress=False)
    batches = open_batches(config, CPU)  # 16 × 3 × 64 × 64 float32: 0.8 MB
    assert batches.train.num_workers == batches.val.num_workers == 0
    assert sum("--shm-size" in note for note in batches.notes) == 1
    with pytest.warns(UserWarning, match="--shm-size"):
        make_loader(batches.train.dataset, batches.sampler, config, CPU)
    monkeypatch.setattr(limits, "shared_memory_free", lambda: 5 * MB)
    fewer = open_batches(config, CPU)
    assert (fewer.train.num_workers, fewer.train.prefetch_factor) == (2, 1)


def test_accumulation_windows_are_counted(digits, monkeypatch):
    monkeypatch.setattr(limits, "shared_memory_free", lambda: 8 * MB)
    config = TrainConfig(data=str(digits), workers=2, batch_size=16, progress=False)
    assert open_batches(config, CPU).train.num_workers == 2
    assert open_batches(config.replace(accumulate=8), CPU).train.num_workers < 2


def test_no_workers_are_never_looked_into():
    assert fit_loader(None, 8, 0, 2) == (0, 2, None)


# The real thing: batches of 25 MB, two workers, prefetch 2.
LOAD = """
import os, sys, warnings, numpy as np, torch
from torch.utils.data import DataLoader
from helpers.config import TrainConfig
from helpers.data.sources import ImageDataset, Pixels
from helpers.loading import EpochBatches, make_loader, plain_errors
size, workers, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
source = Pixels(np.full((128, size, size, 3), 7, np.uint8), torch.arange(128))
dataset, order = ImageDataset(source), EpochBatches(128, 16)
if way == "ours":
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loader = make_loader(dataset, order, TrainConfig(workers=workers), torch.device("cpu"))
    print(*[w.message for w in said if "DataLoader will create" not in str(w.message)], sep="\\n")
else:
    loader = DataLoader(dataset, batch_sampler=order, collate_fn=list, num_workers=workers, timeout=4)
    sys.excepthook = lambda *error: (print(error[1], file=sys.stderr, flush=True), os._exit(3))  # it would hang
seen = 0
for images, labels in plain_errors(loader) if way == "ours" else loader:
    assert (images == 7).all()
    seen += int(labels.sum())
print("workers", loader.num_workers, "seen", seen == sum(range(128)))
"""


@pytest.fixture
def small_shm(child_environment):
    """Runs LOAD with a /dev/shm of 64 MB, as in a Docker container, that only it sees."""
    private = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    if not shutil.which("unshare"):
        pytest.skip("unshare is not installed")
    tried = subprocess.run([*private, "sh", "-c", mount], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"a private /dev/shm is not allowed here: {tried.stderr.strip()}")

    def run(*arguments):
        command = f'{mount} && exec "$0" "$@"'
        return subprocess.run(
            [*private, "sh", "-c", command, sys.executable, "-c", LOAD, *map(str, arguments)],
            capture_output=True, text=True, env=child_environment, timeout=120,
        )  # fmt: skip

    return run


@pytest.mark.slow
def test_big_batches_load_in_64_mb_of_shared_memory_where_plain_workers_die(small_shm):
    plain = small_shm(724, 2, "plain")  # 16 × 3 × 724 × 724 bytes: 25 MB
    assert plain.returncode != 0 and "seen" not in plain.stdout, "the trap is real"
    ours = small_shm(724, 2, "ours")
    assert ours.returncode == 0, ours.stderr
    said, counted = ours.stdout.strip().splitlines()
    assert "25.2 MB" in said and "67 MB free" in said and "--shm-size" in said
    assert counted == "workers 0 seen True" and ours.stderr == ""


@pytest.mark.slow
def test_batches_that_just_fit_keep_their_workers(small_shm):
    ours = small_shm(420, 2, "ours")  # 8.5 MB: 2 workers × prefetch 2 + 2 are 51 MB
    assert (ours.returncode, ours.stdout.strip()) == (0, "workers 2 seen True"), ours.stderr
    fewer = small_shm(500, 2, "ours")  # 12 MB: 72 MB do not fit, prefetch 1 does
    assert fewer.returncode == 0 and "using 2 workers, prefetch 1" in fewer.stdout, fewer.stderr
    assert "workers 2 seen True" in fewer.stdout


@pytest.mark.parametrize("limit", [64, 96])
def test_many_workers_with_few_open_files(limit, child_environment):
    ours = subprocess.run(
        ["sh", "-c", f'ulimit -n {limit} && exec "$0" "$@"', sys.executable, "-c", LOAD, "32", "16", "ours"],
        capture_output=True, text=True, env=child_environment, timeout=120,
    )  # fmt: skip
    assert ours.returncode == 0, ours.stderr
    said, counted = ours.stdout.strip().splitlines()
    assert "16 workers" in said and "ulimit -n" in said
    assert counted.endswith("seen True") and 0 < int(counted.split()[1]) < 16
