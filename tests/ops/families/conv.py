"""Lists cases of convolutions."""

import torch.nn.functional as F

from tests.ops.cases import Case, t

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def numbers(x, rank):
    return [x] * rank if isinstance(x, int) else list(x)


def conv(x, w, bias=None, stride=1, pad=0, dilation=1, group=1, **kwargs):
    """`pad`: one number, one an axis, or one for each side of each axis, all the beginnings first."""
    rank = len(x) - 2
    stride, dilation = numbers(stride, rank), numbers(dilation, rank)
    pads = numbers(pad, rank)
    pads = pads if len(pads) == 2 * rank else pads * 2

    def ref(x, w, b=None):
        x = F.pad(x, [p for axis in reversed(range(rank)) for p in (pads[axis], pads[rank + axis])])
        return CONV[rank](x, w, b, stride, 0, dilation, group)

    attrs = {"strides": stride, "dilations": dilation, "pads": pads, "group": group, "kernel_shape": list(w[2:])}
    inputs = [t(*x), t(*w)] + ([t(w[0])] if bias else [])
    return Case("Conv", inputs, ref, attrs=attrs, resize=False, **kwargs)


def same(x, w, stride, mode):
    """auto_pad: as many outputs as strides fit into the input."""
    kernel, sizes = w[2:], x[2:]
    total = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(sizes, kernel, stride, strict=True)]
    before = [p // 2 if mode == "SAME_UPPER" else p - p // 2 for p in total]
    pads = [p for b, p in reversed(list(zip(before, total, strict=True))) for p in (b, p - b)]
    attrs = {"auto_pad": mode, "strides": stride}
    return Case("Conv", [t(*x), t(*w)], lambda x, w: F.conv2d(F.pad(x, pads), w, None, stride), attrs, resize=False)


def transposed(x, w, bias=None, stride=1, pad=0, dilation=1, group=1, extra=0, **kwargs):
    rank = len(x) - 2
    stride, dilation, pad, extra = (numbers(v, rank) for v in (stride, dilation, pad, extra))

    def ref(x, w, b=None):
        return TRANSPOSED[rank](x, w, b, stride, pad, extra, group, dilation)

    attrs = {"strides": stride, "dilations": dilation, "pads": pad * 2, "group": group, "output_padding": extra}
    inputs = [t(*x), t(*w)] + ([t(w[1] * group)] if bias else [])
    return Case("ConvTranspose", inputs, ref, attrs=attrs, resize=False, **kwargs)


CASES = [
    conv((2, 3, 9), (4, 3, 3)),
    conv((2, 3, 9), (4, 3, 3), bias=True, pad=1),
    conv((2, 3, 9), (9, 3, 4), bias=True, stride=2, pad=(2, 1)),
    conv((2, 6, 11), (6, 1, 4), bias=True, pad=(3, 0), group=6),
    conv((2, 3, 8, 7), (4, 3, 3, 3), bias=True, pad=1),
    conv((2, 3, 8, 7), (16, 3, 3, 3), bias=True, pad=1),
    conv((2, 3, 8, 7), (16, 3, 3, 3), stride=2, pad=1),
    conv((2, 3, 9, 7), (16, 3, 3, 2), bias=True, stride=(2, 1), pad=(0, 1)),
    conv((2, 3, 8, 7), (16, 3, 3, 3), bias=True, pad=(1, 0, 2, 1)),
    conv((2, 3, 9, 8), (16, 3, 3, 3), dilation=2),
    conv((2, 3, 9, 8), (16, 3, 2, 3), dilation=(3, 1), pad=(2, 1), stride=2),
    conv((2, 8, 5, 6), (16, 8, 1, 1), bias=True),
    conv((2, 8, 5, 6), (16, 8, 1, 1), stride=2),
    conv((2, 8, 5, 6), (16, 8, 1, 1), pad=1),
    conv((3, 16, 9, 11), (24, 16, 1, 1), bias=True),
    conv((6, 32, 5, 7), (48, 16, 1, 1), stride=(2, 3), group=2, bias=True),
    conv((2, 16, 4, 6, 5), (8, 16, 1, 1, 1), stride=(3, 2, 1)),
    conv((70, 64, 16, 15), (8, 64, 1, 1), tol=4, fd=False),
    # images of few pixels, side by side: one chunk, several, groups, one image
    conv((5, 16, 2, 3), (24, 16, 1, 1), bias=True),
    conv((9, 32, 1, 1), (16, 32, 1, 1)),
    conv((3, 24, 3, 3), (36, 12, 1, 1), group=2, bias=True),
    conv((300, 40, 2, 2), (9, 40, 1, 1), tol=4, fd=False),
    conv((1, 16, 2, 2), (24, 16, 1, 1), bias=True),
    conv((20, 17, 6, 5), (18, 17, 1, 1)),
    conv((0, 16, 6, 6), (16, 16, 1, 1), bias=True),
    conv((2, 9, 5, 6), (2, 9, 1, 1), bias=True),
    conv((2, 2, 5, 6), (2, 2, 1, 1), bias=True),
    conv((2, 3, 8, 8), (16, 3, 4, 4), bias=True, stride=4),
    conv((2, 3, 9, 10), (16, 3, 4, 4), stride=4),
    conv((2, 3, 9, 10), (16, 3, 2, 2), stride=4),
    conv((2, 4, 6, 5), (4, 1, 3, 3), bias=True, pad=1, group=4),
    conv((2, 4, 7, 6), (8, 1, 3, 3), stride=2, pad=1, group=4),
    conv((2, 6, 14, 13), (6, 1, 5, 5), bias=True, pad=2, group=6),
    conv((2, 4, 9, 33), (4, 1, 7, 7), pad=3, group=4),
    conv((2, 4, 40, 67), (8, 1, 3, 3), bias=True, stride=2, pad=1, group=4),
    conv((2, 4, 20, 31), (12, 1, 3, 3), stride=2, pad=2, dilation=3, group=4),
    conv((2, 4, 17, 40), (4, 1, 3, 5), stride=(2, 1), pad=(1, 0, 0, 3), dilation=(1, 2), group=4),
    conv((2, 4, 31, 30), (4, 1, 3, 3), bias=True, stride=4, pad=1, group=4),
    conv((2, 4, 9, 9), (4, 1, 1, 1), stride=2, group=4),
    conv((2, 4, 3, 3), (4, 1, 5, 5), pad=3, group=4),
    conv((2, 3, 40), (3, 1, 9), bias=True, pad=4, group=3),
    conv((1, 3, 70, 300), (3, 1, 3, 3), pad=1, group=3, tol=4, fd=False),
    conv((1, 2, 4, 2500), (2, 1, 3, 3), pad=1, group=2, tol=4, fd=False),
    conv((1, 2, 30, 31), (2, 1, 21, 21), pad=10, group=2, fd=False),
    conv((2, 4, 6, 5), (32, 2, 3, 3), bias=True, pad=1, group=2),
    conv((2, 6, 6, 5), (6, 2, 3, 3), pad=1, group=3),
    conv((2, 4, 5, 6), (16, 4, 5, 6)),
    conv((1, 1, 1, 1), (1, 1, 1, 1)),
    conv((1, 2, 2, 2), (8, 2, 3, 3), pad=2),
    conv((0, 3, 6, 6), (16, 3, 3, 3), bias=True),
    conv((0, 3, 6, 6), (4, 3, 3, 3)),
    conv((2, 2, 4, 5, 6), (3, 2, 2, 3, 2), bias=True),
    conv((2, 2, 4, 5, 6), (9, 2, 3, 3, 3), bias=True, pad=1, stride=(1, 2, 2)),
    conv((1, 4, 4, 4, 4), (16, 4, 1, 1, 1)),
    conv((4, 16, 30, 31), (24, 16, 3, 3), bias=True, pad=1, tol=4),
    conv((3, 12, 40, 40), (16, 12, 5, 5), stride=2, pad=2, tol=4),
    conv((2, 64, 56, 56), (64, 64, 3, 3), pad=1, tol=4, dtypes=("float32",), fd=False),
    same((2, 3, 8, 7), (9, 3, 3, 3), (1, 1), "SAME_UPPER"),
    same((2, 3, 8, 7), (9, 3, 2, 4), (2, 2), "SAME_UPPER"),
    same((2, 3, 8, 7), (9, 3, 2, 4), (2, 2), "SAME_LOWER"),
    Case("Conv", [t(2, 3, 6, 6), t(9, 3, 3, 3)], F.conv2d, attrs={"auto_pad": "VALID"}, resize=False),
    Case("Conv", [t(2, 3, 6, 6, special=True), t(9, 3, 3, 3)], F.conv2d, resize=False, name="special"),
    Case(
        "Conv",
        [t(2, 4, 6, 6, special=True), t(4, 1, 3, 3)],
        lambda x, w: F.conv2d(x, w, padding=1, groups=4),
        attrs={"group": 4, "pads": [1] * 4},
        resize=False,
        name="special, a channel each",
    ),
    Case(
        "Conv",
        [t(2, 4, 6, 6), t(4, 1, 3, 3, special=True)],
        lambda x, w: F.conv2d(x, w, padding=1, groups=4),
        attrs={"group": 4, "pads": [1] * 4},
        resize=False,
        dtypes=("float32",),  # for float64 PyTorch multiplies padding with infinity, too
        name="special weights, a channel each",
    ),
    transposed((2, 3, 6), (3, 4, 3), bias=True),
    transposed((2, 3, 6), (3, 4, 4), stride=2, pad=1),
    transposed((2, 3, 5, 6), (3, 4, 3, 3), bias=True, stride=2, pad=1, extra=1),
    transposed((2, 3, 5, 6), (3, 9, 2, 2), bias=True, stride=2),
    transposed((2, 16, 5, 6), (16, 9, 4, 4), bias=True, stride=2, pad=1),
    transposed((2, 16, 5, 6), (16, 9, 3, 3), stride=(2, 3), pad=(0, 1), extra=(1, 2)),
    transposed((2, 3, 5, 6), (3, 4, 3, 3), dilation=2, extra=1),
    transposed((2, 4, 5, 6), (4, 2, 3, 3), bias=True, stride=2, group=2),
    transposed((2, 4, 5, 6), (4, 1, 3, 3), stride=2, pad=1, group=4),
    transposed((1, 2, 3, 3, 4), (2, 3, 2, 3, 2), bias=True, stride=2),
    transposed((2, 16, 5, 6), (16, 4, 1, 1)),
    transposed((4, 32, 16, 16), (32, 24, 3, 3), bias=True, stride=2, pad=1, extra=1, tol=4),
    Case(
        "ConvTranspose",
        [t(1, 3, 5, 5), t(3, 4, 3, 3)],
        lambda x, w: F.conv_transpose2d(x, w, None, 2)[:, :, 1:, 1:],
        attrs={"strides": [2, 2], "output_shape": [10, 10]},
        resize=False,
        name="output_shape",
    ),
    Case(
        "ConvTranspose",
        [t(1, 3, 5, 5), t(3, 4, 3, 3)],
        lambda x, w: F.conv_transpose2d(x, w, None, 2)[:, :, :-1, :-1],
        attrs={"strides": [2, 2], "auto_pad": "SAME_UPPER"},
        resize=False,
        name="same_upper",
    ),
]
