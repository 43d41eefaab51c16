"""A value of a trace follows from nothing, sizes, data or chance, and so does its size."""

import pytest
from torch._C import parse_ir

from ortmodule.capture.numbers.read_causes import DATA, NOTHING, RANDOM, SIZE, causes, causes_of_size

HEAD = """
graph(%x : Float(2, 3), %m : Bool(2), %s : Float()):
  %zero : int = prim::Constant[value=0]()
  %one : int = prim::Constant[value=1]()
  %none : NoneType = prim::Constant()
  %half : float = prim::Constant[value=0.5]()
  %nought : float = prim::Constant[value=0.]()
  %yes : bool = prim::Constant[value=1]()
  %no : bool = prim::Constant[value=0]()
"""


def value_of(body):
    graph = parse_ir(f"{HEAD}  {body}\n  return (%y)\n")
    return next(graph.outputs()), {value.unique(): value.debugName() for value in graph.inputs()}


def names(found, inputs):
    return [(inputs[v.unique()], sized) for v, sized in found if v.unique() in inputs]


@pytest.mark.parametrize(
    "body, behind, least",
    [
        ("%y : Float(2, 3) = aten::neg(%x)", [("x", False)], NOTHING),
        ("%y : int = aten::size(%x, %zero)", [("x", True)], SIZE),
        ("%y : Float(2, 3) = aten::rand_like(%x, %none, %none, %none, %none, %none)", [], RANDOM),
        ("%y : Float(2, 3) = aten::dropout(%x, %half, %yes)", [("x", False)], RANDOM),
        ("%y : Float(2, 3) = aten::dropout(%x, %half, %no)", [("x", False)], NOTHING),
        ("%y : Float(2, 3) = aten::dropout(%x, %nought, %yes)", [("x", False)], NOTHING),
    ],
)
def test_values(body, behind, least):
    value, inputs = value_of(body)
    found, of = causes(value.node())
    assert (names(found, inputs), of) == (behind, least)


def test_an_input_is_data():
    graph = parse_ir(f"{HEAD}  return (%x)\n")
    assert causes(next(graph.outputs()).node()) == ([], DATA)


@pytest.mark.parametrize(
    "body, behind",
    [
        ("%y : Float(2, 3) = aten::add(%x, %s, %one)", [("x", True), ("s", True)]),
        ("%y : Float(*) = aten::masked_select(%x, %m)", [("x", True), ("m", False), ("m", True)]),
        ("%y : Long(*, *) = aten::nonzero(%x)", [("x", False), ("x", True)]),
        ("%y : Float(2, 3) = aten::add_(%x, %s, %one)", [("x", True)]),
        ("%i : Tensor?[] = prim::ListConstruct(%m)\n  %y : Float(*, 3) = aten::index(%x, %i)", [("x", True)]),
    ],
)
def test_sizes(body, behind):
    value, inputs = value_of(body)
    found, least = causes_of_size(value)
    assert names(found, inputs) == behind and least == SIZE


def test_a_mask_decides_a_size():
    value, _ = value_of("%i : Tensor?[] = prim::ListConstruct(%m)\n  %y : Float(*, 3) = aten::index(%x, %i)")
    found, _ = causes_of_size(value)
    chosen = list(value.node().inputs())[1].unique()
    assert {sized for v, sized in found if v.unique() == chosen} == {False, True}


def test_rank_0_has_a_known_size():
    value, _ = value_of("%y : Float() = aten::sum(%x, %none)")
    assert causes_of_size(value) == ([], SIZE)
