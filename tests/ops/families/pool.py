"""Lists cases of pooling."""

import torch
import torch.nn.functional as F

from tests.ops.cases import FLOAT, Case, t

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def numbers(x, rank):
    return [x] * rank if isinstance(x, int) else list(x)


def max_pool(x, kernel, stride=1, pad=0, dilation=1, ceil=False, indices=False, special=False, **kwargs):
    rank = len(x) - 2
    kernel, stride, pad, dilation = (numbers(v, rank) for v in (kernel, stride, pad, dilation))

    def ref(x):
        y, index = MAX[rank](x, kernel, stride, pad, dilation, ceil, True)
        planes = torch.arange(x.shape[0] * x.shape[1]).view(*x.shape[:2], *[1] * rank)
        return (y, index + planes * x[0, 0].numel()) if indices else y

    attrs = {"kernel_shape": kernel, "strides": stride, "pads": pad * 2, "dilations": dilation, "ceil_mode": int(ceil)}
    return Case(
        "MaxPool", [t(*x, special=special)], ref, attrs, outputs=2 if indices else 1, resize=False, fd=False, **kwargs
    )


def average_pool(x, kernel, stride=1, pad=0, ceil=False, include=False, **kwargs):
    rank = len(x) - 2
    kernel, stride, pad = (numbers(v, rank) for v in (kernel, stride, pad))
    attrs = {"kernel_shape": kernel, "strides": stride, "pads": pad * 2}
    attrs |= {"ceil_mode": int(ceil), "count_include_pad": int(include)}
    return Case(
        "AveragePool",
        [t(*x)],
        lambda x: AVERAGE[rank](x, kernel, stride, pad, ceil, include),
        attrs,
        resize=False,
        **kwargs,
    )


