"""The optimizers on a GPU against those of torch.optim there.

`scripts/gpu` runs them. Without a GPU they run on the emulated one, if the build has it.
"""

import copy
import math
import os

import pytest
import torch
from torch import nn

from ortmodule import _core
from ortmodule.optim import AdamWMode, FusedAdagrad, FusedAdam, FusedLamb, FusedSGD
from tests.selection import each

DEVICE = torch.device(os.environ.get("ORTMODULE_TEST_DEVICE", "cpu"))

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and not _core.emulated, reason="a GPU is needed (scripts/gpu)"
)  # fmt: skip
SHAPES = [(37, 5), (5000,), (1,), (8, 3, 2, 2), (), (0, 3), (300, 301), *[(7,)] * 60]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SETTINGS = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.1}


def parameters(dtype):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in SHAPES]


def give_gradients(*lists, seed, factor=1.0):
    generator = torch.Generator().manual_seed(1000 + seed)
    for together in zip(*lists, strict=True):
        grad = torch.randn(together[0].shape, generator=generator) * factor
        for p in together:
            p.grad = grad.to(p.device, p.dtype, copy=True)


def assert_near(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        assert a.device == b.device and a.dtype == b.dtype
        a, b = a.detach().double(), b.detach().double()
        assert (a - b).norm() <= tolerance * b.norm() + 1e-30, f"{(a - b).norm() / b.norm():.2e}"


@each("dtype", TOLERANCE, lambda dtype: dtype is not torch.float64, pytest.mark.emulated_full)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_steps(dtype, amsgrad):
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = FusedAdam(ours, adam_w_mode=AdamWMode.ADAMW_TORCH, amsgrad=amsgrad, **SETTINGS)
    reference = torch.optim.AdamW(theirs, amsgrad=amsgrad, fused=True, **SETTINGS)
    steps = 20 if dtype in (torch.bfloat16, torch.float16) else 200
    for i in range(steps):
        give_gradients(ours, theirs, seed=i)
        optimizer.step(), reference.step()
    # Each step rounds; a GPU adds and multiplies in one instruction where PyTorch's kernel on the CPU does not.
    by_chance = 4 * steps**0.5 * torch.finfo(dtype).eps / 2
    assert_near(ours, theirs, max(TOLERANCE[dtype], by_chance) if dtype == torch.float32 else TOLERANCE[dtype])
    for p, q in zip(ours, theirs, strict=True):
        for name, value in reference.state[q].items():
            found = optimizer.state[p][name]
            assert (found.dtype, found.device) == (value.dtype, value.device), name


OTHERS = [
    (FusedSGD, torch.optim.SGD, {}),
    (FusedSGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    (FusedSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05, "maximize": True}),
    (FusedAdagrad, torch.optim.Adagrad, {"lr_decay": 1e-2, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("make", "theirs", "options"), OTHERS)
def test_steps_of_the_others(make, theirs, options, dtype):
    """And a state that goes there and back."""
    ours, reference = parameters(dtype), parameters(dtype)
    mine, other = make(ours, lr=1e-2, **options), theirs(reference, lr=1e-2, **options)
    for i in range(12):
        give_gradients(ours, reference, seed=i)
        mine.step(), other.step()
        if i == 6:
            state = copy.deepcopy(mine.state_dict())
            mine.load_state_dict(copy.deepcopy(other.state_dict()))
            other.load_state_dict(state)
    assert_near(ours, reference, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_steps_of_lamb(dtype):
    """Against the algorithm, written out in float64."""
    ours = parameters(dtype)
    exact = [p.detach().double() for p in ours]
    states = [(torch.zeros_like(p), torch.zeros_like(p)) for p in exact]
    optimizer = FusedLamb(ours, lr=1e-2, weight_decay=0.1, master_weights=True)
    for step in range(1, 9):
        give_gradients(ours, seed=step)
        optimizer.step()
        for p, q, (m, v) in zip(ours, exact, states, strict=True):
            grad = p.grad.double()
            m.lerp_(grad, 0.1)
            v.mul_(0.999).addcmul_(grad, grad, value=0.001)
            u = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-6) + 0.1 * q
            norms = q.norm(), u.norm()
            q -= 1e-2 * u * (norms[0] / norms[1] if all(norms) else 1)
    expected = [q.to(p.dtype) for p, q in zip(ours, exact, strict=True)]
    assert_near(ours, expected, max(TOLERANCE[dtype], 1e-11))


@pytest.mark.parametrize("fused", [False, True])
def test_states_are_exchanged(fused):
    """Both ways; PyTorch counts steps on the GPU or on the CPU."""
    theirs = parameters(torch.float32)
    reference = torch.optim.AdamW(theirs, fused=fused, **SETTINGS)
    for i in range(5):
        give_gradients(theirs, seed=i)
        reference.step()
    ours = copy.deepcopy(theirs)
    optimizer = FusedAdam(ours, adam_w_mode=AdamWMode.ADAMW_TORCH)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for i in range(5, 10):
        give_gradients(ours, theirs, seed=i)
        optimizer.step(), reference.step()
    assert_near(ours, theirs, 1e-6)
    back = copy.deepcopy(ours)
    again = torch.optim.AdamW(back, fused=True)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for i in range(10, 15):
        give_gradients(ours, back, seed=i)
        optimizer.step(), again.step()
    assert_near(back, ours, 1e-6)


def test_clipping_and_grad_scaler():
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    optimizer = FusedAdam(ours, adam_w_mode=AdamWMode.ADAMW_TORCH, **SETTINGS)
    reference = torch.optim.AdamW(theirs, fused=True, **SETTINGS)
    scalers = [torch.amp.GradScaler(DEVICE.type, init_scale=16.0) for _ in range(2)]
    for scaler in scalers:
        scaler.scale(torch.zeros((), device=DEVICE))
    for i in range(8):
        give_gradients(ours, theirs, seed=i, factor=scalers[0].get_scale())
        if i == 3:
            ours[1].grad[7] = theirs[1].grad[7] = math.inf
        if i % 2:
            for scaler, each in zip(scalers, (optimizer, reference), strict=True):
                scaler.unscale_(each)
            norm, expected = optimizer.clip_grad_norm(0.5), nn.utils.clip_grad_norm_(theirs, 0.5)
            assert norm.device == expected.device
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        for scaler, each in zip(scalers, (optimizer, reference), strict=True):
            scaler.step(each)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (16.0 if i < 3 else 8.0)
    assert_near(ours, theirs, 1e-6)
    assert all(optimizer.state[p]["step"] == 7 for p in ours)
