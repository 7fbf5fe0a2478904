"""Presets and settings: what they are, and that a value which cannot work is refused in one line."""

import dataclasses

import pytest

from helpers.config import PRESETS, TrainConfig, preset
from helpers.errors import InputError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("batch_size", -3),
        ("batch_size", 2.5),
        ("batch_size", True),
        ("batch_size", "32"),
        ("epochs", 0),
        ("max_steps", 0),
        ("accumulate", 0),
        ("lr", 0),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("warmup", 1),
        ("weight_decay", -0.1),
        ("clip_norm", 0),
        ("target_accuracy", 90),
        ("target_accuracy", 0),
        ("workers", -2),
        ("shift", 64),
        ("image_size", 0),
        ("precision", "fp8"),
        ("optimizer", "lion"),
        ("start_method", "thread"),
        ("seed", -1),
        ("log_every", 0),
        ("cache", 1),
    ],
)
def test_a_value_that_cannot_work_is_named_in_one_line(field, value):
    with pytest.raises(InputError) as caught:
        TrainConfig(**{field: value})
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"--{field.replace('_', '-')} {value}")


def test_whole_numbers_are_taken_where_a_fraction_is_meant():
    assert TrainConfig(lr=1).lr == 1.0 and isinstance(TrainConfig(lr=1).lr, float)


def test_config_is_frozen_and_replace_checks_again():
    config = TrainConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lr = 1.0
    with pytest.raises(InputError):
        config.replace(batch_size=0)
    with pytest.raises(InputError, match="learning_rate"):
        config.replace(learning_rate=1.0)


def test_every_preset_builds_and_is_recorded_by_name():
    for name in PRESETS:
        assert preset(name, device="cpu").preset == name
    with pytest.raises(InputError, match="naive, seed, tuned"):
        preset("fast")


def test_naive_is_the_plain_defaults_and_changes_win_over_a_preset():
    assert preset("naive") == TrainConfig()
    assert preset("tuned", batch_size=7).batch_size == 7


def test_seed_preset_uses_fp16_only_where_there_is_cuda():
    assert preset("seed", device="cpu").precision == "fp32"
    assert preset("seed", device="cpu", precision="bf16").precision == "bf16"
