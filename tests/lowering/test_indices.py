"""Definitions of operators with indices give PyTorch's results, also where an index comes twice."""

import pytest
import torch

from ortmodule.lowering.decompositions import DEFINITIONS
from tests.lowering.definitions import check, check_kept

X = torch.linspace(-2, 3, 24).reshape(2, 3, 4)
ROWS, COLUMNS = torch.tensor([0, 2, -1, 0]), torch.tensor([3, -4, 0, 3])


@pytest.mark.parametrize(
    "indices",
    [[None, ROWS, COLUMNS], [torch.tensor([1, 0, 1, 1]), None, COLUMNS], [None, ROWS[:, None], COLUMNS]],
    ids=["neighbours", "apart", "broadcast"],
)
def test_several_indices(indices):
    check("index", X, indices)


def test_masks_and_numbers():
    check("index", X, [X[:, :, 0] > 0, COLUMNS[:1]])
    check_kept("index", X, [None, ROWS])


@pytest.mark.parametrize("indices", [[None, ROWS, COLUMNS], [None, ROWS], [ROWS % 2, None, COLUMNS]], ids=str)
def test_adding_where_indices_come_twice(indices):
    values = torch.ones_like(torch.ops.aten.index(X, indices)) * 0.5
    check("index_put", X, indices, values, True)


def test_assignment():
    check("index_put", X, [X > 0], torch.tensor(7.0))
    check("index_put", X, [torch.tensor([1]), torch.tensor([0])], torch.tensor(7.0))
    check("index_put", X, [None, torch.tensor([0, 2])], torch.zeros(2, 2, 4))
    check_kept("index_put", X, [torch.tensor([1, 0])], torch.zeros(2, 3, 4))


@pytest.mark.parametrize("kind", ["tril_indices", "triu_indices"])
@pytest.mark.parametrize("offset", [-1, 0, 2])
def test_triangles(kind, offset):
    found = DEFINITIONS[f"aten::{kind}"](3, 4, offset)
    assert torch.equal(found, getattr(torch, kind)(3, 4, offset))


def test_others():
    check("index_fill", X, 1, torch.tensor([0, -1]), 9.0)
    check("fft_fftshift", X)
    check("fft_ifftshift", X, [1, 2])
