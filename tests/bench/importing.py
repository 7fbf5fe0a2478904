"""`import`: what ``import helpers.train`` costs beyond ``import torch``, in fresh processes."""

from __future__ import annotations

from pathlib import Path

from tests.bench.children import run
from tests.bench.verdict import Row, differences

CLOCK = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
IMPORTS = {
    "torch": CLOCK.format("torch"),
    "ours": CLOCK.format("helpers.train"),
    "added": "import torch; " + CLOCK.format("helpers.train"),
}


def measure(quick: bool, work: Path) -> dict:
    """Seconds of each import, in turns; the first round may compile bytecode and read the disk, and is left out."""
    rounds = []
    for number in range(3 if quick else 8):
        names = list(IMPORTS)[:: 1 if number % 2 else -1]
        rounds.append({name: float(run("-c", IMPORTS[name], timeout=120)) for name in names})
    return {"rounds": rounds[1:]}


def rows(raw: dict, machine: dict) -> list[Row]:
    rounds = raw["rounds"]
    return [
        Row(
            "import",
            "import helpers.train − import torch",
            "s",
            differences(rounds, "ours", "torch"),
            at_most=0.3,
        ),
        Row("import", "import helpers.train after import torch", "s", [values["added"] for values in rounds]),
        Row("import", "import torch", "s", [values["torch"] for values in rounds]),
    ]
