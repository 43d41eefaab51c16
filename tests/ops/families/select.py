"""Cases of csrc/ops/pointwise/select.c."""

import math

import onnx
import torch

from tests.ops.cases import ALL, FLOAT, INT, NUMBER, Case, bools, t, value

NAN, INF = math.nan, math.inf
TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float64": onnx.TensorProto.DOUBLE,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "float16": onnx.TensorProto.FLOAT16,
    "int64": onnx.TensorProto.INT64,
    "int32": onnx.TensorProto.INT32,
    "int16": onnx.TensorProto.INT16,
    "int8": onnx.TensorProto.INT8,
    "uint8": onnx.TensorProto.UINT8,
    "bool": onnx.TensorProto.BOOL,
}
HARD = [NAN, INF, -INF, 0.0, -0.0, 0.4, -0.9, 1.5, 2.5, 300.25, -300.25, 70000.0, 3e9, -3e9, 1e19, 1e-8]
HARD_INTEGERS = [0, 1, -1, 127, 128, 255, 256, -129, 32768, 2**24 + 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**62]


def clip(low, high):
    """ONNX's, whose gradient at a number that is a bound is that of torch.clamp up to 2.13 (docs/versions.md)."""

    def ref(x, *bounds):
        between = x == x
        between &= True if low is None else x >= low
        between &= True if high is None else x <= high
        return torch.where(between, x, x.detach().clamp(low, high))

    return ref


def cast(inputs, to, dtypes, name="", **kwargs):
    def ref(x):
        return x.to(getattr(torch, to))

    return Case("Cast", inputs, ref, attrs={"to": TYPES[to]}, dtypes=dtypes, fd=False, name=f"{name}to {to}", **kwargs)


CASES = [
    # --- Where
    *(
        Case("Where", [bools(*c), t(*a), t(*b)], torch.where, dtypes=ALL if i == 0 else ("float32", "int64"))
        for i, (c, a, b) in enumerate(
            [
                ((3, 5), (3, 5), (3, 5)),
                ((2, 1, 1, 5), (2, 3, 4, 5), ()),
                ((4, 4), (), (2, 3, 4, 4)),
                ((3, 1), (1, 4), (2, 1, 1)),
                ((), (2, 3), (3,)),
                ((5, 2000), (5, 2000), (5, 2000)),
                ((), (), ()),
                ((0, 3), (3,), (0, 1)),
            ]
        )
    ),
    Case("Where", [value(True, "bool"), t(3, 4), t(4)], lambda c, x, y: x.clone(), const=0, name="true"),
    Case("Where", [value([False], "bool"), t(3, 4), t(4)], lambda c, x, y: y.expand_as(x), const=0, name="false"),
    Case("Where", [bools(6, 7), t(6, 7, special=True), value(-INF)], torch.where, const=2, name="special"),
    # --- Clip
    *(
        case
        for name, low, high in [("", -0.5, 0.5), ("low", 0.0, None), ("high", None, 0.25), ("crossed", 1.0, -1.0)]
        for case in (
            Case(
                "Clip",
                [t(3, 5), None if low is None else value(low), None if high is None else value(high)],
                clip(low, high),
                const=(1, 2),
                name=name,
                large=[t(1024, 1024), None if low is None else value(low), None if high is None else value(high)],
            ),
            Case(
                "Clip",
                [
                    value([NAN, INF, -INF, 0.0, -0.0, 0.5, -0.5, 0.25, 1.0, -1.0]),
                    None if low is None else value(low),
                    None if high is None else value(high),
                ],
                clip(low, high),
                const=(1, 2),
                fd=False,
                name=f"edges {name}",
            ),
        )
    ),
    Case("Clip", [t(3, 5)], lambda x: x.clone(), name="unbounded"),
    Case("Clip", [t(3, 5)], clip(-0.5, 1.0), attrs={"min": -0.5, "max": 1.0}, opset=10, name="attributes"),
    Case("Clip", [t(3, 5)], clip(None, 0.25), attrs={"max": 0.25}, opset=10, name="attribute"),
    Case("Clip", [t(0, 5), value(0.0)], clip(0.0, None), const=1, name="empty"),
    Case("Clip", [t(), value(-0.1), value(0.1)], clip(-0.1, 0.1), const=(1, 2), name="scalar"),
    Case("Clip", [t(3, 5), t(), t()], torch.clamp, name="computed bounds"),
    Case("Clip", [t(3, 5), value(0.5), value(-0.5)], torch.clamp, name="computed bounds that cross"),
    Case("Clip", [t(3, 5), value(NAN), value(0.5)], torch.clamp, grad=False, name="bound is nan"),
    Case("Clip", [t(3, 5, low=-9, high=9), value(2), value(4)], clip(2, 4), const=(1, 2), dtypes=INT),
    Case("Clip", [t(3, 5, low=-9, high=9), None, value(4)], clip(None, 4), const=2, dtypes=INT, name="high"),
    Case("Clip", [t(3, 5, low=-9, high=9), value(2)], clip(2, None), const=1, dtypes=INT, name="low"),
    # --- Cast
    *(
        case
        for to in TYPES
        for case in (
            cast([t(4, 9, low=-100, high=100)], to, ALL),
            cast([value(HARD)], to, FLOAT, grad=False, name="hard "),
            cast([value(HARD_INTEGERS)], to, INT, name="hard "),
        )
    ),
    *(cast([t(9003)], to, FLOAT, name="many ") for to in ("float32", "bfloat16", "float16")),
    Case("Cast", [t(0, 3)], lambda x: x.half(), attrs={"to": TYPES["float16"]}, name="empty"),
    Case("Cast", [t()], lambda x: x.long(), attrs={"to": TYPES["int64"]}, name="scalar"),
    Case("Cast", [t(3)], lambda x: x.double(), attrs={"to": TYPES["float64"], "saturate": 0}, opset=19, fd=False),
    Case("CastLike", [t(3, 4), t(2, dtype="float32", grad=False)], lambda x, y: x.float(), dtypes=NUMBER, fd=False),
    Case("CastLike", [t(3, 4), bools()], lambda x, y: x.bool(), dtypes=FLOAT),
]
