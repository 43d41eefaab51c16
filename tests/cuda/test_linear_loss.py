"""The loss of a linear layer by parts of the rows (csrc/cuda/kernels/linear_loss.cu), on the emulated GPU."""

from functools import partial

import pytest
import torch
from torch import nn

from benchmarks import roofline_plan
from ortmodule import _core
from ortmodule.engine.session import DTYPES
from tests.cuda.test_emulated import driver, library  # noqa: F401  (a fixture)
from tests.cuda.test_products import blas  # noqa: F401  (a fixture)
from tests.passes import test_linear_loss as on_cpu
from tests.passes.session import Function, export
from tests.passes.test_linear_loss import CASES, TOLERANCE, WEIGHED, only
from tests.selection import each

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
PASSES = ("linear_loss", "loss_gradient", "product_cast")
ROWS, CLASSES = 4200, 254  # more rows than a part has at most, classes that fill no line of 16 bytes
loss_of = partial(on_cpu.loss_of, classes=CLASSES)
each_loss = partial(on_cpu.each_loss, classes=CLASSES)
operands = partial(on_cpu.operands, rows=ROWS, classes=CLASSES)


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
    assert "LinearCrossEntropy(" in text and f"[{len(tensors[-1])}, {len(tensors[1])}]" not in text
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


@pytest.mark.parametrize(
    ("rows", "classes", "dtype", "products"),
    [(ROWS, 517, BF16, 12), (1100, 1021, BF16, 6), (1100, 1016, BF16, 3), (1100, 1021, F32, 3)],
)
def test_classes_that_fill_no_line(driver, rows, classes, dtype, products):  # noqa: F811
    """Of many, in 16 bits, those beyond a multiple of 8 are products of their own: three of each part of rows."""
    fake = library("libcublasLt.so.13")
    before = fake.fake_blas_products()
    check(loss_of(classes=classes), operands(dtype, rows=rows, classes=classes), dtype)
    assert fake.fake_blas_products() - before == products


def of_rows(hidden, weight, bias, labels):
    return nn.functional.cross_entropy(nn.functional.linear(hidden, weight, bias), labels)


@pytest.mark.parametrize(
    ("rows", "classes", "dtype", "chunk"),
    [(8192, 50_257, BF16, 4096), (6400, 32_000, BF16, 3200), (8192, 128_256, BF16, 2048), (4098, 600_000, F32, 640),
     (1536, 262_144, BF16, 768), (4096, 30_522, F64, 4096)],
)  # fmt: skip
def test_logits_of_a_part_are_bounded(driver, rows, classes, dtype, chunk):  # noqa: F811
    """What a plan has room for, beside the rule, and what the account of bytes says of it."""
    size = dtype.itemsize
    assert roofline_plan.chunk_rows(size, rows, classes) == chunk
    session = session_of(Function(of_rows), [t.flatten(0, -2) if t.dim() == 3 else t for t in operands(dtype, rows=2)])
    shapes = [(rows, 8), (classes, 8), (classes,), (rows,)]
    specs = [(DTYPES[d], s) for s, d in zip(shapes, [dtype] * 3 + [torch.int64], strict=True)]
    plan = session.sketch(specs, [True, True, True, False], [True], gpu=torch.device("cpu"))
    (room,) = [block[1] for block in plan.blocks() if block[4][:2] == ("workspace", "LinearCrossEntropy")]
    logits = chunk * (-(-classes // 8) * 8) * (6 if size == 2 else size)
    others = 16 * rows + 8 * classes  # losses, sums, the bias's gradient
    assert logits + others <= room <= logits + others + (36 << 20)  # and cuBLASLt's workspace
    assert logits <= 3 << 29


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
    labels[4150] = CLASSES
    with pytest.raises(_core.Error, match=f"label {CLASSES}"):
        session.run([*tensors[:-1], labels], [False] * 4)
    assert torch.equal(session.run(tensors, [False] * 4).outputs[0], first)
