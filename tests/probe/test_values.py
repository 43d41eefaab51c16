"""A graph used with other data and sizes than those of its trace: negative indices, places, numbers from sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import DebugOptions, LogLevel, ORTModule


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def check(function, *calls, tolerance=0.0):
    """Results and gradients of one ORTModule in several calls are PyTorch's."""
    ours = ORTModule(Function(function), DebugOptions(log_level=LogLevel.ERROR))
    for call in calls:
        sides = []
        for f in (ours, function):
            given = [t.clone().requires_grad_() if t.is_floating_point() else t for t in call]
            result = f(*given)
            wanted = [t for t in given if t.requires_grad]
            sides.append([result, *torch.autograd.grad(result.double().cos().sum(), wanted)])
        for found, expected in zip(*sides, strict=True):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def numbers(*values):
    return torch.tensor(values)


FORWARD, BACKWARD = (numbers(0, 1, 2), numbers(3, 1, 2)), (numbers(0, -1, 2), numbers(3, -1, -2))
MASKS = [numbers(True, False, True, True), numbers(True, True, True, False)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, j, k: x[j, k] * 1,
        lambda x, j, k: x[j, :, k] * 1,
        lambda x, j, k: x[:, j, k] * 1,
        lambda x, j, k: x[j[:, None], k] * 1,
        lambda x, j, k: x[..., j, None, k] * 1,
        lambda x, j, k: x[:, j] * 1,
        lambda x, j, k: x.index_put((j, k), x[j, k].exp()),
        lambda x, j, k: x.index_put((j, k), x[k, j].exp(), accumulate=True),
    ],
)
def test_indices_count_from_the_end(function):
    x = torch.randn(4, 5, 6)
    check(function, (x, *FORWARD), (x, *BACKWARD), (torch.randn(6, 4, 7), *BACKWARD), tolerance=1e-5)


def test_a_mask_beside_indices():
    x = torch.randn(4, 5, 6)
    calls = [(x, mask, places) for mask in MASKS for places in (FORWARD[1], BACKWARD[1])]
    check(lambda x, mask, k: x[mask, k] * 1, *calls)
    check(lambda x, mask, k: x[mask, :, k] * 1, *calls)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, k: x[k],
        lambda x, k: x[:, k],
        lambda x, k: x.narrow(1, k, 2),
        lambda x, k: x.select(0, k).t(),
        lambda x, k: x[k] * 2,
    ],
)
def test_data_decides_the_place(function):
    x = torch.randn(4, 5, 6)
    check(function, *[(x, torch.tensor(k)) for k in (1, 2, 0, 3)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * (1 / x.shape[0]),
        lambda x: x + 0.1 / x.size(1),
        lambda x: x / x.size(1) ** 0.5,
        lambda x: x * (0.1 * x.shape[1]),
        lambda x: x.masked_fill(x > 0, 1 / x.size(0)),
        lambda x: x + torch.full((x.size(1),), 1 / x.shape[0], dtype=x.dtype),
        lambda x: F.cross_entropy(x, torch.zeros(x.size(0), dtype=torch.int64), label_smoothing=0.1),
        lambda x: F.cross_entropy(x, x.detach().softmax(1), label_smoothing=0.3),
    ],
)
def test_numbers_from_sizes(function, dtype):
    calls = [(torch.randn(n, 2 * n + 1, dtype=dtype),) for n in (3, 5, 7)]
    check(function, *calls, tolerance=1e-5 if dtype == torch.float32 else 1e-13)


def test_deviation_of_one_number():
    check(lambda x: x.std(unbiased=False), (torch.randn(()),))
