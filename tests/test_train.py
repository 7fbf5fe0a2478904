"""The loop: it learns, counts, accumulates, resumes bit for bit, and stops cleanly."""

import ast
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import helpers
from helpers.checkpoint import load_checkpoint
from helpers.config import TrainConfig, preset
from helpers.errors import InputError, NonFinite, Stopped
from helpers.train import Trainer, evaluate, train


def quick(name, tmp_path, digits, run="run", **changes):
    settings = {
        "data": str(digits),
        "image_size": 32,
        "tensorboard": False,
        "progress": False,
        "run_dir": str(tmp_path / run),
    }
    return preset(name, **{**settings, "device": "cpu", "epochs": 2, **changes})


def metrics(folder, kind="train"):
    entries = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["kind"] == kind]


def losses(folder):
    return [(entry["step"], entry["loss"], entry["lr"]) for entry in metrics(folder)]


def same_state(one, other):
    """Model, optimiser and scaler of two checkpoints, bit for bit."""
    one, other = load_checkpoint(one), load_checkpoint(other)
    assert one["model"].keys() == other["model"].keys()
    assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())
    for index, state in one["optimizer"]["state"].items():
        assert all(torch.equal(value, other["optimizer"]["state"][index][name]) for name, value in state.items())
    assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
    assert one["scaler"] == other["scaler"]
    drop = ("seconds", "epochs", "cache_seconds", "seconds_to_target")
    left, right = ({k: v for k, v in c["progress"].items() if k not in drop} for c in (one, other))
    assert left == right


@pytest.mark.parametrize("name", ["naive", "seed", "tuned"])
def test_every_preset_trains_and_leaves_a_whole_run_folder(name, tmp_path, digits):
    summary = train(quick(name, tmp_path, digits, tensorboard=True, workers=0 if name != "seed" else 2))
    run = tmp_path / "run"
    needed = {"config.json", "metrics.jsonl", "summary.json", "train.log", "checkpoints"}
    assert needed <= set(os.listdir(run)) and any("tfevents" in file for file in os.listdir(run))
    assert json.loads((run / "summary.json").read_text()) == summary
    keys = "images_per_s seconds seconds_to_target cache_seconds val_accuracy val_loss steps data_wait_share"
    assert {*keys.split(), "peak_memory_mb", "precision"} <= summary.keys()
    batch = 64 if name == "tuned" else 32
    assert summary["steps"] == 2 * math.ceil(120 / batch)
    assert summary["images_per_s"] > 0 and 0 <= summary["data_wait_share"] <= 1 and summary["peak_memory_mb"] > 50
    assert (summary["cache_seconds"] > 0) == (name == "tuned")
    assert json.loads((run / "config.json").read_text())["preset"] == name
    assert load_checkpoint(run)["progress"]["epoch"] == 2


def test_training_learns(tmp_path, digits):
    summary = train(quick("tuned", tmp_path, digits, epochs=15, precision="fp32", log_every=1, batch_size=32))
    first, last = metrics(tmp_path / "run")[0], metrics(tmp_path / "run")[-1]
    assert last["loss"] < 0.5 * first["loss"] and summary["val_accuracy"] > 0.4


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path, digits):
    for run, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(quick("tuned", tmp_path, digits, run, seed=seed, log_every=1, batch_size=16, precision="fp32"))
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")
    same_state(tmp_path / "a", tmp_path / "b")


