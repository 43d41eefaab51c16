"""What the fuzz targets have found, one test each (docs/fuzzing.md)."""

import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from ortmodule import ORTModule, UnsupportedError
from ortmodule.debug.onnx_interpreter import evaluate
from ortmodule.engine.session import Session

ONE = [True]


def session(nodes, ranks, output="y", opset=18):
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank) for name, rank in ranks.items()]
    outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "found", inputs, outputs)
    opsets = [helper.make_opsetid("", opset)]
    return Session(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


@pytest.mark.parametrize("operator", ["LayerNormalization", "RMSNormalization"])
def test_norm_of_a_scalar(operator):
    """Its axes are those before the first: memory before a shape was read, and that of a row written."""
    made = session([helper.make_node(operator, ["x", "w"], ["y"])], {"x": 0, "w": 1}, opset=23)
    with pytest.raises(ValueError, match="of a scalar: there is no axis"):
        made.plan([("float32", ()), ("float32", (1,))], [True, True], ONE)


def test_sequence_as_an_output():
    """It has no type: memory that no kernel could write."""
    with pytest.raises(UnsupportedError, match="output y is a sequence, not a tensor"):
        session([helper.make_node("SequenceConstruct", ["x", "x"], ["y"])], {"x": 1}).plan([("float32", (3,))], [False])


def test_operand_that_a_form_does_not_have():
    """It was as if it had been left out: here there was no least number."""
    nodes = [helper.make_node("Dropout", ["x"], ["d", "mask", "none"]), helper.make_node("Clip", ["x", "none"], ["y"])]
    with pytest.raises(UnsupportedError, match="operand 1 of Clip .* is not computed"):
        session(nodes, {"x": 1}).plan([("float32", (3,))], [False])


def test_list_of_many_parts():
    """A node for each part: a hundred bytes took a gigabyte."""
    nodes = [helper.make_node("SplitToSequence", ["x"], ["s"]), helper.make_node("SequenceLength", ["s"], ["y"])]
    made = session(nodes, {"x": 1})
    with pytest.raises(UnsupportedError, match="into 1000000 parts"):
        made.plan([("float32", (1_000_000,))], [False])
    assert made.plan([("float32", (100,))], [False])


#: PyTorch warns of the very cases that these tests are about.
OF_NO_DEGREES = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0:UserWarning")


class Spread(torch.nn.Module):
    def __init__(self, correction):
        super().__init__()
        self.correction = correction

    def forward(self, x):
        return torch.var(x, [1], correction=self.correction), torch.std(x, [1], correction=self.correction)


@OF_NO_DEGREES
@pytest.mark.parametrize("elements", [1, 2, 3])
@pytest.mark.parametrize("correction", [0, 1, 2, 3, 4])
def test_correction_beyond_the_elements(elements, correction):
    """The divisor is no less than zero: a variance was negative or zero."""
    model = Spread(correction)
    x = torch.arange(float(elements))[None]
    for found, expected in zip(ORTModule(model)(x), model(x), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)


@OF_NO_DEGREES
@pytest.mark.parametrize("count, correction", [(1, 2), (2, 3), (3, 2), (2, 2)])
def test_the_gradient_of_a_correction_beyond_the_elements(count, correction):
    """PyTorch's variance there is infinite or NaN, and its derivative divides by a negative number."""
    x = torch.randn(4, count, generator=torch.Generator().manual_seed(0))
    grads = []
    for wrap in (lambda module: module, ORTModule):
        leaf = x.clone().requires_grad_()
        wrap(Variance(correction))(leaf).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0], equal_nan=True)


class Variance(torch.nn.Module):
    def __init__(self, correction):
        super().__init__()
        self.correction = correction

    def forward(self, x):
        return torch.var(x, [1], correction=self.correction)


class Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


#: Functions, a shape that is captured, and shapes that PyTorch refuses after it.
REFUSED = {
    **{
        f"halved {mode}": (lambda x, mode=mode: F.interpolate(x, scale_factor=0.5, mode=mode), shape, others)
        for mode, shape, others in [
            *[(m, (1, 2, 8), [(1, 2, 1)]) for m in ("linear", "nearest-exact")],
            *[(m, (1, 2, 8, 8), [(1, 2, 1, 8), (1, 2, 8, 1)]) for m in ("nearest", "bilinear", "bicubic")],
            ("trilinear", (1, 2, 8, 8, 8), [(1, 2, 8, 1, 8)]),
        ]
    },
    "doubled of nothing": (lambda x: F.interpolate(x[:, :, 3:], scale_factor=2.0), (1, 2, 8, 4), [(1, 2, 3, 4)]),
    **{
        f"{mode} pads {list(pads)}": (lambda x, mode=mode, pads=pads: F.pad(x, pads, mode), (1, 1, 8, 8), others)
        for mode, pads, others in [
            ("circular", (0, 0, -2, 3), [(1, 1, 4, 4), (1, 1, 3, 3)]),
            ("circular", (3, 0, 0, 0), [(1, 1, 2, 2), (1, 1, 4, 1)]),
            ("circular", (0, 0, -1, 2), [(1, 1, 2, 2)]),
            ("reflect", (0, 0, -2, 3), [(1, 1, 3, 3)]),
            ("reflect", (3, 0, 0, 0), [(1, 1, 3, 3), (1, 1, 4, 1)]),
        ]
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_pytorch_refuses(name):
    """A graph that is there for other sizes gave a result: none of any element, or padding that goes around again."""
    function, shape, others = REFUSED[name]
    wrapped = ORTModule(Call(function))
    torch.testing.assert_close(wrapped(x := torch.randn(shape)), function(x))
    for other in others:
        x = torch.randn(other)
        with pytest.raises(RuntimeError) as theirs:
            function(x)
        with pytest.raises(RuntimeError) as ours:
            wrapped(x)
        assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


@pytest.mark.parametrize(
    ("operator", "attributes"),
    [
        ("Selu", {"alpha": 2.0, "gamma": 0.0}),
        ("Selu", {"gamma": 0.1}),
        *((f"Reduce{name}", {"noop_with_empty_axes": 1}) for name in ("LogSum", "L1", "L2", "SumSquare", "Sum")),
    ],
)
def test_what_the_engine_is_compared_with(operator, attributes):
    """The interpreter left out attributes, and what a reduction does beside reducing."""
    node = helper.make_node(operator, ["x"], ["y"], **attributes)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).abs() - 0.1
    values = {"x": x}
    evaluate([node], values, {})
    found = session([node], {"x": 2}).run([x], [False]).outputs[0]
    torch.testing.assert_close(found, values["y"], equal_nan=True)


@pytest.mark.parametrize("operator", ["ReduceProd", "ReduceSumSquare", "ReduceL1"])
def test_reductions_of_integers_keep_their_type(operator):
    """The interpreter gave PyTorch's int64."""
    values = {"x": torch.tensor([[100, 3], [-7, 2]], dtype=torch.int8)}
    evaluate([helper.make_node(operator, ["x"], ["y"])], values, {})
    assert values["y"].dtype == torch.int8


def test_quotients_that_no_integer_holds():
    """The least integer by -1 ended the process, in PyTorch's kernels that the interpreter calls."""
    least, nodes = torch.iinfo(torch.int64).min, ["Div", "Mod"]
    values = {"x": torch.tensor([least, 6]), "y": torch.tensor([-1, -4])}
    evaluate([helper.make_node(name, ["x", "y"], [name]) for name in nodes], values, {})
    assert [values[name].tolist() for name in nodes] == [[least, -1], [0, -2]]
