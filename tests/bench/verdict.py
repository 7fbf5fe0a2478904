"""From numbers to verdicts: medians with their spread, the bar each must reach, and the table. No timing here."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the table: what each round gave, and what it must reach (without a bar it is only reported).

    The bar is for the median; with ``worst`` every single value has to keep it.
    """

    figure: str
    what: str
    unit: str
    values: list[float]
    at_least: float | None = None
    at_most: float | None = None
    worst: bool = False

    @property
    def spread(self) -> tuple[float, float, float]:
        """Median, least and greatest value."""
        return statistics.median(self.values), min(self.values), max(self.values)

    @property
    def reached(self) -> bool | None:
        """Whether the bar is kept; None where there is none. What could not be measured has not reached it."""
        if self.at_least is None and self.at_most is None:
            return None
        if not self.values:
            return False
        median, low, high = self.spread
        low, high = (low, high) if self.worst else (median, median)
        return (self.at_least is None or low >= self.at_least) and (self.at_most is None or high <= self.at_most)

    @property
    def must(self) -> str:
        bars = [f"≥ {number(self.at_least)}"] if self.at_least is not None else []
        bars += [f"≤ {number(self.at_most)}"] if self.at_most is not None else []
        return " and ".join(bars) + (", each" if bars and self.worst else "")

    def as_dict(self) -> dict:
        """For JSON, which has no infinity: what was never reached is null."""
        median, low, high = self.spread if self.values else (math.inf,) * 3
        numbers = {"median": _finite(median), "min": _finite(low), "max": _finite(high)}
        text = {"what": self.what, "unit": self.unit, "must": self.must, "reached": self.reached}
        return {**text, **numbers, "values": [_finite(value) for value in self.values]}


def ratios(rounds: list[dict], over: str, under: str) -> list[float]:
    """``over`` ÷ ``under`` of each round: what disturbs one of them mostly disturbs the other too."""
    return [values[over] / values[under] for values in rounds]


def differences(rounds: list[dict], of: str, minus: str) -> list[float]:
    """``of`` − ``minus`` of each round."""
    return [values[of] - values[minus] for values in rounds]


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    cells = [("figure", "what", "median", "min–max (rounds)", "must reach", "verdict")]
    for row in rows:
        middle = around = "–"
        if row.values:
            median, low, high = row.spread
            middle, around = (
                f"{number(median)} {row.unit}",
                f"{number(low)}–{number(high)} ({len(row.values)})",
            )
        verdict = {None: "", True: "reached", False: "NOT REACHED"}[row.reached]
        cells.append((row.figure, row.what, middle, around, row.must, verdict))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(line.rstrip() for line in lines)


def number(value: float) -> str:
    """Three figures at least, without an exponent, and no minus before zero."""
    if math.isinf(value):
        return "never"
    text = f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