SETTINGS = {
    "naive": {},
    "seed": {"workers": 2, "log_every": 3},
    "tuned": {"precision": "bf16", "log_every": 3, "batch_size": 16},
    "accumulated": {"precision": "fp32", "accumulate": 3, "clip_norm": 0.5, "batch_size": 8, "log_every": 2},
    "uncached workers": {
        "cache": False,
        "workers": 2,
        "decoder": "pillow",
        "log_every": 4,
        "batch_size": 16,
        "precision": "fp32",
    },
    "scaled gradients": {"precision": "fp16", "model": "first_cnn", "log_every": 3, "batch_size": 16},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("stop_at", [3, 8])
def test_interrupted_and_resumed_equals_uninterrupted(name, stop_at, tmp_path, digits):
    base = name if name in ("naive", "seed") else "tuned"
    changes = {"batch_size": 16, **SETTINGS[name]}
    train(quick(base, tmp_path, digits, "whole", **changes))
    train(quick(base, tmp_path, digits, "parts", **changes, max_steps=stop_at))
    resumed = quick(base, tmp_path, digits, "parts", **changes, resume=str(tmp_path / "parts"))
    torch.rand(17)  # whatever happened to the global random state in between
    train(resumed)
    same_state(tmp_path / "whole", tmp_path / "parts")
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert metrics(tmp_path / "whole", "eval")[-1]["loss"] == metrics(tmp_path / "parts", "eval")[-1]["loss"]


def test_a_resumed_run_can_go_to_a_folder_of_its_own(tmp_path, digits):
    train(quick("tuned", tmp_path, digits, "a", max_steps=1))
    before = (tmp_path / "a" / "metrics.jsonl").read_text()
    train(quick("tuned", tmp_path, digits, "b", resume=str(tmp_path / "a" / "checkpoints" / "last.pt")))
    assert load_checkpoint(tmp_path / "b")["progress"]["steps"] == 4
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == before and load_checkpoint(tmp_path / "a")["progress"][
        "steps"
    ] == 1


def test_precision_that_was_measured_stays_when_resumed(tmp_path, digits, monkeypatch):
    config = quick("tuned", tmp_path, digits, max_steps=1)
    monkeypatch.setattr("helpers.run.fastest_precision", lambda *_: "bf16")
    assert train(config)["precision"] == "bf16"
    monkeypatch.setattr("helpers.run.fastest_precision", lambda *_: "fp32")
    monkeypatch.setenv("COURSE_DATA", str(tmp_path / "another machine's cache"))
    assert train(config.replace(resume=config.run_dir, max_steps=None))["precision"] == "bf16"


class StopAt:
    """A clock that sends this process a signal in the middle of a given step."""

    def __init__(self, step, number):
        from helpers.monitor import StepClock

        self.clock, self.step, self.number, self.seen = StepClock(), step, number, 0
        self.seconds, self.start = self.clock.seconds, self.clock.start

    def mark(self, phase):
        self.clock.mark(phase)
        self.seen += phase == "backward"
        if phase == "backward" and self.seen == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_mid_step_saves_between_steps_and_resumes_to_the_same_end(number, tmp_path, digits):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    settings = {"batch_size": 16, "log_every": 3, "precision": "fp32"}
    train(quick("tuned", tmp_path, digits, "whole", **settings))
    with pytest.raises(Stopped) as caught:
        train(quick("tuned", tmp_path, digits, "parts", **settings), clock=StopAt(5, number))
    assert (
        caught.value.signal_number == number and "after step 5" in str(caught.value) and "--resume" in str(caught.value)
    )
    assert load_checkpoint(tmp_path / "parts")["progress"]["steps"] == 5
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    train(quick("tuned", tmp_path, digits, "parts", **settings, resume=str(tmp_path / "parts")))
    same_state(tmp_path / "whole", tmp_path / "parts")


def batches_of(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in sizes]


def bare(tmp_path, run="run", **changes):
    settings = {
        "run_dir": str(tmp_path / run),
        "progress": False,
        "tensorboard": False,
        "device": "cpu",
        "epochs": 1,
    }
    return TrainConfig(**{**settings, **changes})


def linear():
    torch.manual_seed(0)
    return nn.Linear(8, 3)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_uneven_micro_batches_equal_one_large_batch(precision, tmp_path):
    """Windows of 6+2+4 and a ragged 5: after two steps of SGD the weights are those of two large batches."""
    parts = batches_of([6, 2, 4, 5])
    large = [tuple(torch.cat(tensors) for tensors in zip(*parts[:3], strict=True)), parts[3]]
    settings = {"optimizer": "sgd", "lr": 0.1, "precision": "fp32", "log_every": 1}
    one, other = linear(), linear()
    train(bare(tmp_path, "parts", **settings, accumulate=3), model=one, loaders=(parts, None))
    train(bare(tmp_path, "large", **settings), model=other, loaders=(large, None))
    torch.testing.assert_close(one.weight, other.weight, rtol=0, atol=1e-6)
    for (step, loss, _), (step_too, loss_too, _) in zip(
        losses(tmp_path / "parts"), losses(tmp_path / "large"), strict=True
    ):
        assert step == step_too and loss == pytest.approx(loss_too, abs=1e-6)


@pytest.mark.parametrize(("batches", "accumulate", "steps"), [(7, 4, 2), (3, 4, 1), (8, 4, 2), (5, 1, 5)])
def test_steps_count_optimiser_steps_and_leftovers_are_stepped(batches, accumulate, steps, tmp_path):
    model = linear()
    trainer = Trainer(
        bare(tmp_path, accumulate=accumulate, epochs=2), model=model, loaders=(batches_of([4] * batches), None)
    )
    assert trainer.fit()["steps"] == 2 * steps == trainer.total_steps
    assert all(p.grad is None for p in model.parameters()), "no gradient may leak into the next epoch"
    assert [entry["step"] for entry in metrics(tmp_path / "run")] == list(range(1, 2 * steps + 1))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clipping_bounds_the_true_gradient(precision, tmp_path):
    model = linear()
    before = model.weight.detach().clone(), model.bias.detach().clone()
    config = bare(tmp_path, optimizer="sgd", lr=1.0, clip_norm=0.01, precision=precision)
    trainer = Trainer(config, model=model, loaders=(batches_of([8]), None))
    for group in trainer.optimizer.param_groups:
        group["momentum"], group["nesterov"] = 0.0, False
    trainer.fit()
    moved = math.sqrt(sum(((p - b) ** 2).sum().item() for p, b in zip((model.weight, model.bias), before, strict=True)))
    assert moved == pytest.approx(0.01, rel=0.05)


def test_a_skipped_step_does_not_count_and_does_not_move_the_schedule(tmp_path):
    """Scaled by 2^16 the first gradients overflow fp16; each skip halves the scale until a step is taken."""
    inputs, labels = batches_of([8])[0]
    loud = [(inputs * 100, labels)] * 12
    config = bare(tmp_path, precision="fp16", optimizer="sgd", lr=1e-6, warmup=0.5, log_every=4)
    trainer = Trainer(config, model=linear(), loaders=(loud, None))
    summary = trainer.fit()
    assert summary["skipped"] > 0 and summary["steps"] + summary["skipped"] == 12
    from helpers.optim import lr_at

    assert all(entry["lr"] <= lr_at(entry["step"] + 3, 12, config) for entry in metrics(tmp_path / "run"))
    assert [e["step"] for e in metrics(tmp_path / "run")] == sorted({e["step"] for e in metrics(tmp_path / "run")})


def test_max_steps_counts_steps_really_taken(tmp_path):
    inputs, labels = batches_of([8])[0]
    config = bare(tmp_path, precision="fp16", optimizer="sgd", lr=1e-6, max_steps=5, log_every=50)
    assert Trainer(config, model=linear(), loaders=([(inputs * 100, labels)] * 30, None)).fit()["steps"] == 5


@pytest.mark.parametrize("log_every", [1, 10])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_loss_names_its_batch_and_keeps_the_good_checkpoint(bad, log_every, tmp_path):
    batches = batches_of([4] * 8)
    batches[5][0][0, 0] = bad
    config = bare(tmp_path, log_every=log_every, checkpoint_every=2)
    with pytest.raises(NonFinite) as caught:
        train(config, model=linear(), loaders=(batches, None))
    assert "epoch 1, batch 6" in str(caught.value) and "\n" not in str(caught.value)
    kept = load_checkpoint(tmp_path / "run")
    assert kept["progress"]["steps"] == 4 and all(value.isfinite().all() for value in kept["model"].values())


def test_a_readers_own_loader_is_not_touched_before_training(tmp_path):
    class Counted(list):
        started = 0

        def __iter__(self):
            Counted.started += 1
            return super().__iter__()

    train(bare(tmp_path), model=linear(), loaders=(Counted(batches_of([4, 4])), None))
    assert Counted.started == 1, "one epoch, one iterator"


def test_broken_weights_are_never_saved(tmp_path):
    trainer = Trainer(bare(tmp_path), model=linear(), loaders=(batches_of([4]), None))
    trainer.fit()
    with torch.no_grad():
        trainer.model.weight[0, 0] = float("nan")
    with pytest.raises(NonFinite, match="weights are no longer finite"):
        trainer.save()
    assert load_checkpoint(tmp_path / "run")["model"]["weight"].isfinite().all()


def test_a_non_finite_loss_on_images_names_the_files(tmp_path, digits):
    with pytest.raises(NonFinite, match=r"batch \d+ \(.*\.jpg"):
        train(quick("naive", tmp_path, digits, lr=1e30, epochs=3))


def test_target_accuracy_stops_and_is_timed(tmp_path, digits):
    summary = train(quick("tuned", tmp_path, digits, epochs=30, target_accuracy=0.2, batch_size=16, precision="fp32"))
    assert summary["val_accuracy"] >= 0.2 and summary["epochs"] < 30
    assert 0 < summary["seconds_to_target"] <= summary["seconds"]
    assert train(quick("tuned", tmp_path, digits, "b", epochs=1, target_accuracy=1.0))["seconds_to_target"] is None


def test_evaluation_counts_each_sample_once_and_leaves_no_gradient():
    model = linear()
    batches = batches_of([5, 3, 1])
    inputs, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    loss, accuracy = evaluate(model, batches, torch.device("cpu"), torch.autocast("cpu", enabled=False))
    with torch.no_grad():
        logits = model(inputs)
    assert loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), abs=1e-6)
    assert accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    with pytest.raises(InputError, match="no validation image"):
        evaluate(model, [], torch.device("cpu"), torch.autocast("cpu", enabled=False))


