"""Definitions of extremes, medians and sorts give PyTorch's values and indices, with NaN and equal elements."""

import math

import pytest
import torch

from ortmodule.lowering.decompositions import DEFINITIONS
from ortmodule.lowering.decompositions.order import picked
from tests.lowering.definitions import check, check_kept

X = torch.tensor([[3.0, -1.0, 2.0, 2.5], [0.0, math.nan, 1.0, 5.0]])


@pytest.mark.parametrize("kind", ["max", "min", "median", "nanmedian"])
@pytest.mark.parametrize("rest", [(), (1,), (0, True)], ids=str)
def test_extremes(kind, rest):
    check(kind, X if kind != "nanmedian" else X, *rest)


def test_equal_elements_have_one_value():
    check("max", torch.tensor([1.0, 4.0, 4.0]))
    assert DEFINITIONS["aten::max"](torch.tensor([[1.0, 4.0, 4.0]]), 1)[1].tolist() == [1]


def test_kthvalue():
    check("kthvalue", X.nan_to_num(7.0), 2)
    check("kthvalue", X.nan_to_num(7.0), 1, 0, True)


def test_forms_that_stay():
    check_kept("max", torch.tensor(1.0))
    check_kept("max", torch.tensor([1, 2]))
    check_kept("nanmedian", torch.tensor([1, 2]))


def test_picked():
    index = torch.tensor([[1], [3]])
    values, same = picked(X, index, 1, True)
    assert values.tolist() == [[-1.0], [5.0]] and same is index
    assert [each.tolist() for each in picked(X, index, 1, False)] == [[-1.0, 5.0], [1, 3]]
