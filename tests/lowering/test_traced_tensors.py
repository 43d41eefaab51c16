"""Sizes, types and ranks of traced tensors are read where a trace knows them, and refused where it does not."""

import pytest
import torch
from torch._C import parse_ir

from ortmodule.lowering.traced_tensors import dtype_of, of_any_size, rank_of, sizes_of

GRAPH = """
graph(%x : Float(2, 3), %t : Tensor, %any : Float(*, *)):
  return (%x)
"""


def values():
    return list(parse_ir(GRAPH).inputs())


def test_what_is_known():
    x, _, some = values()
    assert sizes_of(x) == [2, 3] and dtype_of(x) is torch.float32 and rank_of(x) == rank_of(some) == 2


@pytest.mark.parametrize("ask, what", [(sizes_of, "sizes"), (dtype_of, "type"), (rank_of, "rank")])
def test_what_is_not(ask, what):
    with pytest.raises(TypeError, match=f"the {what} of .* not known in the trace"):
        ask(values()[1])


def test_sizes_of_some_number():
    with pytest.raises(TypeError, match="not known"):
        sizes_of(values()[2])


def test_of_any_size():
    kind = of_any_size(values()[0].type())
    assert kind.dim() == 2 and kind.sizes() is None and kind.dtype() is torch.float32
    with pytest.raises(TypeError, match="rank"):
        of_any_size(values()[1].type())
