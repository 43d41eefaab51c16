"""Memory that nothing has written is found where an operator reads it."""

import pytest
from torch._C import parse_ir

from ortmodule.core.errors import NotTraceable
from ortmodule.lowering.uninitialized import check_written

HEAD = """
graph(%x : Float(2, 3)):
  %none : NoneType = prim::Constant()
  %zero : int = prim::Constant[value=0]()
  %one : int = prim::Constant[value=1]()
  %two : int = prim::Constant[value=2]()
  %sizes : int[] = prim::ListConstruct(%two)
  %e : Float(2) = aten::empty(%sizes, %none, %none, %none, %none, %none)
"""
GOOD = {
    "written": "%a : Float(2) = aten::fill_(%e, %one)\n  %b : Float(2) = aten::add(%e, %a, %one)",
    "written through a view": "%v : Float(1) = aten::select(%e, %zero, %one)\n  %a : Float(1) = aten::fill_(%v, %one)\n"
    "  %b : Float(2) = aten::neg(%e)",
    "its size is asked for": "%n : int = aten::size(%e, %zero)\n  %b : Float(2) = aten::zeros_like(%e, %none, %none, "
    "%none, %none, %none)",
    "another is like it": "%b : Float(2, 3) = aten::type_as(%x, %e)",
    "nothing reads it": "%b : Float(2, 3) = aten::neg(%x)",
}
BAD = {
    "read": "%b : Float(2) = aten::neg(%e)",
    "read by a view": "%v : Float(1) = aten::select(%e, %zero, %one)\n  %b : Float(1) = aten::neg(%v)",
    "added": "%b : Float(2) = aten::add(%x, %e, %one)",
    "in a list": "%l : Tensor[] = prim::ListConstruct(%x, %e)\n  %b : Float(4) = aten::cat(%l, %zero)",
    "cast": "%b : Float(2) = aten::type_as(%e, %x)",
}


def graph(body):
    return parse_ir(f"{HEAD}  {body}\n  return (%b)\n")


@pytest.mark.parametrize("name", GOOD)
def test_good(name):
    check_written(graph(GOOD[name]))


@pytest.mark.parametrize("name", BAD)
def test_bad(name):
    with pytest.raises(NotTraceable, match="reads memory that is written where a trace does not show it") as caught:
        check_written(graph(BAD[name]))
    assert caught.value.node.kind() == list(graph(BAD[name]).nodes())[-1].kind()


def test_memory_without_elements():
    body = BAD["read"]
    text = f"{HEAD}  {body}\n  return (%b)\n".replace("%e : Float(2) =", "%e : Float(0) =")
    check_written(parse_ir(text))
