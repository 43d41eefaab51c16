"""Lists cases of softmax and its logarithm, over any axis, in both of ONNX's meanings."""

import math

import torch

from tests.ops.cases import Case, t, value

INF = math.inf
MASKED = [[0.5, -INF, 1.0], [-INF, -INF, -INF], [INF, 0.0, 1.0], [-INF, 3.0, -INF]]
BIG = [[1000.0, 999.0, -1000.0], [-3e4, -3e4, -3e4 + 64], [88.0, 89.0, 90.0]]


def hardmax(x, axis):
    hot = torch.zeros_like(x)
    return hot.scatter(axis, x.argmax(axis, keepdim=True), 1.0) if x.dim() else hot + 1


def strange(width):
    """Rows wider than vectors: NaN and infinities in any of them or behind the last whole one, larger ones late."""
    rows = [[math.sin(0.37 * i + row) * 4 for i in range(width)] for row in range(8)]
    rows[0][3] = rows[1][-1] = rows[2][width // 2] = math.nan
    rows[3] = [-INF] * width
    rows[4][: width - 2] = [-INF] * (width - 2)
    rows[5][35] = INF
    rows[6][-1], rows[7][33] = 60.0, -INF
    return rows


OPS = {"Softmax": torch.softmax, "LogSoftmax": torch.log_softmax, "Hardmax": hardmax}


def softmax(op, x, axis=-1, opset=13, **kwargs):
    attrs = {} if axis is None else {"axis": axis}

    def ref(x):
        return OPS[op](x, -1 if axis is None else axis)

    return Case(op, [x], ref, attrs=attrs, opset=opset, **{"name": f"axis{axis}", "grad": op != "Hardmax", **kwargs})


def flat(op, shape, axis):
    """Before opset 13: over all axes from `axis` on."""

    def ref(x):
        first = 1 if axis is None else axis
        rows = math.prod(x.shape[:first] if first >= 0 else x.shape[: x.dim() + first])
        columns = x.numel() // rows if rows else math.prod(x.shape[first:])
        return OPS[op](x.reshape(rows, columns), 1).reshape(x.shape)

    attrs = {} if axis is None else {"axis": axis}
    return Case(op, [t(*shape)], ref, attrs=attrs, opset=12, name=f"flat{axis}", grad=op != "Hardmax")


def cases(op):
    yield softmax(op, t(2, 3, 5), None, large=[t(96, 128, 128)])
    yield softmax(op, t(2, 3, 5), 1, large=[t(8, 64, 4096)])
    yield softmax(op, t(2, 3, 5), 0)
    yield softmax(op, t(2, 3, 5), -1)
    for axis in (None, 0, 1, -1):
        yield flat(op, (2, 3, 5), axis)
    yield softmax(op, t(), 0)
    yield softmax(op, t(4, 1))
    yield softmax(op, t(0, 3), 1)
    yield softmax(op, t(3, 0), 1, grad=False, resize=False) if op != "Hardmax" else softmax(op, t(1, 1), 0)
    yield softmax(op, t(3, 7000), 1, fd=False, resize=False)
    yield softmax(op, t(2, 9, 700), 1, fd=False, resize=False)
    if op != "Hardmax":
        for width in (37, 70, 1100, 5000):
            yield softmax(op, value(strange(width)), name=f"strange{width}", grad=False, resize=False, share=1e-3)
        yield softmax(op, value(MASKED), name="masked", grad=False, resize=False)
        yield softmax(op, value(MASKED), 0, name="masked0", grad=False, resize=False)
        yield softmax(op, value(BIG), name="big", resize=False, fd=False)
        yield softmax(op, t(4, 14, special=True), name="special")
        yield softmax(op, t(14, 4, special=True), 0, name="special")


def denormal(op, width, axis=-1):
    """Probabilities that are denormal numbers, times what makes numbers of the usual size of them."""
    nodes = (op, "x0", "p", {} if "::" in op else {"axis": axis}), ("Mul", "p x1", "y0")
    for dtypes, least, scale in (("float32", "bfloat16"), -88.0, 2.0**126), ("float64", -709.0, 2.0**1022):
        row = [0.0] + [least - i % 4 / 4 for i in range(width - 1)]
        inputs = [value([[x] for x in row] if axis == 0 else row), value(scale)]
        options = {"name": f"denormal{axis}", "dtypes": dtypes, "const": 1, "grad": False, "resize": False}
        yield Case(op, inputs, lambda x, scale: x.softmax(axis) * scale, nodes=nodes, **options)


NEVER, ALWAYS = 1e-15, 1.0


def dropped(name, x, axis=-1, rate=NEVER, **kwargs):
    """With a dropout that leaves nothing to chance; what it draws is tested in tests/ops/test_random.py."""
    nodes = ("Softmax", "x0", "p", {"axis": axis}), ("Dropout", "p x1 x2", "y0")

    def ref(x, rate, _):
        return x.softmax(axis) * (0 if rate == ALWAYS else 1)

    inputs = [x, value(rate, "float32"), value(True, "bool")]
    return Case("ortmodule::SoftmaxDropout", inputs, ref, name=name, nodes=nodes, const=(1, 2), **kwargs)


CASES = [case for op in OPS for case in cases(op)]
CASES += [
    dropped("rows", t(2, 3, 5), large=[t(96, 128, 128), value(0.1, "float32"), value(True, "bool")]),
    dropped("axis2", t(2, 3, 70), 2),
    dropped("nothing-left", t(2, 3, 5), rate=ALWAYS),
    dropped("column", t(4, 1)),
    dropped("vector", t(131)),
    dropped("no-rows", t(0, 3)),
    dropped("no-columns", t(3, 0), grad=False, resize=False),
    dropped("long", t(3, 7000), fd=False, resize=False),
    dropped("blocks", t(7, 50, 48), fd=False, resize=False),
    dropped("hidden", value(MASKED), grad=False, resize=False),
    dropped("special", t(4, 14, special=True)),
]
CASES += [*denormal("Softmax", 9), *denormal("Softmax", 9, 0), *denormal("Softmax", 7000)]
