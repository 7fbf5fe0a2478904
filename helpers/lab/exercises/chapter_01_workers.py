"""Chapter 01, random numbers: a generator of its own for each worker process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
from torch.utils.data import Dataset

from helpers.lab.exercises.framework import Mistake, exercise
from helpers.lab.exercises.worlds import loader_process

WORKERS = 4
COPIED = 20_011  # the dataset's own seed: none that an answer would pick
EPOCHS = 7_301_593_012_884_215_117, 2_905_117_640_338_726_941  # base seeds as large as those that a loader draws


class OwnGenerator(Dataset):
    """A dataset that draws its augmentation from a generator made in ``__init__``, which each worker process gets
    a copy of. An item is (index, draw in [0, 1))."""

    def __init__(self, seed: int = 0):
        self.rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(self.rng.random())


def _draws(answer: Callable, worker: int, base_seed: int) -> tuple:
    with loader_process(worker, WORKERS, base_seed, OwnGenerator(COPIED)) as info:
        answer(worker)
        return tuple(info.dataset[index] for index in range(3))


@exercise
def reseed_worker(answer: Callable) -> str:
    """``answer(worker_id)`` must give the generator of ``get_worker_info().dataset`` draws of its own: others in
    each worker, others in each epoch, the same in a repeated run."""
    elsewhere = _generators_in_reach(answer)
    first, second, again = (
        [_draws(answer, worker, seed) for worker in range(WORKERS)] for seed in (EPOCHS[0], EPOCHS[1], EPOCHS[0])
    )
    if set(first) == {_draws(lambda worker: None, 0, EPOCHS[0])}:
        raise Mistake(_what_it_changed(answer, elsewhere))
    if first != again:
        raise Mistake(
            "Run again with the same seed, it draws otherwise; derive the generator from `get_worker_info().seed`, "
            "not from the time, the process or the system."
        )
    if len(set(first)) == 1:
        raise Mistake("All four workers draw the same; the seed you give must depend on the worker.")
    if len(set(first)) < WORKERS:
        raise Mistake("Some of the four workers draw the same; each must have a seed of its own.")
    if any(one == other for one, other in zip(first, second, strict=True)):
        raise Mistake(
            "In the next epoch a worker draws the same again: its number alone does not change between epochs, "
            "`get_worker_info().seed` does."
        )
    return "Each worker and each epoch draws its own, and a repeated run repeats them."


def _generators_in_reach(answer: Callable) -> list[tuple[dict, np.random.Generator, float]]:
    """Datasets that the answer could reach by a global name, of its own or as ``loader.dataset``: their
    attributes, their generator and what it would draw next."""
    things = [vars(thing) for thing in getattr(answer, "__globals__", {}).values() if hasattr(thing, "__dict__")]
    things += [vars(thing["dataset"]) for thing in things if hasattr(thing.get("dataset"), "__dict__")]
    found = [(thing, thing.get("rng")) for thing in things]
    return [(thing, rng, copy.deepcopy(rng).random()) for thing, rng in found if isinstance(rng, np.random.Generator)]


def _what_it_changed(answer: Callable, elsewhere: list) -> str:
    """The worker's dataset draws as if nothing had been done: what was done instead."""
    if any(thing.get("rng") is not rng or copy.deepcopy(rng).random() != draw for thing, rng, draw in elsewhere):
        return (
            "It reseeds the dataset of the main process; a worker has a copy of its own, and that is "
            "`get_worker_info().dataset`."
        )
    with loader_process(1, WORKERS, EPOCHS[0], OwnGenerator(COPIED)) as info:
        attributes, state = dict(vars(info.dataset)), np.random.get_state()
        result = answer(1)
        changed = [key for key, value in vars(info.dataset).items() if value is not attributes.get(key)]
        seeded = not np.array_equal(state[1], np.random.get_state()[1])
    if result is not None:
        return "Nobody looks at what a worker_init_fn returns; store the generator as `get_worker_info().dataset.rng`."
    if changed and "rng" not in changed:
        return f"It sets `{changed[0]}` of the dataset, which goes on drawing from `rng`; set that."
    if seeded:
        return "It seeds NumPy's global generator, which the loader has done already; the dataset draws from its own."
    return (
        "The dataset still draws what it was copied with; a variable in your function is only a name, so assign to "
        "`get_worker_info().dataset.rng`."
    )
