"""Definitions for tensors of rank 0, of diagonals and of splits give PyTorch's results."""

import pytest
import torch

from tests.lowering.definitions import check, check_kept

X = torch.linspace(-2, 3, 24).reshape(2, 3, 4)
ONE, ZERO = torch.tensor(5.0), torch.tensor([0])


@pytest.mark.parametrize(
    "kind, rest",
    [
        ("gather", (0, torch.tensor(0))), ("gather", (0, torch.tensor([0, 0]))), ("index_select", (0, ZERO)),
        ("index_add", (0, ZERO, torch.tensor(2.0))), ("index_copy", (0, ZERO, torch.tensor(2.0))),
        ("scatter", (0, torch.tensor(0), torch.tensor(2.0))), ("scatter_add", (0, torch.tensor(0), torch.tensor(2.0))),
        ("kthvalue", (1,)), ("mode", (0,)), ("cummax", (0,)), ("cummin", (0,)), ("median", (0,)),
    ],
)  # fmt: skip
def test_rank_0(kind, rest):
    check(kind, ONE, *rest)


def test_the_median_of_one():
    check("median", ONE)
    check("nanmedian", ONE)


@pytest.mark.parametrize("places", [2, 3, 5, [1, 3], [0, 9]], ids=str)
def test_splits(places):
    check("tensor_split", X, places, 2)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_matrix_powers(n):
    check("linalg_matrix_power", torch.tensor([[1.0, 2.0], [0.5, -1.0]]), n)
    check_kept("linalg_matrix_power", torch.eye(2), 0)


def test_diagonals():
    check("diag_embed", X)
    check("diag_embed", X, 1, 0, 2)
    check("diag_embed", X, -2)


def test_others():
    check("roll", X, [5])
    check_kept("roll", X, [1], [0])
    check("exp2", X)
    check("unbind_copy", X, 1)
    check("split_with_sizes_copy", X, [1, 3], 2)
