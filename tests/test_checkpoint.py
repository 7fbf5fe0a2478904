"""Checkpoints: atomic, the previous one kept, plain, and refused in one line when they are not ours."""

import os
import pickle
import random
import warnings

import numpy as np
import pytest
import torch

from helpers import checkpoint as checkpoint_module
from helpers.checkpoint import (
    check_continuation,
    load_checkpoint,
    random_state,
    restore_random_state,
    run_folder_of,
    save_checkpoint,
    seed_everything,
)
from helpers.config import TrainConfig
from helpers.errors import InputError


def test_what_was_saved_comes_back_and_the_one_before_is_kept(tmp_path):
    save_checkpoint(tmp_path, {"steps": 1, "weights": torch.ones(2)})
    save_checkpoint(tmp_path, {"steps": 2, "weights": torch.zeros(2)})
    assert load_checkpoint(tmp_path)["steps"] == 2
    assert torch.load(tmp_path / "previous.pt", weights_only=True)["steps"] == 1
    assert sorted(os.listdir(tmp_path)) == ["last.pt", "previous.pt"]


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:-1], lambda b: bytes(len(b))]
)
def test_a_damaged_file_falls_back_to_the_one_before_and_says_so(tmp_path, damage):
    save_checkpoint(tmp_path / "checkpoints", {"steps": 1})
    last = save_checkpoint(tmp_path / "checkpoints", {"steps": 2})
    last.write_bytes(damage(last.read_bytes()))
    said = []
    for source in (tmp_path, tmp_path / "checkpoints", last):
        said.clear()
        assert load_checkpoint(source, log=said.append)["steps"] == 1
        assert len(said) == 1 and "previous.pt" in said[0]
    (tmp_path / "checkpoints/previous.pt").unlink()
    with pytest.raises(InputError) as caught:
        load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("moment", ["write", "link", "replace"])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch, moment):
    save_checkpoint(tmp_path, {"steps": 1})
    target = {"write": (torch, "save"), "link": (os, "link"), "replace": (os, "replace")}[moment]

    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*target, fails)
        with pytest.raises(InputError, match="No space left"):
            save_checkpoint(tmp_path, {"steps": 2})
    assert load_checkpoint(tmp_path)["steps"] == 1
    assert "last.pt" in os.listdir(tmp_path) and not [n for n in os.listdir(tmp_path) if n.startswith(".last")]


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("owned",)


def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.pt").write_bytes(pickle.dumps({"format": checkpoint_module.FORMAT, "x": Hostile()}, protocol=2))
    torch.save({"format": checkpoint_module.FORMAT, "x": Hostile()}, tmp_path / "evil2.pt")
    for name in ("evil.pt", "evil2.pt"):
        with pytest.raises(InputError):
            load_checkpoint(name)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("content", [{"model": {}}, [1, 2], torch.ones(3), {"format": "another program 7"}])
def test_a_foreign_checkpoint_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "foreign.pt")
    with pytest.raises(InputError, match=r"not a checkpoint of helpers.train"):
        load_checkpoint(tmp_path / "foreign.pt")


def test_a_missing_checkpoint_says_what_a_run_folder_is(tmp_path):
    for source in (tmp_path, tmp_path / "nowhere", tmp_path / "nowhere.pt"):
        with pytest.raises(InputError, match=r"checkpoints/last\.pt"):
            load_checkpoint(source)


def test_random_state_survives_a_safe_load(tmp_path):
    seed_everything(5)
    random.gauss(0, 1), np.random.standard_normal()
    save_checkpoint(tmp_path, {"random": random_state()})
    draws = (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        torch.rand(3).tolist(),
    )
    seed_everything(6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore_random_state(load_checkpoint(tmp_path)["random"])
    assert draws == (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        torch.rand(3).tolist(),
    )


def state(**changes):
    return {"config": {**vars(TrainConfig()), **changes}}


def test_a_changed_schedule_is_an_explicit_choice():
    config = TrainConfig(resume="r", epochs=20)
    with pytest.raises(InputError, match=r"--epochs 12 → 20 .*--reschedule"):
        check_continuation(config, state())
    check_continuation(config.replace(reschedule=True), state())
    check_continuation(TrainConfig(resume="r", max_steps=3, workers=2, log_every=9, seed=0), state())


@pytest.mark.parametrize(
    ("field", "value"), [("model", "first_cnn"), ("image_size", 32), ("data", "CIFAR10"), ("optimizer", "sgd")]
)
def test_another_run_is_not_continued(field, value):
    with pytest.raises(InputError, match=field.replace("_", "-")):
        check_continuation(TrainConfig(resume="r", reschedule=True, **{field: value}), state())


def test_run_folder_of_a_resumed_run(tmp_path):
    run = tmp_path / "run"
    save_checkpoint(run / "checkpoints", {"steps": 1})
    (run / "config.json").write_text("{}")
    for source in (run, run / "checkpoints", run / "checkpoints/last.pt"):
        assert run_folder_of(TrainConfig(resume=str(source))) == run
        assert run_folder_of(TrainConfig(resume=str(source), run_dir=str(run))) == run
        assert run_folder_of(TrainConfig(resume=str(source), run_dir=str(tmp_path / "other"))) is None
    assert run_folder_of(TrainConfig()) is None
