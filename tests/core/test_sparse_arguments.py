"""A sparse tensor among arguments becomes two dense ones, and comes back as it was."""

import pytest
import torch

from ortmodule.core import pytree
from ortmodule.core.errors import Unflattenable

SPARSE = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 0]], [3.0, 4.0, 5.0], (2, 3))


@pytest.mark.parametrize("x", [SPARSE, SPARSE.coalesce()], ids=["as given", "coalesced"])
def test_there_and_back(x):
    tensors, structure = pytree.flatten((x, {"y": torch.ones(2)}))
    assert [t.layout for t in tensors] == [torch.strided] * 3
    back, others = structure.rebuild(tensors)
    assert back.is_sparse and back.is_coalesced() == x.is_coalesced() and back.shape == x.shape
    assert torch.equal(back.to_dense(), x.to_dense()) and torch.equal(others["y"], torch.ones(2))


def test_it_stays_one_tensor():
    x = SPARSE.coalesce()
    tensors, structure = pytree.flatten((x, x))
    assert len(tensors) == 2
    first, second = structure.rebuild(tensors)
    assert first is second


def test_a_changed_one_is_refused():
    tensors, structure = pytree.flatten((SPARSE.coalesce(),))
    (back,) = structure.rebuild(tensors)
    assert len(pytree.flatten((back,))[0]) == 2
    back.mul_(2)
    with pytest.raises(Unflattenable, match="changed"):
        pytree.flatten((back,))
