"""Lists random operators where they leave nothing to chance: rates 0 and 1, distributions of one point.

What they do otherwise is tested as statistics (tests/ops/test_random.py).
"""

import math

import torch

from tests.ops.cases import ALL, FLOAT, Case, t, value
from tests.ops.harness import ONNX_TYPE

NEVER, ALWAYS = value(0.0, "float32"), value(1.0, "float32")


def dropout(x, ratio=None, training=None, outputs=1, keep=1, **kwargs):
    def ref(x, *_):
        return (x * keep, torch.full(x.shape, bool(keep)))[:outputs]

    inputs = [x, ratio, training if training is None else value(training, "bool")]
    while inputs[-1] is None:
        inputs.pop()
    options = {"opset": 13, "const": tuple(range(1, len(inputs))), "outputs": outputs, "name": f"keep{keep}", **kwargs}
    return Case("Dropout", inputs, ref, **options)


def onnx_type(dtype):
    return ONNX_TYPE[getattr(torch, dtype)]


def filled(op, number, **attrs):
    """A tensor in which every element is `number`."""
    shape = [2, 3, 5]
    if op.endswith("Like"):
        return Case(op, [t(*shape)], lambda x: torch.full_like(x, number), attrs=attrs, grad=False)

    def make(dtype):
        return Case(op, [], lambda: torch.full(shape, number, dtype=getattr(torch, dtype)), dtypes=dtype, grad=False,
                    attrs={"shape": shape, "dtype": onnx_type(dtype), **attrs}, name=dtype)  # fmt: skip

    return [make(dtype) for dtype in FLOAT]


def bernoulli(data, to=None):
    attrs = {} if to is None else {"dtype": onnx_type(to)}
    dtype = None if to is None else getattr(torch, to)
    return Case(
        "Bernoulli", [value(data)], lambda p: p.to(dtype or p.dtype), attrs=attrs, opset=15, grad=False, name=f"to-{to}"
    )


CASES = [
    dropout(t(3, 5), value(0.3, "float32"), False),
    dropout(t(3, 5), value(0.3, "float32"), False, outputs=2),
    dropout(t(3, 5), value(0.3, "float32")),
    dropout(t(3, 5), outputs=2, opset=12),
    dropout(t(3, 5), NEVER, True, outputs=2),
    dropout(t(3, 5), ALWAYS, True, outputs=2, keep=0),
    dropout(t(3, 5), ALWAYS, True, keep=0),
    dropout(t(), ALWAYS, True, keep=0),
    dropout(t(0, 3), value(0.5, "float64"), True, resize=False),
    *filled("RandomUniform", 1.5, low=1.5, high=1.5),
    *filled("RandomNormal", -2.5, mean=-2.5, scale=0.0),
    filled("RandomUniformLike", 1.5, low=1.5, high=1.5),
    filled("RandomNormalLike", -2.5, mean=-2.5, scale=0.0),
    *(bernoulli([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]], to) for to in (None, *ALL)),
    Case("Multinomial", [value([[-math.inf, 0.0, -math.inf], [-math.inf, -math.inf, -5.0]])],
         lambda x: torch.tensor([[1] * 4, [2] * 4], dtype=torch.int64),
         attrs={"dtype": 7, "sample_size": 4}, grad=False, resize=False),
    Case("Multinomial", [value([[3.0]])], lambda x: torch.tensor([[0]], dtype=torch.int32), grad=False),
]  # fmt: skip
