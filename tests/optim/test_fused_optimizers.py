"""FusedSGD and FusedAdagrad against PyTorch's classes, FusedLamb against the paper's algorithm written out."""

import copy
import io
import math

import pytest
import torch
from torch import nn

from ortmodule.optim import FusedAdagrad, FusedAdam, FusedLamb, FusedSGD
from tests.tolerances import assert_near

SHAPES = [(37, 5), (5000,), (1,), (8, 3, 2, 2), (), (0, 3)]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}
#: Ours, PyTorch's, settings of both.
TWINS = [
    (FusedSGD, torch.optim.SGD, {"lr": 1e-2}),
    (FusedSGD, torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    (FusedSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
    (FusedSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
    (FusedAdagrad, torch.optim.Adagrad, {"lr": 1e-2}),
    (FusedAdagrad, torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 1e-2, "weight_decay": 0.1, "eps": 1e-6}),
    (FusedAdagrad, torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.5, "maximize": True}),
]
twins = pytest.mark.parametrize(("ours", "theirs", "settings"), TWINS, ids=lambda v: getattr(v, "__name__", str(v)))
ALL = [FusedSGD, FusedAdagrad, FusedLamb, FusedAdam]


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(*lists, seed):
    """The same gradients to every list, with a mean, so that weights go somewhere."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for together in zip(*lists, strict=True):
        grad = torch.randn(together[0].shape, generator=generator) + 0.1
        for p in together:
            p.grad = grad.to(p.dtype, copy=True)


def steps(count, start, *pairs):
    for i in range(start, start + count):
        give_gradients(*(params for _, params in pairs), seed=i)
        for optimizer, _ in pairs:
            optimizer.step()


@pytest.mark.parametrize("dtype", TOLERANCE)
@twins
def test_as_torch(ours, theirs, settings, dtype):
    """16-bit types as PyTorch's float32 whose weights and states are rounded after every step."""
    mine = parameters(dtype)
    other = [nn.Parameter(p.detach().to(torch.promote_types(dtype, torch.float32))) for p in mine]
    optimizer, reference = ours(mine, **settings), theirs(other, **settings)
    for i in range(1000):
        give_gradients(mine, seed=i)
        for p, q in zip(mine, other, strict=True):
            q.grad = p.grad.to(q.dtype)
        optimizer.step()
        reference.step()
        states = [v for state in reference.state.values() for k, v in state.items() if k != "step" and v is not None]
        for rounded in [*other, *states]:
            rounded.data.copy_(rounded.data.to(dtype))
    assert_near(mine, other, TOLERANCE[dtype])


@twins
def test_state_dicts_are_exchanged_with_torch(ours, theirs, settings):
    """Both ways, before the first step and after some; everything comes from the state."""
    for before in (0, 7):
        for make, other in ((ours, theirs), (theirs, ours)):
            params = parameters()
            first = make(params, **settings)
            steps(before, 0, (first, params))
            again = copy.deepcopy(params)
            second = other(again, lr=1.0)
            second.load_state_dict(copy.deepcopy(first.state_dict()))
            steps(10, before, (first, params), (second, again))
            assert_near(again, params, 1e-6)


@pytest.mark.parametrize("make", ALL, ids=lambda c: c.__name__)
def test_a_resumed_run_has_the_same_bits(make):
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters(dtype)
        extra = {"momentum": 0.9, "dampening": 0.5} if make is FusedSGD else {}
        optimizer = make(params, lr=0.01, weight_decay=0.1, master_weights=True, **extra)
        steps(5, 0, (optimizer, params))
        file = io.BytesIO()
        torch.save({"optimizer": optimizer.state_dict(), "params": params}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        resumed = make(saved["params"])
        resumed.load_state_dict(saved["optimizer"])
        steps(5, 5, (optimizer, params), (resumed, saved["params"]))
        assert all(torch.equal(a, b) for a, b in zip(params, saved["params"], strict=True))


class Lamb:
    """You et al., 2020, algorithm 2, one operation at a time."""

    def __init__(self, params, lr, betas, eps, weight_decay, bias_correction):
        self.params, self.lr, self.betas, self.eps = params, lr, betas, eps
        self.weight_decay, self.bias_correction = weight_decay, bias_correction
        self.m, self.v = ([torch.zeros_like(p) for p in params] for _ in range(2))
        self.t = 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        b1, b2 = self.betas
        c1, c2 = (1 - b1**self.t, 1 - b2**self.t) if self.bias_correction else (1.0, 1.0)
        for x, m, v in zip(self.params, self.m, self.v, strict=True):
            m.mul_(b1).add_(x.grad, alpha=1 - b1)
            v.mul_(b2).add_(x.grad * x.grad, alpha=1 - b2)
            r = (m / c1) / ((v / c2).sqrt() + self.eps)
            u = r + self.weight_decay * x
            size, step = x.double().norm(), u.double().norm()
            ratio = size / step if size > 0 and step > 0 else 1.0
            x.sub_(u * (self.lr * ratio))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_is_the_papers(weight_decay, bias_correction, dtype):
    mine, other = parameters(dtype), parameters(dtype)
    settings = {
        "lr": 1e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": weight_decay, "bias_correction": bias_correction,
    }  # fmt: skip
    steps(1000, 0, (FusedLamb(mine, **settings), mine), (Lamb(other, **settings), other))
    assert_near(mine, other, TOLERANCE[dtype])


def test_lamb_scales_a_tensor_as_a_whole():
    """A step is lr times as long as the tensor, whatever the gradient; weights of 0 move by Adam's step."""
    p, zeros = nn.Parameter(torch.full((100_000,), 2.0)), nn.Parameter(torch.zeros(5))
    p.grad, zeros.grad = torch.linspace(-1e-3, 1e3, 100_000), torch.ones(5)
    before = p.detach().clone()
    FusedLamb([p, zeros], lr=0.01, eps=0.0).step()
    assert float((p.detach() - before).norm()) == pytest.approx(0.01 * float(before.norm()), rel=1e-3)
    torch.testing.assert_close(zeros.detach(), torch.full((5,), -0.01))


def test_lamb_has_the_same_bits_for_any_number_of_threads():
    results, threads = [], torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            params = [nn.Parameter(torch.linspace(-1, 1, 400_003)), *parameters()]
            steps(3, 0, (FusedLamb(params, weight_decay=0.1), params))
            results.append(params)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("make", ALL, ids=lambda c: c.__name__)
def test_what_is_shared(make):
    """Clipping, GradScaler, cleared gradients, float32 weights of 16-bit parameters, layouts, closures."""
    params, clipped = parameters(), parameters()
    one, two = make(params, lr=0.1), make(clipped, lr=0.1)
    give_gradients(params, clipped, seed=0)
    norm = one.clip_grad_norm(0.5)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(clipped, 0.5)), rel=1e-6)
    one.step(clear_gradients=True)
    two.step()
    assert_near(params, clipped, 1e-6)
    assert not any(p.grad.any() for p in params)

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    give_gradients(params, clipped, seed=1)
    scaler.scale(torch.zeros(()))
    for p in params:
        p.grad *= 8
    scaler.step(one)
    two.step()
    assert_near(params, clipped, 1e-6)
    before = [p.detach().clone() for p in params]
    params[1].grad[7] = math.inf
    scaler.update()
    scaler.step(one, clear_gradients=True)
    scaler.update()
    assert scaler.get_scale() == 4.0 and all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert not any(p.grad.any() for p in params)

    half = [nn.Parameter(torch.randn(300).bfloat16())]
    whole = [nn.Parameter(half[0].detach().float())]
    pair = make(half, lr=1e-4, master_weights=True), make(whole, lr=1e-4)
    for i in range(20):
        half[0].grad = torch.randn(300, generator=torch.Generator().manual_seed(i)).bfloat16()
        whole[0].grad = half[0].grad.float()
        [optimizer.step() for optimizer in pair]
    assert torch.equal(pair[0].state[half[0]]["exact"], whole[0]) and torch.equal(half[0], whole[0].bfloat16())

    gaps = nn.Parameter(torch.randn(6, 8)[:, ::2])
    plain = nn.Parameter(gaps.detach().clone())
    for optimizer, p in ((make([gaps], lr=0.1), gaps), (make([plain], lr=0.1), plain)):
        expected = float(p.detach().square().sum())
        assert float(optimizer.step(lambda p=p: _backward(p))) == expected
    assert_near([gaps], [plain], 1e-6)


