"""Products of groups of rows on the emulated GPU: of 16-bit floats by steps of tensor cores (tensor.h).

The emulator gathers what the lanes of a warp have by the definition of such a step, and multiplies.
"""

import math

import pytest
import torch

from ortmodule import _core
from tests.cuda.test_emulated import driver  # noqa: F401  (a fixture)
from tests.cuda.test_products import session
from tests.ops.harness import dtype_name
from tests.tolerances import OPERATOR, bounds

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def grouped(a, b, ends):
    """Rows r of a, of group e, times b[e]; zeros behind the last group."""
    begin, parts = 0, []
    for e, end in enumerate(ends.tolist()):
        end = min(max(end, begin), len(a))
        parts.append(a[begin:end] @ b[e])
        begin = end
    return torch.cat([*parts, a.new_zeros(len(a) - begin, b.shape[2])])


def compare(a, b, ends, transposed):
    """Result and gradients; ``transposed``: b is stored [groups, columns, inner]."""
    kind = a.dtype
    rows = [("ortmodule::GroupedMatMul", "a b c", {})]
    if transposed:
        rows = [("Transpose", "b", {"perm": [0, 2, 1]}), ("ortmodule::GroupedMatMul", "a t0 c", {})]
    wide = [t.double().requires_grad_() for t in (a, b)]
    y = grouped(wide[0], wide[1].mT if transposed else wide[1], ends)
    run = session(rows, [a, b, ends]).run([a, b, ends], [True, True, False], [True])
    dy = torch.randn(y.shape, dtype=torch.float64).to(kind)
    found = [run.outputs[0], *run.backward([dy])[:2]]
    expected = [y.detach(), *torch.autograd.grad(y, wide, dy.double())]
    for ours, theirs in zip(found, expected, strict=True):
        off = (ours.double() - theirs).abs()
        assert bool((off <= bounds(theirs, *OPERATOR[kind], most=math.inf)).all()), f"off by {off.max():.3g}"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", FLOATS, ids=dtype_name)
@pytest.mark.parametrize(
    "rows, inner, columns, ends",
    [
        (1, 1, 1, [1]),
        (5, 3, 7, [2, 2, 5]),
        (64, 32, 64, [64]),
        (65, 33, 65, [1, 65]),
        (130, 72, 40, [70, 70, 129]),  # lines that eight elements are read from at once
        (30, 40, 24, [0, 0, 0]),
        (12, 16, 8, [8, 4, 99]),  # ends that go back, and beyond
    ],
)
def test_groups(driver, kind, rows, inner, columns, ends, transposed):  # noqa: F811
    torch.manual_seed(0)
    a = torch.randn(rows, inner).to(kind)
    b = torch.randn(len(ends), columns, inner) if transposed else torch.randn(len(ends), inner, columns)
    compare(a, b.to(kind), torch.tensor(ends), transposed)
    compare(a, b.to(kind), torch.tensor(ends, dtype=torch.int32), transposed)


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("kind", FLOATS, ids=dtype_name)
def test_operands_of_any_alignment(driver, kind, offset):  # noqa: F811
    torch.manual_seed(0)
    a = torch.randn(20 * 24 + offset).to(kind)[offset:].view(20, 24)
    b = torch.randn(2 * 24 * 16 + offset).to(kind)[offset:].view(2, 24, 16)
    compare(a, b, torch.tensor([9, 20]), False)


@pytest.mark.parametrize("kind", FLOATS, ids=dtype_name)
def test_what_is_no_number_stays_in_its_group(driver, kind):  # noqa: F811
    """Places that a tile fills with zeros meet no infinity of another group."""
    a, b = torch.ones(6, 5).to(kind), torch.ones(2, 5, 4).to(kind)
    b[1] = float("inf")
    y = session([("ortmodule::GroupedMatMul", "a b c", {})], [a, b, torch.tensor([3, 6])])
    y = y.run([a, b, torch.tensor([3, 6])], [False] * 3).outputs[0]
    assert y[:3].eq(5).all() and y[3:].eq(float("inf")).all()
