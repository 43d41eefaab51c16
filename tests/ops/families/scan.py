"""Cases of csrc/ops/reductions/scan.c."""

import math

from tests.ops.cases import INT, Case, t, value

NAN, INF = math.nan, math.inf
SHAPES = [((7,), 0), ((3, 5), 1), ((3, 5), 0), ((2, 3, 4), -2), ((2, 3, 4), 0), ((), 0), ((0, 3), 1), ((70, 33), 0)]
SPECIAL = [1.0, -INF, 2.0, 0.0, -0.0, INF, 3.0, NAN, 1.0, INF]


def largest(axis):
    return lambda x: x.cummax(axis)[1]


def smallest(axis):
    return lambda x: x.cummin(axis)[1]


CASES = [
    *(
        case
        for shape, axis in SHAPES
        for case in (
            # Of up to 70 factors: near 1, so that products are neither huge nor nothing.
            Case(
                "ortmodule::CumProd",
                [t(*shape, low=0.5, high=1.6) if 70 in shape else t(*shape)],
                lambda x, a=axis: x.cumprod(a),
                attrs={"axis": axis},
            ),
            Case("ortmodule::LogCumSumExp", [t(*shape)], lambda x, a=axis: x.logcumsumexp(a), attrs={"axis": axis}),
            Case("ortmodule::CumArgMax", [t(*shape)], largest(axis), attrs={"axis": axis}, grad=False),
            Case("ortmodule::CumArgMin", [t(*shape)], smallest(axis), attrs={"axis": axis}, grad=False),
        )
    ),
    Case("ortmodule::CumProd", [t(3, 4)], lambda x: x.cumprod(1), dtypes=(*INT, "bool"), name="integers"),
    Case(
        "ortmodule::CumProd",
        [value([[2.0, 0.0, 3.0, 4.0], [0.0, 2.0, 0.0, 5.0], [1.0, 2.0, 3.0, 0.0]])],
        lambda x: x.cumprod(1),
        name="zeros",
    ),
    Case("ortmodule::CumProd", [value(SPECIAL)], lambda x: x.cumprod(0), grad=False, name="special"),
    Case("ortmodule::LogCumSumExp", [value(SPECIAL)], lambda x: x.logcumsumexp(0), grad=False, name="special"),
    Case("ortmodule::LogCumSumExp", [value([-INF, -INF, 1.0, -INF, 2.0])], lambda x: x.logcumsumexp(0), grad=False),
    Case(
        "ortmodule::LogCumSumExp",
        [value([-1e2, 1e2, 0.0, -1e2, 1e2])],
        lambda x: x.logcumsumexp(0),
        fd=False,
        dtypes=("float32", "float64"),
        tol=10,  # the sums are large, and exponentials of their differences wanted
        name="far apart",
    ),
    *(
        case
        for op, ref in (("CumArgMax", largest(-1)), ("CumArgMin", smallest(-1)))
        for case in (
            Case(f"ortmodule::{op}", [t(3, 9)], ref, grad=False, dtypes=(*INT, "bool"), name="integers"),
            Case(f"ortmodule::{op}", [value(SPECIAL)], ref, grad=False, name="special"),
            Case(f"ortmodule::{op}", [value([1.0, 3.0, 3.0, 1.0, 1.0, 3.0])], ref, grad=False, name="ties"),
        )
    ),
]
