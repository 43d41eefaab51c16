"""The engine runs modules whose function knows other modules, and gradients reach the parameters of those.

As the copy of one that closes over its own submodules.
"""

import copy

import torch
from torch import nn

from ortmodule import ORTModule, explain


class Closing(nn.Module):
    """`copy.deepcopy` copies its submodules, and not the function, which goes on with those of the original."""

    def __init__(self):
        super().__init__()
        self.inner = inner = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
        self.function = lambda x: inner["down"](inner["up"](x).relu())
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(x + self.function(x))


def test_gradients_of_parameters_that_a_closure_holds():
    torch.manual_seed(0)
    original = Closing()
    ours = ORTModule(copy.deepcopy(original))
    twin = copy.deepcopy(original)
    found = []
    for model in (twin, ours):
        for rows in (2, 3):
            original.zero_grad()
            model.zero_grad()
            model(torch.ones(rows, 4)).sin().sum().backward()
            grads = [p.grad for p in (*original.parameters(), *model.parameters())]
            found.append([None if grad is None else grad.clone() for grad in grads])
    for expected, got in zip(found[:2], found[2:], strict=True):
        for a, b in zip(expected, got, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b, a)
    report = explain(ours)
    assert (report.captured, report.exports) == (True, 1), report.fallback
