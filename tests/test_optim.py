"""Parameter groups and the learning rate as a function of the step."""

import pytest
import torch
from torch import nn

from helpers.config import TrainConfig
from helpers.errors import InputError
from helpers.models import SmallCNN
from helpers.optim import build_optimizer, lr_at, parameter_groups, set_lr


def test_biases_and_norms_do_not_decay():
    model = SmallCNN(10)
    decayed, plain = parameter_groups(model, 0.1)
    assert all(p.ndim >= 2 for p in decayed["params"]) and decayed["weight_decay"] == 0.1
    assert all(p.ndim < 2 for p in plain["params"]) and plain["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out_and_a_frozen_model_is_refused():
    model = nn.Linear(4, 2)
    model.bias.requires_grad_(False)
    assert [p for g in parameter_groups(model, 0.1) for p in g["params"]] == [model.weight]
    model.weight.requires_grad_(False)
    with pytest.raises(InputError, match="no trainable parameter"):
        parameter_groups(model, 0.0)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("fused", [False, True])
def test_each_optimiser_lowers_a_loss(name, fused):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = build_optimizer(model, TrainConfig(optimizer=name, fused=fused, lr=0.05, weight_decay=0.01))
    inputs = torch.randn(64, 4)
    target = inputs.sum(1, keepdim=True)
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(model(inputs), target)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_schedule_warms_up_peaks_and_ends_at_zero():
    config = TrainConfig(lr=1.0, schedule="cosine", warmup=0.2)
    rates = [lr_at(step, 50, config) for step in range(51)]
    assert 0 < rates[0] < 0.1
    assert rates[:10] == sorted(rates[:10]) and max(rates) == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[50] == pytest.approx(0, abs=1e-9) and lr_at(10_000, 50, config) == pytest.approx(0, abs=1e-9)


def test_constant_schedule_never_changes_and_a_single_step_has_a_rate():
    assert {lr_at(step, 9, TrainConfig(lr=0.3)) for step in range(9)} == {0.3}
    assert lr_at(0, 1, TrainConfig(lr=0.3, schedule="cosine", warmup=0.9)) > 0


def test_set_lr_reaches_every_group():
    optimizer = build_optimizer(nn.Linear(3, 3), TrainConfig(weight_decay=0.1))
    set_lr(optimizer, 0.123)
    assert [group["lr"] for group in optimizer.param_groups] == [0.123, 0.123]
