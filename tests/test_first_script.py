"""The stand-alone script that the course starts from runs by itself, and trains like the seed preset."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.config import preset
from helpers.train import train

SCRIPT = Path(__file__).resolve().parents[1] / "notebooks" / "first_script.py"


def test_it_stays_a_page_long():
    assert len(SCRIPT.read_text().split('"""', 2)[2].strip().splitlines()) <= 60


def test_it_runs_as_a_script(digits, child_environment, tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, digits],
        env=child_environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 1: loss ")


def test_it_trains_like_the_seed_preset(digits, tmp_path):
    script = runpy.run_path(str(SCRIPT))["main"](digits, epochs=2)
    config = preset(
        "seed",
        data=str(digits),
        epochs=2,
        log_every=1,
        run_dir=str(tmp_path / "run"),
        tensorboard=False,
        progress=False,
    )
    train(config)
    entries = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    ours = [entry["loss"] for entry in entries if entry["kind"] == "train"]
    assert len(ours) == 8 and ours == pytest.approx(script, rel=1e-4)
