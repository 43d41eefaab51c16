"""Operands may be without elements, and Resize goes between sizes that are drawn.

Under sanitizers, too: a pointer to no elements may be NULL, which most functions of C do not take.
"""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.ops.cases import FAMILIES
from tests.ops.families.resize import resize
from tests.ops.harness import Trial
from tests.ops.one_type import one_type
from tests.ops.test_ops import resized

RESIZABLE = [case for cases in FAMILIES.values() for case in cases if case.resize]


@pytest.mark.parametrize("op", sorted({case.op for case in RESIZABLE}))
def test_no_elements(op):
    """Each size is 0 in turn, then all are; what PyTorch refuses is left out."""
    for case in (case for case in RESIZABLE if case.op == op):
        dtype = one_type(case)
        old = sorted({d for spec in case.inputs if spec and spec.fixed is None for d in spec.shape if d > 1})
        for sizes in [{d: 0} for d in old] + [dict.fromkeys(old, 0)]:
            try:
                trial = Trial(case, dtype, case.tensors(dtype, 0, resized(case, sizes)))
            except (RuntimeError, IndexError, ValueError, ArithmeticError):
                continue  # the operands do not go together at these sizes
            trial.check_drawn()


WAYS = [(mode, rank) for mode in ("nearest", "linear") for rank in (1, 2, 3)] + [("cubic", 2)]  # those that PyTorch has


@pytest.mark.parametrize(("mode", "rank"), WAYS)
@given(data=st.data())
def test_resize(mode, rank, data):
    """To sizes, or by factors: larger, smaller, one element, no batch or no channels."""
    x = [data.draw(st.sampled_from([0, 1, 2]), label="batch"), data.draw(st.sampled_from([0, 1, 3]), label="channels")]
    x += data.draw(st.lists(st.integers(1, 9), min_size=rank, max_size=rank), label="sizes")
    align = None if mode == "nearest" else data.draw(st.booleans(), label="align_corners")
    way = {"size": st.integers(1, 19)}
    if not align:  # PyTorch's corners at a factor are those of the rounded size
        way["scale"] = st.sampled_from([0.3, 0.5, 0.9, 1.0, 1.5, 2.0, 2.6])
    name = data.draw(st.sampled_from(sorted(way)), label="by")
    new = data.draw(st.lists(way[name], min_size=rank, max_size=rank), label="new")
    case = resize(x, mode, align=align, **{name: tuple(new)})
    try:
        trial = Trial(case, "float32")
    except (RuntimeError, ValueError):
        assume(False)  # PyTorch has no such result
    assert trial.tensors[0].shape == torch.Size(x)
    trial.check_drawn()
