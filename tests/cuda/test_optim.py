"""FusedAdam on an emulated GPU against the same step on the CPU, and what it reads there: scale, overflow, norm."""

import ctypes
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from ortmodule import _core
from ortmodule.optim import AdamWMode, FusedAdam, FusedSGD

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")
#: More than a launch takes, of no elements, of one, of more than a chunk.
SHAPES = [(3, 5), (), (0, 4), (20_000,), *[(n + 1,) for n in range(50)]]
#: Products and sums are contracted or not as compilers like.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-3, torch.float16: 1e-3}


@pytest.fixture
def driver():
    fake = ctypes.CDLL(str(Path(_core.__file__).parent / "libcuda.so.1"))
    fake.fake_complaint.restype = ctypes.c_char_p
    fake.fake_fail_at(0)
    yield fake
    fake.fake_fail_at(0)
    assert fake.fake_complaint() == b""


class OnCPU(FusedAdam):
    _on_gpu = False


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(*lists, seed=0, factor=1.0):
    generator = torch.Generator().manual_seed(1000 + seed)
    for together in zip(*lists, strict=True):
        grad = torch.randn(together[0].shape, generator=generator) * factor
        for p in together:
            p.grad = grad.to(p.dtype, copy=True)


def assert_near(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        a, b = a.detach().double(), b.detach().double()
        assert (a - b).norm() <= tolerance * b.norm() + 1e-30, f"{(a - b).norm() / b.norm():.2e}"


def states(optimizer, params, name):
    return [optimizer.state[p][name] for p in params]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True, "bias_correction": False}], ids=str)
@pytest.mark.parametrize("mode", AdamWMode)
def test_twin(driver, mode, options, dtype):
    here, there = parameters(dtype), parameters(dtype)
    settings = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1, "adam_w_mode": mode} | options
    ours, expected = FusedAdam(there, **settings), OnCPU(here, **settings)
    for i in range(5):
        give_gradients(here, there, seed=i)
        expected.step()
        ours.step(clear_gradients=i == 4)
    assert driver.fake_calls() > 0
    assert_near(there, here, TOLERANCE[dtype])
    for name in ("exp_avg", "exp_avg_sq", "step", *(["max_exp_avg_sq"] if options.get("amsgrad") else [])):
        assert_near(states(ours, there, name), states(expected, here, name), TOLERANCE[dtype])
    assert not any(p.grad.any() for p in there)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_weights_and_other_types_together(driver, dtype):
    lists = []
    for _ in range(2):
        params = parameters(dtype)
        params[4:20] = [nn.Parameter(p.detach().float()) for p in params[4:20]]
        params[30] = nn.Parameter(params[30].detach().double())
        lists.append(params)
    settings = {"lr": 1e-4, "weight_decay": 0.1, "master_weights": True}
    ours, expected = FusedAdam(lists[0], **settings), OnCPU(lists[1], **settings)
    for i in range(5):
        give_gradients(*lists, seed=i)
        ours.step(clear_gradients=True)
        expected.step()
        assert not any(p.grad.any() for p in lists[0])
    for p, q in zip(*lists, strict=True):
        assert_near([p], [q], TOLERANCE[p.dtype])
        if p.dtype == dtype:
            assert_near([ours.state[p]["exact"]], [expected.state[q]["exact"]], 1e-6)
            assert torch.equal(p, ours.state[p]["exact"].to(dtype))


