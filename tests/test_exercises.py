"""The checks of the exercises: the solution passes, the stub is not attempted, each plausible mistake is told what
is wrong with *it*."""

import copy
import os
import random
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from helpers.lab.exercises import CHECKS, check, loader_process
from helpers.lab.exercises.chapter_01_workers import OwnGenerator

REPO = Path(__file__).resolve().parents[1]
SOLUTIONS = {path.stem.split("_", 1)[1]: path for path in sorted((REPO / "notebooks/solutions").glob("*.py"))}


def solution(name):
    scope = {}
    exec(SOLUTIONS[name].read_text(), scope)
    return scope[name]


def stub(*_):
    raise NotImplementedError


# ---- 00 timed_batches ------------------------------------------------------------------------------------------


def counts_the_consumer(batches, clock, waits):
    start = clock()
    for batch in batches:
        waits.append(clock() - start)
        start = clock()
        yield batch


def fetches_everything_first(batches, clock, waits):
    start = clock()
    everything = list(batches)
    waits += [(clock() - start) / len(everything)] * len(everything)
    yield from everything


def forgets_the_start(batches, clock, waits):
    iterator = iter(batches)
    while True:
        start = clock()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        waits.append(clock() - start)
        yield batch


def counts_the_end_too(batches, clock, waits):
    start = clock()
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        waits.append(clock() - start)
        if batch is None:
            return
        yield batch
        start = clock()


def uses_another_clock(batches, clock, waits):
    import time

    for batch in batches:
        waits.append(time.perf_counter() - time.perf_counter())
        yield batch


def loses_the_first(batches, clock, waits):
    iterator = iter(batches)
    next(iterator)
    yield from iterator


def returns_nothing(batches, clock, waits):
    for _ in batches:
        waits.append(0)


def breaks(batches, clock, waits):
    yield batches[0]


def waits_for_next(batches, clock, waits):
    start, iterator, end = clock(), iter(batches), object()
    while (batch := next(iterator, end)) is not end:
        waits.append(clock() - start)
        yield batch
        start = clock()


# ---- 01 pad_collate --------------------------------------------------------------------------------------------


def labels_of(samples):
    return torch.tensor([label for _, label in samples])


def sizes_of(samples):
    return [tuple(image.shape[1:]) for image, _ in samples]


def pads_and_compares_positions(samples):
    """The other way to do it right."""
    images, labels = zip(*samples, strict=True)
    heights, widths = torch.tensor(sizes_of(samples)).unbind(1)
    high, wide = int(heights.max()), int(widths.max())
    padded = [functional.pad(i, (0, wide - i.shape[2], 0, high - i.shape[1])).expand(3, -1, -1) for i in images]
    rows = torch.arange(high)[None, :, None] < heights[:, None, None]
    columns = torch.arange(wide)[None, None, :] < widths[:, None, None]
    return [torch.stack(padded), rows & columns, torch.as_tensor(labels)]


def but(**changes):
    """A right answer of which one part is made wrong: ``images=f`` gives f(images, samples) instead of images."""

    def answer(samples):
        parts = dict(zip(("images", "mask", "labels"), pads_and_compares_positions(samples), strict=True))
        return tuple(changes[part](value, samples) if part in changes else value for part, value in parts.items())

    return answer


def placed(place, high=None, wide=None, make=torch.zeros):
    """Images that ``place(image, height, width)`` puts at a (row, column) of the canvas."""

    def images(right, samples):
        height, width = high or right.shape[2], wide or right.shape[3]
        canvas = make(len(samples), 3, height, width, dtype=torch.uint8)
        for n, (image, _) in enumerate(samples):
            h, w = image.shape[1:]
            top, left = place(h, w, height, width)
            canvas[n, :, top : top + h, left : left + w] = image
        return canvas

    return images


def resized(high=None, wide=None):
    def images(right, samples):
        size = high or right.shape[2], wide or right.shape[3]
        return torch.cat(
            [functional.interpolate(image[None].float(), size).expand(-1, 3, -1, -1) for image, _ in samples]
        ).to(torch.uint8)

    return images


def crops(_, samples):
    height, width = (min(size) for size in zip(*sizes_of(samples), strict=True))
    return torch.stack([image[:, :height, :width].expand(3, -1, -1) for image, _ in samples])


def corner(*_):
    return 0, 0


def centre(h, w, height, width):
    return (height - h) // 2, (width - w) // 2


def square(right, samples):
    side = max(right.shape[2:])
    return placed(corner, side, side)(right, samples)


def fills_one_channel(right, samples):
    for n, (image, _) in enumerate(samples):
        right[n, len(image) :] = 0
    return right


def transposed(mask, samples):
    mask = torch.zeros_like(mask)
    for n, (h, w) in enumerate(sizes_of(samples)):
        mask[n, :w, :h] = True
    return mask


