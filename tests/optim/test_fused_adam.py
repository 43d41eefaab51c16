"""FusedAdam against PyTorch's optimizers and against its modes written out."""

import copy
import io
import math
import warnings

import pytest
import torch
from torch import nn

from ortmodule import _core
from ortmodule.optim import AdamWMode, FusedAdam
from tests.tolerances import assert_near

SHAPES = [(37, 5), (5000,), (1,), (8, 3, 2, 2), (), (0, 3)]
#: Relative to the norm, after many steps in which every rounding is repeated.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(*lists, seed):
    """The same gradients to every list."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for together in zip(*lists, strict=True):
        grad = torch.randn(together[0].shape, generator=generator)
        for p in together:
            p.grad = grad.to(p.dtype, copy=True)


def types_of(state):
    return {name: tensor.dtype for name, tensor in state.items()}


class Reference:
    """Mode 1 as transformers had it, and all modes without bias correction: one tensor and one operation at a time."""

    def __init__(self, params, lr, betas, eps, weight_decay, mode, bias_correction):
        self.params, self.lr, self.betas, self.eps = params, lr, betas, eps
        self.weight_decay, self.mode, self.bias_correction = weight_decay, mode, bias_correction
        self.m = [torch.zeros_like(p) for p in params]
        self.v = [torch.zeros_like(p) for p in params]
        self.t = 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        b1, b2 = self.betas
        c1, c2 = (1 - b1**self.t, 1 - b2**self.t) if self.bias_correction else (1.0, 1.0)
        for p, m, v in zip(self.params, self.m, self.v, strict=True):
            g = p.grad
            if self.mode == AdamWMode.ADAM_L2_REGULARIZATION:
                g = g + self.weight_decay * p
            if self.mode == AdamWMode.ADAMW_TORCH:
                p *= 1 - self.lr * self.weight_decay
            m.mul_(b1).add_(g, alpha=1 - b1)
            v.mul_(b2).add_(g * g, alpha=1 - b2)
            if self.mode == AdamWMode.ADAMW_TRANSFORMERS:
                p.addcdiv_(m, v.sqrt() + self.eps, value=-self.lr * math.sqrt(c2) / c1)
                p.add_(p, alpha=-self.lr * self.weight_decay)
            else:
                p.addcdiv_(m, v.sqrt() / math.sqrt(c2) + self.eps, value=-self.lr / c1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("mode", AdamWMode)
def test_modes_in_a_thousand_steps(mode, bias_correction, dtype):
    """16-bit types as a float32 reference whose weights and states are rounded after every step."""
    ours = parameters(dtype)
    theirs = [nn.Parameter(p.detach().to(torch.promote_types(dtype, torch.float32))) for p in ours]
    settings = {"lr": 1e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": bias_correction}
    optimizer = FusedAdam(ours, adam_w_mode=mode, **settings)
    reference = Reference(theirs, mode=mode, **settings)
    for i in range(1000):
        give_gradients(ours, seed=i)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.to(q.dtype)
        optimizer.step()
        reference.step()
        for rounded in [*theirs, *reference.m, *reference.v]:
            rounded.data.copy_(rounded.data.to(dtype))
    assert_near(ours, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.0}], ids=str)
@pytest.mark.parametrize("mode", [AdamWMode.ADAM_L2_REGULARIZATION, AdamWMode.ADAMW_TORCH])
def test_as_torch(mode, options, dtype):
    other = torch.optim.AdamW if mode == AdamWMode.ADAMW_TORCH else torch.optim.Adam
    ours, theirs = parameters(dtype), parameters(dtype)
    settings = {"lr": 2e-3, "eps": 1e-5, "weight_decay": 0.05} | options
    optimizer, reference = FusedAdam(ours, adam_w_mode=mode, **settings), other(theirs, **settings, fused=True)
    for i in range(20 if dtype in (torch.bfloat16, torch.float16) else 1000):
        give_gradients(ours, theirs, seed=i)
        optimizer.step()
        reference.step()
    assert_near(ours, theirs, TOLERANCE[dtype])
    for p, q in zip(ours, theirs, strict=True):
        assert optimizer.state[p].keys() == reference.state[q].keys()
        assert float(optimizer.state[p]["step"]) == float(reference.state[q]["step"])
        assert {n: t.dtype for n, t in optimizer.state[p].items()} == {
            n: t.dtype for n, t in reference.state[q].items()
        }


def steps(optimizer, params, count, start):
    for i in range(start, start + count):
        give_gradients(params, seed=i)
        optimizer.step()


@pytest.mark.parametrize("mode", [AdamWMode.ADAM_L2_REGULARIZATION, AdamWMode.ADAMW_TORCH])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_state_dicts_are_exchanged_with_torch(dtype, mode):
    other = torch.optim.AdamW if mode == AdamWMode.ADAMW_TORCH else torch.optim.Adam
    settings = {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1, "betas": (0.85, 0.98), "amsgrad": True}
    theirs = parameters(dtype)
    reference = other(theirs, fused=True, **settings)
    steps(reference, theirs, 10, 0)
    saved = copy.deepcopy(reference.state_dict()), copy.deepcopy(theirs)

    ours = copy.deepcopy(theirs)
    optimizer = FusedAdam(ours, lr=1.0, adam_w_mode=mode)  # the rest comes from the state
    optimizer.load_state_dict(copy.deepcopy(saved[0]))
    steps(reference, theirs, 10, 10)
    steps(optimizer, ours, 10, 10)
    assert_near(ours, theirs, TOLERANCE[dtype])

    back = copy.deepcopy(ours)
    again = other(back, lr=1.0, fused=True)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(again, back, 10, 20)
    steps(optimizer, ours, 10, 20)
    assert_near(back, ours, TOLERANCE[dtype])


def test_the_state_of_transformers_adamw():
    """As its class left it: steps are integers, groups know `correct_bias`."""
    theirs = parameters()
    settings = {"lr": 1e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    reference = Reference(theirs, mode=AdamWMode.ADAMW_TRANSFORMERS, bias_correction=True, **settings)
    steps(reference, theirs, 7, 0)
    group = {**settings, "correct_bias": True, "params": list(range(len(theirs)))}
    states = zip(reference.m, reference.v, strict=True)
    state = {i: {"step": 7, "exp_avg": m.clone(), "exp_avg_sq": v.clone()} for i, (m, v) in enumerate(states)}
    ours = copy.deepcopy(theirs)
    optimizer = FusedAdam(ours, lr=1.0)
    optimizer.load_state_dict({"state": state, "param_groups": [group]})
    for i in range(7, 17):
        give_gradients(ours, theirs, seed=i)
        optimizer.step(), reference.step()
    assert_near(ours, theirs, 1e-6)
    assert all(optimizer.state[p]["step"] == 17 for p in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_has_the_same_bits(dtype):
    params = parameters(dtype)
    optimizer = FusedAdam(params, master_weights=True, amsgrad=True, weight_decay=0.1)
    steps(optimizer, params, 5, 0)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": params}, file)
    steps(optimizer, params, 5, 5)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    resumed = FusedAdam(saved["params"], master_weights=True)
    resumed.load_state_dict(saved["optimizer"])
    steps(resumed, saved["params"], 5, 5)
    assert all(torch.equal(a, b) for a, b in zip(params, saved["params"], strict=True))
    for a, b in zip(params, saved["params"], strict=True):
        assert types_of(optimizer.state[a]) == types_of(resumed.state[b])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights(dtype):
    """Steps too small for 16 bits add up, and the parameter is the rounded float32 weight."""
    ours = parameters(dtype)
    exact = [nn.Parameter(p.detach().float()) for p in ours]
    settings = {"lr": 1e-5, "adam_w_mode": AdamWMode.ADAMW_TORCH, "weight_decay": 0.01}
    optimizer, reference = FusedAdam(ours, master_weights=True, **settings), FusedAdam(exact, **settings)
    for i in range(50):
        give_gradients(ours, seed=i)
        for p, q in zip(ours, exact, strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
    for p, q in zip(ours, exact, strict=True):
        assert torch.equal(optimizer.state[p]["exact"], q) and torch.equal(p, q.to(dtype))


def test_layouts():
    """channels_last, gaps between elements, gradients in an order of their own."""
    weights = torch.randn(6, 4, 3, 3)
    ours = [nn.Parameter(weights.clone().contiguous(memory_format=torch.channels_last)), nn.Parameter(weights[:, ::2])]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    assert ours[0].stride() != weights.stride() and not ours[1].is_contiguous()
    settings = {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1}
    optimizer = FusedAdam(ours, adam_w_mode=AdamWMode.ADAMW_TORCH, **settings)
    reference = torch.optim.AdamW(theirs, **settings)
    for i in range(5):
        for p, q in zip(ours, theirs, strict=True):
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
            p.grad, q.grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
    assert_near(ours, theirs, 1e-6)


def test_clipping():
    ours, theirs = parameters(), parameters()
    optimizer = FusedAdam(ours, eps=1e-8, adam_w_mode=AdamWMode.ADAMW_TORCH)
    reference = torch.optim.AdamW(theirs, eps=1e-8, weight_decay=0.0)
    for i, most in enumerate([1.0, 1e6, 0.1]):
        give_gradients(ours, theirs, seed=i)
        before = [p.grad.clone() for p in ours]
        norm = optimizer.clip_grad_norm(most)
        expected = torch.nn.utils.clip_grad_norm_(theirs, most)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        optimizer.step()
        reference.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, before, strict=True))
    assert_near(ours, theirs, 1e-6)

    optimizer.clip_grad_norm(1e-3)
    optimizer.zero_grad()  # these gradients are gone, and the clipping with them
    give_gradients(ours, theirs, seed=9)
    optimizer.step()
    reference.step()
    assert_near(ours, theirs, 1e-6)
    ours[1].grad[3] = math.inf
    with pytest.raises(RuntimeError, match="norm of the gradients is inf"):
        optimizer.clip_grad_norm(1.0, error_if_nonfinite=True)


def test_norm_is_summed_in_blocks():
    x = torch.full((30_000_000,), 0.1)
    exact = x.double().square().sum().item()
    assert abs(sum(_core.sums_of_squares([x[:7], x[7:]])) / exact - 1) < 1e-12
    threads = torch.get_num_threads()
    try:
        y, sums = torch.randn(3_000_001), []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            sums.append(_core.sums_of_squares([y, y[:3], y[:0], y[1:], *y[:2000].view(100, 20)]))
    finally:
        torch.set_num_threads(threads)
    assert sums[0] == sums[1] == sums[2]
    tensors = [y, y[:3], y[:0], y[1:], *y[:2000].view(100, 20)]
    assert sums[0] == pytest.approx([t.double().square().sum().item() for t in tensors], rel=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sums_are_infinite_only_where_an_element_is(dtype):
    most = torch.full((5000,), min(torch.finfo(dtype).max, 1e150), dtype=dtype)
    bad = [most.clone() for _ in range(3)]
    bad[0][17], bad[1][4999], bad[2][0] = math.inf, -math.inf, math.nan
    sums = _core.sums_of_squares([most, *bad, most])
    assert [math.isfinite(value) for value in sums] == [True, False, False, False, True]


def test_gradients_are_cleared():
    params = parameters()
    optimizer = FusedAdam(params, set_grad_none=False)
    give_gradients(params, seed=0)
    grads = [p.grad for p in params]
    optimizer.step(clear_gradients=True)
    assert all(p.grad is g and not g.any() for p, g in zip(params, grads, strict=True))
    grads[0].fill_(math.inf)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())  # as GradScaler does
    optimizer.step(clear_gradients=True)  # of a step that is left out, too
    del optimizer.grad_scale, optimizer.found_inf
    assert all(p.grad is g and not g.any() for p, g in zip(params, grads, strict=True))
    give_gradients(params, seed=1)
    optimizer.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in params)
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in params)


def test_with_a_grad_scaler():
    """Unscaled within the step; a step whose gradients overflow is left out, and the scale moves as with PyTorch's."""
    losses = []
    for make in (
        lambda p: FusedAdam(p, lr=1e-2, eps=1e-8, adam_w_mode=AdamWMode.ADAMW_TORCH),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        seen = []
        for i in range(12):
            x = torch.randn(16, 4)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean() * (math.inf if i == 4 else 1)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if i % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            seen.append((loss.item() if i != 4 else 0, scaler.get_scale()))
        losses.append(seen)
    assert [scale for _, scale in losses[0]] == [scale for _, scale in losses[1]]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)


