"""Lists cases of operators that look at the same elements differently."""

import torch

from tests.ops.cases import ALL, Case, t, value

I64 = "int64"


def dims(x, shape, allowzero=False):
    """ONNX's reading of a shape operand: 0 keeps the dimension."""
    return [x.shape[i] if d == 0 and not allowzero else d for i, d in enumerate(shape.tolist())]


def reshape(shape, to, name, attrs=None, **kwargs):
    allowzero = bool((attrs or {}).get("allowzero"))
    return Case(
        "Reshape", [t(*shape), value(to, I64)], lambda x, s: x.reshape(dims(x, s, allowzero)), const=1,
        attrs=attrs, name=name, **{"dtypes": ALL, "fd": False, **kwargs},
    )  # fmt: skip


def squeeze(shape, axes, **kwargs):
    return Case(
        "Squeeze", [t(*shape), value(axes, I64)], lambda x, a: x.squeeze(tuple(a.tolist())), const=1, dtypes=ALL,
        fd=False, resize=False, **kwargs,
    )  # fmt: skip


def unsqueeze(x, axes):
    rank = x.dim() + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


def unsqueezed(shape, axes):
    return Case(
        "Unsqueeze", [t(*shape), value(axes, I64)], lambda x, a: unsqueeze(x, a.tolist()), const=1, dtypes=ALL,
        fd=False, name=f"{axes}",
    )  # fmt: skip


def flatten(shape, axis, **kwargs):
    def ref(x):
        outer = x.shape[:axis].numel() if axis else 1
        return x.reshape(outer, x.numel() // outer if outer else x.shape[axis:].numel())

    return Case("Flatten", [t(*shape)], ref, attrs={"axis": axis}, dtypes=ALL, name=f"{axis}", fd=False, **kwargs)


def transpose(shape, *perm, **kwargs):
    return Case(
        "Transpose", [t(*shape)], lambda x: x.permute(perm), attrs={"perm": list(perm)}, dtypes=ALL, fd=False,
        name="".join(map(str, perm)), **kwargs,
    )  # fmt: skip


def expand(shape, to, **kwargs):
    def ref(x, s):
        return x.broadcast_to(torch.broadcast_shapes(x.shape, s.tolist()))

    return Case(
        "Expand", [t(*shape), value(to, I64)], ref, const=1, name=f"{to}", resize=False, **{"dtypes": ALL, **kwargs}
    )


def sloped(y, x, slope):
    """y, and of x a zero whose slope is this."""
    return y + (x - x.detach()) * slope.detach()


CASES = [
    Case("Identity", [t(2, 3)], lambda x: x, dtypes=ALL),
    Case("Identity", [t()], lambda x: x, dtypes=ALL),
    Case("ortmodule::NotOne", [t(2, 1, 3)], lambda x: x * 1, attrs={"axes": [0, -1]}, resize=False),
    Case("ortmodule::StopGradient", [t(2, 3)], lambda x: x.detach() * x, fd=False,
         nodes=[("ortmodule::StopGradient", "x0", "still"), ("Mul", "still x0", "y0")]),
    Case("ortmodule::Sloped", [t(2, 3), t(3), t(2, 3, grad=False)], sloped, fd=False),
    Case("ortmodule::Sloped", [t(2, 3), t(2, 3), t(2, 1, grad=False)], sloped, fd=False),
    reshape((2, 3, 4), [6, 4], "merge"),
    reshape((2, 3, 4), [2, -1], "rest"),
    reshape((2, 3, 4), [0, 0, -1], "keep"),
    reshape((2, 3, 4), [0, 2, 6], "keep_first"),
    reshape((2, 3, 4), [0, -1, 2, 2], "split"),
    reshape((2, 3, 4), [24], "flat"),
    reshape((1, 1), [], "scalar", resize=False),
    reshape((), [1, 1, 1], "of_scalar"),
    reshape((2, 0, 3), [0, 0, 3], "empty", resize=False),
    reshape((2, 0, 3), [3, 0], "allowzero", {"allowzero": 1}, resize=False),
    reshape((0, 3), [-1, 3], "empty_rest", resize=False),
    reshape((2, 3, 4), [4, -1], "old", opset=13),
    *[flatten((2, 3, 4), axis) for axis in (0, 1, 2, 3, -1, -2, -3)],
    flatten((), 0),
    flatten((5,), 0),
    flatten((2, 0, 3), 1),
    squeeze((2, 1, 3, 1), [1, 3]),
    squeeze((2, 1, 3, 1), [-1]),
    squeeze((1, 1), [0, 1]),
    squeeze((0, 1), [1]),
    Case("Squeeze", [t(1, 2, 1, 3)], lambda x: x.squeeze(), dtypes=ALL, name="all", fd=False),
    Case("Squeeze", [t()], lambda x: x, name="scalar"),
    Case("Squeeze", [t(2, 1, 3)], lambda x: x.squeeze(1), attrs={"axes": [1]}, opset=11, name="attribute"),
    Case("Squeeze", [t(2, 1, 1, 3)], lambda x: x.squeeze(), opset=11, name="attribute_all"),
    unsqueezed((2, 3), [0]),
    unsqueezed((2, 3), [-1, 1]),
    unsqueezed((2, 3), [0, 1, 4]),
    unsqueezed((), [0]),
    unsqueezed((0, 2), [2]),
    Case("Unsqueeze", [t(2, 3)], lambda x: x[:, None, :, None], attrs={"axes": [1, 3]}, opset=11, name="attribute"),
    transpose((2, 3), 1, 0),
    transpose((2, 3, 4), 0, 2, 1),
    transpose((2, 3, 4), 2, 0, 1),
    transpose((2, 3, 4), 0, 1, 2),
    transpose((2, 3, 4, 5), 0, 2, 1, 3),
    transpose((2, 3, 4, 5), 0, 2, 3, 1),
    transpose((2, 0, 4), 2, 1, 0),
    transpose((70, 90), 1, 0, large=[t(2048, 1024)]),
    transpose((3, 130, 67), 0, 2, 1),
    transpose((300, 5), 1, 0),
    transpose((2, 5, 3, 64), 0, 2, 1, 3),
    transpose((2, 40, 3, 36), 0, 2, 3, 1),
    transpose((2, 3, 2, 2, 3), 4, 1, 3, 0, 2),
    Case("Transpose", [t(2, 3, 4)], lambda x: x.permute(2, 1, 0), dtypes=ALL, name="default", fd=False),
    Case("Transpose", [t()], lambda x: x, name="scalar"),
    expand((3, 1), [3, 4]),
    expand((3, 1), [2, 3, 4], large=[t(512, 1), value([8, 512, 1024], I64)]),
    expand((1, 3, 1), [2, 1, 4]),
    expand((), [2, 3]),
    expand((3,), [1, 3]),
    expand((2, 3), [1, 1]),
    expand((1, 3), [0, 3]),
    expand((0, 3), [1, 3]),
    expand((2, 1), []),
]  # fmt: skip