def stacks_after_padding(samples):
    """Forgets that a grey image has one channel."""
    images, mask, labels = pads_and_compares_positions(samples)
    assert {len(image) for image, _ in samples} == {3}
    return images, mask, labels


def sorts_in_place(samples):
    samples.sort(key=lambda sample: -sample[0].shape[1])
    return pads_and_compares_positions(samples)


def sorts_a_copy(samples):
    return pads_and_compares_positions(sorted(samples, key=lambda sample: -sample[0].shape[1]))


def draws_over_samples(samples):
    result = pads_and_compares_positions(samples)
    for image, _ in samples:
        image.fill_(0)
    return result


def squeezes(samples):
    return tuple(part.squeeze(0) for part in pads_and_compares_positions(samples))


PADDING = [
    (lambda samples: None, "Return three things"),
    (lambda samples: torch.stack([image for image, _ in samples]), "your code raised RuntimeError: stack expects"),
    (but(images=lambda images, _: list(images)), "put them into one tensor"),
    (but(images=crops), "crops all images to the smallest"),
    (but(images=square), "pads to a square"),
    (but(images=placed(corner, 32, 32)), "pads all batches to 32×32"),
    (but(images=resized(24, 24)), "resizes all images to 24×24"),
    (but(images=resized()), "Pixels were changed"),
    (but(images=lambda images, _: images.transpose(2, 3)), "have the shape (3, 3, 6, 5)"),
    (but(images=lambda images, _: images / 255), "hand on uint8"),
    (but(images=placed(centre)), "starts at row 0, column 1"),
    (but(images=placed(lambda h, w, height, width: (height - h, width - w))), "starts at row 1, column 0"),
    (but(images=placed(corner, make=torch.empty)), "The padding is not zero"),
    (but(images=fills_one_channel), "With a grey image (one channel) in the batch: Only its first channel is filled"),
    (stacks_after_padding, "With a grey image (one channel) in the batch your code raised AssertionError"),
    (sorts_in_place, "changes `samples`"),
    (sorts_a_copy, "in another order"),
    (draws_over_samples, "changes `samples`"),
    (squeezes, "With a batch of one image: The images have the shape (3, 4, 6)"),
    (but(mask=lambda mask, samples: torch.tensor(sizes_of(samples))), "The mask is (3, 2)"),
    (but(mask=lambda mask, _: mask[:, None]), "The mask is (3, 1, 5, 6)"),
    (but(mask=lambda mask, _: mask.float()), "make it bool"),
    (but(mask=lambda mask, _: torch.ones_like(mask)), "true everywhere"),
    (but(mask=lambda mask, _: ~mask), "the wrong way round"),
    (but(mask=lambda mask, samples: (but()(samples)[0] != 0).any(1)), "takes a black pixel for padding"),
    (but(mask=transposed), "rows first"),
    (but(labels=lambda labels, _: labels.tolist()), "The labels are a list"),
    (but(labels=lambda labels, _: labels[:, None]), "The labels have the shape (3, 1)"),
    (but(labels=lambda labels, _: labels.int()), "The labels are int32"),
    (but(labels=lambda labels, _: labels.flip(0)), "in the order of the samples they are [7, 2, 5]"),
]


# ---- 01 reseed_worker ------------------------------------------------------------------------------------------

dataset = OwnGenerator()  # as in a notebook: within reach of the answers, and not the one that a worker draws from
loader = DataLoader(OwnGenerator())


def own(seed):
    """An answer that gives the worker's dataset a generator from ``seed(info)``."""

    def answer(worker_id):
        info = get_worker_info()
        info.dataset.rng = np.random.default_rng(seed(info))

    return answer


def resets_in_place(worker_id):
    """The other way to do it right: torch's own seed, and the old generator's new state."""
    rng = torch.utils.data.get_worker_info().dataset.rng
    rng.bit_generator.state = np.random.PCG64(torch.initial_seed()).state


def seeds_numpy(worker_id):
    np.random.seed(get_worker_info().seed % 2**32)


def seeds_the_others(worker_id):
    random.seed(worker_id)
    torch.default_generator.manual_seed(worker_id)


def seeds_numpy_too_large(worker_id):
    np.random.seed(get_worker_info().seed)


def makes_a_variable(worker_id):
    rng = get_worker_info().dataset.rng
    rng = np.random.default_rng(get_worker_info().seed)  # noqa: F841


def returns_it(worker_id):
    return np.random.default_rng(get_worker_info().seed)


def sets_another_name(worker_id):
    get_worker_info().dataset.generator = np.random.default_rng(get_worker_info().seed)


def sets_the_global_dataset(worker_id):
    dataset.rng = np.random.default_rng(torch.initial_seed())


def resets_the_loaders_dataset(worker_id):
    loader.dataset.rng.bit_generator.state = np.random.PCG64(worker_id).state