def test_as_an_optimizer():
    """Closures, groups, hooks, schedulers, averaged models, tensor learning rates, copies."""
    model = nn.Linear(3, 2)
    lr = torch.tensor(1e-2)
    optimizer = FusedAdam(
        [{"params": [model.weight]}, {"params": [model.bias], "lr": 1e-3, "weight_decay": 0.1}], lr=lr
    )
    assert optimizer.param_groups[0]["lr"] is lr and optimizer.param_groups[1]["lr"] == 1e-3
    fired = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    averaged = torch.optim.swa_utils.AveragedModel(model)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(5):
        losses.append(optimizer.step(closure).item())
        schedule.step()
        averaged.update_parameters(model)
    assert losses == sorted(losses, reverse=True) and fired == ["before", "after"] * 5
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-2 * 0.5**5)
    again = copy.deepcopy(optimizer)
    assert again.state_dict()["param_groups"][1]["weight_decay"] == 0.1
    for p in model.parameters():
        p.grad = None
    before = [p.clone() for p in model.parameters()]
    optimizer.step()  # no parameter has a gradient
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_autograd_sees_the_change():
    w = nn.Parameter(torch.randn(3))
    loss = (w * w).sum()
    w.grad = torch.ones(3)
    version = w._version
    FusedAdam([w]).step()
    assert w._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_same_bits_for_any_number_of_threads():
    results = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 4):
            torch.set_num_threads(n)
            params = [nn.Parameter(torch.linspace(-1, 1, 200_003)), *parameters()]
            steps(FusedAdam(params, weight_decay=0.1), params, 3, 0)
            results.append(params)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lr": math.nan}, "learning rate must be a number not below 0, not nan"),
        ({"lr": -1.0}, "learning rate .* not -1"),
        ({"lr": torch.ones(2)}, "learning rate is a tensor of 2 elements"),
        ({"betas": (-0.1, 0.9)}, "betas must be two numbers from 0 to below 1"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"betas": (0.9,)}, "betas must be"),
        ({"eps": -1e-8}, "eps must be"),
        ({"weight_decay": math.inf}, "weight decay must be"),
        ({"adam_w_mode": 3}, "adam_w_mode must be one of"),
    ],
)
def test_bad_settings(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FusedAdam(parameters(), **settings)


def test_bad_parameters_and_gradients():
    with pytest.raises(ValueError, match="empty parameter list"):
        FusedAdam([])
    with pytest.raises(TypeError, match="float parameters, not torch.complex64"):
        FusedAdam([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="on cpu and meta"):
        FusedAdam([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))])
    with pytest.raises(ValueError, match="these parameters are on meta"):
        FusedAdam([nn.Parameter(torch.zeros(2, device="meta"))])
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients .*\[5, 2\]"):
        FusedAdam(table.parameters()).step()
    optimizer = FusedAdam(parameters())
    with warnings.catch_warnings(), pytest.raises(ValueError):
        warnings.simplefilter("ignore")
        optimizer.load_state_dict(FusedAdam(parameters()[:2]).state_dict())


