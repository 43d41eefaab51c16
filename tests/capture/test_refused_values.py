"""Values that PyTorch refuses, in data of a graph: its error comes, of the same class."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, explain

T = torch.tensor


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.arange(1, 11.0).view(5, 2) / 10), function

    def forward(self, *args):
        return self.function(self.weight, *args)


def full(value):
    return torch.full((5, 2), value)


#: A function, arguments that it takes, and such as it does not.
REFUSED = {
    "BCELoss of an argument": (
        lambda w, x: nn.BCELoss()(x, torch.sigmoid(w.detach())) * w.sum(),
        [full(0.5), full(1.0), full(0.0)], [full(1.5), full(-0.5), full(float("nan"))],
    ),
    "with weights": (
        lambda w, x: F.binary_cross_entropy(x * 1, w, weight=x, reduction="none"), [full(0.5), full(0.9)], [full(1.001)]
    ),
    "reshape": (lambda w, n: w.reshape(int(n), -1), [T(2), T(5)], [T(3), T(0)]),
    "reshape, two sizes": (lambda w, n: w.reshape((int(n), 10 // 5)), [T(5)], [T(0), T(4)]),
    "view": (lambda w, n: w.view(int(n), int(n) * 10), [T(1)], [T(0), T(2)]),
    "unflatten": (lambda w, n: w.view(-1).unflatten(0, (int(n), -1)), [T(2), T(5)], [T(3), T(0)]),
    "arange": (lambda w, n: torch.arange(int(n)).sum() * w, [T(2), T(0)], [T(-1)]),
    "arange from": (lambda w, n: torch.arange(2, int(n)).sum() * w, [T(4), T(2)], [T(1)]),
    "arange down": (lambda w, n: torch.arange(2, int(n), -1).sum() * w, [T(-4), T(2)], [T(3)]),
    "linspace": (lambda w, n: torch.linspace(0, 1, int(n)).sum() * w, [T(4), T(2)], [T(-1)]),
    "repeat_interleave": (lambda w, n: w.repeat_interleave(n, 0), [T([1, 2, 0, 1, 1])], [T([1, 2, 0, 1, -1])]),
    "topk": (lambda w, n: w.topk(int(n), 0)[0], [T(2), T(0)], [T(6), T(-1)]),
    "expand": (lambda w, n: w[:1].expand(int(n), -1), [T(2), T(4), T(-1)], [T(-2)]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, taken, refused = REFUSED[name]
    theirs = Net(function)
    ours = ORTModule(copy.deepcopy(theirs))
    for x in [*taken, *refused, *taken]:
        found = []
        for model in (ours, theirs):
            model.zero_grad()
            try:
                result = model(x)
                result.square().sum().backward()
                found.append([result.detach(), model.weight.grad])
            except (RuntimeError, IndexError, ValueError) as error:
                found.append(type(error))
        assert isinstance(found[1], type) == any(x is each for each in refused)
        if isinstance(found[1], type):
            assert found[0] is found[1]
        else:
            torch.testing.assert_close(*found)
    assert explain(ours).engine_calls >= 2 * len(taken) - 1
