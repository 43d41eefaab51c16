"""Definitions of pools and resizing give PyTorch's results, without a batch, too."""

import pytest
import torch

from tests.lowering.definitions import check, check_kept

IMAGE = torch.rand(2, 5, 7)


def test_pools_without_a_batch():
    check("max_pool2d", IMAGE, [2, 2])
    check("max_pool2d", IMAGE, [2], [1], [1])
    check("max_pool2d_with_indices", IMAGE, [2, 3], [2, 1])
    check("max_pool1d", IMAGE[:, 0], [3], [2])


def test_one_number_for_all_dimensions():
    check("max_pool2d", IMAGE[None], [2], [1])
    check_kept("max_pool2d", IMAGE[None], [2, 2], [1, 1], [0, 0], [1, 1])


def test_unpool():
    values, index = torch.nn.functional.max_pool2d(IMAGE, 2, return_indices=True)
    check("max_unpool2d", values, index, [5, 7])


@pytest.mark.parametrize("size", [[3, 9], [5, 7], [10, 14]], ids=str)
def test_nearest_exact(size):
    check("_upsample_nearest_exact2d", IMAGE[None], size, None, None)


def test_nearest_exact_by_factors():
    check("_upsample_nearest_exact2d", IMAGE[None], None, [1.5, 2.0])


def test_a_layer_without_dropout_stays():
    lstm = torch.nn.LSTM(3, 4, 2)
    x, state = torch.rand(5, 1, 3), [torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)]
    check_kept("lstm", x, state, list(lstm.parameters()), True, 2, 0.0, True, False, False)
