"""Formulas of C become expressions of Triton: by precedence, with C's types, or not at all."""

from types import SimpleNamespace

import pytest
import torch

from ortmodule import _core
from ortmodule.core.errors import NotInTriton
from ortmodule.triton_kernels import formulas
from ortmodule.triton_kernels.formulas import Formula, Term, translated

#: Triton's functions, by torch's, so that expressions can be computed.
TL = SimpleNamespace(
    float32=torch.float32, float64=torch.float64, int64=torch.int64, int32=torch.int32, int1=torch.bool,
    where=torch.where, div_rn=torch.div, sqrt_rn=torch.sqrt, sqrt=torch.sqrt, abs=torch.abs, floor=torch.floor,
    ceil=torch.ceil, full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
)  # fmt: skip
X, Y = torch.tensor([-2.5, 0.0, 3.0]), torch.tensor([4.0, 0.5, 3.0])


def computed(text, kind="float32", to="", before="", x=X, y=Y):
    operands = [Term("x", kind == "bool"), Term("y", kind == "bool")]
    lines, result = translated(Formula(2, kind, to or kind, text, before), operands, ["p", "q"], "s_")
    names = {"tl": TL, "libdevice": torch, "x": x, "y": y, "p": torch.tensor(2.0), "q": torch.tensor(0.5)}
    for line in lines:
        exec(line, names)
    return eval(result, names)


FLOATS = {
    "x + y * 2": lambda x, y: x + y * 2,
    "(x + y) * 2": lambda x, y: (x + y) * 2,
    "x - y - 1": lambda x, y: x - y - 1,
    "-x * -y": lambda x, y: x * y,
    "1 / (1 + exp(-x))": lambda x, y: torch.sigmoid(x),
    "x < y ? x : y": torch.minimum,
    "x < 0 ? x : x < 1 ? y : 7": lambda x, y: torch.where(x < 0, x, torch.where(x < 1, y, 7.0)),
    "x > 0 && y > 1 ? 1 : 0": lambda x, y: ((x > 0) & (y > 1)).float(),
    "!(x > 0) ? x : y": lambda x, y: torch.where(x > 0, y, x),
    "x == y": lambda x, y: (x == y).float(),
    "sqrt(fabs(x)) + p0 * p1": lambda x, y: x.abs().sqrt() + 1.0,
    "(real)0.5 * x + (real)1 / 4": lambda x, y: 0.5 * x + 0.25,
    "floor(x) - ceil(y)": lambda x, y: x.floor() - y.ceil(),
    "x < -INFINITY ? 0 : x": lambda x, y: x,
}


@pytest.mark.parametrize("text", FLOATS)
def test_floats(text):
    torch.testing.assert_close(computed(text), FLOATS[text](X, Y))


def test_what_comes_before():
    found = computed("a * b", before="const real a = x + 1; const real b = a * y")
    torch.testing.assert_close(found, (X + 1) * (X + 1) * Y)


def test_integers_and_truths():
    a, b = torch.tensor([5, -3]), torch.tensor([3, 6])
    assert computed("x & y | 8", "int64", x=a, y=b).tolist() == ((a & b) | 8).tolist()
    assert computed("x << 2 ^ ~y", "int64", x=a, y=b).tolist() == ((a << 2) ^ ~b).tolist()
    assert computed("x < y", "int64", "bool", x=a, y=b).tolist() == [False, True]
    true, false = torch.tensor([True, False]), torch.tensor([True, True])
    assert computed("x ^ y", "bool", x=true, y=false).tolist() == [False, True]


@pytest.mark.parametrize(
    "text, why",
    [
        ("x +", "the end has no meaning"), ("x y", "y is left of"), ("z0 + x", "z0 has no meaning"),
        ("x ? y", ": expected, nothing found"), ("cbrt(x)", "there is no cbrt"), ("x @ y", "there is no Triton for"),
    ],
)  # fmt: skip
def test_what_has_no_translation(text, why):
    with pytest.raises(NotInTriton, match=why):
        computed(text)


def test_integers_are_not_divided():
    with pytest.raises(NotInTriton, match="rounds in another way"):
        computed("x / y", "int64")


def test_operators_of_the_table():
    known, found = formulas.formulas(), formulas.pointwise_operators()
    assert len(known) == len(_core.pointwise_formulas()) and {name for name, _, _ in known} >= set(found)
    for name in ("Add", "Mul", "Exp", "Erf", "Sigmoid"):
        assert "float32" in found[name], name
    assert "DropoutTrain" in found  # its draws are written elsewhere
