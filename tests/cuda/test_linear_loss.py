"""The loss of a linear layer by parts of the rows (csrc/cuda/kernels/linear_loss.cu), on the emulated GPU."""

import pytest
import torch
from torch import nn

from ortmodule import _core
from tests.cuda.test_emulated import driver, library  # noqa: F401  (a fixture)
from tests.cuda.test_products import blas  # noqa: F401  (a fixture)
from tests.passes.session import Function, export
from tests.passes.test_linear_loss import CASES, CLASSES, ROWS, TOLERANCE, WEIGHED, each_loss, loss_of, only, operands
from tests.selection import each

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
PASSES = ("linear_loss", "loss_gradient", "product_cast")


def session_of(module, tensors, passes=PASSES):
    session = export(module, tensors)
    session.disabled = only(*passes)
    return session


def check(module, tensors, dtype, exact=None, frozen=(), again=False):
    """A step there is that of ``exact`` in float64. ``again``: backward computes the logits once more."""
    session = session_of(module, tensors, ["linear_loss"] if again else PASSES)
    needs = [t.is_floating_point() and i not in frozen for i, t in enumerate(tensors)]
    wide = [x.double().requires_grad_(n) if x.is_floating_point() else x for x, n in zip(tensors, needs, strict=True)]
    loss = (exact or module)(*wide)
    dy = torch.linspace(0.5, 1.5, loss.numel(), dtype=tensors[0].dtype).view(loss.shape)
    expected = torch.autograd.grad(loss, [x for x, n in zip(wide, needs, strict=True) if n], dy.double())
    run = session.run(tensors, needs, [True])
    results = [run.outputs[0], *(g for g in run.backward([dy]) if g is not None)]
    text = next(iter(session.plans.values())).text()
    assert "LinearCrossEntropy(" in text and f"[{ROWS}, {CLASSES}]" not in text
    assert ("LinearCrossEntropyGrad" in text) == again
    for ours, theirs in zip(results, [loss.detach(), *expected], strict=True):
        assert ours.dtype == tensors[0].dtype
        assert (ours.double() - theirs).abs().max() <= TOLERANCE[dtype] * theirs.abs().max()


@each("dtype", [F32, F64, BF16], [BF16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients(driver, case, dtype):  # noqa: F811
    check(loss_of(**case), operands(dtype, case.get("bias", True)), dtype)


def test_without_the_library(blas):  # noqa: F811
    """Products by the library, and by the kernel that is there for all others."""
    for dtype in (F32, BF16):
        check(loss_of(), operands(dtype), dtype)


@pytest.mark.parametrize(("classes", "dtype", "parts"), [(1021, BF16, 2), (1016, BF16, 1), (1021, F32, 1)])
def test_classes_that_fill_no_line(driver, classes, dtype, parts):  # noqa: F811
    """Of many, in 16 bits, those beyond a multiple of 8 are products of their own: three of each part of rows."""
    fake = library("libcublasLt.so.13")
    labels = torch.randint(0, classes, (ROWS,))
    h, weight, bias, _ = operands(dtype)

    def compute(hidden, w, b, t):
        return nn.functional.cross_entropy(nn.functional.linear(hidden, w, b).view(-1, classes), t)

    before = fake.fake_blas_products()
    check(Function(compute), [h, weight[:classes].clone(), bias[:classes].clone(), labels], dtype)
    assert fake.fake_blas_products() - before == 3 * 2 * parts


def test_as_under_autocast(driver):  # noqa: F811
    def widened(h, weight, bias, labels):
        logits = nn.functional.linear(h.bfloat16(), weight.bfloat16(), bias.bfloat16()).float().view(-1, CLASSES)
        return nn.functional.cross_entropy(logits, labels)

    tensors = operands(F32)
    tensors[:3] = [x.bfloat16().float() for x in tensors[:3]]
    check(Function(widened), tensors, BF16, exact=loss_of())


@each("name", WEIGHED, ["masked", "chosen"])
def test_rows_weighed_by_the_script(driver, name):  # noqa: F811
    """With what arrives for each row known in forward, and with the logits computed again."""
    for again in (False, True):
        check(each_loss(WEIGHED[name]), operands(F32), F32, again=again)


def test_rows_of_a_frozen_weight(driver):  # noqa: F811
    check(each_loss(lambda each, _: each), operands(F32), F32, frozen=(1, 2))


def test_nothing_counts(driver):  # noqa: F811
    """The mean over no row is NaN, its gradient zero, as in PyTorch."""
    tensors = operands(F32, ignored=2.0)
    run = session_of(loss_of(), tensors).run(tensors, [True, True, True, False], [True])
    assert run.outputs[0].isnan() and not any(g.any() for g in run.backward([torch.ones(())]) if g is not None)


def test_a_label_out_of_range_is_named(driver):  # noqa: F811
    tensors = operands(F32)
    session = session_of(loss_of(), tensors)
    first = session.run(tensors, [False] * 4).outputs[0]
    labels = tensors[-1].clone()
    labels[1200] = CLASSES
    with pytest.raises(_core.Error, match=f"label {CLASSES}"):
        session.run([*tensors[:-1], labels], [False] * 4)
    assert torch.equal(session.run(tensors, [False] * 4).outputs[0], first)
