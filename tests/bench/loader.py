"""`loader`: JPEG files to augmented batches, no cache, two workers, against WebDataset and SPDL on the same terms."""

from __future__ import annotations

import gc
import logging
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from helpers.config import TrainConfig
from helpers.data.sources import ImageDataset, open_data
from helpers.loading import EpochBatches, make_loader
from helpers.transforms import BatchTransform
from tests.bench import peers
from tests.bench.children import answer
from tests.bench.verdict import Row, ratios

DEVICE = torch.device("cpu")
PEERS = (("WebDataset", "SPDL"), ("WebDataset, scaled", "SPDL, scaled"))


class Ours:
    """The course's loader; each iteration is the next epoch, in another order. Batches come as they are ready, as
    they do from the peers: one that waits for its turn would make the other worker wait, too."""

    def __init__(self, decoder: str):
        config = TrainConfig(workers=peers.WORKERS, persistent_workers=True, in_order=False, decoder=decoder)
        dataset = ImageDataset(open_data("digits", peers.SIZE, decoder=decoder).train)
        self.order = EpochBatches(len(dataset), peers.BATCH, shuffle=True)
        self.loader = make_loader(dataset, self.order, config, DEVICE)

    def __iter__(self) -> Iterator:
        yield from self.loader
        self.order.epoch += 1


class Consumer:
    """Draws an epoch, augments each batch (shift up to 4, mirrored border) in the same place for all, and takes the
    time."""

    def __init__(self, images: int):
        self.images, self.transform, self.epoch = images, BatchTransform(DEVICE, shift=4), 0

    def images_per_s(self, batches: Iterable) -> float:
        gc.collect()
        self.epoch += 1
        start, count = time.perf_counter(), 0
        for number, (images, _labels) in enumerate(batches):
            count += len(self.transform(images, (self.epoch, number)))
        seconds = time.perf_counter() - start
        if count != self.images:
            raise RuntimeError(f"an epoch of {count} images instead of {self.images}")
        return count / seconds


def measure(quick: bool, work: Path) -> dict:
    """images/s of whole epochs after one to warm up, in turns. SPDL goes the way that was its quickest before."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    source = open_data("digits", peers.SIZE).train
    samples = list(zip(map(str, source.paths), source.labels.tolist(), strict=True))
    shards = peers.write_shards(samples, work / "shards")
    consumer = Consumer(len(samples))
    loaders: dict[str, Iterable] = {"ours": Ours("pillow"), "ours, scaled": Ours("scaled")}
    loaders |= {name: peers.webdataset(shards, "scaled" in name) for name in ("WebDataset", "WebDataset, scaled")}
    for loader in loaders.values():  # these fork, so they come before those that start threads
        consumer.images_per_s(loader)
    ways = {name: make() for name, make in peers.spdl_ways(samples, "pillow").items()}
    tried = {name: [consumer.images_per_s(way) for _ in range(2 if quick else 4)][1:] for name, way in ways.items()}
    best = max(tried, key=lambda name: statistics.median(tried[name]))
    loaders |= {"SPDL": ways[best], "SPDL, scaled": peers.spdl_ways(samples, "scaled")[best]()}
    consumer.images_per_s(loaders["SPDL, scaled"])
    rounds, names = [], list(loaders)
    for number in range(2 if quick else 9):
        turn = number % len(names)
        rounds.append({name: consumer.images_per_s(loaders[name]) for name in names[turn:] + names[:turn]})
    return {"spdl_way": best, "spdl_tried": tried, "rounds": rounds}


def rows(raw: dict, machine: dict) -> list[Row]:
    """Against that of the two peers which is better over all rounds."""
    rounds = raw["rounds"]
    speeds = {name: [values[name] for values in rounds] for name in rounds[0]}
    best, scaled = (max(pair, key=lambda name: statistics.median(speeds[name])) for pair in PEERS)
    return [
        Row("loader", f"ours ÷ {best}, same decoder", "×", ratios(rounds, "ours", best), at_least=1.0),
        Row("loader", f"ours, scaled ÷ {best}", "×", ratios(rounds, "ours, scaled", best), at_least=1.3),
        Row("loader", f"ours, scaled ÷ {scaled}", "×", ratios(rounds, "ours, scaled", scaled)),
        *(Row("loader", name, "images/s", values) for name, values in speeds.items()),
    ]


if __name__ == "__main__":
    answer(measure)
