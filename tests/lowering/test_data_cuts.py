"""Values that decide sizes are found, where a product is between them and what came before."""

import onnx
import pytest
from onnx import TensorProto, helper

from ortmodule.core.names import INPUT, STATE
from ortmodule.lowering.cuts.data_cuts import data_cuts

X, W = f"{INPUT}0", f"{STATE}w"


def model(*nodes):
    """``nodes``: (operator, operands, result)."""
    made = [helper.make_node(operator, list(operands), [result]) for operator, operands, result in nodes]
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (X, W)]
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    results = [onnx.ValueInfoProto(name=made[-1].output[0])]
    return helper.make_model(helper.make_graph(made, "g", given, results, [one]))


PRODUCT, MASK = ("MatMul", (X, W), "y"), ("Greater", ("y", "y"), "mask")


def test_a_mask_of_hidden_states():
    assert data_cuts(model(PRODUCT, MASK, ("NonZero", ("mask",), "rows")), ()) == ["mask"]


def test_a_mask_of_inputs():
    assert data_cuts(model(("Greater", (X, X), "mask"), PRODUCT, ("NonZero", ("mask",), "rows")), ()) == []


def test_sizes_are_no_data():
    nodes = PRODUCT, ("Shape", ("y",), "sizes"), ("Expand", (X, "sizes"), "z"), ("Reshape", ("z", "one"), "flat")
    assert data_cuts(model(*nodes), ()) == []


@pytest.mark.parametrize(
    "operator, before, behind",
    [("Slice", (X,), ("one",)), ("Range", (), ("one", "one")), ("Expand", (X,), ()), ("Tile", (X,), ()),
     ("TopK", (X,), ()), ("Compress", (X,), ()), ("ConstantOfShape", (), ())],
)  # fmt: skip
def test_a_number_of_hidden_states(operator, before, behind):
    nodes = PRODUCT, ("ReduceSum", ("y",), "sum"), ("Cast", ("sum",), "n"), (operator, (*before, "n", *behind), "z")
    assert data_cuts(model(*nodes), ()) == ["n"]


def test_what_an_operator_reads_is_no_size():
    assert data_cuts(model(PRODUCT, ("Cast", ("y",), "n"), ("Gather", (X, "n"), "z")), ()) == []
    assert data_cuts(model(PRODUCT, ("Compress", ("y", "one"), "z")), ()) == []


def test_a_second_mask_is_known_behind_the_cut():
    """It costs no product there; behind another product it does."""
    rest = ("NonZero", ("mask",), "rows"), ("Less", ("y", "y"), "other"), ("NonZero", ("other",), "others")
    assert data_cuts(model(PRODUCT, MASK, *rest), ()) == ["mask"]
    more = ("Gather", (X, "rows"), "z"), ("MatMul", ("z", W), "u"), ("Not", ("u",), "last"), ("NonZero", ("last",), "v")
    assert data_cuts(model(PRODUCT, MASK, *rest, *more), ()) == ["mask", "last"]


def test_inputs_of_integers_decide_sizes():
    nodes = PRODUCT, ("Add", (f"{INPUT}1", "one"), "n"), ("Expand", ("y", "n"), "z")
    assert data_cuts(model(*nodes), (1,)) == []
