"""Lists cases of Slice and Split."""

import torch

from tests.ops.cases import ALL, Case, t, value

I64 = "int64"
LAST = 2**63 - 1
FIRST = -(2**63)


def take(x, axis, start, end, step):
    """Python's slice; torch has no negative steps."""
    rows = range(x.shape[axis])[start : None if end == FIRST else end : step]
    return x.index_select(axis, torch.tensor(rows, dtype=torch.int64))


def slice_ref(x, starts, ends, axes=None, steps=None):
    axes = range(len(starts)) if axes is None else axes.tolist()
    steps = [1] * len(starts) if steps is None else steps.tolist()
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), axes, steps, strict=True):
        x = take(x, axis, start, end, step)
    return x


def cut(shape, starts, ends, axes=None, steps=None, index="int64", **kwargs):
    numbers = [None if n is None else value(n, index) for n in (starts, ends, axes, steps)]
    while numbers[-1] is None:
        numbers.pop()
    return Case(
        "Slice", [t(*shape), *numbers], slice_ref, const=range(1, 5)[: len(numbers)],
        name=f"{starts}{ends}{axes}{steps}", **{"dtypes": ALL, "fd": False, **kwargs},
    )  # fmt: skip


def split(shape, sizes, axis=0, outputs=None, **kwargs):
    return Case(
        "Split", [t(*shape), value(sizes, I64)], lambda x, s: x.split(s.tolist(), axis), const=1, attrs={"axis": axis},
        outputs=outputs or len(sizes), resize=False, **{"dtypes": ALL, "fd": False, **kwargs},
    )  # fmt: skip


def equal(shape, count, ref, attrs=None, **kwargs):
    """Sizes that are not an operand."""
    return Case("Split", [t(*shape)], ref, attrs=attrs, outputs=count, resize=False, **{"name": "equal", **kwargs})


def of_two(start, end, step=1):
    """Columns of two operands side by side."""
    numbers = [value([n], I64) for n in (start, end, 1, step)]
    return Case(
        "Slice", [t(3, 4), t(3, 2), *numbers], lambda x, y, *s: slice_ref(torch.cat([x, y], 1), *s), const=(2, 3, 4, 5),
        nodes=[("Concat", "x0 x1", "both", {"axis": 1}), ("Slice", "both x2 x3 x4 x5", "y0")],
        name=f"of two {start} {end} {step}", resize=False, fd=False,
    )  # fmt: skip


def put_together(order):
    """Three pieces of an operand, in this order."""
    sizes = [2, 3, 1]
    return Case(
        "Concat", [t(3, 6), value(sizes, I64)], lambda x, s: torch.cat([x.split(sizes, 1)[i] for i in order], 1) * x,
        const=1, nodes=[("Split", "x0 x1", "p0 p1 p2", {"axis": 1}),
                        ("Concat", [f"p{i}" for i in order], "again", {"axis": 1}), ("Mul", "again x0", "y0")],
        name=f"pieces {order}", resize=False, fd=False,
    )  # fmt: skip


CASES = [
    *[of_two(*s) for s in ((0, 4), (1, 3), (4, 6), (3, 5), (0, 6, 2), (3, FIRST, -2), (5, 3, -1), (5, 2, -1), (2, 2))],
    *[put_together(order) for order in ((0, 1, 2), (1, 2, 0), (2, 1, 0))],
    cut((5, 6), [1], [4]),
    cut((5, 6), [1, 2], [4, 5]),
    cut((5, 6), [0], [LAST], [1]),
    cut((5, 6), [-3], [-1], [-1]),
    cut((5, 6), [1], [LAST], [1], [2]),
    cut((5, 6), [-1], [FIRST], [0], [-1]),
    cut((5, 6), [-1, 4], [FIRST, -100], [0, 1], [-1, -3]),
    cut((5, 6), [3, 0], [1, LAST], [0, 1], [-1, 4]),
    cut((5, 6), [-100], [100], [0], [1]),
    cut((5, 6), [4], [2], [0], [1]),
    cut((5, 6), [7], [LAST], [0], [1]),
    cut((5, 6), [1], [4], [1], index="int32"),
    cut((0, 3), [0], [2], [0]),
    cut((4, 0), [1], [3], [0]),
    cut((7,), [2], [6], [0], [3], opset=11),
    cut((2, 3, 8, 4), [0, 4], [LAST, 8], [0, 2]),
    cut((5, 6), [1], [LAST], [0], [LAST]),
    Case(
        "Slice",
        [t(5, 6)],
        lambda x: x[1:4, -3:],
        attrs={"starts": [1, -3], "ends": [4, LAST], "axes": [0, 1]},
        opset=9,
        name="attributes",
    ),
    Case("Slice", [t(5, 6)], lambda x: x[1:-1], attrs={"starts": [1], "ends": [-1]}, opset=9, name="attributes_short"),
    split((6, 4), [1, 2, 3]),
    split((6, 4), [1, 3], 1),
    split((3, 12), [4, 4, 4], -1, large=[t(1024, 2304), value([768, 768, 768], I64)]),
    split((3, 12), [4, 4, 4], -1, outputs=(True, False, True), name="unwanted"),
    split((5,), [5]),
    split((5, 2), [0, 5]),
    split((0, 2), [0, 0]),
    split((6, 4), [2, 4], opset=13),
    equal((6, 4), 3, lambda x: x.split(2), opset=13, dtypes=ALL),
    equal((6, 4), 3, lambda x: x.split(2), opset=11),
    equal((6, 4), 2, lambda x: x.split([1, 3], 1), {"axis": 1, "split": [1, 3]}, opset=11, name="attribute"),
    equal((6, 4), 3, lambda x: x.split(2), {"num_outputs": 3}),
    equal((7, 4), 3, lambda x: x.split(3), {"num_outputs": 3}, name="uneven"),
    equal((4, 7), 2, lambda x: x.split(4, 1), {"num_outputs": 2, "axis": -1}, name="uneven"),
]
