"""Which operators have no CUDA kernel, and what kernels say about data that they cannot use."""

import pytest
import torch

from ortmodule import _core
from tests.cuda.test_emulated import driver, session  # noqa: F401  (a fixture)

#: Operators with a CPU kernel only: PyTorch runs them on a GPU, as nodes of the graph. The list can only get shorter.
MISSING = """
    GridSample GridSampleGradGrid GridSampleGradInput GroupedMatMul GroupedMatMulOuter
    Interpolate
"""


def test_kernels_that_are_missing():
    records, known = _core.operators(), set(MISSING.split())
    missing = {record["name"] for record in records if record["has_kernel"] and not record["has_cuda"]}
    assert missing <= known, "an operator needs a CUDA kernel as it has one for the CPU"
    assert missing == known, "there is a kernel now: take it off the list"


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
