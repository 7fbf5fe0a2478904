"""From a dataset to batches on the device: order, workers, the copy ahead, and windows of micro-batches."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import resource_tracker

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from helpers.config import TrainConfig
from helpers.data.cache import cached
from helpers.data.sources import ImageDataset, open_data
from helpers.devices import DTYPES, usable_cpus
from helpers.errors import InputError, LoaderDied
from helpers.limits import fit_loader
from helpers.processes import follow_parent, signals_held
from helpers.progress import Progress
from helpers.transforms import BatchTransform, SampleTransform

# A worker that has not answered for this long hangs: a dead network mount, a deadlocked library.
WORKER_TIMEOUT_S = 300
# How often the loader looks whether its workers live; a fork server's are not our children, so no signal tells.
POLL_S = 5


class EpochBatches(Sampler[np.ndarray]):
    """Batches of keys. A key is ``epoch * n + index``: it tells the dataset, in whatever process, which image and
    which epoch's draw.

    The order is a function of (seed, epoch). ``skip`` leaves out what an interrupted epoch has already used. A
    last batch of one image joins the batch before it: batch norm cannot train on one, and nothing is left out.
    """

    def __init__(self, n: int, batch_size: int, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False):
        self.n, self.batch_size, self.shuffle, self.seed, self.drop_last = n, batch_size, shuffle, seed, drop_last
        self.epoch = self.skip = 0

    def _sizes(self) -> list[int]:
        full, rest = divmod(self.n - self.skip, self.batch_size)
        sizes = [self.batch_size] * full
        if rest == 1 and sizes:
            if not self.drop_last:
                sizes[-1] += 1
        elif rest and not self.drop_last:
            sizes.append(rest)
        return sizes

    def __len__(self) -> int:
        return len(self._sizes())

    def __iter__(self) -> Iterator[np.ndarray]:
        order = np.arange(self.n)
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.n)
        keys = self.epoch * self.n + order[self.skip :]
        start = 0
        for size in self._sizes():
            yield keys[start : start + size]
            start += size


def _as_is(batch):
    return batch


def _start_worker(_worker: int) -> None:
    follow_parent()


def make_loader(
    dataset: ImageDataset,
    batches: EpochBatches,
    config: TrainConfig,
    device: torch.device,
    notes: list[str] | None = None,
) -> DataLoader:
    """A DataLoader that gives (images, labels) for each batch of keys; options that are not legal for the setting
    are left out.

    Workers whose batches do not fit in shared memory, or that would open too many files, are made fewer; ``notes``
    is told, without it a warning is.
    """
    workers = config.workers
    if workers == -1:
        workers = 0 if dataset.in_memory else usable_cpus()
    held = 2 * config.accumulate  # a window in use and the one being gathered
    workers, prefetch, reason = fit_loader(dataset, batches.batch_size, workers, config.loader_prefetch, held=held)
    if reason and notes is None:
        warnings.warn(reason, stacklevel=2)
    elif reason and reason not in notes:
        notes.append(reason)
    options = {}
    if workers:
        method = None if config.start_method == "default" else config.start_method
        used = method or multiprocessing.get_start_method()
        if used == "forkserver":
            multiprocessing.set_forkserver_preload(["helpers.loading"])  # import torch once, not in every worker
        if used != "fork":
            resource_tracker.ensure_running()  # its first start ends any hold on signals, so not inside of one
        options = {
            "prefetch_factor": prefetch,
            "persistent_workers": config.persistent_workers,
            "in_order": config.in_order,
            "multiprocessing_context": method,
            "worker_init_fn": _start_worker,
            "timeout": POLL_S,  # see plain_errors
        }
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=_as_is,  # the dataset makes whole batches
        num_workers=workers,
        pin_memory=config.pin_memory and device.type == "cuda",  # on a CPU it only warns
        generator=torch.Generator(),  # its own, so that starting an epoch leaves the global random state alone
        **options,
    )


class DevicePrefetch:
    """Batches on the device. On a GPU the next batch is copied, on a stream of its own, while the current one is
    being used.

    Two waits make that correct: the computing stream waits for the copy, and ``record_stream`` keeps the memory
    from being reused before the computing stream is done with it. On a CPU, or with ``enabled=False``, the batches
    pass through untouched.
    """

    def __init__(self, batches: Iterable, device: torch.device, *, enabled: bool = True):
        self.batches, self.device = batches, device
        self.stream = torch.cuda.Stream(device) if enabled and device.type == "cuda" else None

    def _copy(self, batch):
        with torch.cuda.stream(self.stream):
            return [tensor.to(self.device, non_blocking=True) for tensor in batch]

    def __iter__(self):
        iterator = plain_errors(self.batches)
        if self.stream is None:
            yield from iterator
            return
        ahead = next(iterator, None)
        ahead = ahead and self._copy(ahead)
        while ahead is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_stream(self.stream)
            for tensor in ahead:
                tensor.record_stream(computing)
            current, ahead = ahead, next(iterator, None)
            ahead = ahead and self._copy(ahead)
            yield current


def plain_errors(batches: Iterable) -> Iterator:
    """The same batches; a loader's error, which carries a worker's whole traceback, becomes one line."""
    try:
        with signals_held():  # workers start here, and signals are for the trainer alone
            iterator = iter(batches)
        answered = time.monotonic()
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except RuntimeError as error:
                # The loader's time-out, which has just found all workers alive: ask again, as long as there is hope.
                if "timed out" not in str(error) or time.monotonic() - answered > WORKER_TIMEOUT_S:
                    raise
                continue
            yield batch
            answered = time.monotonic()
    except InputError as error:
        last = str(error).strip().splitlines()[-1]
        raise InputError(last.removeprefix("helpers.errors.InputError: ")) from None
    except RuntimeError as error:
        if "DataLoader" not in str(error):
            raise
        lines = str(error).strip().splitlines()
        if lines[0].startswith("Caught"):  # an exception in a worker, whose traceback is the text
            raise LoaderDied(f"{lines[-1]}; --workers 0 shows where") from error
        raise LoaderDied(f"{lines[0]} Out of memory or a crash in a worker; --workers 0 may show more") from error


def windows(batches: Iterable, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, bool]]:
    """Group micro-batches into accumulation windows: yields (images, labels, images in the whole window, last of
    its window).

    A window holds ``size`` micro-batches; the last of an epoch holds what is left, so nothing is dropped and
    nothing leaks into the next epoch. Weighting each micro-batch by its share of the window's images makes the
    gradient that of one large batch.
    """
    iterator = iter(batches)
    while window := list(islice(iterator, size)):
        items = sum(len(labels) for _, labels in window)
        for number, (images, labels) in enumerate(window, start=1):
            yield images, labels, items, number == len(window)


@dataclass
class Batches:
    """What the loop draws from. ``train`` and ``val`` are iterables of (images, labels); ``per_epoch`` is the
    number of training batches."""

    train: Iterable
    val: Iterable | None
    per_epoch: int
    classes: list[str] | None = None
    sampler: EpochBatches | None = None
    transform: BatchTransform | None = None
    names: Callable[[int], str] | None = None
    cache_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def epoch(self, progress: Progress) -> Iterable:
        """The training batches that are left of ``progress.epoch``."""
        if self.sampler is None:
            return islice(self.train, progress.batches, None) if progress.batches else self.train
        self.sampler.epoch, self.sampler.skip = progress.epoch, progress.samples
        return self.train

    def prepare(self, images: torch.Tensor, key: tuple[int, int] | None = None) -> torch.Tensor:
        """What the model takes from what the loader gives, on the device. ``key`` (epoch, position) draws
        augmentation; None: none."""
        return self.transform(images, key) if self.transform else images

    def use_precision(self, precision: str) -> None:
        if self.transform:
            self.transform.dtype = DTYPES[precision]

    def sample(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A few training images to measure with (at most 32); None where looking would use them up."""
        if self.sampler is not None:
            size = min(self.sampler.batch_size, self.sampler.n, 32)
            return self.train.dataset.__getitems__(np.arange(size))
        return None if iter(self.train) is self.train else next(iter(self.train), None)

    def describe(self, progress: Progress, number: int) -> str:
        """Which images batch ``number`` (from 1) of an epoch holds, as far as that is known: at most three
        names."""
        if self.sampler is None:
            return ""
        self.sampler.epoch, self.sampler.skip = progress.epoch, 0
        keys = next(islice(self.sampler, number - 1, None), [])
        names = [self.names(int(key) % self.sampler.n) for key in keys[:3]]
        return f" ({', '.join(names)}{' …' if len(keys) > 3 else ''})"


