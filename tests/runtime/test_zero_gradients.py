"""What the loss does not depend on has a gradient of zeros, or none, as in PyTorch.

An optimizer with weight decay or momentum changes the one parameter, and leaves the other alone.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import Config, ORTModule, explain


class Tenfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * 10

    @staticmethod
    def backward(ctx, grad):
        return grad * 10, None


def filled(m, x):
    y = x.new_zeros(len(x), 3)
    y[:] = m.b(x)
    y[:] = m.a(x)
    return y


def counted(m, x):
    """A part that only PyTorch runs, since it looks at values: which of its gradients there are is found in a run."""
    return m.part(m.a(x)) + 0 * m.b(x)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.one(x) if x.sum().item() < 1e9 else self.other(x)


CASES = {
    "a part of a concatenation": lambda m, x: torch.cat([m.a(x), m.b(x)], 1)[:, :3],
    "a part of a stack": lambda m, x: torch.stack([m.a(x), m.b(x)])[0],
    "one half": lambda m, x: torch.cat([m.a(x), m.b(x)], 1).split(3, 1)[0],
    "cut off": lambda m, x: F.pad(torch.cat([m.b(x), m.a(x)], 1), (-3, 0)),
    "times zero": lambda m, x: m.a(x) + 0 * m.b(x),
    "to the power of zero": lambda m, x: m.a(x) + m.b(x).pow(0),
    "a condition that is known": lambda m, x: torch.where(torch.ones(3) > 0, m.a(x), m.b(x)),
    "overwritten": filled,
    "rounded": lambda m, x: m.a(x) + m.b(x).sign() + m.b(x).floor(),
    "compared": lambda m, x: m.a(x) + (m.b(x) > 0),
    "detached": lambda m, x: m.a(x) + m.b(x).detach() + m.b(x).data,
    "without gradients": lambda m, x: m.a(x) + torch.no_grad()(m.b)(x),
    "not used": lambda m, x: m.a(x) + (m.b(x) * 0).detach(),
    "not differentiated": lambda m, x: Tenfold.apply(m.a(x), m.b(x)),
    "a submodule in PyTorch": counted,
}


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.part, self.function = nn.Linear(4, 3), nn.Linear(4, 3), Part(), function

    def forward(self, x):
        y = self.function(self, x)
        return y.square().sum(), self.b(x).sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("handed_over", ["0", "1"])
@pytest.mark.parametrize("name", CASES)
def test_zeros_and_none(name, handed_over):
    eager = Net(CASES[name])
    wrapped = ORTModule(copy.deepcopy(eager), config=Config(enable_mem_efficient_grad_mgmt=handed_over))
    for both in (False, False, True, False):
        x = torch.randn(5, 4)
        for module in (eager, wrapped):
            module.zero_grad()
            loss, other = module(x)
            (loss + other if both else loss).backward()
        for (parameter, a), b in zip(eager.named_parameters(), wrapped.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), parameter
            if a.grad is not None:
                torch.testing.assert_close(b.grad, a.grad, msg=parameter)
    assert explain(wrapped).captured
