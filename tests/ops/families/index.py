"""Lists cases of reading elements whose place is data."""

import torch
import torch.nn.functional as F

from tests.ops.cases import ALL, FLOAT, Case, ints, t, value

I64 = "int64"
FEW = FLOAT + ("int64", "bool")


def gather(shape, index, axis=0, **kwargs):
    def ref(x, i):
        return x[(slice(None),) * (axis % x.dim()) + (i.long(),)]

    return Case(
        "Gather", [t(*shape), index], ref, attrs={"axis": axis},
        **{"dtypes": FEW, "fd": False, "resize": False, **kwargs},
    )  # fmt: skip


def take_along(shape, index, axis=0, **kwargs):
    def ref(x, i):
        return x.gather(axis, i.long() % max(x.shape[axis] if x.dim() else 1, 1))

    return Case(
        "GatherElements", [t(*shape), index], ref, attrs={"axis": axis},
        **{"dtypes": FEW, "fd": False, "resize": False, **kwargs},
    )  # fmt: skip


def gather_nd(x, i, batch):
    if batch:
        return torch.stack([gather_nd(a, b, batch - 1) for a, b in zip(x, i, strict=True)])
    return x[tuple(i.long().unbind(-1))]


def nd(shape, index, batch=0, **kwargs):
    return Case(
        "GatherND", [t(*shape), index], lambda x, i: gather_nd(x, i, batch), attrs={"batch_dims": batch},
        **{"dtypes": FEW, "fd": False, "resize": False, **kwargs},
    )  # fmt: skip


def one_hot(index, depth, axis, values=(0, 1), **kwargs):
    def ref(i, d, v):
        hot = F.one_hot(i.long() % d.item(), d.item()).movedim(-1, axis).bool()
        return torch.where(hot, v[1], v[0])

    return Case(
        "OneHot", [index, value(depth, I64), value(list(values))], ref, const=(1, 2), attrs={"axis": axis},
        dtypes=FLOAT + ("int64",), name=f"{axis}", resize=False, **kwargs,
    )  # fmt: skip


def tied(rows, width, index):
    """A table of words that multiplies the last layer's rows, too."""
    return Case(
        "ortmodule::GatherGradAdd", [t(rows, width), index], lambda w, i: w[i.long()] @ w.T, resize=False,
        dtypes=("float32", "float64"),
        nodes=[("Gather", "x0 x1", "words"), ("Transpose", "x0", "turned", {"perm": [1, 0]}),
               ("MatMul", "words turned", "y0")],
    )  # fmt: skip


def selected(rows, width, index):
    """A table of words of which the first of each row is used: all are looked up in PyTorch."""
    return Case(
        "ortmodule::CheckedIndex", [t(rows, width), t(width, 3), index, value(0, I64)],
        lambda w, a, i, first: (w[i.long()] @ a)[:, 0], const=(3,), resize=False, dtypes=("float32", "float64"),
        nodes=[("Gather", "x0 x2", "words"), ("MatMul", "words x1", "mixed"),
               ("Gather", "mixed x3", "y0", {"axis": 1})],
    )  # fmt: skip


RUNS = [*range(-10, 12), 3, *range(2, 20)]  # as a padded image is read
JUMPS = [5, -1, 0, 0, 23, 7, 5, -24, 11]

