"""What a reader predicted, what was measured, and which exercises passed: one small file, and one JSON to hand in."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
from pathlib import Path

from helpers.files import replace_text

KEY = re.compile(r"(\d\d)-[a-z0-9-]+")  # of a prediction: chapter, name
MEASURED = ("median", "low", "high", "unit", "question")


def predictions_file() -> Path:
    """Where it is kept: the variable COURSE_PREDICTIONS, else notebooks/.predictions.json, which git ignores."""
    default = Path(__file__).resolve().parents[2] / "notebooks" / ".predictions.json"
    return Path(os.environ.get("COURSE_PREDICTIONS") or default)


def kept() -> dict:
    """Predictions by key; measurements by key under 'measured'; exercises under 'checks'.

    A file that is missing, or that somebody edited, counts as empty where it cannot be understood: a prediction is
    not worth an error.
    """
    try:
        values = json.loads(predictions_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def part(name: str) -> dict:
    """'measured' or 'checks' of what is kept."""
    values = kept().get(name)
    return values if isinstance(values, dict) else {}


def keep(values: dict) -> None:
    """Replace what is kept, where that is possible: in a read-only checkout it lasts as long as the page."""
    with contextlib.suppress(OSError):
        replace_text(predictions_file(), json.dumps(values, indent=1) + "\n")


def record(name: str, key: str, value) -> None:
    """Keep one measurement or check."""
    keep({**kept(), name: {**part(name), key: value}})


def record_check(name: str, passed: bool) -> None:
    """Keep the result of an exercise's check; one that has passed stays passed."""
    record("checks", name, passed or part("checks").get(name) is True)


def number(value) -> float | None:
    """``value`` if it is a finite number."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def measurement(key: str) -> dict | None:
    """What was measured for ``key``: median, low and high, unit, question; None if nothing was."""
    value = part("measured").get(key)
    if not isinstance(value, dict) or any(number(value.get(name)) is None for name in MEASURED[:3]):
        return None
    texts = {name: value[name] for name in MEASURED[3:] if isinstance(value.get(name), str)}
    return {name: number(value[name]) for name in MEASURED[:3]} | {"unit": "", "question": key} | texts


def chapter_keys(chapter: str | None = None) -> list[str]:
    """Keys of a chapter ('01'; None: of all) that have been predicted or measured, in the order of the
    measurements."""
    keys = [key for key in dict.fromkeys([*part("measured"), *kept()]) if KEY.fullmatch(key)]
    return [key for key in keys if chapter in (None, key[:2])]


def export() -> dict:
    """Predictions, measurements and checks, and what kind of machine they are from: numbers and the course's own
    words, nothing that names a person, a computer or a folder."""
    import torch

    from helpers.devices import cuda_problem, usable_cpus

    gpu = None if cuda_problem() else torch.cuda.get_device_name(0)
    machine = {"cores": usable_cpus(), "gpu": gpu, "python": platform.python_version(), "torch": torch.__version__}
    entries = {
        key: {"predicted": number(kept().get(key)), "measured": measurement(key)} for key in sorted(chapter_keys())
    }
    checks = {
        name: passed for name, passed in part("checks").items() if name.isidentifier() and passed in (True, False)
    }
    return {"format": 1, "machine": machine, "answers": entries, "checks": checks}