def test_bad_rows():
    """What the engine itself refuses."""
    x, y = torch.zeros(4), torch.zeros(())

    def adam(param, grad, m, v, most, exact, step, mode=0, rule="adam"):
        settings = (mode, 0.1, 0.9, 0.99, 1e-8, 0.0, True)
        _core.optimize(rule, [(param, grad, step, exact, m, v, most)], settings, 1.0, False)

    adam(x, x.clone(), x.clone(), x.clone(), None, None, y)
    assert y == 1
    with pytest.raises(ValueError, match="adam: there is no such mode"):
        adam(x, x, x, x, None, None, y, mode=7)
    with pytest.raises(ValueError, match="no rule rprop"):
        adam(x, x, x, x, None, None, y, rule="rprop")
    with pytest.raises(ValueError, match="sgd has 5 settings, not 7"):
        adam(x, x, x, x, None, None, y, rule="sgd")
    with pytest.raises(ValueError, match="row 0 has 7 parts; lamb knows 6"):
        _core.optimize("lamb", [(x, x, y, None, x, x, x)], (0.1, 0.9, 0.99, 1e-8, 0.0, True), 1.0, False)
    with pytest.raises(ValueError, match="gradient 0 has 3 elements"):
        adam(x, torch.zeros(3), x, x, None, None, y)
    with pytest.raises(ValueError, match="step 0"):
        adam(x, x, x, x, None, None, x)
    with pytest.raises(TypeError, match="first state 0 is not of a float type"):
        adam(x, x, x.long(), x, None, None, y)
    with pytest.raises(TypeError, match="different types"):
        adam(x, x, x, x.double(), None, None, y)
    with pytest.raises(TypeError, match="different types"):
        adam(x, x, x, x, x.double(), None, y)
    with pytest.raises(TypeError, match="float32"):
        adam(x, x, x, x, None, x.double(), y)
    with pytest.raises(ValueError, match="gaps"):
        adam(torch.zeros(8)[::2], x, x, x, None, None, y)
    with pytest.raises(TypeError, match="second state 0 is not of a float type"):
        adam(x, x, x, None, None, None, y)
    with pytest.raises(TypeError):
        _core.optimize("adam", [(x,)], (0, 0.1, 0.9, 0.99, 1e-8, 0.0, True), 1.0, False)
    assert y == 1 and not x.any()


