"""Lists cases of a loss behind a product, most of whose labels are ignored."""

import torch.nn.functional as F

from tests.ops.cases import FLOAT, Case, t, value

LABELS = [7, 7, 2, 7, 7, 0, 7, 7, 7, 3, 7, 7] * 9


def loss(reduction, labels=LABELS, **kwargs):
    def ref(x, w, i):
        return F.cross_entropy(x @ w, i, ignore_index=7, reduction=reduction)

    attrs = {"ignore_index": 7, "reduction": reduction}
    return Case(
        "SoftmaxCrossEntropyLoss", [t(len(labels), 6), t(6, 4), value(labels, "int64")], ref, resize=False,
        nodes=[("MatMul", "x0 x1", "scores"), ("SoftmaxCrossEntropyLoss", "scores x2", "y0", attrs)],
        name=f"rows-{reduction}", dtypes=FLOAT, opset=13, **kwargs,
    )  # fmt: skip


CASES = [
    loss("mean"),
    loss("sum"),
    loss("none"),
    loss("sum", [7] * 100),
    loss("mean", [7] * 90 + [1, 7, 2] + [7] * 20),
]
