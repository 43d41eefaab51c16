"""Lists cases of operators that put elements somewhere else."""

import torch
import torch.nn.functional as F

from tests.ops.cases import ALL, BOOL, FLOAT, NUMBER, Case, ints, t, value

I64 = "int64"


def concat(axis, *shapes, **kwargs):
    return Case(
        "Concat", [t(*s) for s in shapes], lambda *x: torch.cat(x, axis), attrs={"axis": axis},
        **{"name": f"{axis}", "dtypes": ALL, "fd": False, **kwargs},
    )  # fmt: skip


# --- Pad --------------------------------------------------------------------------------------------------------------


def position(mode, i, n):
    if mode == "edge":
        return min(max(i, 0), n - 1)
    period = n if mode == "wrap" else max(2 * (n - 1), 1)
    return min(i % period, period - i % period) if mode == "reflect" else i % period


def padded(x, pads, number=0, axes=None, mode="constant"):
    """numpy's rules; negative pads cut off. IndexError for what goes around an axis again, as in PyTorch."""
    axes = range(x.dim()) if axes is None else [a % x.dim() for a in axes]
    pairs = dict(zip(axes, zip(pads[: len(pads) // 2], pads[len(pads) // 2 :], strict=True), strict=True))
    if mode == "constant":
        flat = [p for axis in reversed(range(x.dim())) for p in pairs.get(axis, (0, 0))]
        return F.pad(x, flat, value=number)
    for axis, (before, after) in pairs.items():
        n = x.shape[axis]
        if mode != "edge" and max(before, after) > n - (mode == "reflect"):
            raise IndexError(f"padding of {n} elements by {before} and {after}")
        x = x.index_select(axis, torch.tensor([position(mode, i - before, n) for i in range(n + before + after)]))
    return x


def pad(shape, pads, number=None, axes=None, mode="constant", **kwargs):
    operands = [t(*shape), value(pads, I64), None if number is None else value(number), axes and value(axes, I64)]
    while operands[-1] is None:
        operands.pop()

    def ref(x, p, v=None, a=None):
        filler = 0 if v is None else v.item()
        return padded(x, p.tolist(), filler, a and a.tolist() if a is None else a.tolist(), mode)

    return Case(
        "Pad", operands, ref, attrs={"mode": mode}, const=[i for i in (1, 2, 3) if i < len(operands)],
        name=f"{mode}{pads}", fd=False, **{"dtypes": FLOAT + ("int64", "int32", "uint8"), **kwargs},
    )  # fmt: skip


def pad_with_operand(x, p, v):
    """A padding value that is data, with a gradient."""
    inside = F.pad(torch.ones_like(x), (1, 2, 0, 1))
    return F.pad(x, (1, 2, 0, 1)) + (1 - inside) * v


# --- the others -------------------------------------------------------------------------------------------------------


def tile(shape, repeats, **kwargs):
    return Case(
        "Tile", [t(*shape), value(repeats, I64)], lambda x, r: x.repeat(r.tolist()), const=1, name=f"{repeats}",
        **{"dtypes": ALL, "fd": False, **kwargs},
    )  # fmt: skip


def depth_to_space(x, b, mode):
    n, c, h, w = x.shape
    if mode == "CRD":
        return F.pixel_shuffle(x, b)
    return x.reshape(n, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // b**2, h * b, w * b)


def space_to_depth(x, b):
    n, c, h, w = x.shape
    return x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, c * b * b, h // b, w // b)


def trilu(shape, upper, k=None, **kwargs):
    def ref(x, k=None):
        k = 0 if k is None else max(-1000, min(1000, k.item()))
        return (x.triu if upper else x.tril)(k)

    return Case(
        "Trilu", [t(*shape), *([] if k is None else [value(k, I64)])], ref, attrs={"upper": int(upper)},
        name=f"{'upper' if upper else 'lower'}{k}", **{"dtypes": NUMBER + BOOL, "fd": False, **kwargs},
    )  # fmt: skip


def reverse(x, lengths, time):
    rows = []
    for sequence, n in zip(x.unbind(1 - time), lengths.tolist(), strict=True):
        rows.append(torch.cat([sequence[:n].flip(0), sequence[n:]]))
    return torch.stack(rows, 1 - time)


CASES = [
    concat(0, (2, 3), (4, 3)),
    concat(1, (2, 3), (2, 1), (2, 4), large=[t(512, 512), t(512, 512), t(512, 512)]),
    concat(-1, (2, 3, 2), (2, 3, 5)),
    concat(1, (2, 3, 4), (2, 5, 4)),
    concat(0, (5,)),
    concat(0, (2, 3), (0, 3), (1, 3)),
    concat(1, (2, 0), (2, 0)),
    concat(0, (0,), (2, 3), name="nothing", resize=False),
    concat(8, (0,), (0,), name="nothing-at-all", resize=False),
    concat(0, (1,), (1,), (1,), (2,), (1,)),
    concat(0, (2, 3), (4, 3), opset=11, dtypes=FLOAT),
    pad((3, 4), [1, 0, 0, 2]),
    pad((3, 4), [1, 2, 3, 4], 7),
    pad((3, 4), [0, -1, 1, -2], 7),
    pad((3, 4), [-1, 0, -1, 0]),
    pad((3, 4), [0, 0, 0, 0]),
    pad((2, 3, 4, 4), [0, 0, 1, 1, 0, 0, 1, 1], large=[t(16, 32, 56, 56), value([0, 0, 1, 1, 0, 0, 1, 1], I64)]),
    pad((2, 3, 4), [1, 2], axes=[-1]),
    pad((2, 3, 4), [1, 2, 0, 1], 3, axes=[2, 1]),
    pad((0, 3), [1, 0, 1, 0], 5),
    pad((2, 3), [1, 0, 1, 0], opset=13),
    pad((2, 5), [0, 2, 0, 3], mode="reflect"),
    pad((2, 3, 5, 4), [0, 0, 2, 1, 0, 0, 1, 3], mode="reflect"),
    pad((2, 5), [0, -1, 0, 3], mode="reflect"),
    pad((2, 8), [0, 7, 0, 5], mode="reflect"),
    pad((2, 3), [0, 2, 0, 1], mode="reflect", resize=False),
    pad((2, 3, 4, 40), [0, 0, 1, 2, 0, 0, 1, 1], mode="reflect"),
    pad((2, 5), [1, 2, 0, 3], mode="edge"),
    pad((2, 3, 2, 3, 4), [0, 0, 1, 2, -1, 0, 0, 1, 0, 3], mode="edge"),
    pad((2, 3, 5), [4, -2], mode="edge", axes=[2]),
    pad((2, 5), [1, 2, 1, 5], mode="wrap", opset=19),
    pad((2, 5), [0, 2, 0, 3], mode="reflect", opset=13),
    Case("Pad", [t(3, 4)], lambda x: F.pad(x, (1, 2, 0, 1), value=1.5), opset=9, name="attributes",
         attrs={"pads": [0, 1, 1, 2], "value": 1.5}),
    Case("Pad", [t(3, 4)], lambda x: F.pad(x[None], (1, 2, 0, 1), "reflect")[0], opset=9, name="attributes_reflect",
         attrs={"pads": [0, 1, 1, 2], "mode": "reflect"}),
    Case("Pad", [t(3, 4), value([0, 1, 1, 2], I64), t()], pad_with_operand, const=1, name="operand"),
    tile((2, 3), [2, 3]),
    tile((2, 3), [1, 2], large=[t(512, 512), value([1, 4], I64)]),
    tile((1, 3, 1), [4, 1, 2]),
    tile((1, 3, 2), [2, 2, 2]),
    tile((2, 3), [1, 1]),
    tile((2, 3), [0, 2]),
    tile((0, 3), [2, 2]),
    tile((), []),
    tile((4,), [3]),
    tile((2, 2, 2, 2, 2, 2), [1, 2, 1, 2, 3, 1], dtypes=FLOAT),
    *[
        Case("DepthToSpace", [t(2, 8, 2, 3)], lambda x, mode=mode: depth_to_space(x, 2, mode), dtypes=ALL, fd=False,
             attrs={"blocksize": 2, "mode": mode}, name=mode, resize=False)
        for mode in ("DCR", "CRD")
    ],
    Case("SpaceToDepth", [t(2, 3, 4, 6)], lambda x: space_to_depth(x, 2), attrs={"blocksize": 2}, dtypes=ALL, fd=False,
         resize=False),
    trilu((4, 5), True),
    trilu((4, 5), False),
    trilu((2, 3, 4, 4), True, 1, large=[t(8, 12, 256, 256), value(1, I64)]),
    trilu((2, 5, 3), False, -2),
    trilu((5, 3), True, -2),
    trilu((3, 5), False, 2),
    trilu((3, 3), False, 100),
    trilu((3, 3), True, 2**63 - 1),
    trilu((3, 3), True, -(2**63)),
    trilu((0, 3), True),
    trilu((2, 3, 0), False, 1),
    Case("Trilu", [t(3, 4), value([1], I64)], lambda x, k: x.tril(1), attrs={"upper": 0}, const=1, name="constant"),
    Case("ReverseSequence", [t(5, 3, 2), value([5, 2, 1], I64)], lambda x, n: reverse(x, n, 0), dtypes=ALL, fd=False,
         resize=False),
    Case("ReverseSequence", [t(3, 5), value([0, 5, 4], I64)], lambda x, n: reverse(x, n, 1), fd=False, resize=False,
         attrs={"batch_axis": 0, "time_axis": 1}, dtypes=ALL, name="batch_first"),
    Case("ReverseSequence", [t(4, 70, 33), ints(70, low=0, high=5)], lambda x, n: reverse(x, n, 0), fd=False,
         name="large", resize=False),
]  # fmt: skip
