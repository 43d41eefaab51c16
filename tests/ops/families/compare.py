"""Cases of csrc/ops/pointwise/compare.c."""

import math

import torch

from tests.ops.cases import FLOAT, INT, NUMBER, Case, bools, t, value

NAN, INF = math.nan, math.inf
ODD = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0]
PAIRS = ([a for a in ODD for _ in ODD], [b for _ in ODD for b in ODD])
MEETINGS = [((3, 5), (3, 5)), ((4, 7), (7,)), ((2, 3, 1), (3, 1500)), ((), (2, 3)), ((), ()), ((0, 3), (3,))]
COMPARISONS = [
    ("Equal", torch.eq),
    ("Less", torch.lt),
    ("LessOrEqual", torch.le),
    ("Greater", torch.gt),
    ("GreaterOrEqual", torch.ge),
]
LOGIC = [("And", torch.logical_and), ("Or", torch.logical_or), ("Xor", torch.logical_xor)]
BITS = [("BitwiseAnd", torch.bitwise_and), ("BitwiseOr", torch.bitwise_or), ("BitwiseXor", torch.bitwise_xor)]


def shift_left(x, y):
    return torch.where(y >= 64, 0, x << y.clamp(max=63))


def shift_right(x, y):
    return x >> y.clamp(max=8 * x.itemsize - 1) if x.dtype != torch.uint8 else torch.where(y >= 8, 0, x >> y)


CASES = [
    *(
        case
        for op, ref in COMPARISONS
        for case in (
            *(
                Case(op, [t(*a), t(*b)], ref, dtypes=NUMBER if i == 0 else ("float32", "int64"))
                for i, (a, b) in enumerate(MEETINGS)
            ),
            Case(op, [value(PAIRS[0]), value(PAIRS[1])], ref, dtypes=FLOAT, name="special"),
            Case(op, [t(5, 300, low=-1, high=1), value(0)], ref, dtypes=INT, name="with number"),
        )
    ),
    Case("Equal", [bools(3, 4), bools(4)], torch.eq, dtypes="bool"),
    Case("Equal", [value([2**53, 2**53 + 1]), value([2**53 + 1, 2**53 + 1])], torch.eq, dtypes="int64", name="large"),
    Case("IsNaN", [t(6, 7, special=True)], torch.isnan, opset=20),
    Case("IsNaN", [t(0)], torch.isnan, name="empty"),
    Case("ortmodule::SignBit", [t(6, 7, special=True)], torch.signbit),
    Case("ortmodule::SignBit", [t(2, 5)], torch.signbit),
    Case("IsInf", [t(6, 7, special=True)], torch.isinf, opset=20),
    Case("IsInf", [t(6, 7, special=True)], torch.isposinf, attrs={"detect_negative": 0}, opset=20, name="positive"),
    Case("IsInf", [t(6, 7, special=True)], torch.isneginf, attrs={"detect_positive": 0}, opset=20, name="negative"),
    *(
        case
        for op, ref in LOGIC
        for case in (
            *(Case(op, [bools(*a), bools(*b)], ref, dtypes="bool") for a, b in MEETINGS),
            Case(op, [bools(3, 4), value(True)], ref, dtypes="bool", const=1, name="with true"),
            Case(op, [value(False), bools(3, 4)], ref, dtypes="bool", const=0, name="with false"),
            Case(op, [bools(4), value([[True], [True]])], ref, dtypes="bool", const=1, name="true over rows"),
        )
    ),
    Case("Not", [bools(3, 5)], torch.logical_not, dtypes="bool"),
    Case("Not", [bools()], torch.logical_not, dtypes="bool", name="scalar"),
    Case("Not", [bools(0)], torch.logical_not, dtypes="bool", name="empty"),
    *(Case(op, [t(3, 4, low=-100, high=100), t(4, low=-100, high=100)], ref, dtypes=INT) for op, ref in BITS),
    Case("BitwiseNot", [t(3, 4, low=-100, high=100)], torch.bitwise_not, dtypes=INT),
    Case(
        "BitShift",
        [value([1, 3, 255, 128, 1]), value([0, 2, 1, 7, 3])],
        shift_left,
        attrs={"direction": "LEFT"},
        dtypes=("uint8",),
    ),
    Case(
        "BitShift",
        [value([1, 3, 255, 128, 9]), value([0, 1, 4, 7, 9])],
        shift_right,
        attrs={"direction": "RIGHT"},
        dtypes=("uint8",),
    ),
]
