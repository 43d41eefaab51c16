"""Cases of csrc/ops/pointwise/binary.c."""

import math

import torch
import torch.nn.functional as F

from tests.ops.cases import FLOAT, INT, Case, bools, ints, t, value

NAN, INF = math.nan, math.inf
# Every way two shapes meet: the same, a bias, a row mask, both sides, scalars, a column, long runs, empty.
MEETINGS = [
    ((3, 5), (3, 5)),
    ((4, 7), (7,)),
    ((2, 3, 4, 5), (2, 1, 1, 5)),
    ((2, 3, 5), (3, 1)),
    ((3, 1), (1, 4)),
    ((2, 3), ()),
    ((), (2, 3)),
    ((), ()),
    ((1, 1), (2, 3)),
    ((5, 2048), (2048,)),
    ((3, 1), (3, 1500)),
    ((2, 700, 3), (700, 1)),
    ((2, 1, 3, 1, 5), (4, 1, 2, 1)),
    ((0, 3), (3,)),
    ((2, 1), (2, 0)),
]
ODD = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.5, -7.0]
PAIRS = ([a for a in ODD for _ in ODD], [b for _ in ODD for b in ODD])
INT_PAIRS = ([a for a in (-7, -1, 0, 1, 7, 3, -4) for _ in range(6)], [-3, -1, 1, 2, 3, 5] * 7)
SMALLEST = -(2**63)


def divide(x, y):
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def floor_divide(x, y):
    return torch.div(x, y, rounding_mode="floor")


def huber(delta, over=1.0):
    if over == 1:
        return lambda x, y: F.huber_loss(*torch.broadcast_tensors(x, y), "none", delta)
    return lambda x, y: F.smooth_l1_loss(*torch.broadcast_tensors(x, y), reduction="none", beta=over)


def with_domain(op, shape, positive):
    return t(*shape, low=0.3, high=3) if positive else t(*shape)


ARITHMETIC = [("Add", torch.add, False), ("Sub", torch.sub, False), ("Mul", torch.mul, False), ("Div", divide, True)]
EXTREMES = [("Max", torch.maximum), ("Min", torch.minimum)]

