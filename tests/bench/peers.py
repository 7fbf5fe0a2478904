"""Other people's loaders for the same work: JPEG files to uint8 batches N×3×64×64 with labels, an epoch an iteration.

SPDL decodes with our own ``read_image``; WebDataset, which has bytes and no file, with the same calls of Pillow and
fewer checks. ``scaled`` gives them our trick too, a JPEG decoded at half size.
"""

from __future__ import annotations

import io
import multiprocessing
import random
import tarfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from helpers.data.images import read_image

SIZE, BATCH, WORKERS, SHARDS = 64, 64, 2, 8
Sample = tuple[str, int]


def to_batch(pairs: list[tuple[np.ndarray, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.from_numpy(np.stack([image for image, _ in pairs])).permute(0, 3, 1, 2)
    return images, torch.tensor([label for _, label in pairs])


def decode_bytes(data: bytes, scaled: bool) -> np.ndarray:
    image = Image.open(io.BytesIO(data))
    if scaled:
        image.draft("RGB", (SIZE * 3 // 2, SIZE * 3 // 2))
    return np.array(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))


def write_shards(samples: list[Sample], folder: Path) -> list[str]:
    """The JPEG files, unchanged, in tar files, each picture beside its label."""
    folder.mkdir()
    shards = [folder / f"{number:02}.tar" for number in range(SHARDS)]
    for number, shard in enumerate(shards):
        with tarfile.open(shard, "w", format=tarfile.USTAR_FORMAT) as tar:
            for index in range(number, len(samples), SHARDS):
                path, label = samples[index]
                for kind, data in (("jpg", Path(path).read_bytes()), ("cls", str(label).encode())):
                    entry = tarfile.TarInfo(f"{index:06}.{kind}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    return [str(shard) for shard in shards]


def webdataset(shards: list[str], scaled: bool) -> Iterable:
    """As its documentation says: shuffle shards and a buffer of undecoded samples, make batches in the workers."""
    import webdataset as wds

    dataset = (
        wds.WebDataset(shards, shardshuffle=len(shards))
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .map_tuple(partial(decode_bytes, scaled=scaled), int)
        .batched(BATCH, collation_fn=to_batch)
    )
    return wds.WebLoader(dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True)


class Shuffled:
    """The samples in a new order each time, in lists of ``chunk``, or (None) one by one."""

    def __init__(self, samples: list[Sample], chunk: int | None):
        self.samples, self.chunk = samples, chunk

    def __iter__(self) -> Iterator:
        order = random.sample(self.samples, len(self.samples))
        if self.chunk is None:
            yield from order
        else:
            yield from (order[start : start + self.chunk] for start in range(0, len(order), self.chunk))


def load_one(sample: Sample, decoder: str) -> tuple[np.ndarray, int]:
    return read_image(sample[0], SIZE, decoder), sample[1]


def load_batch(samples: list[Sample], decoder: str) -> tuple[torch.Tensor, torch.Tensor]:
    return to_batch([load_one(sample, decoder) for sample in samples])


class Spdl:
    """A pipeline with ``threads`` tasks at a time; a task is one image, or (``whole``) a whole batch."""

    def __init__(
        self,
        samples: list[Sample],
        decoder: str,
        threads: int,
        whole: bool = True,
        executor: Executor | None = None,
    ):
        from spdl.pipeline import PipelineBuilder

        self.threads = threads
        load = partial(load_batch if whole else load_one, decoder=decoder)
        builder = PipelineBuilder().add_source(Shuffled(samples, BATCH if whole else None))
        builder = builder.pipe(load, concurrency=threads, executor=executor)
        self.builder = (builder if whole else builder.aggregate(BATCH).pipe(to_batch)).add_sink(4)

    def __iter__(self) -> Iterator:
        # Built anew for each epoch: a continuous source would work on the next epoch while the clock stands.
        pipeline = self.builder.build(num_threads=self.threads + 1)
        with pipeline.auto_stop():
            yield from pipeline

    def in_subprocess(self) -> Iterable:
        from spdl.pipeline import run_pipeline_in_subprocess

        return run_pipeline_in_subprocess(
            self.builder.get_config(), num_threads=self.threads + 1, mp_context="forkserver"
        )


def spdl_ways(samples: list[Sample], decoder: str) -> dict[str, Callable[[], Iterable]]:
    """The ways that SPDL's guide offers: threads, threads in a subprocess, processes."""
    pool = partial(ProcessPoolExecutor, WORKERS, multiprocessing.get_context("forkserver"), torch.set_num_threads, (1,))
    return {
        "3 threads, images": partial(Spdl, samples, decoder, 3, whole=False),
        **{f"{n} threads, batches": partial(Spdl, samples, decoder, n) for n in (2, 3, 4)},
        **{f"{n} threads in a subprocess, batches": Spdl(samples, decoder, n).in_subprocess for n in (2, 3)},
        "2 processes, batches": lambda: Spdl(samples, decoder, WORKERS, executor=pool()),
    }
