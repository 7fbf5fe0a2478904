"""What chapter 01 measures a DataLoader on: small data sets, each slow for one reason, and the experiments.

The data sets live here because worker processes that are not forked import them by name, and nothing can be imported
from a notebook's cell.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from helpers.config import TrainConfig
from helpers.data.cache import cached
from helpers.data.sources import Files, ImageDataset, Pixels, open_data
from helpers.lab.measure import Spread
from helpers.loading import EpochBatches, make_loader, plain_errors
from helpers.processes import follow_parent

CPU = torch.device("cpu")


class Waiting(Dataset):
    """Items that come from far away: each takes ``ms`` milliseconds in which nothing computes. ``slow`` names items
    that take ``slow_ms``. Gives (float32 B, int64 B) for a batch of keys."""

    in_memory = False

    def __init__(self, items: int, ms: float, slow: Iterable[int] = (), slow_ms: float = 0.0):
        self.items, self.ms, self.slow, self.slow_ms = items, ms, frozenset(slow), slow_ms

    def __len__(self) -> int:
        return self.items

    def __getitems__(self, keys) -> tuple[torch.Tensor, torch.Tensor]:
        indices = [int(key) % self.items for key in keys]
        time.sleep(1e-3 * sum(self.slow_ms if index in self.slow else self.ms for index in indices))
        return torch.zeros(len(indices)), torch.tensor(indices)


class PerSample(Dataset):
    """The images of a Pixels source one by one, as float32 3×S×S: what a first Dataset does."""

    def __init__(self, pixels: Pixels):
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = torch.from_numpy(self.pixels.pixels(index)).permute(2, 0, 1).float().div(255)
        return image, self.pixels.labels[index]


class Floats(Dataset):
    """The same images a batch at a time, turned into floats in the worker."""

    def __init__(self, pixels: Pixels):
        self.bytes = ImageDataset(pixels)

    def __len__(self) -> int:
        return len(self.bytes)

    def __getitems__(self, keys) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self.bytes.__getitems__(keys)
        return images.float().div_(255), labels


# ---- how fast batches come ----------


@contextlib.contextmanager
def without_advice():
    """More workers than cores draw a warning from torch; here they are the experiment."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*worker processes in total")
        yield


@without_advice()
def loader(dataset: Dataset, batch: int, workers: int, **settings) -> DataLoader:
    """The training code's own loader, in order, on any of these data sets."""
    config = TrainConfig(workers=workers, **{"persistent_workers": True, **settings})
    return make_loader(dataset, EpochBatches(len(dataset), batch), config, CPU)


@without_advice()
def epochs(loaders: dict, rounds: int, step_s: float = 0.0) -> dict[object, list[float]]:
    """Seconds of ``rounds`` epochs of each loader: in turn, so that a busy moment of the machine hits all of them
    alike. A first epoch, in which workers start, is not counted. The consumer is busy elsewhere for ``step_s`` after
    each batch, as a device is. This process computes in one thread meanwhile, as every worker does."""
    seconds, threads = {name: [] for name in loaders}, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(rounds + 1):
            for name, batches in loaders.items():
                start = time.perf_counter()
                for _ in plain_errors(batches):
                    time.sleep(step_s)
                if number:
                    seconds[name].append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return seconds


def rates(loaders: dict, images: int, rounds: int = 4, step_s: float = 0.0) -> dict[object, Spread]:
    """Images per second of each loader, from ``epochs`` of ``images`` images."""
    seconds = epochs(loaders, rounds, step_s)
    return {name: Spread.of([images / value for value in values]) for name, values in seconds.items()}


def workers_curve(dataset: Dataset, batch: int, workers: Iterable[int] = (0, 1, 2, 4, 8), rounds: int = 4) -> dict:
    """Images per second that come out of the loader, nobody using them: {workers: Spread}."""
    return rates({count: loader(dataset, batch, count) for count in workers}, len(dataset), rounds)


