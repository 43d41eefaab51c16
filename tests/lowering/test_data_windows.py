"""A slice that begins where data says is a window where its length does not follow from that."""

import pytest
import torch
from torch._C import parse_ir

from ortmodule.lowering.data_windows import type_of_rows, window_of

GRAPH = """
graph(%x : Float(8, 3), %p : Long(), %n : Long()):
  %zero : int = prim::Constant[value=0]()
  %one : int = prim::Constant[value=1]()
  %two : int = prim::Constant[value=2]()
  %start : int = aten::Int(%p)
  %end : Long() = {end}
  %last : int = aten::Int(%end)
  %out : Float(*, *) = aten::slice(%x, %zero, {begin}, %last, {step})
  return (%out)
"""


def slice_of(end="aten::add(%p, %n, %one)", begin="%start", step="%one"):
    graph = parse_ir(GRAPH.format(end=end, begin=begin, step=step))
    (node,) = [node for node in graph.nodes() if node.kind() == "aten::slice"]
    return node, {value.debugName(): value for value in graph.inputs()}


@pytest.mark.parametrize("end", ["aten::add(%p, %n, %one)", "aten::add(%n, %p, %one)"])
def test_a_window(end):
    node, inputs = slice_of(end)
    window = window_of(node)
    assert window.start.unique() == inputs["p"].unique() and window.length.unique() == inputs["n"].unique()


@pytest.mark.parametrize(
    "others",
    [
        {"step": "%two"},
        {"begin": "%zero"},
        {"end": "aten::add(%n, %n, %one)"},
        {"end": "aten::add(%p, %n, %two)"},  # p + 2 n
        {"end": "aten::add(%p, %p, %one)"},  # a length that is p
        {"end": "aten::mul(%p, %n)"},
    ],
    ids=str,
)
def test_none(others):
    assert window_of(slice_of(**others)[0]) is None


def test_type_of_rows():
    kind = type_of_rows(5, torch.device("cpu"))
    assert kind.sizes() == [5] and kind.dtype() is torch.int64
