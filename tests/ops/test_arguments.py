"""Drawn arguments: cases that the families' own makers build from drawn shapes, axes, windows and modes.

What PyTorch itself refuses is no case. Types are drawn from the case's.
"""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.ops.cases import ints
from tests.ops.families import (
    conv,
    cumulative,
    einsum,
    index,
    movement,
    norm,
    pool,
    reduce,
    scan,
    scatter,
    slice,
    softmax,
    topk,
    view,
)
from tests.ops.families import resize as resizing
from tests.ops.harness import Trial

SIZES = st.sampled_from([1, 2, 3, 4, 5, 7, 9, 17, 33])
MAKERS = {}


def maker(function):
    MAKERS[function.__name__.strip("_")] = function
    return function


def shape(draw, low=1, high=4):
    sizes = tuple(draw(st.lists(SIZES, min_size=low, max_size=high), label="shape"))
    assume(torch.Size(sizes).numel() <= 20_000)
    return sizes


def axis(draw, sizes):
    return draw(st.integers(-len(sizes), len(sizes) - 1), label="axis")


def axes(draw, sizes):
    chosen = draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1), label="axes")
    return [a - len(sizes) if draw(st.booleans()) else a for a in sorted(chosen)]


def numbers(draw, rank, low, high, label):
    return tuple(draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank), label=label))


def image(draw, ranks=(1, 2, 3)):
    rank = draw(st.sampled_from(ranks), label="rank")
    return (draw(st.integers(1, 3)), draw(st.integers(1, 6), label="channels"), *numbers(draw, rank, 3, 9, "sizes"))


