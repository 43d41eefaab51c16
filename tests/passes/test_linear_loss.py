"""A linear layer and a cross entropy without the logits between them: PyTorch's loss and gradients, less memory."""

import pytest
import torch
from torch import nn

from ortmodule.session import DTYPES, Run
from tests.passes.test_passes import ALL_PASSES, NO_PASSES, Function, export, run

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
# bfloat16: the gradient of the logits is rounded before it is multiplied.
TOLERANCE = {F32: 1e-5, F64: 1e-12, BF16: 8e-3}
# Elsewhere 16-bit operands keep their logits.
needs_bf16 = pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="no products of bfloat16")
DTYPES_TESTED = [F32, F64, pytest.param(BF16, marks=needs_bf16)]
ROWS, WIDTH, CLASSES = 1300, 12, 1024


def loss_of(reduction="mean", ignored=True, bias=True, weighted=False, smoothing=0.0):
    """Of h [2, rows / 2, width], a weight, a bias and labels."""

    def compute(h, weight, *rest):
        labels = rest[-1]
        logits = nn.functional.linear(h, weight, rest[0] if bias else None)
        weights = torch.linspace(0.1, 2, CLASSES, dtype=h.dtype) if weighted else None
        how = {"reduction": reduction, "ignore_index": -100 if ignored else 7, "label_smoothing": smoothing}
        return nn.functional.cross_entropy(logits.view(-1, CLASSES), labels, weights, **how)

    return Function(compute)


def operands(dtype, bias=True, ignored=0.3):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(2, ROWS // 2, WIDTH, generator=generator, dtype=F64)
    weight = torch.randn(CLASSES, WIDTH, generator=generator, dtype=F64) / 2
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    labels[torch.rand(ROWS, generator=generator) < ignored] = -100
    floats = [h, weight, *([torch.randn(CLASSES, generator=generator, dtype=F64)] if bias else [])]
    return [*(x.to(dtype) for x in floats), labels]


def plan_of(session, tensors, disabled):
    specs = tuple((DTYPES[t.dtype], tuple(t.shape)) for t in tensors)
    return session.model.plan(specs, tuple(t.is_floating_point() for t in tensors), (True,), disabled)


def alone(session, tensors):
    """The switches that leave only this pass on."""
    for bit in range(32):
        if plan_of(session, tensors, NO_PASSES ^ (1 << bit)).fired.keys() == {"linear_loss"}:
            return NO_PASSES ^ (1 << bit)
    raise AssertionError("the pass does not fire")


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
    plan, results = run_plan(session, tensors, alone(session, tensors), dy)
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
    product_cast = next(
        1 << bit
        for bit in range(32)
        if plan_of(session, tensors, alone(session, tensors) ^ (1 << bit)).fired.keys()
        == {"linear_loss", "product_cast"}
    )
    plan, results = run_plan(session, tensors, alone(session, tensors) ^ product_cast, dy)
    compare(plan, results, expected, F32, BF16)
    gradients = [g for g in results[1:] if g is not None]
    assert all((g != g.bfloat16()).any() for g in gradients)  # more digits than bfloat16 has
    assert "bfloat16" not in plan.text().partition("backward")[2]
    _, rounded = run_plan(session, tensors, alone(session, tensors), dy)
    assert all(torch.equal(g.bfloat16(), r.bfloat16()) for g, r in zip(gradients, rounded[1:], strict=False))


def test_less_memory():
    tensors = operands(F32)
    session = export(loss_of(), tensors)
    switch = alone(session, tensors)
    with_logits, without = plan_of(session, tensors, NO_PASSES), plan_of(session, tensors, switch)
    assert without.arena_bytes < 0.6 * with_logits.arena_bytes


def test_nothing_counts():
    """The mean over no row is NaN, its gradient zero, as in PyTorch."""
    tensors = operands(F32, ignored=2.0)
    session = export(loss_of(), tensors)
    _, results = run_plan(session, tensors, alone(session, tensors), torch.tensor(1.0))
    assert results[0].isnan() and all(not g.any() for g in results[1:4] if g is not None)


def test_a_label_out_of_range_is_named():
    tensors = operands(F32)
    session = export(loss_of(), tensors)
    tensors[-1][1200] = CLASSES
    with pytest.raises(Exception, match=f"label {CLASSES} of sample 1200"):
        run_plan(session, tensors, alone(session, tensors), torch.tensor(1.0))


@pytest.mark.parametrize("threads", [1, 2])
def test_without_gradients_and_in_threads(threads):
    tensors = operands(F32)
    session = export(loss_of(), tensors)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        switch = alone(session, tensors)
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
