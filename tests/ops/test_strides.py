"""Operands that are views: any case, with some of its operands transposed, cut out of larger ones or repeated.

The views are nodes of the model, so the planner hands strides to the kernels that take them and copies to the others;
gradients go back through them.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.ops.cases import CASES, value
from tests.ops.harness import Trial, fed_operands

pytestmark = pytest.mark.emulated


class Viewed:
    """A case whose operands are becoming views."""

    def __init__(self, case, tensors):
        self.case, self.tensors = case, list(tensors)
        self.inputs, self.rows = list(case.inputs), []
        self.names = ["" if x is None else f"x{i}" for i, x in enumerate(tensors)]
        self.views = [lambda x: x] * len(tensors)
        self.extra = []

    def constant(self, numbers):
        """One more operand, a constant; its name."""
        self.extra.append(len(self.inputs))
        self.inputs.append(value(numbers, "int64"))
        self.tensors.append(torch.tensor(numbers))
        return f"x{self.extra[-1]}"

    def become(self, i, stored, op, operands, view, attrs=None):
        self.tensors[i], self.views[i], self.names[i] = stored, view, f"v{i}"
        self.rows.append((op, " ".join([f"x{i}", *operands]), f"v{i}", attrs or {}))

    def transpose(self, data, i):
        x = self.tensors[i]
        perm = data.draw(st.permutations(range(x.dim())), label=f"order of operand {i}")
        back = [perm.index(d) for d in range(x.dim())]
        self.become(i, x.permute(back).contiguous(), "Transpose", [], lambda s: s.permute(perm), {"perm": list(perm)})

    def cut(self, data, i):
        x = self.tensors[i]
        axis = data.draw(st.integers(0, x.dim() - 1), label=f"axis of operand {i}")
        start, step = data.draw(st.integers(0, 2), label="start"), data.draw(st.integers(1, 3), label="step")
        end = start + x.shape[axis] * step
        where = (slice(None),) * axis + (slice(start, end, step),)
        shape = list(x.shape)
        shape[axis] = end + data.draw(st.integers(0, 1), label="rest")
        stored = torch.ones(shape, dtype=x.dtype)
        stored[where] = x
        operands = [self.constant([n]) for n in (start, end, axis, step)]
        self.become(i, stored, "Slice", operands, lambda s: s[where])

    def repeat(self, data, i):
        x = self.tensors[i]
        axis = data.draw(st.integers(0, x.dim() - 1), label=f"axis of operand {i}")
        assume(x.shape[axis] > 0)
        stored, shape = x.narrow(axis, 0, 1).clone(), list(x.shape)
        self.become(i, stored, "Expand", [self.constant(shape)], lambda s: s.expand(shape))

    def build(self, dtype):
        case, count = self.case, len(self.case.inputs)
        attributes = case.attributes(dtype)
        outputs = [f"y{i}" if wanted else "" for i, wanted in enumerate(case.wanted)]

        def ref(*tensors):
            return case.ref(*[x if x is None else view(x) for view, x in zip(self.views, tensors[:count], strict=True)])

        return replace(
            case, inputs=self.inputs, ref=ref, const=(*case.const, *self.extra),
            nodes=(*self.rows, (case.op, self.names, outputs, attributes)),
        )  # fmt: skip


SUITED = [case for case in CASES if not case.nodes and not case.call and case.opset >= 13]


@given(data=st.data())
def test_views_of_operands(data):
    case = data.draw(st.sampled_from(SUITED), label="case")
    dtype = data.draw(st.sampled_from(case.dtypes), label="dtype")
    tensors = case.tensors(dtype, data.draw(st.integers(0, 99), label="seed"))
    viewed = Viewed(case, tensors)
    for i in fed_operands(case, tensors):
        x = tensors[i]
        kinds = [None, viewed.transpose, viewed.cut] if x.dim() else [None]
        # Repeated numbers may be no indices that PyTorch defines a result for, nor anything that has a variance.
        if case.op != "BatchNormalization":
            kinds += [viewed.repeat] * (x.dim() > 0 and x.is_floating_point() and case.resize)
        elif i:
            continue  # of weights and statistics that are not contiguous PyTorch's backward reads the wrong elements
        kind = data.draw(st.sampled_from(kinds), label=f"view of operand {i}")
        if kind is not None:
            kind(data, i)
    assume(viewed.rows)
    try:
        trial = Trial(viewed.build(dtype), dtype, viewed.tensors)
    except RuntimeError:
        assume(False)  # PyTorch's own gradient refuses such strides
    # What PyTorch makes of a NaN's gradient may depend on how many elements it takes at a time.
    trial.check_drawn(gradients=not any(x is not None and x.isnan().any() for x in viewed.tensors))