@maker
def _conv(draw):
    x = image(draw)
    rank, group = len(x) - 2, draw(st.sampled_from([1, 1, 2, 3, x[1]]), label="group")
    x = (x[0], x[1] * group, *x[2:]) if x[1] % group else x
    w = (group * draw(st.integers(1, 9)), x[1] // group, *numbers(draw, rank, 1, 4, "kernel"))
    return conv.conv(
        x, w, draw(st.booleans(), label="bias"), numbers(draw, rank, 1, 3, "stride"),
        numbers(draw, 2 * rank, 0, 3, "pads"), numbers(draw, rank, 1, 2, "dilation"), group,
    )  # fmt: skip


@maker
def _transposed(draw):
    x = image(draw)
    rank, group = len(x) - 2, draw(st.sampled_from([1, 1, 2]), label="group")
    x = (x[0], x[1] * group, *x[2:])
    w = (x[1], draw(st.integers(1, 5)), *numbers(draw, rank, 1, 4, "kernel"))
    return conv.transposed(
        x, w, draw(st.booleans(), label="bias"), numbers(draw, rank, 1, 3, "stride"), numbers(draw, rank, 0, 2, "pads"),
        numbers(draw, rank, 1, 2, "dilation"), group, numbers(draw, rank, 0, 2, "extra"),
    )  # fmt: skip


@maker
def _max_pool(draw):
    x = image(draw)
    rank = len(x) - 2
    return pool.max_pool(
        x, numbers(draw, rank, 1, 4, "kernel"), numbers(draw, rank, 1, 3, "stride"), numbers(draw, rank, 0, 2, "pads"),
        numbers(draw, rank, 1, 2, "dilation"), draw(st.booleans(), label="ceil"), draw(st.booleans(), label="indices"),
        draw(st.booleans(), label="special"),
    )  # fmt: skip


@maker
def _average_pool(draw):
    x = image(draw)
    rank = len(x) - 2
    return pool.average_pool(
        x, numbers(draw, rank, 1, 4, "kernel"), numbers(draw, rank, 1, 3, "stride"), numbers(draw, rank, 0, 2, "pads"),
        draw(st.booleans(), label="ceil"), draw(st.booleans(), label="include"),
    )  # fmt: skip


@maker
def _grid_sample(draw):
    x = image(draw, (2, 3))
    modes = ["bilinear", "nearest", "bicubic"] if len(x) == 4 else ["bilinear", "nearest"]
    padding = draw(st.sampled_from(["zeros", "border", "reflection"]), label="padding")
    points = numbers(draw, len(x) - 2, 1, 9, "points")
    return resizing.grid_sample(
        x, points, draw(st.sampled_from(modes)), padding, draw(st.booleans(), label="align")
    )  # fmt: skip


@maker
def _reduction(draw):
    op, sizes = draw(st.sampled_from(sorted(reduce.OPS)), label="operator"), shape(draw)
    # A product of many is beyond narrow types.
    assume(op != "ReduceProd" or torch.Size(sizes).numel() <= 24)
    over = draw(st.sampled_from([None, axes(draw, sizes)]), label="over")
    return reduce.reduction(op, reduce.operand_of(op, *sizes), over, draw(st.integers(0, 1), label="keep"), full=True)


@maker
def _softmax(draw):
    sizes = shape(draw)
    return softmax.softmax(draw(st.sampled_from(["Softmax", "LogSoftmax"])), softmax.t(*sizes), axis(draw, sizes))


@maker
def _top(draw):
    sizes = shape(draw)
    along = axis(draw, sizes)
    return topk.top(sizes, draw(st.integers(0, sizes[along]), label="k"), along, draw(st.booleans(), label="largest"))


@maker
def _cumsum(draw):
    sizes = shape(draw)
    return cumulative.cumsum(sizes, axis(draw, sizes), draw(st.integers(0, 1)), draw(st.integers(0, 1)))


@maker
def _scan(draw):
    sizes = shape(draw)
    along, kind = axis(draw, sizes), draw(st.sampled_from(["CumArgMax", "CumArgMin"]), label="operator")
    ref = (scan.largest if kind == "CumArgMax" else scan.smallest)(along)
    x = scan.t(*sizes, special=draw(st.booleans(), label="special"))
    return scan.Case(f"ortmodule::{kind}", [x], ref, attrs={"axis": along}, grad=False)


@maker
def _gather(draw):
    sizes = shape(draw)
    along = axis(draw, sizes)
    return index.gather(sizes, ints(*shape(draw, 0, 2), low=-sizes[along], high=sizes[along]), along)


@maker
def _take_along(draw):
    sizes = shape(draw)
    along = axis(draw, sizes)
    there = [draw(st.integers(1, n)) for n in sizes]
    there[along] = draw(SIZES, label="as many")
    kind = draw(st.sampled_from(["int64", "int32"]))
    return index.take_along(sizes, ints(*there, low=-sizes[along], high=sizes[along], dtype=kind), along)


@maker
def _scatter(draw):
    sizes = shape(draw)
    along = axis(draw, sizes)
    there = tuple(draw(st.integers(1, n)) for n in sizes)
    # Which of several updates of one element stays is not defined: only reductions get an index twice.
    how = draw(st.sampled_from(["add", "mul", "max", "min"]), label="reduction")
    assume(how != "mul" or there[along] <= 5)
    return scatter.elements(
        sizes, ints(*there, low=0, high=sizes[along]), there, along, how, tol=4, grad=how == "add", dtypes=("float32",)
    )


@maker
def _concat(draw):
    sizes = shape(draw)
    along = axis(draw, sizes)
    parts = [list(sizes) for _ in range(draw(st.integers(1, 4), label="parts"))]
    for part in parts:
        part[along] = draw(st.integers(0, 5))
    return movement.concat(along, *parts)


@maker
def _pad(draw):
    sizes = shape(draw)
    pads = [draw(st.integers(-1, 3)) for _ in range(2 * len(sizes))]
    assume(all(n + a + b >= 0 for n, a, b in zip(sizes, pads[: len(sizes)], pads[len(sizes) :], strict=True)))
    return movement.pad(sizes, pads, draw(st.sampled_from([None, 0.0, 2.0]), label="number"))


@maker
def _slice(draw):
    sizes = shape(draw)
    over = axes(draw, sizes)
    starts, ends = (list(numbers(draw, len(over), -12, 12, what)) for what in ("starts", "ends"))
    steps = [draw(st.sampled_from([-3, -2, -1, 1, 2, 3]), label="step") for _ in over]
    return slice.cut(sizes, starts, ends, over, steps)


@maker
def _transpose(draw):
    sizes = shape(draw, 1, 5)
    return view.transpose(sizes, *draw(st.permutations(range(len(sizes))), label="order"))


@maker
def _layer(draw):
    sizes = shape(draw)
    return norm.layer(sizes, axis(draw, sizes), draw(st.booleans(), label="bias"), epsilon=0.1)


@maker
def _group(draw):
    x, groups = image(draw), draw(st.integers(1, 3), label="groups")
    return norm.group((x[0], x[1] * groups, *x[2:]), groups, epsilon=0.1)


@maker
def _einsum(draw):
    labels = "abcd"
    sizes = dict(zip(labels, numbers(draw, 4, 1, 5, "sizes"), strict=True))
    terms = [
        "".join(draw(st.lists(st.sampled_from(labels), min_size=1, max_size=3), label="term"))
        for _ in range(draw(st.integers(1, 3), label="operands"))
    ]
    known = sorted(set("".join(terms)))
    result = draw(st.permutations(known), label="order")[: draw(st.integers(0, len(known)), label="rank")]
    shapes = [tuple(sizes[c] for c in term) for term in terms]
    return einsum.einsum(f"{','.join(terms)}->{''.join(result)}", *shapes)


@pytest.mark.parametrize("name", sorted(MAKERS))
@given(data=st.data())
def test_arguments(name, data):
    case = MAKERS[name](data.draw)
    dtype = data.draw(st.sampled_from(case.dtypes), label="dtype")
    try:
        trial = Trial(case, dtype, case.tensors(dtype, data.draw(st.integers(0, 99), label="seed")))
    except (RuntimeError, IndexError, ValueError):
        assume(False)  # PyTorch refuses it
    assume(all(y.numel() for y in trial.expected.outputs) or not all(x is None or x.numel() for x in trial.tensors))
    trial.check_drawn()