def test_eval_every_zero_never_evaluates(tmp_path, digits):
    assert train(quick("tuned", tmp_path, digits, eval_every=0))["val_accuracy"] is None
    train(quick("tuned", tmp_path, digits, "b", eval_every=2, epochs=5))
    assert [entry["epoch"] for entry in metrics(tmp_path / "b", "eval")] == [2, 4, 5]


def test_a_trained_model_of_other_classes_is_not_continued(tmp_path, digits):
    train(quick("tuned", tmp_path, digits, max_steps=1))
    state = load_checkpoint(tmp_path / "run")
    from helpers.checkpoint import save_checkpoint

    state.pop("format")
    save_checkpoint(tmp_path / "run" / "checkpoints", {**state, "classes": list("abcdefghij")})
    with pytest.raises(InputError, match="other classes"):
        train(quick("tuned", tmp_path, digits, resume=str(tmp_path / "run")))


def test_weights_of_another_shape_are_one_line(tmp_path):
    train(bare(tmp_path), model=linear(), loaders=(batches_of([4]), None))
    with pytest.raises(InputError) as caught:
        train(bare(tmp_path, resume=str(tmp_path / "run")), model=nn.Linear(9, 3), loaders=(batches_of([4]), None))
    assert "do not fit" in str(caught.value) and "\n" not in str(caught.value)


