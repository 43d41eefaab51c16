"""Reductions: every operator in both forms, over last, first, middle and all axes, and what only some of them show."""

import math
from dataclasses import replace

import torch

from tests.ops.cases import ALL, FLOAT, NUMBER, Case, t, value

FEW = ("float32", "float64", "bfloat16")


def product(x, dims, keep):
    for d in sorted((d % x.dim() for d in dims), reverse=True):
        x = x.prod(d, keepdim=keep, dtype=x.dtype)
    return x


# What is computed over a list of dimensions (torch's names for the arguments), and the opset of the second form.
OPS = {
    "ReduceSum": (lambda x, dims, keep: x.sum(dims, keepdim=keep, dtype=x.dtype), 13, NUMBER),
    "ReduceMean": (lambda x, dims, keep: x.mean(dims, keepdim=keep), 18, FLOAT),
    "ReduceMax": (lambda x, dims, keep: x.amax(dims, keepdim=keep), 18, ALL),
    "ReduceMin": (lambda x, dims, keep: x.amin(dims, keepdim=keep), 18, ALL),
    "ReduceProd": (product, 18, NUMBER),
    "ReduceL1": (lambda x, dims, keep: x.abs().sum(dims, keepdim=keep, dtype=x.dtype), 18, NUMBER),
    "ReduceL2": (lambda x, dims, keep: torch.linalg.vector_norm(x, 2, dims, keepdim=keep), 18, FLOAT),
    "ReduceSumSquare": (lambda x, dims, keep: (x * x).sum(dims, keepdim=keep, dtype=x.dtype), 18, NUMBER),
    "ReduceLogSum": (lambda x, dims, keep: x.sum(dims, keepdim=keep).log(), 18, FLOAT),
    "ReduceLogSumExp": (lambda x, dims, keep: x.logsumexp(dims, keepdim=keep), 18, FLOAT),
}


def reduction(op, x, axes=None, keep=1, operand=True, full=False, **kwargs):
    """`axes` None: all of them. `operand`: in the form whose axes are an operand. `full`: with every type."""
    function, since, dtypes = OPS[op]

    def ref(x, _=None):
        dims = list(range(x.dim())) if axes is None else list(axes)
        return function(x, dims, bool(keep)) if x.dim() else function(x.reshape(1), [0], False)

    if op == "ReduceProd" and x.low == -2 and math.prod(x.shape[d] for d in (axes or range(len(x.shape)))) > 8:
        x = replace(x, low=0.5, high=1.6)  # products of many are neither huge nor nothing
    attrs = {"keepdims": keep} | ({} if operand or axes is None else {"axes": list(axes)})
    inputs = [x, value(list(axes), "int64")] if operand and axes is not None else [x]
    where = "all" if axes is None else "_".join(map(str, axes))
    options = {
        "dtypes": dtypes if full else FEW,
        "opset": since if operand else since - 1,
        "name": f"{where}-keep{keep}",
        **kwargs,
    }
    return Case(op, inputs, ref, attrs=attrs, const=tuple(range(1, len(inputs))), **options)


def operand_of(op, *shape):
    """Numbers for which the operator has a value, and products stay small."""
    if op == "ReduceLogSum":
        return t(*shape, low=0.1, high=2)
    if op == "ReduceProd":
        return t(*shape, low=-2, high=2)
    return t(*shape)


def forms(op):
    def some(*shape):
        return operand_of(op, *shape)

    yield reduction(op, some(2, 3, 5), [1], full=True)
    yield reduction(op, some(2, 3, 5), [-1], keep=0, full=True)
    yield reduction(op, some(2, 3, 5), [0, 2], keep=0)
    yield reduction(op, some(2, 3, 5))
    yield reduction(op, some(2, 3, 5), [2, 0], keep=0, operand=False)
    yield reduction(op, some(2, 3, 5), [-3], operand=False)
    yield reduction(op, some(2, 3, 5), keep=0, operand=False)
    yield reduction(op, some(3, 4, 2, 5), [0, 2])
    yield reduction(op, some(3, 4, 2, 5), [1, 3], keep=0)
    yield reduction(op, some(2, 1, 3, 1), [1], keep=0)
    yield reduction(op, some(1, 1), keep=0)
    yield reduction(op, some(), keep=0)
    yield reduction(op, some(0, 3), [1])
    yield Case(op, [some(2, 3), value([], "int64")], lambda x, _: OPS[op][0](x[..., None], [2], False), const=1,
               attrs={"noop_with_empty_axes": 1}, opset=OPS[op][1], name="noop", dtypes=FEW)  # fmt: skip


