"""Scalers scale losses, unscale gradients once, leave out steps that overflow, and move their factor."""

import math

import pytest
import torch

from ortmodule.optim import FusedSGD
from ortmodule.optim.loss_scaler import DynamicLossScaler, StaticLossScaler

OPTIMIZERS = [torch.optim.SGD, FusedSGD]


def trained(optimizer, scaler, bad=False):
    """One step of w = 1 with the gradient 2: (did it step, w)."""
    w = torch.nn.Parameter(torch.ones(1))
    optimizer = optimizer([w], lr=0.25)
    scaler.scale(w * (math.inf if bad else 2.0)).sum().backward()
    return scaler.step(optimizer), w.item()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step(optimizer):
    assert trained(optimizer, StaticLossScaler(1024.0)) == (True, 0.5)
    assert trained(optimizer, StaticLossScaler(), bad=True) == (False, 1.0)


def test_a_loss_is_scaled_in_float32_at_least():
    scaler = StaticLossScaler(65536.0)
    assert scaler.scale(torch.tensor(4.0, dtype=torch.float16)).item() == 262144.0
    assert scaler.scale(torch.tensor(4.0, dtype=torch.float64)).dtype is torch.float64


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_unscaled_once(optimizer):
    w = torch.nn.Parameter(torch.ones(1))
    made, scaler = optimizer([w], lr=0.25), StaticLossScaler(8.0)
    scaler.scale(w * 2.0).sum().backward()
    assert scaler.unscale_(made) and w.grad.item() == 2.0
    with pytest.raises(RuntimeError, match="unscaled already"):
        scaler.unscale_(made)
    assert scaler.step(made) and w.item() == 0.5
    scaler.unscale_(made)  # the next step begins


def test_the_factor_moves():
    scaler = DynamicLossScaler(loss_scale=8.0, up_scale_window=2, min_loss_scale=4.0, max_loss_scale=16.0)
    factors = []
    for bad in (False, False, False, False, True, True, True, False, True):
        trained(torch.optim.SGD, scaler, bad)
        factors.append(scaler.loss_scale)
    assert factors == [8, 16, 16, 16, 8, 4, 4, 4, 4]
    scaler.reset()
    assert scaler.loss_scale == 8.0


def test_several_optimizers_are_one_update():
    scaler = DynamicLossScaler(automatic_update=False, loss_scale=8.0, up_scale_window=1)
    trained(torch.optim.SGD, scaler), trained(torch.optim.SGD, scaler, bad=True), trained(torch.optim.SGD, scaler)
    assert scaler.loss_scale == 8.0
    scaler.update()
    assert scaler.loss_scale == 4.0
    scaler.update()
    assert scaler.loss_scale == 8.0


def test_state():
    scaler, other = DynamicLossScaler(up_scale_window=3), DynamicLossScaler()
    trained(torch.optim.SGD, scaler, bad=True)
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict() and other.up_scale_window == 3
    with pytest.raises(ValueError, match="not the state of a StaticLossScaler"):
        StaticLossScaler().load_state_dict(scaler.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda: StaticLossScaler(0), lambda: StaticLossScaler(math.inf), lambda: DynamicLossScaler(loss_scale=0.5),
        lambda: DynamicLossScaler(max_loss_scale=1e4), lambda: DynamicLossScaler(up_scale_window=0),
    ],
)  # fmt: skip
def test_refused(make):
    with pytest.raises(ValueError):
        make()
