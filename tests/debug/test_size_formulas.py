"""Formulas are found for figures that are polynomials in sizes, and none for others."""

import pytest

from ortmodule.debug.memory.size_formulas import Formulas


def found(shapes, figure, pinned=(), names=("x", "y")):
    formulas = Formulas(shapes, names, frozenset(pinned), figure)
    return formulas.find()


@pytest.mark.parametrize(
    "figure, text",
    [
        (lambda s: [4 * s[0][0]], "4*x_dim0"),
        (lambda s: [s[0][0] * s[0][1] ** 2 + 3], "1*x_dim0*x_dim1**2 + 3"),
        (lambda s: [s[0][1] - 8 * s[0][0]], "1*x_dim1 - 8*x_dim0"),
        (lambda s: [0], "0"),
    ],
)
def test_polynomials(figure, text):
    assert found(((4, 16),), figure).text(0, 1) == text


def test_sums_of_figures():
    formulas = found(((4,),), lambda s: [s[0][0], 2 * s[0][0], 5])
    assert formulas.text(0, 2) == "3*x_dim0" and formulas.text(1, 3) == "2*x_dim0 + 5"


def test_what_is_no_polynomial():
    formulas = found(((4,),), lambda s: [2 ** s[0][0], s[0][0]])
    assert formulas.text(0, 1) == "" and formulas.text(1, 2) == "1*x_dim0"


def test_sizes_that_belong_together():
    def figure(shapes):
        (a, b), (c,) = shapes
        return [a * b] if b == c else None

    assert found(((4, 16), (16,)), figure, pinned=[]).text(0, 1) == "1*x_dim0*x_dim1"


def test_pinned_sizes_stay():
    def figure(shapes):
        assert shapes[0][1] == 16
        return [shapes[0][0] * 16]

    assert found(((4, 16),), figure, pinned=[(0, 1)]).text(0, 1) == "16*x_dim0"


def test_sizes_with_divisors():
    assert found(((8,),), lambda s: [s[0][0]] if s[0][0] <= 8 else None).text(0, 1) == "1*x_dim0"


def test_none():
    assert found(((4,),), lambda s: None) is None
    assert found(((2, 3, 4, 5),), lambda s: [1]) is None  # more variables than are looked at
