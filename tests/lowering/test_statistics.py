"""Definitions of quantiles, areas, covariances and distances give PyTorch's results."""

import math

import pytest
import torch

from ortmodule.lowering.decompositions import DEFINITIONS
from tests.lowering.definitions import check

X = torch.tensor([[3.0, -1.0, 2.0, 2.5], [0.0, 4.0, 1.0, 5.0]])
WITH_NAN = torch.tensor([[3.0, math.nan, 2.0, 2.5], [0.0, 4.0, 1.0, 5.0]])


@pytest.mark.parametrize("how", ["linear", "lower", "higher", "midpoint", "nearest"])
@pytest.mark.parametrize("kind", ["quantile", "nanquantile"])
@pytest.mark.parametrize("x", [X, WITH_NAN], ids=["numbers", "NaN"])
def test_quantiles(how, kind, x):
    q = torch.tensor([0.0, 0.3, 1.0])
    for dim, keepdim in ((None, False), (1, False), (0, True)):
        found = DEFINITIONS[f"aten::{kind}"](x, q, dim, keepdim, how)
        expected = getattr(torch, kind)(x, q, dim, keepdim, interpolation=how)
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_areas():
    check("trapezoid", X)
    check("cumulative_trapezoid", X)
    check("trapezoid", X, torch.tensor([0.0, 1.0, 3.0, 4.0]), dim=1)


def test_covariance():
    check("cov", X)
    check("cov", X[0])
    check("cov", X, correction=0)
    check("cov", X, correction=1, fweights=torch.tensor([1, 2, 3, 1]))


def test_pairs():
    check("_pdist_forward", torch.rand(4, 3), 2.0)
    check("combinations", torch.arange(5.0), 2)
    check("combinations", torch.arange(4.0), 3, True)