# Of few rows a thread has neighbouring totals, in pieces where their number allows it.
REPEATS = [((3, 5, 2, 8), [1]), ((2, 4, 3, 6, 16), [1, 3]), ((37, 8), [0]), ((32, 40), [0]), ((33, 40), [0])]
# Long folds are cut into parts; few and many totals, in rows and in columns.
SIZES = [((70000,), [0]), ((3, 40000), [1]), ((50000, 3), [0]), ((300, 1500), [0]), ((9, 40, 300), [0, 2])]
ROWS = [((700, 5), [1]), ((70, 32), [1]), ((1200, 1), [1]), ((5, 70, 33), [0, 2]), ((3, 4, 50, 2, 9), [2, 4])]  # short

TIES = [[1.0, 3.0, 3.0, -2.0], [0.0, 0.0, 0.0, 0.0], [-1.0, -5.0, -1.0, -1.0]]
ZEROS = [[2.0, 0.5, -3.0], [0.0, 4.0, 5.0], [0.0, 2.0, 0.0], [-0.0, -1.0, 2.0]]


def arg(op, x, axis, keep=1, last=0, **kwargs):
    function = torch.argmax if op == "ArgMax" else torch.argmin

    def ref(x):
        if not last:
            return function(x, axis, keepdim=bool(keep))
        flipped = function(x.flip(axis) if x.dim() else x, axis, keepdim=bool(keep))
        return (x.shape[axis] if x.dim() else 1) - 1 - flipped

    attrs = {"axis": axis, "keepdims": keep, "select_last_index": last}
    return Case(
        op, [x], ref, attrs=attrs, grad=False, name=f"{axis}-keep{keep}-last{last}", **{"dtypes": FEW, **kwargs}
    )


def args(op):
    for last in (0, 1):
        yield arg(op, t(2, 3, 5), 1, last=last, dtypes=NUMBER)
        yield arg(op, t(2, 3, 5), -1, keep=0, last=last, dtypes=NUMBER)
        yield arg(op, t(2, 3, 5), 0, keep=0, last=last)
        yield arg(op, value(TIES), 1, last=last, resize=False)
        yield arg(op, value(TIES), 0, last=last, resize=False)
        yield arg(op, t(3, 2500), 1, last=last)
        yield arg(op, t(50, 1100), 0, last=last)
    yield arg(op, t(), 0, keep=0)
    yield arg(op, t(0, 3), 1)
    yield arg(op, t(4, 21, special=True), 1, dtypes=FLOAT)
    yield arg(op, t(21, 4, special=True), 0, dtypes=FLOAT)


INF, NAN = math.inf, math.nan
LARGEST = [[NAN, 1.0], [-INF, -INF], [2.0, INF]]
SMALLEST = [[NAN, 1.0], [INF, INF], [2.0, -INF]]
EXTREMES = [[-INF, 1.0], [-INF, -INF], [2.0, INF], [800.0, 799.0]]


def fixed(op, numbers, axes=None, **kwargs):
    """Of these very numbers, where derivatives are a convention."""
    return reduction(op, value(numbers), axes, **{"dtypes": FLOAT, "fd": False, "resize": False, **kwargs})


def special_cases():
    yield fixed("ReduceMax", LARGEST, [1])
    yield fixed("ReduceMin", SMALLEST, [1])
    yield fixed("ReduceLogSumExp", EXTREMES, [1], grad=False)
    # Ties share the gradient.
    for op in ("ReduceMax", "ReduceMin"):
        for axes in ([0], [1], None):
            yield fixed(op, TIES, axes)
    # Products with no, one and several zeros; norms of nothing but zeros.
    for axes in ([0], [1]):
        yield fixed("ReduceProd", ZEROS, axes, fd=True)
    yield fixed("ReduceL1", TIES, [1])
    yield fixed("ReduceL2", TIES, [1])
    for op in ("ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSumExp"):
        yield reduction(op, t(0, 3), [0], fd=False, resize=False, name="nothing")
    for op in OPS:
        if op != "ReduceProd":
            for shape, axes in SIZES:
                # The gradient is exp(x - y), of y that is rounded to the type: near 12 by up to 1/32 in bfloat16.
                more = {"tol": 2} if op == "ReduceLogSumExp" and shape == (70000,) else {}
                yield reduction(op, operand_of(op, *shape), axes, fd=False, resize=False, **more)
        for shape, axes in ROWS + REPEATS:
            yield reduction(op, operand_of(op, *shape), axes, fd=False, resize=False)
        if op != "ReduceLogSum":
            yield reduction(op, t(9, 14, special=True), [0])
            yield reduction(op, t(9, 14, special=True), [1])
            yield reduction(op, t(9, 40, special=True), [1])
    near_one = t(3, 40000, low=0.999, high=1.001)
    yield reduction("ReduceProd", near_one, [1], dtypes=("float32", "float64"), fd=False, resize=False)


CASES = [
    *(case for op in OPS for case in forms(op)),
    *special_cases(),
    *(case for op in ("ArgMax", "ArgMin") for case in args(op)),
]
