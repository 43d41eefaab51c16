"""Cases of csrc/ops/fused.c: chains of pointwise nodes, of which passes/pointwise_fusion.c makes one."""

import torch

from tests.ops.cases import Case, t, value

FLOATS = ("float32", "float64", "bfloat16", "float16")


def chain(name, inputs, ref, *nodes, op="ortmodule::Fused", **kwargs):
    return Case(op, inputs, ref, name=name, nodes=nodes, dtypes=kwargs.pop("dtypes", FLOATS), **kwargs)


SCALED_SUM = [("Mul", "x0 x1", "p"), ("Add", "p x2", "y0")]
GATED = [("Sigmoid", "x0", "s"), ("Mul", "x0 s", "a"), ("Mul", "a x1", "y0")]
TREE = [("Exp", "x0", "e"), ("Sin", "x1", "s"), ("Mul", "e s", "p"), ("Sub", "p x0", "y0")]
CHOICE = [("Less", "x0 x1", "below"), ("Where", "below x0 x1", "least"), ("Tanh", "least", "y0")]
CASTS = [("Cast", "x0", "wide", {"to": 11}), ("Mul", "wide wide", "square"), ("Cast", "square", "y0", {"to": 1})]
INTEGERS = [("Mul", "x0 x1", "p"), ("Add", "p x0", "s"), ("Neg", "s", "y0")]
TWO = [("Add", "x0 x1", "y0"), ("Mul", "x0 y0", "y1")]
DROPPED = [("Dropout", "x0 x2 x3", "d"), ("Add", "d x1", "y0")]


def gated(x, y):
    return x * x.sigmoid() * y


def choice(x, y):
    return torch.where(x < y, x, y).tanh()


def squared(x):
    return x.double().square().float()


def dropped(x, y, *_):
    """At a rate of 1 nothing is left of x."""
    return x * 0 + y


CASES = [
    chain("scaled-sum", [t(2, 3, 5), t(5), t(2, 3, 5)], lambda x, s, y: x * s + y, *SCALED_SUM),
    chain("columns", [t(4, 1), t(4, 300), t(300)], lambda x, s, y: x * s + y, *SCALED_SUM),
    chain("gated", [t(3, 700), t(3, 700)], gated, *GATED, fd=False),
    chain("gated", [t(2, 3, 4), t(3, 1)], gated, *GATED),
    chain("tree", [t(3, 4), t(3, 4)], lambda x, y: x.exp() * y.sin() - x, *TREE),
    chain("choice", [t(3, 5), t(3, 5)], choice, *CHOICE, fd=False),
    chain("special", [t(7, 40, special=True), t(7, 40, special=True)], gated, *GATED),
    chain("casts", [t(5, 7)], squared, *CASTS, dtypes=("float32", "bfloat16", "int64", "uint8", "bool"), fd=False),
    chain("integers", [t(3, 5), t(5)], lambda x, y: -(x * y + x), *INTEGERS, grad=False,
          dtypes=("int64", "int32", "int16", "int8")),
    chain("two-results", [t(3, 5), t(5)], lambda x, y: (x + y, x * (x + y)), *TWO, outputs=2),
    chain("empty", [t(0, 4), t(0, 4)], gated, *GATED, resize=False),
    chain("dropout", [t(3, 900), t(900), value(1.0, "float32"), value(True, "bool")], dropped, *DROPPED,
          op="ortmodule::FusedRandom", const=(2, 3), fd=False),
]  # fmt: skip
