"""Losses with labels: reductions, weights, ignored labels, any number of axes, single samples, soft labels."""

import math

import torch.nn.functional as F

from tests.ops.cases import FLOAT, Case, ints, t, value
from tests.ops.families.softmax import strange

FEW = ("float32", "float64", "bfloat16")
BIG = [[1000.0, 1001.0, -1000.0], [-3e4, -3e4, -3e4 + 64], [0.0, -math.inf, 5.0]]


def cross_entropy(x, labels, weights=None, reduction="mean", ignore=None, outputs=1, **kwargs):
    def ref(x, labels, weights=None):
        loss = F.cross_entropy(
            x, labels.long(), weights, ignore_index=-100 if ignore is None else ignore, reduction=reduction
        )
        return (loss, x.log_softmax(min(1, x.dim() - 1)))[:outputs]

    attrs = {"reduction": reduction} | ({} if ignore is None else {"ignore_index": ignore})
    name = f"{reduction}{'' if ignore is None else f'-ignore{ignore}'}"
    options = {"dtypes": FEW, "opset": 13, "outputs": outputs, "name": name, **kwargs}
    return Case("SoftmaxCrossEntropyLoss", [x, labels] + ([weights] if weights else []), ref, attrs=attrs, **options)


def widened(x, labels, reduction="mean"):
    def ref(x, labels):
        return F.cross_entropy(x.float() if x.dtype.itemsize == 2 else x, labels.long(), reduction=reduction)

    loss = ("SoftmaxCrossEntropyLoss", "wide x1", "y0", {"reduction": reduction})
    return Case(
        "ortmodule::CrossEntropy", [x, labels], ref, dtypes=("bfloat16", "float16"), resize=False,
        nodes=[("Cast", "x0", "wide", {"to": 1}), loss], name=f"widened {reduction}",
    )  # fmt: skip


def smoothed(x, labels, weights=None, reduction="mean", ignore=-100, smoothing=0.1, **kwargs):
    def ref(x, labels, weights=None):
        how = {"ignore_index": ignore, "reduction": reduction, "label_smoothing": smoothing}
        return F.cross_entropy(x, labels.long(), weights, **how)

    attrs = {"reduction": reduction, "ignore_index": ignore, "smoothing": smoothing}
    options = {"dtypes": FEW, "name": f"{reduction}-{smoothing}-ignore{ignore}", **kwargs}
    operands = [x, labels] + ([weights] if weights else [])
    return Case("ortmodule::SmoothedCrossEntropy", operands, ref, attrs=attrs, **options)


def nll(x, labels, weights=None, reduction="mean", ignore=None, **kwargs):
    def ref(x, labels, weights=None):
        return F.nll_loss(
            x, labels.long(), weights, ignore_index=-100 if ignore is None else ignore, reduction=reduction
        )

    attrs = {"reduction": reduction} | ({} if ignore is None else {"ignore_index": ignore})
    name = f"{reduction}{'' if ignore is None else f'-ignore{ignore}'}"
    options = {"dtypes": FEW, "opset": 13, "name": name, **kwargs}
    return Case("NegativeLogLikelihoodLoss", [x, labels] + ([weights] if weights else []), ref, attrs=attrs, **options)


def soft(x, weights=None, reduction="mean"):
    """Labels that are probabilities, which the exporter writes with the same operator."""

    def ref(x, p, weights=None):
        return F.cross_entropy(x, p, weights, reduction=reduction)

    inputs = [x, t(*x.shape, low=0, high=1)] + ([weights] if weights else [])
    return Case(
        "SoftmaxCrossEntropyLoss",
        inputs,
        ref,
        attrs={"reduction": reduction},
        opset=13,
        dtypes=FEW,
        name=f"soft-{reduction}",
    )


def weights(classes):
    return t(classes, low=0.1, high=2, grad=False)


