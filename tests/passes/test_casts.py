"""Passes of mixed precision: what is widened, rounded and cast, and where the same bits have to come out."""

import math

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ortmodule import ORTModule, _core, explain
from ortmodule.engine.session import Run
from tests.passes.session import (
    ALL_PASSES,
    BF16,
    F32,
    TOLERANCE,
    Function,
    check_against_pytorch,
    difference,
    export,
    run,
)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("narrow", [BF16, torch.float16])
@pytest.mark.parametrize(("rows", "width", "columns"), [(5, 7, 9), (64, 40, 48), (3, 1, 2), (1, 5, 1), (70, 1100, 33)])
def test_sums_that_stay_wide(narrow, rows, width, columns, batch):
    """As under autocast: result and gradients in float32, nearer to the exact ones than those that are rounded."""
    torch.manual_seed(0)
    x, w = torch.randn(batch, rows, width), torch.randn(columns, width)
    session = export(Function(lambda x, w: (x.type(narrow) @ w.type(narrow).t()).float()), [x, w])
    leaves = [t.to(narrow).double().requires_grad_() for t in (x, w)]
    dy = torch.randn(batch, rows, columns).to(narrow).float()
    exact = leaves[0] @ leaves[1].mT
    exact = [exact.detach(), *torch.autograd.grad(exact, leaves, dy.double())]
    fired, results = run(session, [x, w], dy, ALL_PASSES)
    assert fired["product_cast"] == 3
    for ours, truth in zip(results, exact, strict=True):
        assert ours.dtype == F32 and difference(ours, truth) <= 1e-5


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "columns"), [(5, 7, 9), (64, 40, 48), (1, 33, 2), (70, 900, 33), (40, 65, 300)]
)
def test_weights_that_are_rounded_on_their_way(rows, width, columns, turned):
    """As under autocast, with a bias: the bits are those of a weight that was cast."""
    torch.manual_seed(0)

    def forward(x, w, b):
        return x.bfloat16() @ (w.t() if turned else w).bfloat16() + b.bfloat16()

    x, w = torch.randn(2, rows, width), torch.randn(*((columns, width) if turned else (width, columns)))
    operands = [x, w, torch.randn(columns)]
    session, dy = export(Function(forward), operands), torch.randn(2, rows, columns).bfloat16()
    fired, ours = run(session, operands, dy, ALL_PASSES)
    without, cast = run(session, operands, dy, _core.passes()["wide_operands"])
    assert "wide_operands" not in without
    for a, b in zip(ours, cast, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    if not fired.get("wide_operands"):
        pytest.skip("this CPU has no kernel that rounds")


@pytest.mark.parametrize("narrow", [BF16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(7, 33), (2, 5, 300), (3, 9, 4), (40, 2)], ids=str)
def test_scores_that_are_widened_for_the_loss(shape, smoothing, reduction, narrow):
    """Loss in float32, with and without weights; the gradient is rounded once."""
    torch.manual_seed(0)
    flat = shape == (2, 5, 300)  # as of words
    classes, samples = (shape[-1], (10,)) if flat else (shape[1], (shape[0], *shape[2:]))
    labels = torch.randint(0, classes, samples)
    labels.view(-1)[::4] = -100
    weight = torch.rand(classes) if smoothing else None

    def forward(x):
        x = x.float()
        x = x.view(-1, classes) if flat else x
        return nn.functional.cross_entropy(
            x, labels, reduction=reduction, label_smoothing=smoothing, **({} if weight is None else {"weight": weight})
        )

    x = torch.randn(shape).to(narrow)
    leaf = x.clone().requires_grad_()
    loss = forward(leaf)
    dy = torch.randn(loss.shape)
    expected = [loss.detach(), *torch.autograd.grad(loss, [leaf], dy)]
    session = export(Function(forward), [x])
    fired, results = run(session, [x], dy, ALL_PASSES)
    assert fired["loss_cast"] == 1
    assert results[0].dtype == F32 and difference(results[0], expected[0]) <= TOLERANCE[F32]
    assert results[1].dtype == narrow and difference(results[1], expected[1]) <= (4e-3 if narrow == BF16 else 5e-4)
    bits = results[1] == expected[1]
    assert bits.float().mean() > 0.98  # what is not the same was between two numbers


def test_weights_that_others_read_are_cast_once():
    """A fourth product, or an operator that is none."""

    def fourth(x, w):
        w = w.bfloat16()
        return x @ w @ w @ w @ w

    def other(x, w):
        w = w.bfloat16()
        return (x @ w) * w.sum()

    for function in (fourth, other):
        operands = [torch.randn(3, 8).bfloat16(), torch.randn(8, 8)]
        fired, _ = run(export(Function(function), operands), operands, torch.ones(3, 8).bfloat16(), ALL_PASSES)
        assert "wide_operands" not in fired


@pytest.mark.parametrize(
    "product",
    [lambda z: z @ z.transpose(1, 2), lambda z: z.transpose(1, 2) @ z, lambda z: z @ z],
    ids=["right", "left", "neither"],
)
def test_what_is_multiplied_by_itself_is_cast(product):
    """As in attention of an input to itself under autocast: one operand at least says in 16 bits what is multiplied."""
    torch.manual_seed(0)
    x = torch.randn(2, 40, 40)
    session = export(Function(lambda x: product(x.bfloat16())), [x])
    plan = session.model.plan([("float32", tuple(x.shape))], (False,), (False,), ALL_PASSES)
    result = Run(plan, [x], 0).outputs[0]
    assert "wide_operands" not in plan.fired and result.dtype == BF16
    assert difference(result, product(x.bfloat16().double())) <= TOLERANCE[BF16]


class Autocast(nn.Module):
    """What autocast makes of a layer between two norms: 16 bits around products, float32 in norms and the residual."""

    def __init__(self, norm, width, dropout, narrow):
        super().__init__()
        self.first, self.second, self.weight = norm(width), norm(width), nn.Parameter(torch.eye(width))
        self.dropout, self.narrow = nn.Dropout(dropout), narrow

    def product(self, x):
        return x.to(self.narrow) @ self.weight.to(self.narrow)

    def forward(self, x):
        s = self.dropout(self.product(self.first(x))).float() + x
        return torch.cat((self.product(self.second(s)).float(), s), -1)


@pytest.mark.parametrize("width", [3, 70, 1030])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("narrow", [BF16, torch.float16, F32])
@pytest.mark.parametrize("norm", [nn.LayerNorm, LlamaRMSNorm])
def test_norms_and_residuals_of_autocast(norm, narrow, dropout, width):
    """As without the pass: the same masks, and as many roundings; both as near to float64 as PyTorch."""
    torch.manual_seed(0)
    module = Autocast(norm, width, dropout, narrow)
    x, dy = torch.randn(3, 5, width), torch.randn(3, 5, 2 * width)
    session = export(module, [x])
    tensors = [x if name == "x0" else dict(module.named_parameters())[name].detach() for name in session.inputs]
    fired, results = run(session, tensors, dy, ALL_PASSES)
    without, expected = run(session, tensors, dy, _core.passes()["norm_residual"])
    assert fired["norm_residual"] == (2 if narrow == F32 else 3) and "norm_residual" not in without
    for ours, theirs in zip(results, expected, strict=True):
        assert difference(ours, theirs) <= (1e-5 if narrow == F32 else 2e-2)
    if dropout:
        assert torch.equal(results[0][..., width:] == x, expected[0][..., width:] == x)
    for found in (results, expected):
        check_against_pytorch(module, session, tensors, dy, found, narrowest=narrow)


@pytest.mark.parametrize("narrow", [BF16, torch.float16])
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 48, 48), (5, 70), (1, 129), (131, 1), (3, 0), (4, 4096)], ids=str)
def test_a_softmax_that_is_stored_in_16_bits(shape, masked, rate, narrow):
    """Of float32 scores: result, mask and gradient, which stays float32, differ from those of the nodes one by one by
    the rounding of the weights alone."""
    torch.manual_seed(0)
    x, allowed = torch.randn(shape), torch.rand(shape) < 0.7
    allowed[1:2] = False

    def forward(x):
        p = x.softmax(-1)
        if masked:
            x = x.clamp(-50, 50)  # finite, as products are
            p = torch.where(allowed, torch.where(allowed, x, -math.inf).softmax(-1), 0.0)
        return (nn.functional.dropout(p, rate, True) if rate else p).type(narrow)

    session = export(Function(forward), [x])
    dy, bit = torch.randn(shape).type(narrow), _core.passes()["softmax_cast"]
    fired, (y, dx) = run(session, [x], dy, ALL_PASSES)
    assert fired["softmax_cast"] == 1
    without, (expected, slope) = run(session, [x], dy, bit)
    assert "softmax_cast" not in without and y.dtype == narrow and dx.dtype == F32
    assert torch.equal(y, expected)
    unit = torch.finfo(narrow).eps
    weight = slope.abs().amax(-1, keepdim=True) if x.numel() else slope
    assert ((dx - slope).abs() <= unit * (slope.abs() + weight)).all()


@pytest.mark.parametrize("narrow", [BF16, torch.float16])
def test_a_softmax_of_16_bits_is_no_farther_from_float64(narrow):
    """Than PyTorch's. (Exponentials differ in float32's last bit, and then some weights are rounded the other way.)"""
    torch.manual_seed(0)
    x, dy = torch.randn(40, 6, 10, 10), torch.randn(40, 6, 10, 10).type(narrow)

    def step(softmax, x):
        leaf = x.clone().requires_grad_()
        y = softmax(leaf)
        return [y.detach(), *torch.autograd.grad(y, leaf, dy.to(y.dtype))]

    def softmax(x):
        return torch.softmax(x, -1, dtype=narrow)

    wrapped = ORTModule(Function(softmax))
    ours, truths = step(wrapped, x), step(lambda x: torch.softmax(x, -1), x.type(narrow).double())
    assert explain(wrapped).captured
    for a, b, truth in zip(ours, step(softmax, x), truths, strict=True):
        mine, theirs = (a.double() - truth).abs(), (b.double() - truth).abs()
        assert mine.mean() <= 1.001 * theirs.mean() and mine.max() <= 1.001 * theirs.max()
