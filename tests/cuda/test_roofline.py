"""What benchmarks.roofline counts of a plan for a GPU, beside figures worked out by hand."""

import pytest
import torch

from benchmarks import roofline, roofline_page, roofline_plan
from benchmarks.roofline_account import least_bytes
from ortmodule import _core
from tests.cuda.test_emulated import driver  # noqa: F401  (a fixture)
from tests.project.test_roofline import IN, PAGE, PRODUCT, ROWS, Small, W, X, Y, summary_of, table_of

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")


def test_small_model(driver):  # noqa: F811
    plan, peak = roofline_plan.plan_of(Small, {"x": torch.zeros(ROWS, IN)}, None)
    found = roofline_plan.kernels_of(plan)
    assert [(k.name, k.bytes, k.flops) for k in found.kernels] == [
        ("MatMul", X + W + Y, PRODUCT), ("FusedReduce", 2 * Y + 4, 0),  # tanh, and its sum on the way
        ("TanhGrad", 4 + 2 * Y, 0),  # the loss's gradient, which is one number everywhere, and tanh
        ("MatMul", Y + X + W, PRODUCT),
    ]  # fmt: skip
    # tanh and its sum are one kernel: it reads the product, and writes tanh for backward and the sum
    assert least_bytes(found.kernels, found.kept) == [X + W + Y, 2 * Y + 4, 4 + 2 * Y, Y + X + W]
    assert not any(k.launch for k in found.kernels)
    assert peak.parameters == peak.gradients == W and peak.optimizer == 2 * W


@pytest.mark.emulated_full
@pytest.mark.parametrize("name", roofline.ROWS)
def test_the_page_is_what_plans_say(driver, name):  # noqa: F811
    """As python -m benchmarks.roofline finds it now: every kernel, what is predicted, and the peaks."""
    row = roofline.row_of(name)
    assert "\n".join(roofline_page.section(name, row)).rstrip() in PAGE
    for column, found in row["columns"].items():
        expected = table_of(name)[column]["kernels"]
        assert [(k["name"], k["bytes"], k["count"]) for k in sorted(found["kernels"], key=str)] == [
            (k["name"], k["bytes"], k["count"]) for k in sorted(expected, key=str)
        ], column
    peaks = [f"{row['columns'][c]['peak'] / 1e9:.1f}, {row['columns']['eager']['peak'] / 1e9:.1f}" for c in
             (roofline_page.OURS, roofline_page.ALONE)]  # fmt: skip
    assert [cells[6] for cells in summary_of(name)] == peaks
