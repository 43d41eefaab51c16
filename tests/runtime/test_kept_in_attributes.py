"""Gradients with respect to what forward puts into attributes, and goes on with, are PyTorch's."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each

#: (where forward puts an activation, where the script finds it)
PLACES = {
    "an attribute": (lambda m, y: setattr(m, "kept", y), lambda m: m.kept),
    "a tuple": (lambda m, y: setattr(m, "kept", (y.detach(), y)), lambda m: m.kept[1]),
    "a list": (lambda m, y: m.listed.append(y), lambda m: m.listed[-1]),
    "a dictionary": (lambda m, y: m.named.__setitem__("y", y), lambda m: m.named["y"]),
    "an object's attribute": (lambda m, y: setattr(m.held, "y", y), lambda m: m.held.y),
    "a tuple of an object's": (lambda m, y: setattr(m.held, "y", (y, y.detach())), lambda m: m.held.y[0]),
    "an object's list": (lambda m, y: m.held.listed.append(y), lambda m: m.held.listed[-1]),
    "an attribute of a submodule": (lambda m, y: setattr(m.first, "kept", y), lambda m: m.first.kept),
}


class Keeps(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.kept, self.listed, self.named = None, [], {}
        self.held, self.put = SimpleNamespace(y=None, listed=[]), PLACES[place][0]

    def forward(self, x):
        y = self.norm(self.first(x)).tanh()
        self.put(self, y)
        return self.last(y).square().mean()


def asked(loss, kept):
    """As Grad-CAM: how much does each activation do?"""
    (grad,) = torch.autograd.grad(loss, kept, retain_graph=True)
    loss.backward()
    return grad


def penalised(loss, kept):
    (grad,) = torch.autograd.grad(loss, kept, create_graph=True)
    (loss + grad.square().sum()).backward()
    return grad


def retained(loss, kept):
    kept.retain_grad()
    loss.backward()
    return kept.grad


def hooked(loss, kept):
    seen = []
    kept.register_hook(seen.append)
    loss.backward()
    return seen[0]


def in_a_loss(loss, kept):
    (loss + kept.mean()).backward()
    return kept


USES = {use.__name__: use for use in (asked, penalised, retained, hooked, in_a_loss)}
ALL = [(place, use) for place in PLACES for use in USES]
SHORT = [
    ("an attribute", "asked"), ("an attribute", "retained"), ("a dictionary", "penalised"),
    ("an object's attribute", "hooked"), ("a list", "asked"), ("an attribute of a submodule", "in_a_loss"),
]  # fmt: skip


def run(module, inner, place, use):
    found = []
    for step in range(3):
        torch.manual_seed(step)
        module.zero_grad()
        inner.listed.clear(), inner.held.listed.clear()
        loss = module(torch.randn(6, 4, dtype=torch.float64))
        grad = USES[use](loss, PLACES[place][1](inner))
        found.append([loss.detach(), grad.detach(), *(p.grad for p in module.parameters())])
    return found


@pytest.mark.filterwarnings("ignore")
@each("place, use", ALL, SHORT)
def test_gradients_of_what_is_kept(place, use):
    torch.manual_seed(0)
    eager = Keeps(place).double()
    inner = copy.deepcopy(eager)
    module = ORTModule(inner)
    torch.testing.assert_close(run(module, inner, place, use), run(eager, eager, place, use), rtol=1e-9, atol=1e-12)
    report = explain(module)
    assert report.captured or "another list now" in report.fallback, report.fallback


#: What Python decides beside it: (by what is given, what becomes of the result).
DECISIONS = {
    "by data": lambda x, y: y * 2 if x.sum() > 0 else y,
    "by data behind the cut": lambda x, y: y * 2 if y.mean() > 0 else y,
    "by a size": lambda x, y: y + 1 if len(x) > 5 else y,
    "by a number": lambda x, y: y[: int(x[0, 0] > 0) + 2],
    "by a mask": lambda x, y: y[x[:, 0] > 0],
    "by size and data": lambda x, y: y * 3 if len(x) > 4 and x[0, 0] > 0 else y,
}
INTO = {**{place: put for place, (put, _) in PLACES.items()}, "a list of the caller's": lambda m, y: m.given.append(y)}


class Decides(Keeps):
    def __init__(self, place, decision):
        super().__init__("an attribute")
        self.put, self.decision = INTO[place], DECISIONS[decision]

    def forward(self, x, given):
        y = self.first(x).tanh()
        if self.put is INTO["a list of the caller's"]:
            given.append(y)
        else:
            self.put(self, y)
        return self.decision(x, self.last(y))


CHOSEN = [("an attribute", each) for each in DECISIONS] + [("a list of the caller's", each) for each in DECISIONS]


@pytest.mark.filterwarnings("ignore")
@each("place, decision", [(place, decision) for place in INTO for decision in DECISIONS], CHOSEN)
def test_decisions_beside_what_is_kept(place, decision, monkeypatch):
    """Sizes and data that Python reads are compared before anything runs."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    torch.manual_seed(0)
    eager = Decides(place, decision)
    module = ORTModule(copy.deepcopy(eager))
    for step in range(9):
        x = torch.randn(4 + step % 3, 4).abs() * (-1 if step % 4 == 0 else 1)
        found, expected = module(x, []), eager(x, [])
        torch.testing.assert_close(found, expected)
        for model in (module, eager):
            model.zero_grad()
        found.square().sum().backward(), expected.square().sum().backward()
        for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_what_is_only_kept_does_not_cut_the_graph():
    """A loss that nothing goes on with, and what has no gradient."""

    class Balances(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.first(x).tanh()
            self.balance, self.seen = y.square().mean(), y.detach()
            return self.last(y).mean()

    module = ORTModule(Balances())
    (module(torch.ones(3, 4)) + module.balance).backward()
    assert explain(module).captured and not explain(module).breaks
    assert not explain(module).fallback
