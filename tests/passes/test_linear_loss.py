"""A linear layer and a cross entropy without the logits between them: PyTorch's loss and gradients, less memory."""

import pytest
import torch
from torch import nn

from ortmodule import _core
from ortmodule.engine.session import DTYPES, Run
from tests.cpu import HAS_AVX512_BF16
from tests.passes.session import ALL_PASSES, NO_PASSES, Function, export, found, run

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
# bfloat16: the gradient of the logits is rounded before it is multiplied.
TOLERANCE = {F32: 1e-5, F64: 1e-12, BF16: 8e-3}
# Elsewhere 16-bit operands keep their logits.
needs_bf16 = pytest.mark.skipif(not HAS_AVX512_BF16, reason="no products of bfloat16")
DTYPES_TESTED = [F32, F64, pytest.param(BF16, marks=needs_bf16)]
ROWS, WIDTH, CLASSES = 1300, 12, 1024


def loss_of(reduction="mean", ignored=True, bias=True, weighted=False, smoothing=0.0, classes=CLASSES):
    """Of h [2, rows / 2, width], a weight, a bias and labels."""

    def compute(h, weight, *rest):
        labels = rest[-1]
        logits = nn.functional.linear(h, weight, rest[0] if bias else None)
        weights = torch.linspace(0.1, 2, classes, dtype=h.dtype) if weighted else None
        how = {"reduction": reduction, "ignore_index": -100 if ignored else 7, "label_smoothing": smoothing}
        return nn.functional.cross_entropy(logits.view(-1, classes), labels, weights, **how)

    return Function(compute)


