"""Lists cases of chains of pointwise nodes and reductions, which passes make one node.

Of csrc/ops/chains/fused.c, fused_reduce.c and fused_rows.c, by passes/pointwise_fusion.c and passes/row_fusion.c.
"""

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
SQUARES = [("Sub", "x0 x1", "d"), ("Mul", "d d", "s")]
DROPPED_ROWS = [*DROPPED[:1], ("Mul", "d x1", "p"), ("ReduceSum", "p x4", "y0", {"keepdims": 0})]


def folded(name, inputs, ref, op="ReduceMean", axes=None, keepdims=0, **kwargs):
    """The squares of differences, reduced; with outputs=2 they are a result, too."""
    rows = SQUARES if kwargs.get("outputs") != 2 else [SQUARES[0], ("Mul", "d d", "y1")]
    attrs = {"keepdims": keepdims} | ({} if axes is None else {"axes": axes})
    last = (op, "y1" if kwargs.get("outputs") == 2 else "s", "y0", attrs)
    return chain(name, inputs, ref, *rows, last, op="ortmodule::FusedReduce", opset=kwargs.pop("opset", 17), **kwargs)


#: x over the mean of x y, and more that comes of the mean; behind a dropout.
SHARE = [("Mul", "x0 x1", "p"), ("ReduceMean", "p", "m", {"axes": [-1], "keepdims": 1}), ("Exp", "m", "e")]
SHARE += [("Mul", "x0 e", "q"), ("Sub", "q m", "y0")]
DROPPED_SHARE = [*DROPPED[:1], ("ReduceMax", "d", "m", {"axes": [-1], "keepdims": 1}), ("Add", "d m", "s")]
DROPPED_SHARE += [("Add", "s x1", "y0")]


def share(x, y):
    m = (x * y).mean(-1, True)
    return x * m.exp() - m


def rows(name, inputs, ref, nodes, op="ortmodule::FusedRows", **kwargs):
    """Fewer elements would stay as they are."""
    return chain(name, inputs, ref, *nodes, op=op, opset=17, fd=False, resize=False, **kwargs)


def squares(x, y):
    return (x - y).square()


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
    folded("mean", [t(3, 5), t(3, 5)], lambda x, y: squares(x, y).mean()),
    folded("mean", [t(7, 3000), t(3000)], lambda x, y: squares(x, y).mean(), fd=False),
    folded("rows", [t(4, 300), t(4, 1)], lambda x, y: squares(x, y).mean(-1), axes=[1]),
    folded("rows", [t(3, 5, 2000), t(2000)], lambda x, y: squares(x, y).mean(-1, True), axes=[-1], keepdims=1,
           fd=False),
    folded("columns", [t(2, 40, 9), t(9)], lambda x, y: squares(x, y).mean((0, 1), True), axes=[0, 1], keepdims=1),
    folded("columns", [t(130, 1500), t(130, 1500)], lambda x, y: squares(x, y).mean(0), axes=[0], fd=False),
    folded("largest", [t(3, 90), t(3, 90)], lambda x, y: squares(x, y).amax(-1), "ReduceMax", axes=[1]),
    folded("length", [t(3, 90), t(90)], lambda x, y: squares(x, y).norm(dim=-1), "ReduceL2", axes=[1]),
    folded("special", [t(7, 40, special=True), t(7, 40)], lambda x, y: squares(x, y).mean(-1), axes=[1]),
    folded("two-results", [t(6, 20), t(20)], lambda x, y: (squares(x, y).mean(0), squares(x, y)), axes=[0],
           outputs=2),
    folded("empty", [t(0, 4), t(0, 4)], lambda x, y: squares(x, y).sum(-1), "ReduceL1", axes=[1], resize=False),
    chain("rows", [t(3, 900), t(900), value(1.0, "float32"), value(True, "bool"), value([1], "int64")],
          lambda x, y, *_: (x * 0 * y).sum(-1), *DROPPED_ROWS,
          op="ortmodule::FusedReduceRandom", const=(2, 3, 4), fd=False),
    rows("rows", [t(64, 1100), t(64, 1100)], share, SHARE),
    rows("rows-and-columns", [t(3, 30, 800), t(800)], share, SHARE),
    rows("dropout", [t(100, 900), t(900), value(1.0, "float32"), value(True, "bool")],
         lambda x, y, *_: x * 0 + y, DROPPED_SHARE, op="ortmodule::FusedRowsRandom", const=(2, 3)),
]  # fmt: skip
