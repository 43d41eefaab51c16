"""Cases of csrc/ops/pointwise/activation.c."""

import math

import torch
import torch.nn.functional as F

from tests.ops.cases import Case, t, value

NAN, INF = math.nan, math.inf
NEVER, ALWAYS = 1e-15, 1.0
# Kinks of any activation, and numbers where exponentials overflow.
EDGES = [NAN, INF, 0.0, -0.0, 3.0, -3.0, 2.9, -2.9, 3.1, -3.1, 1e-4, -1e-4, 20.5, -20.5, 100.0, -100.0, 1e4, -1e4]

# name, operator, attributes, PyTorch's function, opset
ACTIVATIONS = [
    ("", "Relu", {}, F.relu, 18),
    ("", "LeakyRelu", {}, F.leaky_relu, 18),
    ("steep", "LeakyRelu", {"alpha": 0.25}, lambda x: F.leaky_relu(x, 0.25), 18),
    ("hundredth", "LeakyRelu", {"alpha": 0.01}, F.leaky_relu, 18),
    ("negative", "LeakyRelu", {"alpha": -0.5}, lambda x: F.leaky_relu(x, -0.5), 18),
    ("", "ThresholdedRelu", {}, lambda x: F.threshold(x, 1, 0), 18),
    ("half", "ThresholdedRelu", {"alpha": 0.5}, lambda x: F.threshold(x, 0.5, 0), 18),
    ("", "HardSigmoid", {}, lambda x: F.hardtanh(0.2 * x + 0.5, 0.0, 1.0), 18),
    ("torch", "HardSigmoid", {"alpha": 1 / 6}, F.hardsigmoid, 18),
    ("", "ortmodule::HardTanh", {}, F.hardtanh, 18),
    ("six", "ortmodule::HardTanh", {"min": 0.0, "max": 6.0}, F.relu6, 18),
    ("three", "ortmodule::HardTanh", {"min": -3.0, "max": 3.0}, lambda x: F.hardtanh(x, -3.0, 3.0), 18),
    ("", "HardSwish", {}, F.hardswish, 18),
    ("", "Elu", {}, F.elu, 18),
    ("half", "Elu", {"alpha": 0.5}, lambda x: F.elu(x, 0.5), 18),
    ("", "Selu", {}, F.selu, 18),
    ("", "Celu", {}, F.celu, 18),
    ("double", "Celu", {"alpha": 2.0}, lambda x: F.celu(x, 2.0), 18),
    ("", "Sigmoid", {}, F.sigmoid, 18),
    ("", "Softplus", {}, F.softplus, 18),
    ("", "Softsign", {}, F.softsign, 18),
    ("", "Mish", {}, F.mish, 18),
    ("", "Gelu", {}, F.gelu, 20),
    ("tanh", "Gelu", {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh"), 20),
    ("", "Swish", {}, F.silu, 24),
    ("quick", "Swish", {"alpha": 1.702}, lambda x: x * torch.sigmoid(1.702 * x), 24),
]
# PyTorch's own answers there depend on the length of the tensor.
NO_NAN_GRADIENT = ("HardSwish", "Elu", "Selu", "Celu")
NO_INFINITY = ("Gelu", "Mish", "Softsign", "Swish")


def edges(op):
    return [x for x in EDGES if not (math.isnan(x) and op in NO_NAN_GRADIENT or math.isinf(x) and op in NO_INFINITY)]


def relu_dropped(name, x, rate=NEVER, **kwargs):
    """With a dropout that leaves nothing to chance; one that does is tested in tests/passes/test_dropout.py."""
    nodes = ("Relu", "x0", "r"), ("Dropout", "r x1 x2", "y0")

    def ref(x, *_):
        return F.relu(x) * (rate != ALWAYS)

    inputs = [x, value(rate, "float32"), value(True, "bool")]
    return Case("ortmodule::ReluDropoutGrad", inputs, ref, name=name, nodes=nodes, const=(1, 2), opset=14, **kwargs)


CASES = [
    *(
        case
        for name, op, attrs, ref, opset in ACTIVATIONS
        for case in (
            Case(op, [t(3, 5)], ref, attrs=attrs, opset=opset, name=name, large=[t(1024, 1024)]),
            Case(op, [t(2, 1031)], ref, attrs=attrs, opset=opset, dtypes="float32", name=f"{name} tiles"),
            Case(op, [t()], ref, attrs=attrs, opset=opset, name=f"{name} scalar"),
            Case(op, [t(3, 0)], ref, attrs=attrs, opset=opset, name=f"{name} empty"),
            Case(op, [value(edges(op))], ref, attrs=attrs, opset=opset, name=f"{name} edges", fd=False),
            Case(op, [value([NAN, 1.0, *edges(op)])], ref, attrs=attrs, opset=opset, name=f"{name} nan", grad=False),
        )
    ),
    Case("Relu", [t(3, 5)], F.relu, dtypes=("int32", "int64", "int16", "int8"), name="integers"),
    *(
        Case("PRelu", [t(*x), t(*slope)], lambda x, slope: torch.where(x > 0, x, slope * x), name=name)
        for name, x, slope in [
            ("", (2, 3, 4), (3, 1)),
            ("one slope", (2, 3, 4), (1,)),
            ("scalar slope", (4, 3), ()),
            ("every element", (2, 3), (2, 3)),
            ("empty", (0, 3), (3,)),
            ("scalar", (), ()),
        ]
    ),
    Case("PRelu", [value([NAN, 0.0, -0.0, INF, 2.0, -3.0]), value([0.25])], F.prelu, fd=False, name="edges"),
    relu_dropped("kept", t(3, 5), large=[t(1024, 1024), value(0.1, "float32"), value(True, "bool")]),
    relu_dropped("tiles", t(2, 1031), dtypes="float32"),
    relu_dropped("scalar", t()),
    relu_dropped("empty", t(3, 0)),
    relu_dropped("nothing-left", t(3, 5), ALWAYS),
    relu_dropped("edges", value([-INF, 0.0, -0.0, 3.0, -3.0, 1e-4, -1e-4]), fd=False),
]
