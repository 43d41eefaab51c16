"""Definitions of losses, pools and attention give PyTorch's results."""

import math

import pytest
import torch

from ortmodule.lowering.decompositions import DEFINITIONS
from tests.lowering.definitions import check, check_kept, check_left

X = torch.linspace(-2, 3, 24).reshape(2, 3, 4)
SHARES = torch.linspace(0.05, 0.95, 12).reshape(3, 4)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses(reduction):
    check("binary_cross_entropy", SHARES, SHARES.flip(0).round(), None, reduction)
    check("binary_cross_entropy_with_logits", X[0], SHARES, None, None, reduction)
    check("binary_cross_entropy_with_logits", X[0], SHARES, SHARES, SHARES[0], reduction)
    check("kl_div", SHARES.log(), SHARES.flip(1), reduction)
    check("multi_margin_loss", X[0], torch.tensor([1, 0, 3]), 1, 1.0, None, reduction)
    check("cross_entropy_loss", X[0], SHARES, None, reduction, -100, 0.0)


def test_log_sigmoid():
    found = DEFINITIONS["aten::log_sigmoid"](torch.tensor([-200.0, -1.0, 0.0, 50.0, math.nan]))
    expected = torch.nn.functional.logsigmoid(torch.tensor([-200.0, -1.0, 0.0, 50.0, math.nan]))
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    q, k, v = (torch.rand(2, 2, n, 4) for n in (3, 5, 5))
    check("scaled_dot_product_attention", q, k, v, None, 0.0, causal)
    mask = None if causal else torch.rand(3, 5) > 0.5
    check("scaled_dot_product_attention", q, k, v, mask, 0.0, causal, scale=0.3)


def test_repeat_interleave():
    check("repeat_interleave", X, 2, None)
    check("repeat_interleave", X, 3, 1)
    check("repeat_interleave", X, torch.tensor([1, 0, 2]), 1)
    check("repeat_interleave", torch.tensor([2, 0, 3]), output_size=None)
    check_left("repeat_interleave", torch.tensor([2, 0, 3]), 5)


def test_pools():
    check("adaptive_avg_pool1d", X, [3])
    check("adaptive_avg_pool2d", torch.rand(1, 2, 5, 7), [2, 3])
    check("adaptive_max_pool1d", X, [3])
    check("avg_pool2d", torch.rand(1, 2, 5, 6), [2, 3], [], [0, 1], True, True, 4)
    check_kept("avg_pool2d", torch.rand(1, 2, 5, 6), [2, 3], [], [0, 1], False, True)


def test_others():
    check("diff", X, 2)
    check("diff", X, 1, -1, X[..., :1])
    check("unfold", X, 2, 2, 1)
    check("index_add", X, 1, torch.tensor([0, 2, 0]), torch.ones(2, 3, 4), alpha=2)