def test_compiled_training_saves_plain_names(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda model: calls.append(model) or (lambda x: model(x)))
    train(bare(tmp_path, compile=True), model=linear(), loaders=(batches_of([4]), None))
    assert calls and set(load_checkpoint(tmp_path / "run")["model"]) == {"weight", "bias"}


def test_checkpoint_of_a_gpu_loads_on_a_cpu_box():
    """Loading maps to the CPU first, so a tensor that says cuda:0 is no obstacle; see test_checkpoint for the file
    itself."""
    source = Path(helpers.__file__).with_name("checkpoint.py").read_text()
    call = next(
        n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "torch.load"
    )
    assert {k.arg: ast.unparse(k.value) for k in call.keywords} == {
        "map_location": "'cpu'",
        "weights_only": "True",
    }


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_nothing_in_the_loop_waits_for_the_gpu(precision, tmp_path, digits):
    config = quick(
        "tuned", tmp_path, digits, device="cuda", precision=precision, log_every=1000, epochs=1, batch_size=16
    )
    trainer = Trainer(config)
    optimizer_step, look = trainer.optimizer_step, trainer.look
    mode = {"first": True}

    def strict_step():
        optimizer_step()
        if mode.pop("first", None):  # the first step allocates the optimiser's state
            torch.cuda.set_sync_debug_mode("error")

    def free_look(log=False):
        torch.cuda.set_sync_debug_mode("default")
        look(log)

    trainer.optimizer_step, trainer.look = strict_step, free_look
    try:
        trainer.fit()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["naive", "seed", "tuned"])
def test_every_preset_trains_on_the_gpu(name, tmp_path, digits):
    summary = train(quick(name, tmp_path, digits, device="cuda"))
    assert summary["device"].startswith("cuda") and summary["peak_memory_mb"] > 0 and summary["images_per_s"] > 0