def test_a_launch_takes_many_tensors(driver):
    params = parameters()
    optimizer = FusedAdam(params)
    give_gradients(params)
    optimizer.step()
    driver.fake_fail_at(0)
    optimizer.step()
    assert driver.fake_calls() < 12  # two for each 48 tensors, and what surrounds a run
    driver.fake_fail_at(0)
    optimizer.clip_grad_norm(1.0)
    assert driver.fake_calls() < 12


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_clipping(driver, dtype):
    here, there = parameters(dtype), parameters(dtype)
    settings = {"eps": 1e-2, "adam_w_mode": AdamWMode.ADAMW_TORCH}
    ours, expected = FusedAdam(there, **settings), OnCPU(here, **settings)
    for i, most in enumerate([1e9, 0.5, 0.01]):
        give_gradients(here, there, seed=i)
        for _ in range(2):
            found, norm = ours.clip_grad_norm(most), expected.clip_grad_norm(most)
            assert found.dtype == torch.float32 and found.shape == ()
            torch.testing.assert_close(found, norm, rtol=1e-5, atol=0)
        ours.step(), expected.step()
    assert_near(there, here, TOLERANCE[dtype])
    there[3].grad[7] = math.nan
    assert ours.clip_grad_norm(1.0).isnan()
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        ours.clip_grad_norm(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("clear", [False, True])
def test_grad_scaler(driver, clear):
    """Unscaled in the step; an overflow changes nothing but gradients that are to be cleared, and no count of steps."""
    params, reference = parameters(), parameters()
    optimizer = FusedAdam(params, lr=1e-2)
    other = OnCPU(reference, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.zeros(()))
    for i in range(5):
        give_gradients(params, seed=i, factor=scaler.get_scale())
        give_gradients(reference, seed=i)
        before = [p.detach().clone() for p in params]
        if i == 2:
            params[3].grad[17] = math.inf
        else:
            other.step()
        scaler.step(optimizer, clear_gradients=clear)
        scaler.update()
        if i == 2:
            assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        assert all(p.grad.any() != clear for p in params if p.numel())
        assert all(step == (i if i >= 2 else i + 1) for step in states(optimizer, params, "step"))
    assert scaler.get_scale() == 8.0
    assert_near(params, reference, 1e-6)


def test_learning_rate_is_read_there(driver):
    lr = torch.tensor(1e-2, dtype=torch.float64)
    params, reference = parameters(), parameters()
    optimizer, other = FusedAdam(params, lr=lr, weight_decay=0.1), OnCPU(reference, lr=1e-2, weight_decay=0.1)
    for i in range(4):
        lr.fill_(1e-2 / (i + 1))
        other.param_groups[0]["lr"] = 1e-2 / (i + 1)
        give_gradients(params, reference, seed=i)
        optimizer.step(), other.step()
    assert_near(params, reference, 1e-6)


def test_every_call_may_fail(driver):
    params = parameters()
    optimizer = FusedAdam(params)
    give_gradients(params)
    optimizer.step()
    held, failures = driver.fake_held(), 0
    for work in (optimizer.step, lambda: optimizer.clip_grad_norm(1.0)):
        for n in range(1, 30):
            driver.fake_fail_at(n)
            try:
                work()
            except (_core.Error, MemoryError) as error:
                assert "CUDA error 2 in cu" in str(error)
                failures += 1
            assert driver.fake_held() == held
    assert failures > 8
    driver.fake_fail_at(0)
    optimizer.step()


def test_bad_places():
    x = torch.zeros(4)
    row = (x, x.clone(), torch.zeros(()), None, x.clone(), x.clone())
    settings = (0, 0.1, 0.9, 0.99, 1e-8, 0.0, True)

    def adam(*place, rows=(row,), rule="adam", settings=settings):
        _core.optimize(rule, list(rows), settings, 1.0, False, place)

    adam(0, 0, None, None, None, None)
    with pytest.raises(TypeError, match="clipping factor is not one float64"):
        adam(0, 0, None, None, None, torch.zeros(()))
    with pytest.raises(TypeError, match="overflow is not one float32"):
        adam(0, 0, None, None, torch.zeros(2), None)
    with pytest.raises(TypeError, match="learning rate is not one float"):
        adam(0, 0, torch.zeros((), dtype=torch.int64), None, None, None)
    with pytest.raises(TypeError, match="step 0 is not there"):
        adam(0, 0, None, None, None, None, rows=[(x, x, None, None, x, x)])
    with pytest.raises(_core.UnsupportedError, match="no kernels of sgd"):
        adam(0, 0, None, None, None, None, rule="sgd", rows=[(x, x, torch.zeros(()))], settings=(0.1, 0, 0, 0, False))
    with pytest.raises(_core.UnsupportedError, match="there is no cuda:7"):
        adam(7, 0, None, None, None, None)
    with pytest.raises(ValueError, match="a float64 for each tensor"):
        _core.cuda_sums_of_squares([x], torch.zeros(1), torch.zeros(1), 0, 0)
    assert FusedSGD([nn.Parameter(x)])._place({"params": [x]}) is None  # it has none
