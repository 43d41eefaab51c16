"""Scatters on the emulated GPU (csrc/cuda/kernels/scatter.cu): updates of one destination are taken in their order."""

import pytest
import torch

from ortmodule import _core
from tests.cuda.test_emulated import driver, library, session  # noqa: F401  (a fixture)
from tests.cuda.test_graphs import aligned

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

REDUCTIONS = ["none", "add", "mul", "max", "min"]


def scatter(op, reduction):
    rank, attrs = (2, {"axis": 1}) if op == "ScatterElements" else (1, {})
    if reduction != "none":
        attrs["reduction"] = reduction
    inputs = {"x": ("float32", rank), "i": ("int64", 2), "u": ("float32", rank)}
    return session([(op, "x i u", "y", attrs)], inputs, ("y", "float32", rank))


def operands(op, count):
    """Of 3 lanes of 40 elements, or of 40 rows: each is hit many times."""
    torch.manual_seed(0)
    if op == "ScatterElements":
        return [torch.randn(3, 40), torch.randint(-40, 40, (3, count)), torch.rand(3, count) + 0.5]
    return [torch.randn(40), torch.randint(-40, 40, (count, 1)), torch.rand(count) + 0.5]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
def test_bits_are_those_of_the_cpu(driver, op, reduction):  # noqa: F811
    s, tensors = scatter(op, reduction), operands(op, 700)
    there = s.run(tensors, [False] * 3).outputs[0]
    plan = s.model.plan([(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in tensors], [False] * 3)
    here = torch.empty_like(there)
    plan.forward(aligned(plan.arena_bytes), tensors, [here], [], 0)
    assert torch.equal(there, here)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
def test_an_index_out_of_range_is_an_error(driver, op, reduction):  # noqa: F811
    """It says which; the next run is right."""
    s, tensors = scatter(op, reduction), operands(op, 9)
    expected = s.run(tensors, [False] * 3).outputs[0]
    wrong = [tensors[0], tensors[1].clone(), tensors[2]]
    wrong[1][-1, -1] = 40
    with pytest.raises(_core.Error, match="index 40 is out of range for an axis of size 40"):
        s.run(wrong, [False] * 3)
    assert torch.equal(s.run(tensors, [False] * 3).outputs[0], expected)