def given_batches(train: Iterable, val: Iterable | None = None) -> Batches:
    """Wrap a reader's own iterables; the training one needs a length, from which the schedule is planned."""
    try:
        per_epoch = len(train)
    except TypeError:
        raise InputError(
            "the training batches have no length; wrap them so that len() tells the batches of an epoch"
        ) from None
    if per_epoch == 0:
        raise InputError("the training loader gives no batch: is the dataset smaller than a batch, with drop_last?")
    return Batches(train, val, per_epoch)


def open_batches(config: TrainConfig, device: torch.device) -> Batches:
    """Open the data that ``config`` names, cache it if asked, and make its loaders. Raises InputError for what
    cannot work."""
    show = config.progress
    data = open_data(
        config.data, config.image_size, decoder=config.decoder, split_seed=config.split_seed, progress=show
    )
    train, val, seconds = data.train, data.val, 0.0
    if config.cache:
        train, first = cached(train, f"{data.name}-train", progress=show)
        val, second = cached(val, f"{data.name}-val", progress=show)
        seconds = first + second
    draws = {"shift": config.shift, "flip": config.flip, "seed": config.seed}
    by_sample = config.transforms == "sample"
    transform = None if by_sample else BatchTransform(device, **draws, channels_last=config.channels_last)
    sets = [ImageDataset(train, SampleTransform(**draws) if by_sample else None)]
    sets.append(ImageDataset(val, SampleTransform() if by_sample else None))
    order = {"shuffle": config.shuffle, "seed": config.seed, "drop_last": config.drop_last}
    sampler = EpochBatches(len(train), config.batch_size, **order)
    if len(sampler) == 0:
        raise InputError(
            f"{len(train)} training images make no batch of {config.batch_size} with --drop-last; "
            "use a smaller --batch-size or --no-drop-last"
        )
    loaders = [
        make_loader(s, b, config, device, data.notes)
        for s, b in zip(sets, (sampler, EpochBatches(len(val), config.batch_size)), strict=True)
    ]
    return Batches(*loaders, len(sampler), list(data.classes), sampler, transform, data.train.name, seconds, data.notes)
