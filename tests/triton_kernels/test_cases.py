"""The cases of operators, each as a Triton kernel that the interpreter runs, against PyTorch: results and gradients."""

from functools import cached_property

import pytest

from ortmodule.triton_kernels.rules import all_rules
from ortmodule.triton_kernels.use import TritonUse
from tests.ops.cases import FAMILIES
from tests.ops.harness import Trial

#: Families with operators that become kernels.
OF_KERNELS = ("activation", "binary", "compare", "norm", "random", "reduce", "select", "softmax", "unary", "fused")
#: A kernel of one node, too: each operator alone.
EACH_NODE = TritonUse(all_rules()._replace(min_nodes=1), False)
CASES = [
    pytest.param(case, dtype, id=f"{family}-{case.label}-{dtype}")
    for family in OF_KERNELS
    for case in FAMILIES[family]
    for dtype in case.dtypes
]


class TritonTrial(Trial):
    @cached_property
    def session(self):
        session = super().session
        session.triton = EACH_NODE
        return session


@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_case(case, dtype):
    trial = TritonTrial(case, dtype)
    trial.check_forward()
    if trial.wrt:
        trial.check_gradient()