def test_clipping_is_of_the_gradients_that_were_read():
    """Twice is once; gradients that came later are not clipped; those that changed are refused."""
    ours, theirs = parameters(), parameters()
    optimizer = FusedAdam(ours, eps=1e-2, adam_w_mode=AdamWMode.ADAMW_TORCH)
    reference = torch.optim.AdamW(theirs, eps=1e-2, weight_decay=0.0)
    give_gradients(ours, theirs, seed=0)
    for most in (0.5, 0.5, 0.1):
        expected = torch.nn.utils.clip_grad_norm_(theirs, most)
        torch.testing.assert_close(optimizer.clip_grad_norm(most), expected, rtol=1e-5, atol=0)
    optimizer.step(), reference.step()
    assert_near(ours, theirs, 1e-6)

    give_gradients(ours, seed=1)
    optimizer.clip_grad_norm(1e-3)
    for p in ours:  # as model.zero_grad() does
        p.grad = None
    give_gradients(ours, theirs, seed=2)
    optimizer.step(), reference.step()
    assert_near(ours, theirs, 1e-6)

    optimizer.clip_grad_norm(1e-3)
    before = [p.detach().clone() for p in ours]
    ours[1].grad += 1
    with pytest.raises(RuntimeError, match="changed after clip_grad_norm"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients .*\[5, 2\]"):
        FusedAdam(table.parameters()).clip_grad_norm(1.0)


def test_states_that_settings_do_not_need():
    """AMSGrad and float32 weights that were turned off in a group are not used, as in PyTorch."""
    ours, theirs = parameters(), parameters()
    optimizer = FusedAdam(ours, eps=1e-8, amsgrad=True, adam_w_mode=AdamWMode.ADAMW_TORCH)
    reference = torch.optim.AdamW(theirs, eps=1e-8, amsgrad=True, weight_decay=0.0)
    for i in range(6):
        for each in (optimizer, reference):
            each.param_groups[0]["amsgrad"] = i < 3
        give_gradients(ours, theirs, seed=i)
        optimizer.step(), reference.step()
    assert_near(ours, theirs, 1e-6)


def test_learning_rates_that_are_no_numbers():
    params = parameters()
    optimizer = FusedAdam([{"params": params[:2]}, {"params": params[2:]}])
    give_gradients(params, seed=0)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1]["lr"] = math.nan
    with pytest.raises(ValueError, match="learning rate must be a number not below 0, not nan"):
        optimizer.load_state_dict(saved)
    optimizer.param_groups[1]["lr"] = math.nan
    with pytest.raises(ValueError, match="learning rate must be a number, not nan"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    with pytest.raises(TypeError, match="learning rate must be a number, not 'fast'"):
        FusedAdam(params, lr="fast")
    with pytest.raises(TypeError, match=r"betas must be two numbers, not 0\.9"):
        FusedAdam(params, betas=0.9)


@pytest.mark.parametrize("group", [False, True])
def test_a_saved_state_is_read_as_weights_only(group, tmp_path):
    """As a Trainer reads that of a checkpoint."""
    params = [torch.nn.Parameter(torch.ones(3))]
    given = [{"params": params, "adam_w_mode": AdamWMode.ADAMW_TORCH}] if group else params
    optimizer = FusedAdam(given)
    params[0].grad = torch.ones(3)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    again = FusedAdam(given)
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert again.param_groups[0]["adam_w_mode"] == optimizer.param_groups[0]["adam_w_mode"]
