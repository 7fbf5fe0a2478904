"""`speed` and `target`: whole trainings by the command line, naive and tuned, each in a fresh process."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path

from helpers.data.digits import ensure_digits
from tests.bench.children import run, say
from tests.bench.verdict import Row, ratios

NUMBER = itertools.count()


def fresh_home(work: Path) -> Path:
    """A data folder with the rendered digits and no cache. All are read once, so that no run pays for the disk."""
    digits = ensure_digits(progress=False)
    for path in digits.rglob("*.jpg"):
        path.read_bytes()
    home = work / f"home-{next(NUMBER)}"
    home.mkdir()
    (home / "digits").symlink_to(digits, target_is_directory=True)
    return home


def train(preset: str, home: Path, work: Path, *options: str) -> dict:
    """Train with a preset; returns what the bench keeps of the summary."""
    folder = work / f"run-{next(NUMBER)}"
    fixed = ("--no-tensorboard", "--no-progress", "--device", "cpu", "--run-dir", folder)
    run("-m", "helpers.train", "--preset", preset, *fixed, *options, timeout=1200, COURSE_DATA=home)
    summary = json.loads((folder / "summary.json").read_text())
    shutil.rmtree(folder)
    rates = ("images_per_s", "seconds_to_target", "seconds", "cache_seconds")
    names = (*rates, "epochs", "val_accuracy", "precision")
    return {name: summary[name] for name in names}


def in_turn(number: int) -> tuple[str, str]:
    return ("naive", "tuned") if number % 2 == 0 else ("tuned", "naive")


def measure_speed(quick: bool, work: Path) -> dict:
    """images/s of the epochs after the first, without evaluation, checkpoints and cache building."""
    home, rounds = fresh_home(work), []
    options = ("--epochs", "2" if quick else "3", "--eval-every", "0")
    for number in range(1 if quick else 5):
        rounds.append({preset: train(preset, home, work, *options) for preset in in_turn(number)})
        say(f"  pair {number + 1}: {rounds[-1]}")
    return {"rounds": rounds}


def speed_rows(raw: dict, machine: dict) -> list[Row]:
    rounds = [{preset: pair[preset]["images_per_s"] for preset in ("naive", "tuned")} for pair in raw["rounds"]]
    bar = 3.5 if machine["bf16_hardware"] else 2.5
    return [
        Row("speed", "tuned ÷ naive", "×", ratios(rounds, "tuned", "naive"), at_least=bar),
        *(Row("speed", preset, "images/s", [pair[preset] for pair in rounds]) for preset in ("naive", "tuned")),
    ]


def measure_target(quick: bool, work: Path) -> dict:
    """Seconds from the call of train() to the end of the evaluation that first reaches 90 %, with the building of
    the cache. Quick: to 30 %, with one seed, which says that it works and no more."""
    goal, rounds = "0.3" if quick else "0.9", []
    for seed in range(1 if quick else 3):
        rounds.append({"seed": seed})
        for preset in in_turn(seed):
            home = fresh_home(work)
            cap = ("--epochs", "40") if preset == "naive" else ()
            rounds[-1][preset] = train(preset, home, work, "--seed", str(seed), "--target-accuracy", goal, *cap)
            shutil.rmtree(home)
            say(f"  seed {seed}, {preset}: {rounds[-1][preset]}")
    return {"goal": goal, "rounds": rounds}


def target_rows(raw: dict, machine: dict) -> list[Row]:
    """A tuned run that does not get there has missed both bars; a naive one counts with the time it had, which is
    kind to it."""
    naive = [pair["naive"]["seconds_to_target"] or pair["naive"]["seconds"] for pair in raw["rounds"]]
    tuned = [pair["tuned"]["seconds_to_target"] or math.inf for pair in raw["rounds"]]
    goal = f"seconds to {float(raw['goal']):.0%}"
    shares = [slow / quick for slow, quick in zip(naive, tuned, strict=True)]
    return [
        Row("target", f"naive ÷ tuned, {goal}", "×", shares, at_least=2.5),
        Row("target", f"tuned, {goal}", "s", tuned, at_most=60, worst=True),
        Row("target", f"naive, {goal}", "s", naive),
    ]
