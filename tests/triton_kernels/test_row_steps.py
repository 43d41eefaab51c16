"""Every operator of rows writes an expression for each result, and names its values once."""

import re

import pytest

from ortmodule.triton_kernels.row_steps import ROW_OPERATORS, Rows

OPERANDS = {
    "SoftmaxGrad": ("dy", "y"), "LogSoftmaxGrad": ("dy", "y"), "LayerNormalization": ("x", "scale", "bias"),
    "RMSNormalization": ("x", "scale"), "LayerNormGrad": ("dy", "x", "scale", "inverse", "mean", None),
    "RMSNormGrad": ("dy", "x", None, "inverse", None, "addend"),
}  # fmt: skip
RESULTS = {"LayerNormalization": 3, "RMSNormalization": 2, "LayerNormGrad": 3, "RMSNormGrad": 3}


def written(operator, kind, operands=None):
    lines = []
    rows = Rows(lines.append, "s1_", kind, "epsilon")
    return lines, ROW_OPERATORS[operator](rows, *(operands or OPERANDS.get(operator, ("x",))))


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("operator", ROW_OPERATORS)
def test_expressions(operator, kind):
    lines, results = written(operator, kind)
    assert len(results) == RESULTS.get(operator, 1)
    names = [line.partition(" = ")[0] for line in lines]
    assert len(set(names)) == len(names) and all(name.startswith("s1_") for name in names)
    for text in (*lines, *results):
        compile(text, operator, "exec")  # as Python, which Triton is
        assert ("tl.div_rn" in text or "tl.sqrt_rn" in text) <= (kind == "float32")
    for name in names:
        assert any(re.search(rf"\b{name}\b", text) for text in (*lines, *results) if not text.startswith(f"{name} = "))


def test_what_is_absent_is_left_out():
    _, (without, *_) = written("LayerNormalization", "float32", ("x",))
    _, (scaled, *_) = written("LayerNormalization", "float32", ("x", "scale", "bias"))
    assert scaled == f"{without} * scale + bias"


def test_elements_beyond_a_row_do_not_count():
    lines, (result,) = written("ReduceMax", "float32")
    assert "tl.where(is_there, x, float('-inf'))" in lines[0]
    assert "float('nan')" in result  # where there is one
