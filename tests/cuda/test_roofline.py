"""What benchmarks.roofline counts of a plan for a GPU, beside figures worked out by hand."""

import pytest
import torch

from benchmarks import roofline_plan
from benchmarks.roofline_account import least_bytes
from ortmodule import _core
from tests.cuda.test_emulated import driver  # noqa: F401  (a fixture)
from tests.project.test_roofline import IN, PRODUCT, ROWS, Small, W, X, Y

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
