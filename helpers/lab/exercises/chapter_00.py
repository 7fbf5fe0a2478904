"""Chapter 00: telling waiting from computing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from helpers.lab.exercises.framework import Mistake, exercise
from helpers.lab.exercises.worlds import FakeTime


class _SlowBatches:
    """Batches 'a', 'b', … that take known times to come, after a start-up time; counts how many were fetched."""

    def __init__(self, time: FakeTime, startup: float, seconds: list[float]):
        self.time, self.startup, self.seconds, self.fetched = time, startup, seconds, 0

    def __iter__(self) -> Iterator[str]:
        self.time.pass_by(self.startup)
        return self._batches()

    def _batches(self):
        for number, seconds in enumerate(self.seconds):
            self.time.pass_by(seconds)
            self.fetched += 1
            yield "abcdefgh"[number]


@exercise
def timed_batches(answer: Callable) -> str:
    """``answer(batches, clock, waits)`` must yield every batch and append to ``waits`` the seconds it waited for
    each."""
    time, startup, loading, training = FakeTime(), 4.0, [2.0, 1.0, 3.0], 10.0
    batches, waits, seen = _SlowBatches(time, startup, loading), [], []
    result = answer(batches, time, waits)
    if result is None:
        raise Mistake(
            "It returned None; write `yield batch` inside the loop, so that it hands on one batch after another."
        )
    for batch in result:
        due = "abc"[len(seen) : len(seen) + 1]
        if batch != due:
            raise Mistake(
                f"Batch {batch} came where {due or 'none'} was due; hand on every batch, each once and in order."
            )
        seen.append(batch)
        if batches.fetched > len(seen):
            raise Mistake(
                f"It fetched {batches.fetched} batches before the first was used; hand each on as soon as it is there."
            )
        time.pass_by(training)
    if len(seen) < len(loading):
        raise Mistake(f"It handed on {len(seen)} of {len(loading)} batches; every one must come through.")
    expected = [startup + loading[0], *loading[1:]]
    if waits == expected:
        return "Start-up belongs to the first wait, your own computing to none."
    if len(waits) != len(seen):
        raise Mistake(
            f"There are {len(waits)} waits for {len(seen)} batches; append exactly one for each batch, before you "
            "yield it."
        )
    if all(abs(wait) < 1 for wait in waits):
        raise Mistake(
            "The waits are almost zero; read the time from the `clock` you are given, before and after fetching."
        )
    if waits == loading:
        raise Mistake(
            "The first wait leaves out starting the iterator (4 s here, worker processes in real life); start "
            "the clock before."
        )
    if any(wait >= training for wait in waits):
        raise Mistake(
            "A wait includes the 10 s that the consumer computed; after `yield` returns, start the clock anew."
        )
    raise Mistake(f"The waits should be {expected} seconds, yours are {waits}.")
