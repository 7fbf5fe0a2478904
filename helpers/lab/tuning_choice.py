"""Which measured loader setting to take, and why: the simplest of those that are as good as the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from helpers.config import TrainConfig
from helpers.lab.measure import Spread
from helpers.loading import WORKER_TIMEOUT_S

AS_GOOD = 0.05  # a difference below this is none, however little the rounds vary


@dataclass(frozen=True)
class Setting:
    """What is turned of a loader."""

    workers: int
    prefetch: int = 2
    pin_memory: bool = False
    start_method: str = "default"

    def options(self) -> dict:
        """Arguments for a DataLoader of one's own; those that are not legal without workers are left out."""
        options = {"num_workers": self.workers, "pin_memory": self.pin_memory}
        if self.workers:
            method = None if self.start_method == "default" else self.start_method
            options |= {"prefetch_factor": self.prefetch, "persistent_workers": True, "multiprocessing_context": method}
            options["timeout"] = WORKER_TIMEOUT_S
        return options

    def simplicity(self) -> tuple:
        """Sorts the simple first: few workers, then what torch does when not told otherwise."""
        return self.workers, abs(self.prefetch - 2), self.pin_memory, self.start_method != "default"

    def changes(self, other: Setting) -> str:
        """What differs from ``other``, apart from the workers."""
        found = [f"prefetch {self.prefetch}"] * (self.prefetch != other.prefetch)
        found += ["pinning" if self.pin_memory else "not pinning"] * (self.pin_memory != other.pin_memory)
        return " with ".join(found + [self.start_method] * (self.start_method != other.start_method))

    def __str__(self) -> str:
        return f"{self.workers} worker{'s' * (self.workers != 1)}"


@dataclass(frozen=True)
class Row:
    """A setting, measured in some rounds: steady images/s; seconds to the first batch, worker start included; CPU
    time that loading took, as a share of all usable cores (0 to 1)."""

    setting: Setting
    images_per_s: Spread
    first_batch_s: float
    cpu_share: float
    rounds: int

    def as_good_as(self, best: Row) -> bool:
        """Within 5 % of ``best``, or within the noise: the middle halves of their rounds overlap."""
        mine, other = self.images_per_s, best.images_per_s
        return mine.median >= (1 - AS_GOOD) * other.median or mine.high >= other.low


@dataclass(frozen=True)
class Tuning:
    """The measured rows, the chosen ``setting`` and why; ``config`` is the given one with the chosen values (None
    for a dataset of one's own)."""

    rows: list[Row]
    setting: Setting
    why: str
    config: TrainConfig | None = None

    def table(self) -> str:
        """The rows as text, an arrow at the chosen one."""
        lines = ["workers  prefetch  images/s      middle half  first batch  CPU in use"]
        for row in sorted(self.rows, key=lambda row: row.setting.simplicity()):
            rate, one = row.images_per_s, row.setting
            extra = ["pinned"] * one.pin_memory + [one.start_method] * (one.start_method != "default")
            half = f"{rate.low:.0f}–{rate.high:.0f}" if row.rounds > 1 else "one round"
            figures = f"{rate.median:8.0f}  {half:>15}  {row.first_batch_s:9.2f} s"
            line = f"{one.workers:7}  {one.prefetch if one.workers else '–':>8}  {figures}  {row.cpu_share:10.0%}"
            lines.append("  ".join([line, *extra, *["← chosen"] * (one == self.setting)]))
        return "\n".join(lines)


def choose(rows: Sequence[Row]) -> Row:
    """The simplest of the rows that are as good as the fastest. One round, where others had more, was hopeless or
    chance, and does not count."""
    rows = [row for row in rows if row.rounds > 1] or rows
    best = max(rows, key=lambda row: row.images_per_s.median)
    return min((row for row in rows if row.as_good_as(best)), key=lambda row: row.setting.simplicity())


def explain(rows: Sequence[Row], cores: int, *, waits=False, takes: float | None = None, busy=False) -> str:
    """Why ``choose`` takes what it takes, with the numbers and the null results.

    ``waits``: without workers, loading waited more than it computed. ``takes``: images/s that the consumer takes at
    most. ``busy``: it computes on the same cores.
    """
    chosen = choose(rows)
    setting, rate = chosen.setting, chosen.images_per_s.median
    full = takes is not None and rate >= 0.9 * takes
    said = f"{setting}: {rate:,.0f} images/s"
    none = max((r.images_per_s.median for r in rows if r.setting.workers == 0), default=None)
    if setting.workers and none:
        said += f", {rate / none:.1f}× the {none:,.0f} without workers"
    if full:
        said += f", about all that the consumer takes ({takes:,.0f})"
    elif setting.workers and waits:
        said += "; loading waits more than it computes, and workers wait side by side"
    if more := [row for row in rows if row.setting.workers > setting.workers]:
        most = max(more, key=lambda row: row.images_per_s.median)
        tied = most.as_good_as(chosen)
        verb = f"{'was' if most.setting.workers == 1 else 'were'} {'no better' if tied else 'slower'}"
        verb += " within the noise" * (most.images_per_s.median > (1 + AS_GOOD) * rate)
        because = f"{cores} core{'s' * (cores != 1)}"
        if busy:
            because += ", and the consumer computes on them too"
        elif full and tied:
            because = "the consumer is the limit"
        elif setting.workers == 0 and not tied:
            because = "handing a batch over costs more than making it"
        said += f". {most.setting} {verb} ({most.images_per_s.median:,.0f}): {because}"
    same = [r for r in rows if r.setting.workers == setting.workers and r.rounds > 1 and r.as_good_as(chosen)]
    if changed := " and ".join(row.setting.changes(setting) for row in same if row is not chosen):
        said += f". {changed[0].upper()}{changed[1:]} made no difference"
    return said + "."
