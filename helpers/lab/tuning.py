"""The loader tuned by measurement: a few settings in seconds, each in short rounds, and the simplest that is as
good as the best."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from helpers.bars import progress_bar
from helpers.config import TrainConfig
from helpers.devices import pick_device, usable_cpus
from helpers.errors import InputError
from helpers.lab.loader_rounds import Round, others_busy, run_round, stand_in
from helpers.lab.measure import Spread
from helpers.lab.tuning_choice import AS_GOOD, Row, Setting, Tuning, choose, explain
from helpers.limits import fit_loader
from helpers.loading import make_loader, open_batches
from helpers.processes import follow_parent

HOPELESS = 0.7  # of the best rate, after one round: not measured again
BUSY = 0.2  # of the cores in other programs' hands changes the answer
ROUNDS = 4


def _ladder(cores: int, waits: bool) -> list[int]:
    # Beyond the cores where waiting can overlap; on few cores always, for that is what everybody asks.
    top = 2 * cores if waits or cores <= 4 else cores
    return sorted({cores, top} | {2**n for n in range(top.bit_length())})


def tune(
    loader_from: Callable[[Setting], DataLoader],
    *,
    base: Setting | None = None,
    budget_s: float = 10.0,
    step_s: float | None = None,
    consumer: Literal["sleep", "busy"] = "sleep",
    device: torch.device | None = None,
    start_methods: Sequence[str] = (),
    progress: bool = False,
) -> Tuning:
    """Measure the loaders that ``loader_from(setting)`` makes (``setting.options()`` are arguments for DataLoader)
    and choose.

    Takes about ``budget_s`` seconds, less where the answer is plain, more where one batch takes seconds. Workers
    from 0 upwards, then prefetch, ``start_methods`` if given, and pinning if ``device`` is a GPU. After each batch
    the consumer takes ``step_s`` seconds: it sleeps, like a program that waits for its GPU, or it is busy with work
    of that length on the cores. Raises what the dataset raises, InputError where there is no batch.
    """
    base, cores, device = base or Setting(0), usable_cpus(), device or torch.device("cpu")
    consume, others = stand_in(consumer, step_s, device), others_busy()
    rounds: dict[Setting, list[Round]] = {}
    trouble, start = [], time.perf_counter()

    def rate(setting: Setting) -> float:
        return median(one.rate for one in rounds[setting])

    def measure(setting: Setting) -> float:
        try:
            with warnings.catch_warnings():  # more workers than cores are tried on purpose
                warnings.filterwarnings("ignore", message="This DataLoader will create")
                found = run_round(loader_from(setting), setting.workers, min(budget_s / 25, 1), consume, cores)
        except Exception as error:
            if setting.workers == 0 or isinstance(error, InputError):
                raise
            trouble.append(f"{setting} did not work: {str(error).splitlines()[0]}")
            return 0.0
        finally:
            bar.update(min(time.perf_counter() - start, budget_s) - bar.n)
        rounds.setdefault(setting, []).append(found)
        return rate(setting)

    def in_time(share: float) -> bool:
        return time.perf_counter() - start < share * budget_s

    def repeat(settings: Sequence[Setting], share: float) -> None:
        for _ in range(ROUNDS - 1):
            if in_time(share):
                for setting in settings:
                    measure(setting)

    def rows() -> list[Row]:
        found = []
        for setting, each in rounds.items():
            first, cpu = median(one.first for one in each), median(one.cpu for one in each)
            found.append(Row(setting, Spread.of([one.rate for one in each]), first, cpu, len(each)))
        return found

    with progress_bar(
        show=progress, total=budget_s, desc="tuning", bar_format="{desc} {percentage:3.0f}% |{bar}|"
    ) as bar:
        none = replace(base, workers=0)
        best, misses = measure(none), 0
        waits = rounds[none][0].waits
        left = _ladder(cores, waits)
        while left and misses < 2 and not trouble and in_time(0.5):  # two in a row that are no better: none will be
            found = measure(replace(base, workers=left.pop(0)))
            misses, best = 0 if found > (1 + AS_GOOD) * best else misses + 1, max(best, found)
        repeat([setting for setting in rounds if setting == none or rate(setting) > HOPELESS * best], 0.7)
        chosen = choose(rows()).setting
        variants = [replace(chosen, pin_memory=not chosen.pin_memory)] if device.type == "cuda" else []
        if chosen.workers:
            variants += [replace(chosen, prefetch=p) for p in {2, 2 * base.prefetch} - {base.prefetch}]
            variants += [replace(chosen, start_method=m) for m in start_methods if m != base.start_method]
        repeat([*variants, chosen] if variants else [], 1.0)

    takes = rounds[none][0].batch / step_s if step_s else None
    why = [explain(rows(), cores, waits=waits, takes=takes, busy=consumer == "busy"), *(f"{t}." for t in trouble)]
    if left and misses < 2 and not trouble:
        why.append(f"There was no time to try {', '.join(map(str, left))} workers.")
    if others > BUSY:
        why.append(f"Other programs kept {others:.0%} of the cores busy: measure again when they are done.")
    return Tuning(rows(), choose(rows()).setting, " ".join(why))


def tune_loader(config: TrainConfig, **options) -> Tuning:
    """``tune`` for the training images of ``config``, read, cached and transformed as it says; ``options`` are
    those of ``tune``. ``config.device`` decides whether there is a GPU to pin memory for.

    Opening the data, and a cache that has to be built first, come on top of the budget.
    """
    device = pick_device(config.device)
    on_gpu, progress = device.type == "cuda", options.get("progress", False)
    data = open_batches(config.replace(workers=0, progress=progress), device)

    def values(setting: Setting) -> dict:
        chosen = {"workers": setting.workers, "start_method": setting.start_method, "loader_prefetch": setting.prefetch}
        return chosen | ({"pin_memory": setting.pin_memory} if on_gpu else {})

    def loader_from(setting: Setting) -> DataLoader:
        changed, notes = config.replace(**values(setting), persistent_workers=True), []
        loader = make_loader(data.train.dataset, data.sampler, changed, device, notes)
        if notes:
            raise MemoryError(notes[0])
        return loader

    base = Setting(0, config.loader_prefetch, config.pin_memory and on_gpu, config.start_method)
    tuning = tune(loader_from, base=base, device=device, **options)
    return replace(tuning, config=config.replace(**values(tuning.setting)))


def _follow(_worker: int) -> None:
    follow_parent()


def tune_dataset(dataset: Dataset, batch_size: int, *, collate_fn: Callable | None = None, **options) -> Tuning:
    """``tune`` for a dataset of one's own, shuffled; ``tuning.setting.options()`` are then the arguments for its
    DataLoader.

    With start methods other than fork, dataset and ``collate_fn`` must come from a module, not from a notebook.
    """
    multiprocessing.set_forkserver_preload(["helpers.loading"])  # where it is used: import torch once
    shuffle = not isinstance(dataset, IterableDataset)

    def loader_from(setting: Setting) -> DataLoader:
        *_, reason = fit_loader(dataset, batch_size, setting.workers, setting.prefetch)
        if reason:
            raise MemoryError(reason)
        given = {"shuffle": shuffle, "collate_fn": collate_fn, "worker_init_fn": _follow}
        return DataLoader(dataset, batch_size, generator=torch.Generator(), **given, **setting.options())

    return tune(loader_from, **options)
