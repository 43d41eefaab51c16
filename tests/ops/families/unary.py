"""Cases of csrc/ops/pointwise/unary.c."""

import math

import torch

from tests.ops.cases import EDGES, INT, NUMBER, Case, curve, t, value

WIDE = ("float32", "float64")
NAN, INF = math.nan, math.inf

# operator, PyTorch's function, domain of the random operand. Those of ours whose domain is all numbers: operators.py
SMOOTH = [
    ("Exp", torch.exp, {}),
    ("Log", torch.log, {"low": 0.05, "high": 4}),
    ("Sqrt", torch.sqrt, {"low": 0.05, "high": 4}),
    ("Reciprocal", torch.reciprocal, {"low": 0.2, "high": 3}),
    ("Erf", torch.erf, {}),
    ("Sin", torch.sin, {}),
    ("Cos", torch.cos, {}),
    ("Tan", torch.tan, {"low": -1.2, "high": 1.2}),
    ("Asin", torch.asin, {"low": -0.9, "high": 0.9}),
    ("Acos", torch.acos, {"low": -0.9, "high": 0.9}),
    ("Atan", torch.atan, {}),
    ("Sinh", torch.sinh, {}),
    ("Cosh", torch.cosh, {}),
    ("Tanh", torch.tanh, {}),
    ("Asinh", torch.asinh, {}),
    ("Acosh", torch.acosh, {"low": 1.1, "high": 4}),
    ("Atanh", torch.atanh, {"low": -0.9, "high": 0.9}),
    ("ortmodule::Log1p", torch.log1p, {"low": -0.9, "high": 4}),
    ("ortmodule::Lgamma", torch.lgamma, {"low": 0.2, "high": 6}),
]
STEPS = [
    ("Floor", torch.floor),
    ("Ceil", torch.ceil),
    ("Round", torch.round),
    ("ortmodule::Trunc", torch.trunc),
]

CASES = [
    *(case for op, ref, domain in SMOOTH for case in curve(op, ref, **domain)),
    *(
        case
        for op, ref in STEPS
        for case in (
            Case(op, [t(4, 7, low=-4, high=4)], ref, fd=False),
            Case(op, [t(0)], ref, name="empty"),
            Case(op, [t()], ref, name="scalar", fd=False),
            Case(op, [value([*EDGES, 1.5, 3.5, -1.5, 0.49999997, 1e20])], ref, fd=False, name="edges"),
        )
    ),
    Case("Abs", [t(3, 5)], torch.abs),
    Case("Abs", [t(3, 5)], torch.abs, dtypes=INT, name="integers"),
    Case("Abs", [value(EDGES)], torch.abs, fd=False, name="edges"),
    Case("Abs", [value([-128, 127, 0])], torch.abs, dtypes=("int8", "int64"), name="smallest"),
    Case("Neg", [t(3, 5)], torch.neg, dtypes=NUMBER),
    Case("Neg", [value(EDGES)], torch.neg, fd=False, name="edges"),
    Case("Sign", [t(3, 5)], torch.sign, dtypes=NUMBER, fd=False),
    Case("Sign", [value(EDGES)], torch.sign, fd=False, name="edges"),
    # PyTorch's own trigamma is good to nine digits.
    Case("ortmodule::Digamma", [t(3, 5, low=0.2, high=6)], torch.digamma, dtypes=("float64",), tol=100),
    Case(
        "ortmodule::Digamma",
        [t(3, 5, low=0.2, high=6)],
        torch.digamma,
        dtypes=("float32", "bfloat16", "float16"),
        name="short",
    ),
    Case("ortmodule::Digamma", [t(700, low=-5, high=20)], torch.digamma, dtypes=WIDE, grad=False, name="wide"),
    Case("ortmodule::Digamma", [value([*EDGES, -2.0])], torch.digamma, dtypes=WIDE, grad=False, name="edges"),
    Case("Sin", [t(2, 600, low=-1e7, high=1e7)], torch.sin, dtypes=WIDE, fd=False, name="far"),
    Case("Cos", [t(2, 600, low=-1e7, high=1e7)], torch.cos, dtypes=WIDE, fd=False, name="far"),
    Case("Sqrt", [value([0.0, 1.0, 4.0, INF])], torch.sqrt, fd=False, name="gradient at 0"),
    Case("Log", [value([0.0, 1e-40, 1e-38, 1.0, INF])], torch.log, dtypes=WIDE, name="tiny", grad=False),
    Case("Exp", [value([88.5, 89.5, -87.5, -103.0, -104.5, 709.5, 710.5])], torch.exp, grad=False, name="limits"),
    Case("Tanh", [value([1e-30, -1e-8, 0.6, 0.62, 0.63, 9.0, 20.0, 100.0])], torch.tanh, name="range"),
    Case("Erf", [value([1e-30, -1e-8, 0.89, 0.91, -3.9, 4.1, 20.0])], torch.erf, fd=False, name="range"),
]
