"""Tensors that are made into the memory of another one: `torch.eye(n, out=y)`."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

pytestmark = pytest.mark.filterwarnings("ignore")

#: Each makes [4, 4] of the type of `like`, from sizes of it.
FORMS = {
    "eye": lambda like: torch.eye(*like.size(), out=torch.empty_like(like)),
    "eye of another type": lambda like: torch.eye(4, out=torch.empty(4, 4, dtype=torch.float64)).to(like.dtype),
    "zeros": lambda like: torch.zeros(*like.size(), out=torch.empty_like(like)),
    "ones": lambda like: torch.ones(4, 4, out=torch.empty_like(like)),
    "full": lambda like: torch.full((4, 4), 2.5, out=torch.empty_like(like)),
    "arange": lambda like: torch.arange(4, out=torch.empty(4, dtype=like.dtype)).expand(4, 4),
    "arange from, of integers": lambda like: torch.arange(2, 10, 2, out=torch.empty(4, dtype=torch.int64)).expand(4, 4),
    "linspace": lambda like: torch.linspace(0, 1, 4, out=torch.empty(4)).expand(4, 4),
    "logspace": lambda like: torch.logspace(0, 1, 4, out=torch.empty(4)).expand(4, 4),
    "a part of another": lambda like: _into_a_part(like),
}


def _into_a_part(like):
    whole = torch.zeros(6, 4, dtype=like.dtype)
    torch.ones(4, 4, out=whole[1:5])
    return whole[:4] + whole[2:]


class Made(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(6, 4), form

    def forward(self, x):
        weight = self.layer.weight
        square = weight @ weight.T
        return self.layer(x) @ (square - self.form(square))


@pytest.mark.parametrize("name", FORMS)
def test_results_are_pytorchs(name):
    torch.manual_seed(0)
    model = Made(FORMS[name])
    expected, wrapped = copy.deepcopy(model), ORTModule(model)
    for rows in (3, 5, 3):
        x, found = torch.randn(rows, 6), []
        for each in (wrapped, expected):
            each.zero_grad()
            y = each(x)
            y.sum().backward()
            found.append([y.detach(), *(p.grad.clone() for p in each.parameters())])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    report = explain(wrapped)
    assert report.captured and report.pytorch_calls == 0, report.fallback


@pytest.mark.parametrize("make", [torch.rand, torch.randn])
def test_random_numbers(make):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 64)

        def forward(self, x):
            return self.layer(x) * 0 + make(64, out=torch.empty(64))

    wrapped = ORTModule(Noisy())
    runs = [wrapped(torch.randn(3, 6)) for _ in range(3)]
    assert explain(wrapped).captured and not torch.equal(runs[1], runs[2])
    assert runs[2].std() > 0.1