def operands(dtype, bias=True, ignored=0.3, rows=ROWS, classes=CLASSES):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(2, rows // 2, WIDTH, generator=generator, dtype=F64)
    weight = torch.randn(classes, WIDTH, generator=generator, dtype=F64) / 2
    labels = torch.randint(0, classes, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < ignored] = -100
    floats = [h, weight, *([torch.randn(classes, generator=generator, dtype=F64)] if bias else [])]
    return [*(x.to(dtype) for x in floats), labels]


def plan_of(session, tensors, disabled):
    specs = tuple((DTYPES[t.dtype], tuple(t.shape)) for t in tensors)
    return session.model.plan(specs, tuple(t.is_floating_point() for t in tensors), (True,), disabled)


def only(*names):
    """The switches that leave these passes on."""
    return NO_PASSES ^ sum(_core.passes()[name] for name in names)


ALONE = only("linear_loss")


def run_plan(session, tensors, disabled, dy):
    plan = plan_of(session, tensors, disabled)
    result = Run(plan, tensors, 0)
    return plan, [result.outputs[0], *result.backward([dy])]


CASES = [
    dict(),
    dict(reduction="sum"),
    dict(bias=False),
    dict(weighted=True),
    dict(weighted=True, reduction="sum", bias=False),
    dict(smoothing=0.1),
    dict(smoothing=0.3, weighted=True),
]


@pytest.mark.parametrize("dtype", DTYPES_TESTED, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients(case, dtype):
    module = loss_of(**case)
    tensors = operands(dtype, case.get("bias", True))
    session = export(module, tensors)
    wide = [x.double().clone().requires_grad_() if x.is_floating_point() else x for x in tensors]
    dy = torch.tensor(0.7, dtype=dtype)
    loss = module(*wide)
    expected = [loss.detach(), *torch.autograd.grad(loss, wide[:-1], dy.double())]
    plan, results = run_plan(session, tensors, ALONE, dy)
    compare(plan, results, expected, dtype, dtype)


def compare(plan, results, expected, dtype, precision):
    assert "LinearCrossEntropy(" in plan.text() and f"[{ROWS}, {CLASSES}]" not in plan.text()
    for ours, theirs in zip(results, expected, strict=False):
        assert ours.dtype == dtype
        scale = theirs.abs().max()
        assert (ours.double() - theirs).abs().max() <= TOLERANCE[precision] * scale


@needs_bf16
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_as_under_autocast(case):
    """float32 operands cast to bfloat16, logits widened: what comes back was never rounded to 16 bits."""
    module = loss_of(**case)

    def widened(*operands):
        *floats, labels = operands
        logits = nn.functional.linear(*(x.bfloat16() for x in floats)).float().view(-1, CLASSES)
        return nn.functional.cross_entropy(logits, labels, reduction=case.get("reduction", "mean"))

    tensors = operands(F32, case.get("bias", True))
    session = export(Function(widened), tensors)
    wide = [x.bfloat16().double().requires_grad_() if x.is_floating_point() else x for x in tensors]
    dy = torch.tensor(0.7)
    loss = module(*wide)
    expected = [loss.detach(), *torch.autograd.grad(loss, wide[:-1], dy.double())]
    plan, results = run_plan(session, tensors, only("linear_loss", "product_cast"), dy)
    compare(plan, results, expected, F32, BF16)
    gradients = [g for g in results[1:] if g is not None]
    assert all((g != g.bfloat16()).any() for g in gradients)  # more digits than bfloat16 has
    assert "bfloat16" not in plan.text().partition("backward")[2]
    _, rounded = run_plan(session, tensors, ALONE, dy)
    assert all(torch.equal(g.bfloat16(), r.bfloat16()) for g, r in zip(gradients, rounded[1:], strict=False))


# --- losses that are not reduced --------------------------------------------------------------------------------------


def kept(each, labels):
    return (labels % 3 > 0).to(each.dtype)


#: How a script makes one number of the losses of the rows: (losses, labels) -> loss.
WEIGHED = {
    "masked": lambda each, labels: (each * kept(each, labels)).sum() / kept(each, labels).sum(),
    "of sequences": lambda each, labels: (each.view(2, -1).sum(1) / kept(each, labels).view(2, -1).sum(1)).mean(),
    "some": lambda each, labels: 2 * each[100:900:2].mean() - each.view(2, -1)[0].sum() / 7,
    "chosen": lambda each, labels: torch.where(labels % 5 > 2, each, torch.zeros_like(each)).mean(),
}


def each_loss(weigh, **case):
    inner = loss_of(reduction="none", **case).function
    return Function(lambda *operands: weigh(inner(*operands), operands[-1]))


def check_each(module, tensors, dtype, also=None, frozen=()):
    """The plan, compared with PyTorch. ``also``: another pass that is on. ``frozen``: operands without a gradient."""
    session = export(module, tensors)
    wide = [x.double().clone().requires_grad_() if x.is_floating_point() else x for x in tensors]
    needing = [x for i, x in enumerate(wide) if x.is_floating_point() and i not in frozen]
    loss = module(*wide)
    dy = torch.linspace(0.5, 1.5, loss.numel(), dtype=dtype).view(loss.shape)
    expected = torch.autograd.grad(loss, needing, dy.double())
    disabled = only("linear_loss", also) if also else ALONE
    specs = tuple((DTYPES[t.dtype], tuple(t.shape)) for t in tensors)
    needs = tuple(t.is_floating_point() and i not in frozen for i, t in enumerate(tensors))
    plan = session.model.plan(specs, needs, (True,), disabled)
    result = Run(plan, tensors, 0)
    gradients = [g for g in result.backward([dy]) if g is not None]
    assert len(gradients) == len(needing)
    compare(plan, [result.outputs[0], *gradients], [loss.detach(), *expected], dtype, dtype)
    return plan


# float64: the exporter makes float32 of some of these.
@pytest.mark.parametrize("dtype", [F32, DTYPES_TESTED[2]], ids=str)
@pytest.mark.parametrize("case", [dict(), *CASES[2:4], CASES[6]], ids=str)
@pytest.mark.parametrize("name", WEIGHED)
def test_rows_weighed_by_the_script(name, case, dtype):
    """What arrives for each row is known in forward, up to one factor: the logits are computed once."""
    plan = check_each(each_loss(WEIGHED[name], **case), operands(dtype, case.get("bias", True)), dtype, "loss_gradient")
    assert plan.fired["loss_gradient"] == 1
    assert "LinearCrossEntropyGrad" not in plan.text()


@pytest.mark.parametrize("dtype", DTYPES_TESTED, ids=str)
@pytest.mark.parametrize("case", [dict(), *CASES[2:4], CASES[6]], ids=str)
def test_rows_with_any_gradient(case, dtype):
    """With the other pass off backward computes the logits again, with what arrives for each row."""
    plan = check_each(each_loss(WEIGHED["of sequences"], **case), operands(dtype, case.get("bias", True)), dtype)
    assert "LinearCrossEntropyGrad(" in plan.text()


@pytest.mark.parametrize("name", ["focal", "two outputs"])
def test_rows_whose_gradient_is_not_known(name):
    """It depends on the losses themselves, or is the caller's; then so large a part of the graph stays as it is."""
    weigh = {
        "focal": lambda each, labels: ((1 - (-each).exp()) ** 2 * each).mean(),
        "two outputs": lambda each, _: each,
    }
    tensors = operands(F32)
    session = export(each_loss(weigh[name]), tensors)
    dy = torch.ones(()) if name == "focal" else torch.ones(ROWS)
    both = only("linear_loss", "loss_gradient")
    assert found(plan_of(session, tensors, both)) == {}
    wide = [x.clone().requires_grad_() if x.is_floating_point() else x for x in tensors]
    expected = torch.autograd.grad(each_loss(weigh[name])(*wide), wide[:-1], dy)
    _, results = run_plan(session, tensors, both, dy)
    for ours, theirs in zip([g for g in results[1:] if g is not None], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES_TESTED, ids=str)
def test_rows_of_a_frozen_weight(dtype):
    """One row's gradient scales with its own upstream gradient, whatever that is."""
    plan = check_each(each_loss(lambda each, _: each), operands(dtype), dtype, frozen=(1, 2))
    assert "LinearCrossEntropyGrad" not in plan.text()


@needs_bf16
def test_rows_under_autocast():
    def widened(h, weight, bias, labels):
        logits = nn.functional.linear(h.bfloat16(), weight.bfloat16(), bias.bfloat16()).float().view(-1, CLASSES)
        return (nn.functional.cross_entropy(logits, labels, reduction="none") * kept(h, labels)).mean()

    tensors = operands(F32)
    session = export(Function(widened), tensors)
    wide = [x.bfloat16().double().requires_grad_() if x.is_floating_point() else x for x in tensors]
    module = each_loss(lambda each, labels: (each * kept(each, labels)).mean())
    loss = module(*wide)
    expected = [loss.detach(), *torch.autograd.grad(loss, wide[:-1], torch.tensor(0.7).double())]
    plan, results = run_plan(session, tensors, only("linear_loss", "loss_gradient", "product_cast"), torch.tensor(0.7))
    assert found(plan) == {"linear_loss": 1, "loss_gradient": 1, "product_cast": 3}
    compare(plan, results, expected, F32, BF16)


# --- what it is for, and where it ends --------------------------------------------------------------------------------


def test_less_memory():
    tensors = operands(F32)
    session = export(loss_of(), tensors)
    switch = ALONE
    with_logits, without = plan_of(session, tensors, NO_PASSES), plan_of(session, tensors, switch)
    assert without.arena_bytes < 0.6 * with_logits.arena_bytes


def test_nothing_counts():
    """The mean over no row is NaN, its gradient zero, as in PyTorch."""
    tensors = operands(F32, ignored=2.0)
    session = export(loss_of(), tensors)
    _, results = run_plan(session, tensors, ALONE, torch.tensor(1.0))
    assert results[0].isnan() and all(not g.any() for g in results[1:4] if g is not None)


def test_a_label_out_of_range_is_named():
    tensors = operands(F32)
    session = export(loss_of(), tensors)
    tensors[-1][1200] = CLASSES
    with pytest.raises(Exception, match=f"label {CLASSES} of sample 1200"):
        run_plan(session, tensors, ALONE, torch.tensor(1.0))


@pytest.mark.parametrize("threads", [1, 2])
def test_without_gradients_and_in_threads(threads):
    tensors = operands(F32)
    session = export(loss_of(), tensors)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        switch = ALONE
        _, first = run_plan(session, tensors, switch, torch.tensor(1.0))
        _, second = run_plan(session, tensors, switch, torch.tensor(1.0))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a is not None)
        inference = session.run(tensors, [False] * len(tensors)).outputs[0]
        torch.testing.assert_close(inference, first[0])
    finally:
        torch.set_num_threads(before)


def test_float16_stays():
    """The gradient of the logits of one row of many would be zero there, until a GradScaler's factor arrives."""
    tensors = operands(F16)
    fired, _ = run(export(loss_of(), tensors), tensors[:], torch.ones((), dtype=F16), ALL_PASSES)
    assert "linear_loss" not in fired