def three_kinds(rounds: int = 4) -> dict[str, dict[int, Spread]]:
    """``workers_curve`` of items that wait 2 ms each, of photos to decode, and of pixels that lie in memory."""
    photos, pixels = open_data("digits", 64).train, digit_pixels()
    return {
        "waiting": workers_curve(Waiting(128, 2.0), 8, rounds=rounds),
        "decoding": workers_curve(ImageDataset(few(photos, 256)), 16, rounds=rounds),
        "in memory": workers_curve(ImageDataset(pixels), 64, rounds=rounds),
    }


def few(source: Files, count: int) -> Files:
    """``count`` images from all over a source."""
    indices = np.linspace(0, len(source) - 1, count).astype(np.int64)
    return Files(source.root, source.paths.take(indices), source.labels.numpy()[indices], source.size, source.decoder)


def digit_pixels(size: int = 64) -> Pixels:
    """The training digits, decoded: from the cache that ``tuned`` makes."""
    return cached(open_data("digits", size, decoder="scaled").train, "digits-train")[0]


def times(one: Spread, other: Spread) -> Spread:
    """How many times ``other`` goes into ``one``; low and high from the far ends of the middle halves."""
    return Spread(one.median / other.median, one.low / other.high, one.high / other.low)


def prefetch_effect(depths: tuple[int, int] = (1, 8), rounds: int = 3) -> dict:
    """Images per second behind a consumer of 5 ms a batch, two workers: {(evenness, depth): Spread}. In 'uneven' every
    tenth batch takes 40 ms instead of 4; on average two workers are faster than the consumer either way."""
    kinds = {"even": Waiting(240, 1.0), "uneven": Waiting(240, 1.0, (i for i in range(240) if i % 40 >= 36), 10.0)}
    loaders = {
        (kind, depth): loader(dataset, 4, 2, loader_prefetch=depth)
        for kind, dataset in kinds.items()
        for depth in depths
    }
    return rates(loaders, 240, rounds, step_s=0.005)


def transport(batch: int = 64, rounds: int = 4) -> dict[str, Spread]:
    """Images per second from one worker to this process, for three ways to hand over the same 64 px pictures."""
    pixels = digit_pixels()
    ways = {
        "float32, one by one, collated": DataLoader(
            PerSample(pixels), batch, num_workers=1, persistent_workers=True, worker_init_fn=follow
        ),
        "float32, a batch at once": loader(Floats(pixels), batch, 1),
        "uint8, a batch at once": loader(ImageDataset(pixels), batch, 1),
    }
    return rates(ways, len(pixels), rounds)


def follow(_worker: int) -> None:
    """A worker_init_fn: end when the process that started the worker has ended."""
    follow_parent()


# ---- how workers start ----------

_served = False


@without_advice()
def first_batches(rounds: int = 2) -> dict[str, Spread]:
    """Seconds from asking for an iterator to its first batch, two workers, by start method. A forkserver starts once in
    a process; what is slow about it is in the first of its measurements, which is kept apart."""
    global _served
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for method in ("fork", "forkserver", "spawn"):
            name = method
            if method == "forkserver":
                name, _served = ("forkserver, later" if _served else "forkserver, first"), True
            start = time.perf_counter()
            batches = plain_errors(loader(Waiting(4, 0.0), 1, 2, start_method=method, persistent_workers=False))
            next(batches)
            seconds.setdefault(name, []).append(time.perf_counter() - start)
            batches.close()  # ends its workers
    return {name: Spread.of(seconds[name]) for name in sorted(seconds)}


def short_epochs(rounds: int = 4) -> dict[str, Spread]:
    """Seconds of an epoch of eight quick batches with two workers: started for each epoch, or kept."""
    items = Waiting(32, 1.0)
    kinds = {"epoch, workers new": False, "epoch, workers kept": True}
    loaders = {name: loader(items, 4, 2, persistent_workers=kept) for name, kept in kinds.items()}
    return {name: Spread.of(values) for name, values in epochs(loaders, rounds).items()}
