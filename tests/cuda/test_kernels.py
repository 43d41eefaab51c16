"""That no operator lacks a CUDA kernel, and what kernels say about data that they cannot use."""

import pytest
import torch

from ortmodule import _core
from tests.cuda.test_emulated import driver, session  # noqa: F401  (a fixture)

#: What only passes make, and only for CPUs (docs/passes.md).
FOR_CPUS = {"EmbeddingNorm", "FusedRows", "FusedRowsRandom", "GatherGradAdd"}
FOR_CPUS.add("Prepack")
FOR_CPUS |= {"NarrowSoftmax", "NarrowSoftmaxGrad", "NarrowSoftmaxGradRandom", "NarrowSoftmaxRandom"}


def test_no_kernel_is_missing():
    """PyTorch runs operators without one, as nodes of the graph: slower, and no CUDA graph goes across them."""
    missing = {r["name"] for r in _core.operators() if r["has_kernel"] and not r["has_cuda"]} - FOR_CPUS
    assert not missing, "an operator needs a CUDA kernel as it has one for the CPU"


@pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")
@pytest.mark.parametrize("op", ["Div", "Mod"])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 1027])
def test_integers_divided_by_zero(driver, op, count):  # noqa: F811
    """An error wherever the zero is; none of the elements that are not there divides."""
    s = session([(op, "x y", "z", {})], {"x": ("int64", 1), "y": ("int64", 1)}, ("z", "int64", 1))
    x, y = torch.arange(count) - 2, torch.full((count,), -3)
    expected = x.div(y, rounding_mode="trunc") if op == "Div" else x.remainder(y)
    for place in (0, count // 2, count - 1):
        zero = y.clone()
        zero[place] = 0
        with pytest.raises(_core.Error, match="ZeroDivisionError: a divisor is 0"):
            s.run([x, zero], [False, False])
        assert torch.equal(s.run([x, y], [False, False]).outputs[0], expected)


@pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")
@pytest.mark.parametrize("kind", ["float32", "int64"])
@pytest.mark.parametrize("columns", [8, 5, 6])
@pytest.mark.parametrize("shift", [0, 1])
def test_parts_of_rows(driver, columns, shift, kind):  # noqa: F811
    """Operands that lie together four by four, from addresses that are aligned and not, or do not; and one that is a
    single number for each row."""
    rows = [("Split", "x", "a b c", {"axis": 1, "num_outputs": 3}), ("Mul", "b y", "z", {})]
    s = session(rows, {"x": (kind, 2), "y": (kind, 2)}, ("z", kind, 2))
    x = torch.arange(1 + 18 * columns, dtype=getattr(torch, kind))[shift:][: 18 * columns].view(6, -1)
    y = torch.arange(6, dtype=x.dtype).view(6, 1)
    assert torch.equal(s.run([x, y], [False] * 2).outputs[0], x[:, columns : 2 * columns] * y)