CASES = [
    tied(9, 8, ints(2, 3, high=9)),
    selected(9, 8, ints(4, 6, high=9)),
    tied(5, 33, value([-1, 4, 0, 0, -5, 4], I64)),
    tied(3, 1, ints(0, high=3)),
    gather((5, 24), value(RUNS, I64), 1, dtypes=ALL, name="runs"),
    gather((5, 24), value(RUNS, "int32"), 1, name="runs_int32"),
    gather((80, 24), value(JUMPS, I64), 1, dtypes=ALL, name="jumps"),
    gather((5, 24), value(JUMPS, "int32"), 1, dtypes=ALL, name="jumps_int32"),
    gather((40, 24, 3), value(JUMPS, I64), 1, name="jumps_of_three"),
    gather((5, 4), ints(3, low=-5, high=5), dtypes=ALL),
    gather((5, 4), ints(2, 3, low=-5, high=5), large=[t(30000, 256), ints(8, 128, high=30000)]),
    gather((5, 4), ints(2, 3, low=-5, high=5, dtype="int32"), dtypes=ALL, name="int32"),
    gather((3, 5, 4), ints(7, low=-5, high=5), 1),
    gather((3, 5, 4), ints(2, 7, low=-4, high=4), -1),
    gather((3, 5), value(1, I64), 1, name="scalar"),
    gather((3, 5), value(-1, I64), 0, const=1, name="constant_scalar"),
    gather((3, 5, 2), value([3], I64), 1, const=1, name="constant_one"),
    gather((9, 5), value([[2, 3, 4]], I64), 0, const=1, name="progression"),
    gather((9, 5), value([[0, 2], [4, 6]], I64), 0, const=1, name="progression_2d"),
    gather((9, 5), value([3, 2, 1], I64), 0, const=1, name="progression_back"),
    gather((9, 5), value([0, 0, 0], I64), 0, const=1, name="repeated"),
    gather((4, 9, 5), value([[[1, 2, 3]], [[1, 2, 3]]], I64), 1, const=1, name="repeated_progression"),
    gather((9, 5), value([[1, 1], [3, 3]], I64), 0, const=1, name="progression_repeated"),
    gather((9, 5), value([0, -8, 2], "int32"), 0, const=1, name="progression_wrapped"),
    gather((9, 5), value([0, 2, 3], I64), 0, const=1, name="irregular"),
    gather((9, 5), value([[0, 1], [1, 2]], I64), 0, const=1, name="overlapping"),
    gather((5, 0), ints(3, high=5)),
    gather((5, 4), ints(0, high=5)),
    gather((0, 4), ints(0, high=5)),
    gather((2, 600), ints(40, high=2), name="repeats"),
    *[gather((2, width), ints(700, high=2), dtypes=FLOAT, name=f"repeats_{width}") for width in (9, 264)],
    gather((2, 400, 16), ints(2100, high=400), 1, dtypes=FLOAT, name="many_wide"),
    gather((3, 700, 2), ints(2000, high=700), 1, dtypes=FLOAT, name="many"),
    gather((50, 300), ints(4, 100, high=50), dtypes=FLOAT, name="embedding"),
    *[
        Case("ortmodule::Embedding", [t(5, 4), ints(2, 3, high=5)], lambda w, i, p=p: F.embedding(i, w, padding_idx=p),
             attrs={"padding_idx": p if p is not None else -1}, name=f"padding{p}", fd=False, resize=False)
        for p in (None, 0, 3)
    ],
    take_along((5, 4), ints(3, 4, low=-5, high=5), dtypes=ALL),
    take_along((5, 4), ints(5, 7, low=-4, high=4), 1),
    take_along((5, 4), ints(3, 2, low=-4, high=4, dtype="int32"), -1),
    take_along((3, 5, 4), ints(2, 9, 3, high=5), 1),
    take_along((7,), ints(20, high=7)),
    take_along((3, 5), ints(0, 5, high=3)),
    take_along((3, 5), ints(2, 0, high=5), 1),
    take_along((40, 300), ints(40, 90, high=300), 1, dtypes=FLOAT, name="many",
               large=[t(1024, 8192), ints(1024, 64, high=8192)]),
    take_along((), value(0, I64)),
    nd((4, 5, 6), ints(7, 2, low=-4, high=4), dtypes=ALL),
    nd((4, 5, 6), ints(2, 3, 3, low=-4, high=4)),
    nd((4, 5, 6), ints(3, 1, high=4, dtype="int32")),
    nd((3, 5, 6), ints(3, 2, 1, low=-5, high=5), 1),
    nd((2, 3, 5, 6), ints(2, 3, 4, 2, high=5), 2),
    nd((2, 3, 4), ints(2, 2, high=3), 1),
    nd((4, 300), ints(50, 1, high=4), dtypes=FLOAT, name="repeats"),
    nd((4, 5), ints(0, 2, high=4)),
    nd((4, 5), ints(2, high=4)),
    one_hot(ints(2, 3, low=-4, high=4), 4, -1),
    one_hot(ints(2, 3, high=4, dtype="int32"), 4, 1, (-1, 3)),
    one_hot(ints(2, 3, high=4), 4, 0),
    one_hot(ints(high=4), 4, -1),
    one_hot(ints(0, high=4), 4, -1),
    Case("OneHot", [ints(3, low=6, high=9), value(4, I64), t(2)], lambda i, d, v: v[0].expand(3, 4), const=1,
         name="out_of_range", resize=False),
    Case("OneHot", [ints(3, high=4), value(4, I64), t(2)], const=1, name="values", resize=False,
         ref=lambda i, d, v: torch.where(F.one_hot(i, 4).bool(), v[1], v[0])),
]  # fmt: skip
