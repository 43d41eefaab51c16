"""Definitions of norms, variances and normalisations give PyTorch's results, of zeros and single elements, too."""

import math

import pytest
import torch

from tests.lowering.definitions import check, check_kept, check_left

X = torch.linspace(-2, 3, 24).reshape(2, 3, 4)
ORDERS = [0, 0.5, 1, 1.5, 2, 3, math.inf, -math.inf, -1]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dim", [None, [1], [0, 2]], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_vector_norms(order, dim, keepdim):
    check("linalg_vector_norm", X, order, dim, keepdim)


def test_vector_norms_of_others():
    check("linalg_vector_norm", torch.zeros(3), 2)
    check("linalg_vector_norm", torch.tensor(-2.0), 3)
    check("linalg_vector_norm", X.bfloat16(), math.inf)
    check_kept("linalg_vector_norm", torch.tensor([1, 2]), 2)


@pytest.mark.parametrize("order", ["fro", 1, -1, math.inf, -math.inf])
def test_matrix_norms(order):
    check("linalg_matrix_norm", X, order)
    check("linalg_matrix_norm", X, order, [0, 1], True)


def test_norms_that_pytorch_runs():
    check_left("linalg_matrix_norm", X, "nuc")
    check_left("linalg_matrix_norm", X, 2)
    check_left("linalg_cond", X[0, :2, :2], None)


@pytest.mark.parametrize("kind", ["var", "std", "var_mean", "std_mean"])
@pytest.mark.parametrize("rest", [(), (False,), ([1], True), ([0, 2], False, True)], ids=str)
def test_moments(kind, rest):
    check(kind, X, *rest)


def test_linalg_norm():
    check("linalg_norm", X, None, None, False)
    check("linalg_norm", X[0, 0], 3)
    check("linalg_norm", X[0], math.inf)


def test_distances():
    check("pairwise_distance", X[0], X[1])
    check("cosine_similarity", X[0], X[1])
    check("cdist", X[0], X[1])
    check("renorm", X, 2, 0, 3.0)
    check("logdet", torch.eye(3) * 2)
