"""`len(x)` of a tensor is a size as `x.shape[0]` is: one graph is for all of them."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each
from tests.twins import step

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 6
ROWS = (5, 3, 8, 5, 12, 2)


class Block(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.first, self.last, self.use = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), use

    def forward(self, x):
        h = self.first(x)
        return self.last(self.use(h)) if self.use is not None else self.last(self.used(h))


class Method(Block):
    def __init__(self):
        super().__init__(None)

    @staticmethod
    def count(h):
        return len(h)

    @property
    def scale(self):
        return 2.0

    def used(self, h):
        return h.sum(0, keepdim=True) / self.count(h) * self.scale + h


class InSubmodules(Block):
    def __init__(self):
        super().__init__(None)
        self.inner = Method()

    def used(self, h):
        return self.inner(h) * len(h)


def inner_function(h):
    def rows(t):
        return t.new_ones(len(t), 1)

    return h * rows(h)


def shadowed(h):
    """Other things have lengths, too."""
    parts = [h, h * 2]
    return sum(parts) / len(parts) + len("ab") * h.mean() / len(h) + len(h[0])


def branched(h):
    return h * 2 if len(h) > 1 else h


USES = {
    "view": lambda h: h.view(len(h), 2, -1).flip(1).reshape(len(h), -1),
    "mean": lambda h: h - h.sum(0) / len(h),
    "positions": lambda h: h + torch.arange(len(h), dtype=h.dtype)[:, None],
    "slice": lambda h: h + h.flip(0)[: len(h) // 2 + 1].mean(0),
    "expand": lambda h: h + h[:1].expand(len(h), -1),
    "mask": lambda h: torch.full((len(h), len(h)), -1e9).triu(1).add(h @ h.T).softmax(-1) @ h,
    "of a transpose": lambda h: h.T.reshape(len(h.T), len(h)).T,
    "comprehension": lambda h: sum(t.sum() / len(t) for t in h.split(3, 1)) + h,
    "max": lambda h: h * max(len(h), 4) + min(len(h), 7),
    "square root": lambda h: h / len(h) ** 0.5,
    "inner function": inner_function,
    "other lengths": shadowed,
    "comparison": branched,
}
MAKERS = {name: lambda use=use: Block(use) for name, use in USES.items()} | {
    "method": Method,
    "submodules": InSubmodules,
}
#: Python takes one way or another by the length.
BY_VALUE = ("max",)


def compare(make, inputs, share="inf", monkeypatch=None):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", share)
    torch.manual_seed(0)
    eager = make()
    ours = ORTModule(copy.deepcopy(eager))
    for x in inputs:
        torch.testing.assert_close(step(ours, x.clone()), step(eager, x.clone()), rtol=1e-4, atol=1e-5)
    report = explain(ours)
    assert report.captured and not report.python_ops and not report.pytorch_calls, report
    return report


@each("name", MAKERS, ("view", "mask", "submodules", "other lengths"))
def test_one_graph(name, monkeypatch):
    report = compare(MAKERS[name], [torch.randn(n, WIDTH) for n in ROWS], monkeypatch=monkeypatch)
    assert report.exports == 1 or name in BY_VALUE, report


def test_what_needs_a_number(monkeypatch):
    """A graph for each length, and the right one."""
    uses = (
        lambda h: h * torch.tensor([1.0] * len(h))[:, None],
        lambda h: torch.stack([h[i] * i for i in range(len(h))]),
        lambda h: h * {5: 1.0, 3: 2.0}.get(len(h), 4.0),
        lambda h: h * float(f"{len(h)}"),
    )
    for use in uses:
        compare(lambda use=use: Block(use), [torch.randn(n, WIDTH) for n in (5, 3, 5, 3)], monkeypatch=monkeypatch)


def test_a_length_that_data_decides(monkeypatch):
    def selected(h):
        rows = h[h.detach().sum(1) > 0]
        return h + rows.sum(0) / (len(rows) + 1)

    compare(lambda: Block(selected), [torch.randn(n, WIDTH) for n in (16, 24, 16)], monkeypatch=monkeypatch)


def test_code_is_as_it_was(monkeypatch):
    """Functions whose calls were replaced in a trace are their own again."""
    code = inner_function.__code__
    compare(lambda: Block(inner_function), [torch.randn(4, WIDTH)], monkeypatch=monkeypatch)
    assert inner_function.__code__ is code and len(torch.zeros(3)) == 3 and type(len(torch.zeros(3))) is int
