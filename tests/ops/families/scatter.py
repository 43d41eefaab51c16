"""Lists cases of writing and adding elements where indices say."""

import torch

from tests.ops.cases import ALL, FLOAT, NUMBER, Case, ints, t, value

I64 = "int64"
TORCH = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def scatter(x, i, u, axis, reduction):
    i = i.long() % max(x.shape[axis] if x.dim() else 1, 1)
    if reduction == "none":
        return x.scatter(axis, i, u)
    return x.scatter_reduce(axis, i, u, TORCH[reduction])


def elements(shape, index, updates, axis=0, reduction="none", **kwargs):
    attrs = {"axis": axis} | ({} if reduction == "none" else {"reduction": reduction})
    return Case(
        "ScatterElements", [t(*shape), index, t(*updates)], lambda x, i, u: scatter(x, i, u, axis, reduction),
        attrs=attrs, **{"name": reduction, "fd": False, "resize": False, **kwargs},
    )  # fmt: skip


def scatter_nd(x, i, u, reduction):
    """The tuples as row numbers, then a scatter of rows."""
    depth = i.shape[-1]
    rows = torch.zeros(i.shape[:-1], dtype=torch.int64)
    for axis in range(depth):
        rows = rows * x.shape[axis] + i[..., axis].long() % x.shape[axis]
    flat = x.reshape(x.shape[:depth].numel(), x.shape[depth:].numel())
    rows = rows.reshape(-1, 1).expand(-1, flat.shape[1])
    return scatter(flat, rows, u.reshape(rows.shape), 0, reduction).reshape(x.shape)


def nd(shape, index, updates, reduction="none", **kwargs):
    return Case(
        "ScatterND", [t(*shape), index, t(*updates)], lambda x, i, u: scatter_nd(x, i, u, reduction),
        attrs={} if reduction == "none" else {"reduction": reduction},
        **{"name": reduction, "fd": False, "resize": False, **kwargs},
    )  # fmt: skip


DISTINCT = value([[3, 0, 1], [0, 3, 2]], I64)

CASES = [
    elements((4, 3), DISTINCT, (2, 3), dtypes=ALL),
    elements((4, 3), value([[-1, 0, 1], [0, -1, 2]], "int32"), (2, 3), dtypes=ALL),
    elements((2, 5, 3), value([[[4], [0]], [[1], [2]]], I64), (2, 2, 1), 1),
    elements((3, 4), value([[3, 0], [1, 2], [0, 1]], I64), (3, 2), -1),
    elements((7,), value([6, 0, 3], I64), (3,)),
    elements((4, 3), ints(0, 3), (0, 3)),
    elements((4, 3), DISTINCT, (2, 3), opset=13),
    elements((), value(0, I64), ()),
    *[elements((4, 3), ints(6, 3, low=-4, high=4), (6, 3), 0, r, dtypes=NUMBER) for r in TORCH],
    *[elements((3, 4, 2), ints(2, 9, 2, high=4, dtype="int32"), (2, 9, 2), 1, r) for r in TORCH],
    elements((50,), ints(3000, high=50), (3000,), 0, "add", name="many"),
    elements((40, 30), ints(40, 200, high=30), (40, 200), 1, "add", name="lanes",
             large=[t(1024, 4096), ints(1024, 1024, high=4096), t(1024, 1024)]),
    elements((), value(0, I64), (), 0, "add"),
    Case("ScatterElements", [value([0.0, 2.0, 0.0, 3.0]), value([0, 0, 1, 1, 2, 3], I64),
                             value([2.0, 5.0, 0.0, 4.0, 0.0, 0.0])],
         lambda x, i, u: scatter(x, i, u, 0, "mul"), attrs={"reduction": "mul"}, name="zeros", fd=False, resize=False),
    Case("ScatterElements", [value([1.0, 2.0, 3.0]), value([0, 0, 1, 2, 2], I64), value([1.0, 0.5, 2.0, 5.0, 5.0])],
         lambda x, i, u: scatter(x, i, u, 0, "max"), attrs={"reduction": "max"}, name="ties", fd=False, resize=False),
    Case("ScatterElements", [t(20, special=True), ints(40, high=20), t(40, special=True)],
         lambda x, i, u: scatter(x, i, u, 0, "max"), attrs={"reduction": "max"}, name="special", resize=False),
    Case("ScatterElements", [t(20, special=True), ints(40, high=20), t(40, special=True)],
         lambda x, i, u: scatter(x, i, u, 0, "min"), attrs={"reduction": "min"}, name="special", resize=False),
    nd((4, 5), value([[0], [-1]], I64), (2, 5), dtypes=ALL),
    nd((4, 5, 6), value([[0, 1], [3, 4], [2, 0]], "int32"), (3, 6), dtypes=ALL),
    nd((4, 5), value([[[0, 1], [1, 0]], [[3, 4], [-2, -2]]], I64), (2, 2), opset=16),
    nd((4, 5), ints(0, 1), (0, 5)),
    nd((0, 5), ints(0, 1), (0, 5)),
    nd((4, 0), value([[0], [1]], I64), (2, 0)),
    *[nd((4, 5), ints(7, 1, low=-4, high=4), (7, 5), r, dtypes=NUMBER) for r in TORCH],
    *[nd((3, 4, 2), ints(9, 2, high=3), (9, 2), r) for r in TORCH],
    nd((5, 600), ints(40, 1, high=5), (40, 600), "add", name="wide",
       large=[t(512, 1024), ints(4096, 1, high=512), t(4096, 1024)]),
    nd((70, 80), ints(2000, 2, high=70), (2000,), "add", name="many", dtypes=FLOAT),
]  # fmt: skip
