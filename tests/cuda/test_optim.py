"""Optimizers on an emulated GPU against the same step on the CPU, and what they read there: scale, overflow, norm."""

import copy
import ctypes
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from ortmodule import _core
from ortmodule.optim import AdamWMode, FusedAdagrad, FusedAdam, FusedLamb, FusedSGD
from tests.cuda.failing_calls import FailingCalls
from tests.cuda.test_emulated import session

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


#: Every other rule with what its settings switch.
OTHERS = [
    (FusedSGD, {}),
    (FusedSGD, {"momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (FusedSGD, {"momentum": 0.9, "nesterov": True}),
    (FusedAdagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    (FusedAdagrad, {"maximize": True, "eps": 1e-3}),
    (FusedLamb, {}),
    (FusedLamb, {"bias_correction": False, "maximize": True}),
]


def pair(make, params, others, **settings):
    """An optimizer on the GPU, and the same on the CPU."""
    here = type(make.__name__, (make,), {"_on_gpu": False})
    return make(params, **settings), here(others, **settings)


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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("make", "options"), OTHERS, ids=str)
def test_twins_of_the_others(driver, make, options, dtype):
    here, there = parameters(dtype), parameters(dtype)
    ours, expected = pair(make, there, here, lr=1e-2, weight_decay=0.1, **options)
    for i in range(5):
        give_gradients(here, there, seed=i)
        if i == 3:
            ours.clip_grad_norm(0.5), expected.clip_grad_norm(0.5)
        expected.step()
        ours.step(clear_gradients=i == 4)
    assert driver.fake_calls() > 0
    assert_near(there, here, 2 * TOLERANCE[dtype])
    for p, q in zip(there, here, strict=True):
        assert ours.state[p].keys() - {"step"} == expected.state[q].keys() - {"step"}
        for name, value in expected.state[q].items():
            assert_near([ours.state[p][name]], [value], 2 * TOLERANCE[dtype])
    assert not any(p.grad.any() for p in there)


def test_lamb_scales_by_the_norms_of_whole_tensors(driver):
    """Of more elements than sums have chunks for at their usual size, of zeros, of none."""
    lists = [[nn.Parameter(p) for p in (torch.randn(1_100_000, generator=torch.Generator().manual_seed(0)) * 0.1,
             torch.zeros(9), torch.zeros(0), torch.ones(3))] for _ in range(2)]  # fmt: skip
    ours, expected = pair(FusedLamb, *lists, lr=0.1)
    for i in range(2):
        give_gradients(*lists, seed=i)
        ours.step(), expected.step()
    assert_near(*lists, 1e-5)


@pytest.mark.parametrize(("make", "options"), OTHERS, ids=str)
def test_overflow_leaves_the_others_alone(driver, make, options):
    """In the first step, too, of which the host thinks that it has been."""
    there, here = parameters(), parameters()
    ours, expected = pair(make, there, here, lr=1e-2, weight_decay=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.zeros(()))
    for i in range(5):
        give_gradients(there, seed=i, factor=scaler.get_scale())
        give_gradients(here, seed=i)
        before = [p.detach().clone() for p in there]
        if i in (0, 3):
            there[3].grad[17] = math.inf
        else:
            expected.step()
        scaler.step(ours, clear_gradients=i == 3)
        scaler.update()
        assert (i in (0, 3)) == all(torch.equal(a, b) for a, b in zip(there, before, strict=True))
        assert all(p.grad.any() != (i == 3) for p in there if p.numel())
    assert_near(there, here, 2e-6)


@pytest.mark.parametrize("make", [FusedSGD, FusedAdagrad, FusedLamb])
def test_a_learning_rate_there_and_float32_weights(driver, make):
    lists = []
    for _ in range(2):
        params = parameters(torch.bfloat16)
        params[4:20] = [nn.Parameter(p.detach().float()) for p in params[4:20]]
        params[30] = nn.Parameter(params[30].detach().double())
        lists.append(params)
    extra = {"momentum": 0.9} if make is FusedSGD else {}
    ours, expected = pair(make, *lists, lr=1e-3, weight_decay=0.1, master_weights=True, **extra)
    lr = torch.tensor(1e-3, dtype=torch.float64)
    ours.param_groups[0]["lr"] = lr
    for i in range(5):
        lr.fill_(1e-3 / (i + 1))
        expected.param_groups[0]["lr"] = 1e-3 / (i + 1)
        give_gradients(*lists, seed=i)
        ours.step(), expected.step()
    for p, q in zip(*lists, strict=True):
        assert_near([p], [q], TOLERANCE[p.dtype])
        if p.dtype == torch.bfloat16:
            assert_near([ours.state[p]["exact"]], [expected.state[q]["exact"]], 2e-6)
            assert torch.equal(p, ours.state[p]["exact"].to(p.dtype))


def test_dampening_goes_on_from_a_state_without_steps():
    """PyTorch's has none: there is momentum, so its first step has been."""
    theirs, ours = parameters(), parameters()
    settings = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.4}
    reference, optimizer = torch.optim.SGD(theirs, **settings), FusedSGD(ours, **settings)
    give_gradients(theirs, seed=0)
    reference.step()
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for i in range(1, 4):
        give_gradients(ours, theirs, seed=i)
        optimizer.step(), reference.step()
    assert_near(ours, theirs, 1e-6)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    give_gradients(ours, theirs, seed=9)
    optimizer.step(), reference.step()
    assert_near(ours, theirs, 1e-6)


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


@pytest.mark.parametrize("make", [FusedAdam, FusedLamb])
def test_every_call_may_fail(driver, make):
    params = parameters()
    optimizer = make(params)
    give_gradients(params)
    optimizer.step()
    held, failures = driver.fake_held(), 0
    for work in (optimizer.step, lambda: optimizer.clip_grad_norm(1.0)):
        calls = FailingCalls(driver)
        for attempt in calls:
            with attempt:
                work()
            assert driver.fake_held() == held
        failures += calls.failures
    assert failures > 8
    optimizer.step()


def test_every_call_of_a_whole_step_may_fail(driver):
    """Plan, forward, backward and optimizer: an error, nothing is held that was not before, and the weights are those
    before the step or after it."""
    nodes = [("MatMul", "x w", "t", {}), ("Softmax", "t", "y", {"axis": -1})]
    x, dy = torch.randn(9, 17), torch.randn(9, 5)
    before = torch.randn(17, 5)
    weight = nn.Parameter(before.clone())
    optimizer = FusedSGD([weight], lr=0.1)

    def step():
        with torch.no_grad():
            weight.copy_(before)
        made = session(nodes, {"x": ("float32", 2), "w": ("float32", 2)}, ("y", "float32", 2))
        run = made.run([x, weight.detach()], [False, True], [True])
        weight.grad = run.backward([dy])[1]
        optimizer.step()

    step()
    after, held, calls = weight.detach().clone(), driver.fake_held(), FailingCalls(driver)
    assert not torch.equal(after, before)
    for attempt in calls:
        with attempt:
            step()
        assert any(torch.equal(weight, w) for w in (before, after)), attempt.n
        assert driver.fake_held() == held
    assert attempt.n > 12 and torch.equal(weight, after)


def test_bad_places():
    x = torch.zeros(4)
    row = (x, x.clone(), torch.zeros(()), None, x.clone(), x.clone())
    settings = (0, 0.1, 0.9, 0.99, 1e-8, 0.0, True)

    def adam(*place, rows=(row,), rule="adam", settings=settings):
        _core.optimize(rule, list(rows), settings, 1.0, False, place)

    adam(0, 0, None, None, None, None, None)
    with pytest.raises(TypeError, match="clipping factor is not one float64"):
        adam(0, 0, None, None, None, torch.zeros(()), None)
    with pytest.raises(TypeError, match="overflow is not one float32"):
        adam(0, 0, None, None, torch.zeros(2), None, None)
    with pytest.raises(TypeError, match="learning rate is not one float"):
        adam(0, 0, torch.zeros((), dtype=torch.int64), None, None, None, None)
    with pytest.raises(_core.Error, match="step 0 is not there"):
        adam(0, 0, None, None, None, None, None, rows=[(x, x, None, None, x, x)])
    lamb = {"rule": "lamb", "settings": (0.1, 0.9, 0.99, 1e-8, 0.0, True)}
    with pytest.raises(_core.Error, match="lamb needs room for its sums"):
        adam(0, 0, None, None, None, None, None, **lamb)
    with pytest.raises(_core.Error, match="there is room for the sums of 0 tensors, not 1"):
        adam(0, 0, None, None, None, None, torch.zeros(8, dtype=torch.float64), **lamb)
    with pytest.raises(TypeError, match="room for sums is not float64"):
        adam(0, 0, None, None, None, None, torch.zeros(4096), **lamb)
    with pytest.raises(_core.UnsupportedError, match="there is no cuda:7"):
        adam(7, 0, None, None, None, None, None)
    with pytest.raises(ValueError, match="a float64 for each tensor"):
        _core.cuda_sums_of_squares([x], torch.zeros(1), torch.zeros(1), 0, 0)
