"""Shared fixtures: a small rendered data set, and everything the course keeps (data, cache, predictions) away from
the reader's own."""

import os
from pathlib import Path

import pytest
import torch

from helpers.data.digits import ensure_digits

REPO = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """120 training and 60 validation digits, rendered once for all tests."""
    return ensure_digits(tmp_path_factory.mktemp("data"), train=120, val=60, progress=False)


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    """Each test has its own data folder for caches and its own predictions, and one thread: the work is small, and
    threads that wait for each other on busy cores make it slow."""
    monkeypatch.setenv("COURSE_DATA", str(tmp_path / "course-data"))
    monkeypatch.setenv("COURSE_PREDICTIONS", str(tmp_path / "predictions.json"))
    torch.set_num_threads(1)


@pytest.fixture
def child_environment():
    """Environment for `python -m helpers.…` in a child process."""
    return {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