CASES = [
    *(
        Case(
            op,
            [with_domain(op, a, positive), with_domain(op, b, positive)],
            ref,
            dtypes=FLOAT if i == 0 else ("float32", "float64"),
            large=[t(1024, 1024), t(1024, 1024)] if i == 0 else None,
            resize=i < 5,
        )
        for op, ref, positive in [*ARITHMETIC, ("Pow", torch.pow, True)]
        for i, (a, b) in enumerate(MEETINGS)
    ),
    *(
        case
        for op, ref, _ in ARITHMETIC
        for case in (
            Case(op, [t(2, 3, 5), t(3, 1, low=0.5, high=2)], ref, dtypes=("bfloat16", "float16"), name="narrow"),
            Case(op, [value(PAIRS[0]), value(PAIRS[1])], ref, fd=False, grad=op != "Div", name="special"),
            Case(op, [ints(4, 1500, low=-50, high=50), value(7)], ref, dtypes="int64", name="by number"),
            Case(op, [value(INT_PAIRS[0]), value(INT_PAIRS[1])], ref, dtypes=("int64", "int32", "int16", "int8")),
        )
    ),
    *(Case(op, [t(2, 3, 4), t(3, 1)], ref, dtypes=INT) for op, ref, _ in ARITHMETIC[:3]),
    Case("Div", [t(2, 3, 4, low=0, high=100), t(3, 1, low=1, high=9)], divide, dtypes=INT),
    *(
        Case(op, [value([100, 200, 255]), value([100, 100, 2])], ref, dtypes="uint8", name="wraps")
        for op, ref, _ in ARITHMETIC[:3]
    ),
    Case("Div", [value([SMALLEST, 5]), value([-1, 3])], lambda x, y: torch.tensor([SMALLEST, 1]), dtypes="int64"),
    Case("Add", [bools(3, 4), bools(4)], torch.add, dtypes="bool"),
    Case("Mul", [bools(3, 4), bools(4)], torch.mul, dtypes="bool"),
    Case("Max", [bools(3, 4), bools(4)], torch.maximum, dtypes="bool"),
    Case("Min", [bools(3, 4), bools(4)], torch.minimum, dtypes="bool"),
    Case("Add", [t(3, 4), value(0.0)], torch.add, const=1, name="zero"),
    Case("Add", [value(0.0), t(3, 4)], torch.add, const=0, name="zero first"),
    Case("Add", [t(4), value([[0.0], [0.0]])], torch.add, const=1, name="zeros that broadcast"),
    Case("Sub", [t(3, 4), value(0.0)], torch.sub, const=1, name="zero"),
    Case("Sub", [value(0.0), t(3, 4)], torch.sub, const=0, name="from zero"),
    Case("Mul", [t(3, 4), value(1.0)], torch.mul, const=1, name="one"),
    Case("Mul", [value([1.0]), t(3, 4)], torch.mul, const=0, name="one first"),
    Case("Mul", [value([NAN, INF, 1.0]), value(0.0)], torch.mul, const=1, fd=False, name="zero"),
    Case("Div", [t(3, 4), value(1.0)], torch.div, const=1, name="one"),
    # --- Pow
    *(
        Case("Pow", [t(3, 5, low=0.3, high=2), value(y)], lambda x, y: x ** y.item(), const=1, name=f"to {y}")
        for y in (0.0, 1.0, 2.0, 3.0, 0.5, -1.0, -2.0, -0.5, 4.0, 1.7)
    ),
    *(
        Case(
            "Pow",
            [value([NAN, INF, -INF, 0.0, -0.0, 1.5, -1.5]), value(y)],
            lambda x, y: x ** y.item(),
            const=1,
            fd=False,
            dtypes=("float32", "float64"),
            grad=y != -0.5,  # of -0 and -infinity: of the other sign, and NaN
            name=f"special to {y}",
        )
        for y in (0.0, 1.0, 2.0, 3.0, 0.5, -1.0, -2.0, -0.5, 4.0, 1.5)
    ),
    Case(
        "Pow",
        [value([1e10, -1e12, 1e-10, 2.0, -3e8]), value(-2.0)],
        lambda x, y: x ** y.item(),
        const=1,
        fd=False,
        dtypes=("float32", "float64"),
        name="far to -2",
    ),
    Case(
        "Pow",
        [value([0.0, 0.0, 0.0, 2.0, -2.0, -2.0, 3.0, 0.0]), value([0.0, 2.0, -1.0, 0.0, 2.0, 3.0, -1.5, 1.0])],
        torch.pow,
        fd=False,
        name="zeros and signs",
    ),
    Case("Pow", [t(3, 4, low=0.3, high=2), ints(4, low=-2, high=4)], lambda x, y: x ** y.to(x.dtype), name="whole"),
    Case("Pow", [t(3, 4, low=0.3, high=2), value(2, "int64")], lambda x, y: x**2, const=1, name="whole number"),
    Case("Pow", [value(2.0), t(3, 4)], torch.pow, const=0, name="of a number"),
    Case("Pow", [value(0.0), t(3, 4)], torch.pow, const=0, name="of zero", fd=False),
    Case("Pow", [ints(3, 4, low=-4, high=5), ints(3, 4, low=0, high=6)], torch.pow, dtypes=("int64",), name="integers"),
    Case(
        "Pow",
        [value([1, -1, -1, 2, 0, 3, 10]), value([-3, -3, -2, -1, 0, 40, 19])],
        torch.pow,
        dtypes=("int64", "int32"),
        name="negative exponents",
    ),
    *(
        Case(
            "Pow",
            [ints(3, 4, low=0, high=6), value(y, "int64")],
            lambda x, y: x**y,
            const=1,
            dtypes="int64",
            name=f"whole to {y}",
        )
        for y in (0, 1, 2, 3)
    ),
    Case(
        "Pow",
        [ints(5, low=0, high=9), value(1.5, "float32")],
        lambda x, y: (x.double() ** 1.5).long(),
        dtypes="int64",
        const=1,
        name="whole to fraction",
    ),
    # --- Mod
    Case("Mod", [t(3, 5, low=-9, high=9), t(5, low=0.5, high=4)], torch.fmod, attrs={"fmod": 1}, fd=False),
    Case("Mod", [value(INT_PAIRS[0]), value(INT_PAIRS[1])], torch.fmod, attrs={"fmod": 1}, fd=False, name="signs"),
    Case("Mod", [value(PAIRS[0]), value(PAIRS[1])], torch.fmod, attrs={"fmod": 1}, grad=False, name="special"),
    Case("Mod", [value(INT_PAIRS[0]), value(INT_PAIRS[1])], torch.fmod, attrs={"fmod": 1}, dtypes=INT[:4]),
    Case("Mod", [value(INT_PAIRS[0]), value(INT_PAIRS[1])], torch.remainder, dtypes=INT[:4]),
    Case("Mod", [value([200, 255]), value([7, 16])], torch.remainder, dtypes="uint8"),
    Case("Mod", [value([SMALLEST, 5]), value([-1, 3])], lambda x, y: torch.tensor([0, 2]), dtypes="int64"),
    # --- PyTorch's division: floor, and the remainder of it
    *(
        case
        for op, ref in (("ortmodule::FloorDiv", floor_divide), ("ortmodule::Remainder", torch.remainder))
        for case in (
            Case(op, [t(3, 5, low=-9, high=9), t(5, low=0.5, high=4)], ref, fd=False),
            Case(op, [value(PAIRS[0]), value(PAIRS[1])], ref, grad=False, name="special"),
            Case(op, [value(INT_PAIRS[0]), value(INT_PAIRS[1])], ref, dtypes=INT[:4], name="integers"),
            Case(op, [value([200, 255]), value([7, 16])], ref, dtypes="uint8"),
            Case(op, [value([0.3, 6.0, -1.0, 1e20]), value([0.1, 0.1, 3.0, 7.0])], ref, fd=False, name="near"),
        )
    ),
    *(Case("ortmodule::Atan2", [t(*a), t(*b)], torch.atan2, resize=i < 5) for i, (a, b) in enumerate(MEETINGS[:6])),
    Case("ortmodule::Atan2", [value(PAIRS[0]), value(PAIRS[1])], torch.atan2, grad=False, name="special"),
    *(Case("ortmodule::Hypot", [t(*a), t(*b)], torch.hypot, resize=i < 5) for i, (a, b) in enumerate(MEETINGS[:6])),
    Case("ortmodule::Hypot", [value(PAIRS[0]), value(PAIRS[1])], torch.hypot, grad=False, name="special"),
    *(
        Case(
            "ortmodule::Huber",
            [t(*a), t(*b)],
            huber(0.7),
            resize=i < 5,
            dtypes=FLOAT if i == 0 else ("float32",),
            attrs={"delta": 0.7},
            large=[t(1024, 1024), t(1024, 1024)] if i == 0 else None,
        )
        for i, (a, b) in enumerate(MEETINGS)
    ),
    Case("ortmodule::Huber", [t(3, 5), t(5)], huber(0.3, 0.3), attrs={"delta": 0.3, "over": 0.3}, name="smooth"),
    Case("ortmodule::Huber", [value(PAIRS[0]), value(PAIRS[1])], huber(1.0), fd=False, name="special"),
    Case(
        "ortmodule::Huber",
        [value(PAIRS[0]), value(PAIRS[1])],
        huber(0.5, 0.5),
        fd=False,
        name="special, smooth",
        attrs={"delta": 0.5, "over": 0.5},
    ),
    # --- Max, Min, Sum, Mean
    *(
        case
        for op, ref in EXTREMES
        for case in (
            *(Case(op, [t(*a), t(*b)], ref, resize=i < 5) for i, (a, b) in enumerate(MEETINGS)),
            Case(op, [t(3, 4), t(4)], ref, dtypes=INT),
            Case(op, [value(PAIRS[0]), value(PAIRS[1])], ref, fd=False, name="special"),
            Case(op, [t(3, 4)], lambda x: x.clone(), name="one operand"),
            Case(op, [t(3, 4), t(4), t(3, 1)], lambda x, y, z, ref=ref: ref(ref(x, y), z), name="three"),
            Case(op, [t(3, 4), t(4), t(), t(2, 1, 1)], lambda *x, ref=ref: ref(ref(ref(x[0], x[1]), x[2]), x[3])),
        )
    ),
    Case("Sum", [t(3, 4)], lambda x: x.clone(), name="one operand"),
    Case("Sum", [t(3, 4), t(3, 4)], torch.add),
    Case("Sum", [t(3, 4), t(4), t(2, 1, 1)], lambda x, y, z: x + y + z, name="three"),
    Case("Mean", [t(3, 4)], lambda x: x.clone(), name="one operand"),
    Case("Mean", [t(3, 4), t(4), t(2, 1, 1)], lambda x, y, z: (x + y + z) / 3, name="three"),
]
