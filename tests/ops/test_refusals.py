"""What reductions, losses and normalisations refuse: an exception whose sentence names the thing."""

import onnx
import pytest
import torch
from onnx import helper

from tests.ops.harness import ONNX_TYPE, tensor_proto

X = torch.zeros
LABELS = torch.tensor
CE, NLL, GROUPS = "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss", "GroupNormalization"


def run(op, *operands, outputs=1, opset=18, constants=(), **attrs):
    """One node; `constants` are the places of operands that belong to the model."""
    from ortmodule.engine.session import Session

    names = [f"x{i}" for i in range(len(operands))]
    fed = [i for i in range(len(operands)) if i not in constants]
    graph = helper.make_graph(
        [helper.make_node(op, names, [f"y{i}" for i in range(outputs)], name="the_node", **attrs)],
        "refusal",
        [
            helper.make_tensor_value_info(names[i], ONNX_TYPE[operands[i].dtype], [None] * operands[i].dim())
            for i in fed
        ],
        [helper.make_tensor_value_info("y0", onnx.TensorProto.FLOAT, None)],
        initializer=[tensor_proto(operands[i], names[i]) for i in constants],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    Session(model.SerializeToString()).run([operands[i] for i in fed], [False] * len(fed))


def reduce_max(x, axis, constants=(1,)):
    run("ReduceMax", x, LABELS([axis]), constants=constants)


def divide(op, dtype, divisors, **attrs):
    """Three rows by the divisors, which the kernel reads with a stride of 0."""
    run(op, X(3, len(divisors), dtype=dtype), LABELS(divisors, dtype=dtype), **attrs)


def batch_norm(samples, channels, parameters, training):
    four = [X(parameters)] * 4
    run("BatchNormalization", X(samples, channels), *four, outputs=3 if training else 1, training_mode=training)


@pytest.mark.parametrize(
    ("sentence", "attempt"),
    [
        ("label 7 of sample 1 .* there are 4 classes", lambda: run(CE, X(3, 4), LABELS([1, 7, 0]))),
        ("label -1 of sample 0 .* 4 classes", lambda: run(NLL, X(2, 4), LABELS([-1, 0]))),
        (r"labels of shape \[2\] .* logits of shape \[3, 4\]", lambda: run(CE, X(3, 4), LABELS([1, 0]))),
        (r"weights of shape \[3\]", lambda: run(CE, X(2, 4), LABELS([1, 0]), X(3))),
        ('no reduction "avg"', lambda: run(NLL, X(2, 4), LABELS([1, 0]), reduction="avg")),
        (r"axis 1 of \[3, 0\] is empty", lambda: reduce_max(X(3, 0), 1)),
        ("axis 4 is out of range", lambda: reduce_max(X(3, 2), 4)),
        ("axes to reduce is computed from data", lambda: run("ReduceMax", X(3, 2), LABELS([0] * 129))),
        (r"ArgMin of no elements: axis 0 of \[0, 2\]", lambda: run("ArgMin", X(0, 2), axis=0)),
        ("axis 3 is out of range", lambda: run("LogSoftmax", X(2, 4), axis=3)),
        ("axis -3 is out of range", lambda: run("CumSum", X(2, 4), LABELS(-3), constants=(1,))),
        ("do not broadcast", lambda: run("LayerNormalization", X(3, 4), X(5))),
        (r"more than one element a channel, unlike \[1, 4\]", lambda: batch_norm(1, 4, 4, 1)),
        (r"operand 1 .* each channel of \[2, 4\]", lambda: batch_norm(2, 4, 3, 0)),
        ("4 channels cannot be in 3 groups", lambda: run(GROUPS, X(2, 4, 5), X(4), X(4), num_groups=3, opset=21)),
        (r"scale or bias of shape \[1, 1, 1\]", lambda: run("LayerNormalization", X(3, 4), X(1, 1, 1))),
        (r"not broadcast.*", lambda: run("Gemm", X(2, 6), X(6, 2), X(6, 2), beta=0.0)),
        (r"adds \[3, 2, 2\] to a product", lambda: run("Gemm", X(2, 6), X(6, 2), X(3, 2, 2), beta=0.0)),
        ("p = 3", lambda: run("LpNormalization", X(2, 4), p=3)),
        ("GlobalLpPool with p = 0", lambda: run("GlobalLpPool", X(2, 4, 3), p=0)),
        ("GlobalLpPool with p = -3", lambda: run("GlobalLpPool", X(2, 4, 3), p=-3)),
        ("LpPool with p = 0", lambda: run("LpPool", X(2, 4, 3), p=0, kernel_shape=[2])),
        ("ratio of 1.5", lambda: run("Dropout", X(2), torch.tensor(1.5), torch.tensor(True), constants=(1, 2))),
        ("ZeroDivisionError.* int64 .*\n.*Div", lambda: divide("Div", torch.int64, [1, 0, 2])),
        ("ZeroDivisionError.* uint8 ", lambda: divide("Div", torch.uint8, [1] * 1500 + [0])),
        ("ZeroDivisionError.* int32 .*\n.*Mod", lambda: divide("Mod", torch.int32, [0])),
        ("ZeroDivisionError.* int8 ", lambda: divide("Mod", torch.int8, [3, 0], fmod=1)),
    ],
)  # fmt: skip
def test_refusal(sentence, attempt):
    with pytest.raises(Exception, match=sentence) as refusal:
        attempt()
    assert "the_node" in str(refusal.value)


def test_nothing_is_divided_by_zero():
    """As in PyTorch: no element, no division; floats have infinities."""
    none = torch.zeros(0, dtype=torch.int64)
    run("Div", none, torch.zeros(1, dtype=torch.int64))
    run("Mod", none, none)
    run("Div", X(2), X(2))