def both(loss):
    labels, images = ints(6, high=7), ints(2, 3, 4, high=7)
    for reduction in ("mean", "sum", "none"):
        yield loss(t(6, 7), labels, reduction=reduction, dtypes=FLOAT)
        yield loss(t(6, 7), labels, weights(7), reduction, ignore=2)
        yield loss(t(2, 7, 3, 4), images, reduction=reduction)
        yield loss(t(2, 7, 3, 4), images, weights(7), reduction, ignore=5)
        yield loss(t(7), ints(high=7), reduction=reduction, resize=False)
        # Nothing counts, and nothing is there.
        yield loss(t(3, 7), value([-100] * 3, "int64"), reduction=reduction, ignore=-100, resize=False, fd=False)
        yield loss(t(2, 7, 3), value([[-1] * 3] * 2, "int64"), weights(7), reduction, ignore=-1, resize=False, fd=False)
        yield loss(t(0, 7), ints(0, high=7), reduction=reduction, resize=False, fd=False)
    yield loss(t(6, 7), value([0, 6, -100, 3, -100, 2], "int64"), ignore=-100, resize=False)
    for dtype in ("int32", "uint8"):
        yield loss(t(6, 7), ints(6, high=7, dtype=dtype), name=dtype)
    large = [t(512, 30522), ints(512, high=30522)]
    # The gradient of a label is a thousand times as large as that of another class.
    yield loss(t(40, 3000), ints(40, high=3000), fd=False, resize=False, large=large, share=1e-3)
    large = [t(4, 21, 65536), ints(4, 65536, high=21)]
    yield loss(t(3, 20, 700), ints(3, 700, high=20), fd=False, resize=False, large=large)
    yield loss(t(6, 7), ints(6, high=7), opset=12)


def each_loss(h, w, labels):
    return F.cross_entropy(h @ w.T, labels, reduction="none")


CASES = [
    *both(cross_entropy),
    *both(nll),
    *(
        smoothed(x, labels, w, reduction, ignore)
        for x, labels in ((t(6, 7), ints(6, high=7)), (t(2, 7, 3, 4), ints(2, 3, 4, high=7)))
        for w, ignore in ((None, -100), (weights(7), 2))
        for reduction in ("mean", "sum", "none")
    ),
    smoothed(t(7), ints(high=7), resize=False),
    smoothed(t(6, 7), ints(6, high=7), weights(7), smoothing=1.0, dtypes=FLOAT),
    smoothed(t(3, 7), value([-100] * 3, "int64"), resize=False, fd=False),
    *(smoothed(t(0, 0), ints(0, high=1), reduction=reduction, resize=False, fd=False) for reduction in ("mean", "sum")),
    smoothed(t(3, 0), value([-100] * 3, "int64"), reduction="none", resize=False, fd=False),
    smoothed(value(BIG), value([0, 2, 2], "int64"), reduction="none", name="big", fd=False, resize=False),
    smoothed(t(40, 3000), ints(40, high=3000), fd=False, resize=False, share=1e-3),
    smoothed(t(3, 20, 700), ints(3, 700, high=20), fd=False, resize=False),
    cross_entropy(t(6, 7), ints(6, high=7), outputs=2),
    cross_entropy(t(2, 7, 3), ints(2, 3, high=7), weights(7), "none", ignore=1, outputs=2),
    cross_entropy(t(7), ints(high=7), outputs=2, resize=False),
    cross_entropy(value(BIG), value([0, 2, 2], "int64"), reduction="none", name="big", fd=False, resize=False),
    *(
        cross_entropy(value(strange(width)), value(list(range(8)), "int64"), reduction="none", name=f"strange{width}",
                      grad=False, resize=False)
        for width in (37, 70, 1100, 5000)
    ),
    cross_entropy(t(4, 7, special=True), ints(4, high=7), reduction="none", name="special"),
    *(soft(t(6, 7), w, reduction) for w in (None, weights(7)) for reduction in ("mean", "sum", "none")),
    soft(t(2, 7, 3), weights(7)),
    soft(t(7)),
    Case("ortmodule::LinearCrossEntropy", [t(1024, 8), t(1024, 8), ints(1024, high=1024)],
         lambda h, w, labels: F.cross_entropy(h @ w.T, labels), resize=False, fd=False, dtypes=("float32", "float64"),
         nodes=[("Transpose", "x1", "turned", {"perm": [1, 0]}), ("MatMul", "x0 turned", "logits"),
                ("SoftmaxCrossEntropyLoss", "logits x2", "y0")]),
    widened(t(6, 9), ints(6, high=9)),
    widened(t(4, 3, 5), ints(4, 5, high=3), "none"),
    # Two results with a gradient each: what arrives for a row is only known in backward.
    Case("ortmodule::LinearCrossEntropy", [t(1024, 8), t(1024, 8), ints(1024, high=1024)],
         lambda h, w, labels: (each_loss(h, w, labels).sum(), each_loss(h, w, labels).mean()), resize=False, fd=False,
         dtypes=("float32", "float64"), outputs=2, name="two results",
         nodes=[("Transpose", "x1", "turned", {"perm": [1, 0]}), ("MatMul", "x0 turned", "logits"),
                ("SoftmaxCrossEntropyLoss", "logits x2", "each", {"reduction": "none"}),
                ("ReduceSum", "each", "y0", {"keepdims": 0}), ("ReduceMean", "each", "y1", {"keepdims": 0})]),
]  # fmt: skip
