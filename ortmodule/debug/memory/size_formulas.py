"""Finds formulas for bytes: how they grow with the sizes of inputs, from figures at a few sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

MOST_VARIABLES, POINTS = 3, 3  # sizes that a polynomial of degree 2 is found from
#: (the powers of the variables): coefficient.
Polynomial = dict[tuple[int, ...], Fraction]
#: Shapes of inputs -> figures, or None where there are none.
Measure = Callable[[tuple], Sequence[int] | None]
#: (dimension, its size) -> the same for dimensions of inputs that are one variable.
Same = Callable[[int, int], Any]

#: For a size others to look at: those that keep it divisible first. The last is for a check.
_OTHERS: tuple[Callable[[int], tuple[int, int, int]], ...] = (
    lambda n: (2 * n, 3 * n, 4 * n),
    lambda n: (n // 2, n // 4, 3 * n // 4),
    lambda n: (n - 1, n - 2, n - 3),
)


class Formulas:
    """Of figures that are polynomials in sizes, of degree 2 at most in each of them."""

    def __init__(
        self, shapes: tuple, names: Sequence[str], pinned: frozenset[tuple[int, int]], measure: Measure
    ) -> None:
        """``shapes``: of inputs; ``names``: theirs. ``pinned``: dimensions (input, dimension) that are the same
        always."""
        self.shapes, self.names, self.pinned, self.measure = shapes, names, pinned, measure
        self.variables: list[str] = []
        self.found: list[Polynomial | None] = []

    def find(self) -> Formulas | None:
        """Itself, once it knows; None where there are no figures at other sizes."""
        ways: tuple[Same, ...] = (lambda d, size: (d, size), lambda d, size: size)
        return self if any(self._fit(same) for same in ways) else None

    def text(self, begin: int, end: int) -> str:
        """Of the sum of the figures [begin, end): "512*ids_dim0*ids_dim1**2 + 4*ids_dim0"; empty where one has none."""
        total: Polynomial = defaultdict(Fraction)
        for polynomial in self.found[begin:end]:
            if polynomial is None:
                return ""
            for powers, coefficient in polynomial.items():
                total[powers] += coefficient
        terms = [
            "*".join([str(coefficient), *(_power(v, p) for v, p in zip(self.variables, powers, strict=True) if p)])
            for powers, coefficient in sorted(total.items(), key=lambda item: (-sum(item[0]), item[0]))
            if coefficient
        ]
        return " + ".join(terms).replace("+ -", "- ") or "0"

    def _fit(self, same: Same) -> bool:
        groups: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for i, shape in enumerate(self.shapes):
            for d, size in enumerate(shape):
                if (i, d) not in self.pinned:
                    groups[same(d, size)].append((i, d))
        places = list(groups.values())
        known: dict[tuple[int, ...], Sequence[int] | None] = {}

        def measured(sizes: tuple[int, ...]) -> Sequence[int] | None:
            if sizes not in known:
                shapes = [list(shape) for shape in self.shapes]
                for group, size in zip(places, sizes, strict=True):
                    for i, d in group:
                        shapes[i][d] = size
                known[sizes] = self.measure(tuple(map(tuple, shapes)))
            return known[sizes]

        now = tuple(self.shapes[group[0][0]][group[0][1]] for group in places)
        if len(places) > MOST_VARIABLES:
            return False

        def along(k: int, size: int) -> Sequence[int] | None:
            return measured((*now[:k], size, *now[k + 1 :]))

        grid = [_points(partial(along, k), size) for k, size in enumerate(now)]
        axes = [points for points in grid if points is not None]
        if len(axes) < len(grid):
            return False
        at = {sizes: measured(sizes) for sizes in product(*(points[:POINTS] for points in axes))}
        check = tuple(points[POINTS] for points in axes)
        expected = measured(check)
        if expected is None or any(row is None for row in at.values()):
            return False
        self.variables = [f"{self.names[group[0][0]]}_dim{group[0][1]}" for group in places]
        for j, figure in enumerate(expected):
            polynomial = _through([points[:POINTS] for points in axes], {s: row[j] for s, row in at.items() if row})
            self.found.append(polynomial if _at(polynomial, check) == figure else None)
        return True


def _points(measured: Callable[[int], Any], size: int) -> list[int] | None:
    """Sizes at which there are figures, beginning with ``size``."""
    for others in _OTHERS:
        points = [size, *others(size)]
        if len(set(points)) == len(points) and min(points) > 0 and all(measured(x) is not None for x in points):
            return points
    return None


def _through(axes: Sequence[Sequence[int]], at: dict[tuple[int, ...], int]) -> Polynomial:
    """The polynomial with these values on the grid of the axes' points."""
    result: Polynomial = defaultdict(Fraction)
    for sizes, value in at.items():
        factors = [_basis(points, size) for points, size in zip(axes, sizes, strict=True)]
        for powers in product(*(range(POINTS) for _ in axes)):
            coefficient = Fraction(value)
            for factor, power in zip(factors, powers, strict=True):
                coefficient *= factor[power]
            result[powers] += coefficient
    return result


def _basis(points: Sequence[int], one: int) -> tuple[Fraction, Fraction, Fraction]:
    """Coefficients of 1, x and x² of the polynomial that is 1 at the point ``one`` and 0 at the two others."""
    a, b = (x for x in points if x != one)
    scale = Fraction(1, (one - a) * (one - b))
    return a * b * scale, -(a + b) * scale, scale


def _at(polynomial: Polynomial, sizes: Sequence[int]) -> Fraction:
    total = Fraction(0)
    for powers, coefficient in polynomial.items():
        for size, power in zip(sizes, powers, strict=True):
            coefficient *= size**power
        total += coefficient
    return total


def _power(name: str, power: int) -> str:
    return name if power == 1 else f"{name}**{power}"
