"""A linear layer and a cross entropy without the logits between them: PyTorch's loss and gradients, less memory."""

import pytest
import torch
from torch import nn

from ortmodule.session import DTYPES, Run
from tests.passes.test_passes import ALL_PASSES, NO_PASSES, Function, export, run

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
TOLERANCE = {F32: 1e-5, F64: 1e-12}
ROWS, WIDTH, CLASSES = 1300, 12, 1024


def loss_of(reduction="mean", ignored=True, bias=True, weighted=False):
    """Of h [2, rows / 2, width], a weight, a bias and labels."""

    def compute(h, weight, *rest):
        labels = rest[-1]
        logits = nn.functional.linear(h, weight, rest[0] if bias else None)
        weights = torch.linspace(0.1, 2, CLASSES, dtype=h.dtype) if weighted else None
        return nn.functional.cross_entropy(
            logits.view(-1, CLASSES), labels, weights, reduction=reduction, ignore_index=-100 if ignored else 7
        )

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
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
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
    assert "LinearCrossEntropy(" in plan.text() and f"[{ROWS}, {CLASSES}]" not in plan.text()
    for ours, theirs in zip(results, expected, strict=False):
        assert ours.dtype == dtype
        scale = theirs.abs().max()
        assert (ours.double() - theirs).abs().max() <= TOLERANCE[dtype] * scale


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


def test_sixteen_bits_stay():
    tensors = operands(BF16)
    fired, _ = run(export(loss_of(), tensors), tensors[:], torch.ones((), dtype=BF16), ALL_PASSES)
    assert "linear_loss" not in fired
