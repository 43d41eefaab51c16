"""Scripted submodules and functions: what branches or loops is PyTorch's, the rest of the module the engine's."""

import warnings

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

warnings.filterwarnings("ignore", message=".*torch.jit.script.*")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.linear(x))


class While(Plain):
    def forward(self, x):
        i = 0
        while bool(x.abs().sum() > 1.0) and i < 5:
            x = self.linear(x) * 0.5
            i += 1
        return x


class Branch(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        if bool(x.sum() > 0):
            x = self.linear(x)
        return self.norm(x)


@torch.jit.script
def looped(x, n: int):
    for i in range(n):
        x = x * 0.5 + i
    return x


@torch.jit.script
def branched(x):
    if bool(x.sum() > 0):
        return x.exp()
    return x.tanh()


@torch.jit.script
def straight(x):
    if x.dim() == 3:
        return x.exp()
    return x * torch.sigmoid(x)


class Calls(nn.Module):
    def __init__(self, function, *more):
        super().__init__()
        self.linear, self.function, self.more = nn.Linear(4, 4), function, more

    def forward(self, x):
        return self.function(self.linear(x), *self.more)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


MAKERS = {
    "plain": lambda: Around(torch.jit.script(Plain())),
    "while": lambda: Around(torch.jit.script(While())),
    "branch": lambda: Around(torch.jit.script(Branch())),
    "deeper": lambda: Around(Around(torch.jit.script(Branch()))),
    "loop in a function": lambda: Around(Calls(looped, 3)),
    "branch in a function": lambda: Around(Calls(branched)),
    "function without either": lambda: Around(Calls(straight)),
}


def pair(make):
    """Two equal modules, one of them wrapped."""
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(make())
    return ORTModule(modules[0]), modules[1]


def batches(count=4):
    """Sums of both signs, numbers of rows that differ."""
    for i in range(count):
        sign = 1.0 if i % 2 else -1.0
        yield torch.randn(2 + i, 4, generator=torch.Generator().manual_seed(i)) * sign + sign


def check_steps(ours, theirs, dtype=torch.float32):
    for x in batches():
        ours.zero_grad(), theirs.zero_grad()
        results = []
        for module in (ours, theirs):
            y = module(x.to(dtype))
            y.square().sum().backward()
            results.append(y.detach())
        torch.testing.assert_close(*results)
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (p.grad is None or not p.grad.any()) == (q.grad is None or not q.grad.any()), name
            if p.grad is not None and q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
        for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", MAKERS)
def test_steps(name):
    """Every way through the control flow, and back: the branch is chosen anew for every batch."""
    ours, theirs = pair(MAKERS[name])
    check_steps(ours, theirs)
    report = explain(ours)
    assert report.captured, report.fallback


def test_what_becomes_of_it():
    """Types, modes, frozen parameters and weights that are loaded."""
    ours, theirs = pair(MAKERS["branch"])
    check_steps(ours, theirs)
    for module in (ours, theirs):
        module.double()
    check_steps(ours, theirs, torch.float64)
    for module in (ours, theirs):
        module.eval()
    check_steps(ours, theirs, torch.float64)
    for module in (ours, theirs):
        for parameter in module.inner.parameters():
            parameter.requires_grad_(False)
    check_steps(ours, theirs, torch.float64)
    torch.manual_seed(5)
    other = MAKERS["branch"]().double().state_dict()
    for module in (ours, theirs):
        module.load_state_dict(other)
    check_steps(ours, theirs, torch.float64)
    with torch.no_grad():
        x = next(batches()).double()
        torch.testing.assert_close(ours(x), theirs(x))
    assert explain(ours).captured