CASES = [
    max_pool((2, 3, 9), 3),
    max_pool((2, 3, 9), 2, stride=2, pad=1, ceil=True),
    max_pool((2, 3, 8, 7), 2, stride=2, dtypes=FLOAT + ("int8", "uint8", "int32", "int64"), indices=True),
    max_pool((2, 3, 8, 7), 3, stride=2, pad=1),
    max_pool((2, 3, 8, 7), 3, stride=2, pad=1, indices=True),
    max_pool((2, 3, 8, 7), (3, 2), stride=(1, 2), pad=(1, 0), ceil=True),
    max_pool((2, 3, 9, 9), 3, stride=2, ceil=True, indices=True),
    max_pool((2, 3, 9, 9), 2, stride=3, ceil=True),
    max_pool((2, 3, 9, 9), 2, dilation=(2, 3), pad=1, indices=True),
    max_pool((2, 2, 5, 6, 7), 2, stride=2),
    max_pool((2, 2, 5, 6, 7), (2, 3, 2), stride=(1, 2, 2), pad=1, ceil=True, indices=True),
    max_pool((1, 1, 3, 600), (2, 3), stride=1, pad=(0, 1)),
    max_pool((1, 1, 3, 600), (2, 3), stride=2, pad=1, indices=True),
    max_pool((2, 3, 8, 8), 3, stride=2, pad=1, special=True, indices=True, name="special"),
    max_pool((2, 3, 3), 3, stride=3, dilation=2, ceil=True, name="as large as the line, with holes"),
    max_pool((0, 3, 8, 8), 3, stride=2, pad=1),
    max_pool((4, 16, 32, 32), 3, stride=2, pad=1),
    Case(
        "MaxPool",
        [t(2, 3, 8, 8, low=-1, high=1)],
        lambda x: F.max_pool2d(x, 2, 1),
        attrs={"kernel_shape": [2, 2]},
        dtypes=("bfloat16", "float16"),
        fd=False,
        name="ties",
    ),
    Case(
        "MaxPool",
        [t(2, 3, 8, 7)],
        lambda x: F.max_pool2d(F.pad(x, (1, 2, 0, 1), value=-torch.inf), 3, 2),
        attrs={"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 1, 1, 2]},
        fd=False,
        name="asymmetric",
    ),
    Case(
        "MaxPool",
        [t(2, 3, 7, 8)],
        lambda x: F.max_pool2d(F.pad(x, (0, 1, 1, 1), value=-torch.inf), 3, 2),
        attrs={"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
        fd=False,
        resize=False,
        name="same",
    ),
    average_pool((2, 3, 9), 3),
    average_pool((2, 3, 9), 2, stride=2, pad=1, include=True),
    average_pool((2, 3, 8, 7), 2, stride=2),
    average_pool((2, 3, 8, 7), 3, stride=2, pad=1),
    average_pool((2, 3, 8, 7), 3, stride=2, pad=1, include=True),
    average_pool((2, 3, 8, 7), 3, stride=2, pad=1, ceil=True),
    average_pool((2, 3, 8, 7), 3, stride=2, pad=1, ceil=True, include=True),
    average_pool((2, 3, 9, 9), 2, stride=3, ceil=True),
    average_pool((2, 3, 9, 9), 2, stride=3, pad=1, ceil=True, include=True),
    average_pool((2, 3, 8, 7), (3, 2), stride=(1, 2), pad=(1, 0)),
    average_pool((2, 2, 5, 6, 7), 2, stride=2),
    average_pool((2, 2, 5, 6, 7), (2, 3, 2), stride=(1, 2, 2), pad=1, ceil=True, include=True),
    average_pool((2, 3, 8, 8), 3, stride=2, pad=1, include=True, opset=19),
    average_pool((1, 1, 3, 600), (2, 3), pad=(0, 1)),
    average_pool((0, 3, 8, 8), 3, stride=2, pad=1),
    average_pool((4, 16, 32, 32), 3, stride=2, pad=1),
    Case(
        "AveragePool",
        [t(1, 1, 8, 8)],
        lambda x: F.conv2d(x, x.new_full((1, 1, 2, 2), 0.25), dilation=2),
        attrs={"kernel_shape": [2, 2], "dilations": [2, 2]},
        opset=19,
        name="dilations",
    ),
    Case("GlobalAveragePool", [t(2, 3, 5, 4)], lambda x: x.mean((2, 3), keepdim=True)),
    Case("GlobalAveragePool", [t(2, 3, 5)], lambda x: x.mean(2, keepdim=True)),
    Case("GlobalAveragePool", [t(2, 3, 2, 5, 4)], lambda x: x.mean((2, 3, 4), keepdim=True)),
    Case("GlobalMaxPool", [t(2, 3, 5, 4)], lambda x: F.adaptive_max_pool2d(x, 1), fd=False),
    Case("GlobalMaxPool", [t(2, 3, 5)], lambda x: F.adaptive_max_pool1d(x, 1), fd=False),
    Case("GlobalMaxPool", [t(2, 3, 6, 7, special=True)], lambda x: F.adaptive_max_pool2d(x, 1), name="special"),
    Case("GlobalLpPool", [t(2, 3, 5, 4)], lambda x: x.pow(2).sum((2, 3), keepdim=True).sqrt()),
    Case("GlobalLpPool", [t(2, 3, 5)], lambda x: x.abs().pow(3).sum(2, keepdim=True).pow(1 / 3), attrs={"p": 3}),
    Case(
        "LpPool",
        [t(2, 3, 7, 6)],
        lambda x: (F.avg_pool2d(x.pow(2), (3, 2), 2) * 6).sqrt(),
        attrs={"kernel_shape": [3, 2], "strides": [2, 2]},
    ),
    Case(
        "LpPool",
        [t(2, 3, 7, 6)],
        lambda x: (F.avg_pool2d(x.abs().pow(3), 3, 2, 1) * 9).pow(1 / 3),
        attrs={"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "p": 3},
    ),
]
