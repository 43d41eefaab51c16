"""Mixtures of experts, each the module that is wrapped: loops over the experts that data hits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, explain
from tests.twins import rows

EXPERTS, WIDTH = 4, 8


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def experts():
    return nn.ModuleList([Expert() for _ in range(EXPERTS)])


def over_all(parts, x, chosen, weights, skip=False):
    result = torch.zeros_like(x)
    for number, expert in enumerate(parts):
        row, place = torch.where(chosen == number)
        if skip and row.numel() == 0:
            continue
        result.index_add_(0, row, expert(x[row]) * weights[row, place, None])
    return result


def over_hit(parts, x, chosen, weights):
    result = torch.zeros_like(x)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for hit in mask.sum((-1, -2)).greater(0).nonzero():
        place, row = torch.where(mask[hit[0]])
        result.index_add_(0, row, parts[hit[0]](x[row]) * weights[row, place, None])
    return result


LOOPS = {
    "all": over_all,
    "all but empty ones": lambda *given: over_all(*given, skip=True),
    "those hit": over_hit,
}


class Mixture(nn.Module):
    """With its gate."""

    def __init__(self, loop):
        super().__init__()
        self.gate, self.parts, self.loop = nn.Linear(WIDTH, EXPERTS), experts(), loop

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        return self.loop(self.parts, x, chosen, weights)


class Parts(nn.ModuleList):
    """The experts alone, which the gate's choice is given to."""

    def __init__(self, loop):
        super().__init__(experts())
        self.loop = loop

    def forward(self, x, chosen, weights):
        return self.loop(self, x, chosen, weights)


@pytest.mark.parametrize("root", [Mixture, Parts])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_root_is_a_mixture(root, loop):
    torch.manual_seed(0)
    eager = root(LOOPS[loop])
    ours = ORTModule(copy.deepcopy(eager))
    for step, n in enumerate((6, 6, 9, 2, 3, 6, 1, 9)):
        x = rows(n, WIDTH, seed=step)
        weights, chosen = rows(n, EXPERTS, seed=step + 50).softmax(-1).topk(2)
        given = (x,) if root is Mixture else (x, chosen, weights)
        results = [module(*given) for module in (ours, eager)]
        torch.testing.assert_close(*results)
        for module, result in zip((ours, eager), results, strict=True):
            module.zero_grad()
            result.square().sum().backward()
        for (name, mine), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad)
    report = explain(ours)
    assert report.captured or (root is Mixture and loop == "those hit" and "takes another way" in report.fallback)
