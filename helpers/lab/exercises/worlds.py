"""The made-up worlds: the same on every machine, and over at once."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

_process_ids = count(1000)


class FakeTime:
    """A clock that only moves when the made-up world says so, so that a check of timing code never depends on the
    machine."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@contextmanager
def loader_process(number: int, workers: int, base_seed: int = 0, dataset: Any = None) -> Iterator[Any]:
    """Inside, code finds what a DataLoader's worker ``number`` of ``workers`` finds when ``worker_init_fn`` is
    called: yields what ``get_worker_info()`` gives there. No process is started, and the global generators are
    left as they were. With ``workers=0`` it is the main process, where that is None."""
    if workers == 0:
        yield None
        return
    seed = base_seed + number
    info = torch_worker.WorkerInfo(id=number, num_workers=workers, seed=seed, dataset=dataset)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(seed)
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed: that reaches for the GPU as well
        np.random.seed([number, base_seed % 2**32])
        # The module's variable, not the function: code may have imported get_worker_info by name.
        info_is = mock.patch.object(torch_worker, "_worker_info", info)
        process_id = next(_process_ids)
        with info_is, mock.patch.object(os, "getpid", lambda: process_id):
            yield info
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
