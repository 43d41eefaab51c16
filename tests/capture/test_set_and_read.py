"""Attributes, and items of dictionaries in them, that forward sets and then reads: what they were is no matter."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

pytestmark = pytest.mark.filterwarnings("ignore")


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)


class Tensor(Base):
    def forward(self, x):
        self.h = self.layer(x)
        return torch.tanh(self.h) + self.h.mean()


class Items(Base):
    def forward(self, x):
        self.memo = {}
        self.memo["h"] = self.layer(x)
        self.memo["g"] = torch.tanh(self.memo["h"])
        return self.memo["g"]


class Losses(Base):
    def forward(self, x):
        self.losses = []
        h = self.layer(x)
        self.losses.append(h.square().mean())
        self.losses.append(h.sum() * 0.1)
        return torch.tanh(h) + sum(self.losses)


class Number(Base):
    def forward(self, x):
        self.scale = x.shape[1] * 0.5
        return self.layer(x) * self.scale


class Part(nn.Module):
    """Sets its own; the one around it reads that."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        self.loss = self.layer(x).square().mean()
        return self.layer(x)


class Around(Base):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x):
        return self.part(self.layer(x)) + self.part.loss


class Memo(Base):
    """Items of a dictionary that stays, with others that forward does not set."""

    def __init__(self):
        super().__init__()
        self.memo = {"scale": 2.0, "unused": object()}

    def forward(self, x):
        self.memo["h"] = self.layer(x)
        self.memo["g"] = torch.tanh(self.memo["h"]) * self.memo["scale"]
        return self.memo["g"]


class Kinds(Memo):
    """Whatever forward may put there: what it returns, an argument, a parameter, a view, a tuple, no gradient."""

    def forward(self, x):
        h = self.layer(x)
        self.memo["y"], self.memo["x"], self.memo["w"] = h, x, self.layer.weight
        self.memo["view"], self.memo["pair"] = h[:, :2], (h.sum(), {"a": h.mean()})
        self.memo["plain"] = h.detach()
        return h


class PartMemo(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.memo = nn.Linear(8, 8), {}

    def forward(self, x):
        self.memo["loss"] = self.layer(x).square().mean()
        return self.layer(x)


class AroundMemo(Base):
    def __init__(self):
        super().__init__()
        self.part = PartMemo()

    def forward(self, x):
        y = self.part(self.layer(x))
        return y + self.part.memo["loss"]


class Before(Memo):
    """It looks at an item before it sets it."""

    def forward(self, x):
        before = self.memo.get("h")
        h = self.layer(x)
        self.memo["h"] = h.detach()
        return h if before is None else h + before.mean()


class HowMany(Memo):
    def forward(self, x):
        h = self.layer(x)
        self.memo["h"] = h
        return h * len(self.memo)


class Numbers(Memo):
    def forward(self, x):
        self.memo["n"] = x.shape[1]
        return self.layer(x) * self.memo["n"]


class Removes(Memo):
    def forward(self, x):
        self.memo.pop("h", None)
        self.memo["h"] = self.layer(x)
        return self.memo["h"] * 2


class Shared(Base):
    """A dictionary that two modules hold."""

    def __init__(self):
        super().__init__()
        self.part = PartMemo()
        self.memo = self.part.memo

    def forward(self, x):
        y = self.part(self.layer(x))
        return y + self.memo["loss"]


class ReadFirst(Base):
    """It looks at what the call before has left."""

    def forward(self, x):
        before = getattr(self, "seen", None)
        self.seen = (x.shape[1],)
        y = self.layer(x) + len(self.seen)
        return y if before is None else y * 2


class OfTheClass(Base):
    scale = 2.0

    def forward(self, x):
        y = self.layer(x) * self.scale
        self.scale = 3.0
        return y + self.scale


KINDS = [Tensor, Items, Losses, Number, Around, Memo, Kinds, AroundMemo]
OTHERS = [ReadFirst, OfTheClass, Before, HowMany, Numbers, Removes, Shared]


def tensors_of(held):
    if isinstance(held, torch.Tensor):
        return [held]
    parts = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def compare(kind, lengths, change=lambda model, step: None):
    """``change``: what a script does to both before a step."""
    torch.manual_seed(0)
    model = kind()
    wrapped, expected = ORTModule(copy.deepcopy(model)), model
    for step, length in enumerate(lengths):
        for own in (wrapped._ortmodule.module, expected):
            change(own, step)
        x = torch.randn(2, length, 8)
        found = []
        for each, own in ((wrapped, wrapped._ortmodule.module), (expected, expected)):
            own.zero_grad()
            y = each(x)
            y.sum().backward()
            left = tensors_of([vars(module) for module in own.modules()])
            found.append([y.detach(), *(t.detach() for t in left), *(p.grad for p in own.parameters())])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return explain(wrapped)


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_for_all_calls(kind):
    report = compare(kind, [4, 4, 6, 4, 5, 4])
    assert report.captured and report.exports == 1 and report.pytorch_calls == 0, report


@pytest.mark.parametrize("kind", OTHERS)
def test_what_was_read_before_counts(kind):
    compare(kind, [4, 4, 6, 4])


CHANGES = {
    "an item that is read": lambda model, step: model.memo.update(scale=float(step)),
    "one that is not": lambda model, step: model.memo.update(unused=step),
    "a new one": lambda model, step: model.memo.update({f"new {step}": step}),
    "what forward sets": lambda model, step: model.memo.update(h=torch.ones(3) * step),
    "what forward sets is gone": lambda model, step: model.memo.pop("h", None),
    "another dictionary": lambda model, step: setattr(model, "memo", dict(model.memo)),
    "a copy of another kind": lambda model, step: setattr(model, "memo", OrderedDict(model.memo)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", [Memo, Before, HowMany])
def test_what_a_script_changes_between_calls(kind, name):
    compare(kind, [4, 4, 6, 4, 4], lambda model, step: CHANGES[name](model, step) if step >= 2 else None)


def test_gradients_of_what_was_left():
    """Items have a graph behind them, as PyTorch's have; one that is kept is not changed by the next call."""
    torch.manual_seed(0)
    model = Memo()
    wrapped, expected = ORTModule(copy.deepcopy(model)), model
    kept = []
    for each, own in ((wrapped, wrapped._ortmodule.module), (expected, expected)):
        for seed in range(3):
            torch.manual_seed(seed)
            y = each(torch.randn(2, 4, 8))
            assert own.memo["g"] is y
            kept.append(own.memo["h"])
            (own.memo["h"].square().sum() + y.sum()).backward()
    for ours, theirs in zip(kept[:3], kept[3:], strict=True):
        torch.testing.assert_close(ours, theirs)
    for p, q in zip(wrapped.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert explain(wrapped).captured