def _backward(p):
    loss = p.square().sum()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: FusedSGD(p, lr=-1.0), "learning rate must be a number not below 0"),
        (lambda p: FusedSGD(p, momentum=math.nan), "momentum must be a number not below 0, not nan"),
        (lambda p: FusedSGD(p, nesterov=True), "nesterov needs a momentum"),
        (lambda p: FusedSGD(p, nesterov=True, momentum=0.9, dampening=0.1), "nesterov needs .* dampening of 0"),
        (lambda p: FusedAdagrad(p, lr_decay=-0.1), "learning rate's decay must be"),
        (lambda p: FusedAdagrad(p, initial_accumulator_value=-1), "initial accumulator value must be"),
        (lambda p: FusedLamb(p, betas=(0.9, 1.0)), "betas must be"),
        (lambda p: FusedLamb(p, eps=-1.0), "eps must be"),
        (lambda p: FusedLamb([p[0], nn.Parameter(torch.zeros(2, device="meta"))]), "on cpu and meta"),
    ],
)
def test_bad_settings(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(parameters())


def test_wrong_states():
    kinds = {FusedSGD: {"momentum": 0.9}, FusedAdagrad: {}, FusedAdam: {}}
    made = {}
    for kind, settings in kinds.items():
        params = parameters()
        made[kind] = kind(params, **settings)
        steps(1, 0, (made[kind], params))
    for kind, optimizer in made.items():
        for other in made:
            if other is not kind:
                with pytest.raises(ValueError, match=f"not the state of a {kind.__name__}"):
                    optimizer.load_state_dict(made[other].state_dict())
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"FusedSGD does not take sparse gradients .*\[5, 2\]"):
        FusedSGD(table.parameters()).step()
