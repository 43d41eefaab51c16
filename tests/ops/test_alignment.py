"""Memory may be aligned to its elements and no further: operands, outputs, gradients in views of a user's tensors.

Behind an odd number of elements; of odd sizes, of none, and read through views.
"""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.ops.harness import Trial, fed_operands
from tests.ops.one_type import IN_ONE_TYPE
from tests.ops.test_ops import check, resized
from tests.ops.test_strides import SUITED, Viewed

pytestmark = pytest.mark.emulated

#: Operator -> rows of elements that are divided by one norm.
NORMALIZED = {
    "InstanceNormalization": lambda x, attrs: x.flatten(2),
    "LayerNormalization": lambda x, attrs: x.flatten(attrs.get("axis", -1)),
    "LpNormalization": lambda x, attrs: x.movedim(attrs.get("axis", -1), -1),
    "RMSNormalization": lambda x, attrs: x.flatten(attrs.get("axis", -1)),
}
#: Those whose gradient is 0 for rows of equal elements; that of the others is for one element that is repeated.
CENTERED = ("InstanceNormalization", "LayerNormalization")


def norm_vanishes(case, x, repeated):
    """Is the gradient of a norm of ``x`` 0, for some rows? What cancels does so inside of one operator of PyTorch."""
    rows = NORMALIZED[case.op](x.double(), case.attrs)
    return bool((case.op in CENTERED or repeated) and (rows.std(-1, correction=0) <= 1e-3).any())


@pytest.mark.parametrize(("case", "dtype"), IN_ONE_TYPE)
def test_unaligned(case, dtype):
    check(Trial(case, dtype, shift=1))


@pytest.mark.parametrize("op", sorted({case.op for case in SUITED if case.resize}))
@settings(max_examples=max(5, settings.default.max_examples // 8))
@given(data=st.data())
def test_unaligned_views_of_odd_sizes(op, data):
    """Operands are cut out of larger ones, repeated or transposed, and sizes are odd or 0."""
    case = data.draw(st.sampled_from([case for case in SUITED if case.op == op and case.resize]), label="case")
    # Third powers of what is small are 0 in 16 bits, and LpPool rounds to them.
    types = [dtype for dtype in case.dtypes if op != "LpPool" or dtype in ("float32", "float64")]
    dtype = data.draw(st.sampled_from(types), label="dtype")
    old = sorted({d for spec in case.inputs if spec and spec.fixed is None for d in spec.shape if d != 1})
    sizes = {d: data.draw(st.sampled_from([d, 0, 1, 3, 5, 17, 37]), label=f"size instead of {d}") for d in old}
    specs = resized(case, sizes)
    assume(all(spec is None or torch.Size(spec.shape).numel() <= 20_000 for spec in specs))
    repeated = False  # the first operand
    viewed = Viewed(case, case.tensors(dtype, data.draw(st.integers(0, 99), label="seed"), specs))
    for i in fed_operands(case, viewed.tensors):
        x = viewed.tensors[i]
        kinds = [None, viewed.transpose, viewed.cut] if x.dim() else [None]
        if case.op == "BatchNormalization":  # of operands that are not contiguous PyTorch reads the wrong elements
            kinds = [None]
        elif x.dim() and x.is_floating_point():
            kinds.append(viewed.repeat)
        kind = data.draw(st.sampled_from(kinds), label=f"view of operand {i}")
        repeated |= i == 0 and kind == viewed.repeat
        if kind is not None:
            kind(data, i)
    gradients = not any(x is not None and x.isnan().any() for x in viewed.tensors)
    if op in NORMALIZED:
        gradients = gradients and not norm_vanishes(case, viewed.views[0](viewed.tensors[0]), repeated)
    try:
        trial = Trial(
            viewed.build(dtype), dtype, viewed.tensors, shift=data.draw(st.sampled_from([1, 3]), label="shift")
        )
    except (RuntimeError, IndexError, ValueError, ArithmeticError):
        assume(False)  # the operands do not go together at these sizes, or PyTorch's gradient refuses such strides
    trial.check_drawn(gradients)
