"""Cases of csrc/ops/attention/fused_attention.c: products around a softmax, of which a pass makes one operator."""

import math

import torch

from tests.ops.cases import Case, bools, t, value

SCORES = ("MatMul", "x0 x1", "scores")
WEIGHTS = ("Softmax", "scores", "weights", {"axis": -1})
RESULT = ("MatMul", "weights x2", "y0")


def attention(q, k, v, allowed=None, bias=None):
    """`k` is transposed. A row in which nothing is allowed gives zeros."""
    scores = q @ k if bias is None else q @ k + bias
    if allowed is None:
        return scores.softmax(-1) @ v
    left = allowed.expand(scores.shape).any(-1, keepdim=True)
    scores = torch.where(left, torch.where(allowed, scores, -math.inf), 0.0)
    return torch.where(left, scores.softmax(-1), 0.0) @ v


def operands(batch, heads, queries, keys, width, value_width=None):
    size = 2 / width**0.5  # scores stay small
    return [
        t(batch, heads, queries, width, low=-size, high=size),
        t(batch, heads, width, keys, low=-2, high=2),
        t(batch, heads, keys, value_width or width),
    ]


def case(name, inputs, ref, *nodes, **kwargs):
    return Case("ortmodule::FusedAttention", inputs, ref, name=name, nodes=nodes, resize=False, **kwargs)


def plain(name, *sizes, **kwargs):
    return case(name, operands(*sizes), attention, SCORES, WEIGHTS, RESULT, **kwargs)


def masked(name, sizes, mask, **kwargs):
    nodes = SCORES, ("ortmodule::MaskedSoftmax", "scores x3", "weights"), RESULT
    return case(name, [*operands(*sizes), mask], attention, *nodes, **kwargs)


def biased(name, sizes, *bias, **kwargs):
    nodes = SCORES, ("Add", "scores x3", "sum"), ("Softmax", "sum", "weights", {"axis": -1}), RESULT
    return case(name, [*operands(*sizes), t(*bias)], lambda q, k, v, b: attention(q, k, v, None, b), *nodes, **kwargs)


def causal(queries, keys, window=None):
    rows = [[i >= j and (window is None or i - j < window) for j in range(keys)] for i in range(queries)]
    return value(rows, "bool")


def dropped(q, k, v, *_):
    """At a rate of 1 nothing is left."""
    return (q @ k).softmax(-1) @ v * 0


HOLES = [[[[True, False, True, True]]], [[[False, True, True, False]]]]
NOTHING = [[True, False, True], [False, False, False], [True, True, True]]
# As some models mask: where nothing is left, all keys count the same.
LOWEST = [[0.0, -3.4e38, -3.4e38, 0.0], [-3.4e38] * 4, [0.0] * 4]
BOTH = [
    SCORES,
    ("Add", "x4 scores", "sum"),
    ("ortmodule::MaskedSoftmax", "sum x3", "weights"),
    RESULT,
]

CASES = [
    plain("small", 2, 3, 4, 5, 6),
    plain("one-key", 1, 2, 3, 1, 4, vanishing=(0, 1)),  # its weight is 1
    plain("one-row", 2, 1, 1, 7, 4, 3),
    plain("tiles", 1, 2, 70, 300, 8, 5, fd=False),
    plain("wide", 1, 1, 5, 4, 256, fd=False, tol=3.0),
    masked("keys", (2, 2, 3, 4, 5), value(HOLES, "bool")),
    masked("rows", (1, 2, 3, 3, 4), value(NOTHING, "bool")),
    masked("heads", (2, 3, 4, 5, 2), bools(2, 3, 4, 5)),
    masked("column", (2, 2, 4, 5, 2), bools(2, 1, 4, 1)),
    masked("causal", (1, 2, 130, 130, 4), causal(130, 130), fd=False),
    masked("window", (1, 1, 140, 330, 4), causal(140, 330, 9), fd=False),
    biased("bias", (2, 2, 3, 4, 5), 2, 2, 3, 4),
    biased("bias-of-heads", (2, 2, 3, 4, 5), 1, 2, 3, 4),
    biased("bias-of-all", (2, 2, 3, 4, 5), 3, 4),
    biased("bias-of-sequences", (2, 2, 3, 4, 5), 2, 1, 3, 4),
    biased("bias-tiles", (2, 2, 70, 270, 3), 1, 2, 70, 270, fd=False),
    case("lowest", [*operands(1, 2, 3, 4, 5), value(LOWEST, "float32")], lambda q, k, v, b: attention(q, k, v, None, b),
         SCORES, ("Add", "scores x3", "sum"), ("Softmax", "sum", "weights", {"axis": -1}), RESULT, dtypes=("float32",)),
    case("mask-and-bias", [*operands(2, 2, 3, 4, 5), bools(2, 1, 1, 4), t(1, 2, 3, 4)], attention, *BOTH),
    case("dropout", [*operands(2, 2, 5, 70, 3), value(1.0, "float32"), value(True, "bool")], dropped,
         SCORES, WEIGHTS, ("Dropout", "weights x3 x4", "left"), ("MatMul", "left x2", "y0"), const=(3, 4), fd=False),
]  # fmt: skip