RESEEDING = [
    (lambda worker_id: None, "a variable in your function is only a name"),
    (makes_a_variable, "a variable in your function is only a name"),
    (seeds_the_others, "a variable in your function is only a name"),
    (seeds_numpy, "seeds NumPy's global generator"),
    (seeds_numpy_too_large, "your code raised ValueError"),
    (returns_it, "Nobody looks at what a worker_init_fn returns"),
    (sets_another_name, "It sets `generator` of the dataset"),
    (sets_the_global_dataset, "the dataset of the main process"),
    (resets_the_loaders_dataset, "the dataset of the main process"),
    (own(lambda info: 0), "All four workers draw the same"),
    (own(lambda info: info.seed - info.id), "All four workers draw the same"),
    (own(lambda info: info.id // 2), "Some of the four workers"),
    (own(lambda info: info.id), "does not change between epochs"),
    (own(lambda info: info.seed * info.id), "does not change between epochs"),
    (own(lambda info: None), "Run again with the same seed"),
    (own(lambda info: time.time_ns()), "Run again with the same seed"),
    (own(lambda info: os.getpid()), "Run again with the same seed"),
]


# ---- 01 sharded ------------------------------------------------------------------------------------------------


def numbered(rank):
    info = get_worker_info()
    return (rank * info.num_workers + info.id, info.num_workers) if info else (rank, 1)


def slices_blocks(items, rank, world_size):
    """The other way to do it right: neighbouring items, and an iterator that is no generator."""
    shard, workers = numbered(rank)
    shards = world_size * workers
    return iter(items[len(items) * shard // shards : len(items) * (shard + 1) // shards])


def strides(start=lambda shard, rank, worker: shard, step=lambda ranks, workers: ranks * workers):
    def answer(items, rank, world_size):
        shard, workers = numbered(rank)
        for index in range(start(shard, rank, shard % workers), len(items), step(world_size, workers)):
            yield items[index]

    return answer


def blocks(size, last_takes_the_rest=False):
    def answer(items, rank, world_size):
        shard, workers = numbered(rank)
        shards = world_size * workers
        length = size(len(items), shards)
        end = len(items) if last_takes_the_rest and shard == shards - 1 else min((shard + 1) * length, len(items))
        for index in range(shard * length, end):
            yield items[index]

    return answer


def repeats_the_first(items, rank, world_size):
    shard, workers = numbered(rank)
    shards = world_size * workers
    for index in range(shard, -(-len(items) // shards) * shards, shards):
        yield items[index % len(items)]


def needs_a_worker(items, rank, world_size):
    info = get_worker_info()
    for index in range(rank * info.num_workers + info.id, len(items), world_size * info.num_workers):
        yield items[index]


def steps_by_share(items, rank, world_size):
    """Balanced blocks, until there are more shares than items: a step of 0."""
    shard, workers = numbered(rank)
    length, rest = divmod(len(items), world_size * workers)
    start = range(0, len(items) - rest, length)[shard] + min(shard, rest)
    for index in range(start, start + length + (shard < rest)):
        yield items[index]


def reads_all(items, rank, world_size):
    shard, workers = numbered(rank)
    yield from islice(items, shard, None, world_size * workers)


def reads_ahead(items, rank, world_size):
    return list(slices_blocks(items, rank, world_size))


def yields_positions(items, rank, world_size):
    shard, workers = numbered(rank)
    yield from range(shard, len(items), world_size * workers)


def goes_round(items, rank, world_size):
    while True:
        yield from items


def returns_nothing_shared(items, rank, world_size):
    print(end="")


def remembers():
    seen = set()

    def answer(items, rank, world_size):
        for item in items:
            if item not in seen:
                seen.add(item)
                yield item

    return answer


SHARING = [
    (returns_nothing_shared, "It returned None"),
    (lambda items, rank, world_size: iter(()), "nothing comes at all"),
    (lambda items, rank, world_size: iter(items), "every process yields the same"),
    (strides(lambda shard, rank, worker: rank, lambda ranks, workers: ranks), "all workers of a rank yield the same"),
    (strides(lambda shard, rank, worker: worker, lambda ranks, workers: workers), "all ranks yield the same"),
    (strides(lambda shard, rank, worker: rank + worker), "b comes from worker 1 of rank 0 and from worker 0 of rank 1"),
    (strides(lambda shard, rank, worker: shard + 1), "nobody yields a; the shares together"),
    (blocks(lambda items, shards: items // shards), "nobody yields i, j: 10 does not divide by 4"),
    (blocks(lambda items, shards: items // shards, True), "the shares have 2, 2, 2, 4 items"),
    (blocks(lambda items, shards: -(-items // shards)), "the shares have 3, 3, 3, 1 items"),
    (repeats_the_first, "a, b come again to make the shares equal"),
    (needs_a_worker, "With num_workers=0 `get_worker_info()` is None"),
    (steps_by_share, "With 3 items, 2 ranks and num_workers=2 your code raised ValueError"),
    (reads_all, "reads more than its share"),
    (reads_ahead, "before it hands on the first"),
    (yields_positions, "It yields 0, which is none of the items"),
    (goes_round, "a share is longer than the whole"),
    (remembers(), "one process takes everything"),
]


# ---- all of them -----------------------------------------------------------------------------------------------

TIMED = [
    (counts_the_consumer, "start the clock anew"),
    (fetches_everything_first, "before the first was used"),
    (forgets_the_start, "leaves out starting the iterator"),
    (counts_the_end_too, "4 waits for 3 batches"),
    (uses_another_clock, "the `clock` you are given"),
    (loses_the_first, "Batch b came where a was due"),
    (returns_nothing, "returned None"),
    (breaks, "your code raised TypeError"),
]
WRONG = {"timed_batches": TIMED, "pad_collate": PADDING, "reseed_worker": RESEEDING, "sharded": SHARING}
RIGHT_TOO = {
    "timed_batches": waits_for_next,
    "pad_collate": pads_and_compares_positions,
    "reseed_worker": resets_in_place,
    "sharded": slices_blocks,
}


@pytest.fixture
def told(capsys):
    """The one line that ``check`` prints about an answer."""

    def told(name, answer):
        check(name, answer)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        return lines[0]

    return told


def test_every_check_has_a_solution_and_wrong_answers():
    assert SOLUTIONS.keys() == CHECKS.keys() == WRONG.keys() == RIGHT_TOO.keys()


@pytest.mark.parametrize("name", CHECKS)
def test_right_answers_pass_however_they_are_written(name, told):
    assert told(name, solution(name)).startswith(f"{name}: passed. ")
    assert told(name, RIGHT_TOO[name]).startswith(f"{name}: passed. ")


@pytest.mark.parametrize("name", CHECKS)
def test_a_stub_is_not_attempted(name, told):
    assert told(name, stub) == f"{name}: not attempted yet"


@pytest.mark.parametrize(("name", "answer", "message"), [(name, *row) for name, rows in WRONG.items() for row in rows])
def test_a_wrong_answer_is_told_what_is_wrong_with_it(name, answer, message, told):
    line = told(name, answer)
    assert message in line and not line.startswith(f"{name}: passed")
    fitting = {other for _, other in WRONG[name] if other in line}
    assert fitting == {message}, "each mistake has a message of its own"


def test_a_page_of_error_is_cut_to_one_line(told):
    def fails(samples):
        raise RuntimeError("first\nsecond")

    assert told("pad_collate", fails) == "pad_collate: your code raised RuntimeError: first"


def test_checks_leave_the_global_generators_alone(told):
    def state():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), os.getpid()

    before = copy.deepcopy(state())
    for name in CHECKS:
        told(name, solution(name))
    assert state() == before and get_worker_info() is None and torch.get_deterministic_debug_mode() == 0


# ---- the made-up worker is like a real one ----------------------------------------------------------------------


class Shared(IterableDataset):
    def __iter__(self):
        return solution("sharded")(range(10), 1, 2)


class Introduced(OwnGenerator):
    """Gives what a worker can know of itself."""

    def __getitem__(self, index):
        info = get_worker_info()
        knows = info.id, info.num_workers, info.seed, torch.initial_seed(), info.dataset is self
        return knows, float(self.rng.random()), random.random(), float(torch.rand(()))


def test_a_simulated_worker_finds_what_a_real_one_finds():
    reseed = solution("reseed_worker")
    options = {"batch_size": None, "num_workers": 2, "multiprocessing_context": "fork"}
    options |= {"worker_init_fn": reseed, "generator": torch.Generator().manual_seed(3)}
    real = list(DataLoader(Introduced(), collate_fn=tuple, **options))
    base_seed = real[0][0][2]
    for number in (0, 1):
        with loader_process(number, 2, base_seed, Introduced()) as info:
            reseed(number)
            assert [info.dataset[index] for index in range(number, 12, 2)] == real[number::2]


def test_the_solution_shares_between_real_workers():
    options = {"batch_size": None, "num_workers": 2, "multiprocessing_context": "fork"}
    assert sorted(DataLoader(Shared(), **options)) == [1, 3, 5, 7, 9] == sorted(DataLoader(Shared(), batch_size=None))


def test_what_was_solved_is_recorded_and_stays_so(capsys):
    from helpers.lab.record import part

    check("timed_batches", solution("timed_batches"))
    assert part("checks") == {"timed_batches": True}
    check("timed_batches", lambda batches, clock, waits: None)
    check("pad_collate", lambda samples: None)
    assert part("checks") == {"timed_batches": True, "pad_collate": False}
