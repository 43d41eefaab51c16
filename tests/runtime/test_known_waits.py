"""Calls that PyTorch is known to run are not looked at anew; where a graph may hold, it runs."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortmodule import ORTModule, explain
from ortmodule.runtime.calls import capture_budget
from ortmodule.runtime.calls.capture_budget import OFTEN

X = torch.randn(2, 4)


class Model(nn.Module):
    """Its Python goes another way for a mode, a factor, an attribute, or the sign of the data."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 1.0

    def forward(self, x, mode="a", factor=1.0, by_data=False):
        y = self.linear(x) * self.scale * factor
        if mode != "a":
            y = y.sin() if mode == "b" else y.cos()
        if by_data and x.sum() > 0:
            y = y.exp()
        return y.square().mean()


@pytest.fixture
def looked(monkeypatch):
    """Counts calls that were looked at. No variant but the first is ever captured."""
    monkeypatch.delenv("ORTMODULE_CAPTURE_SHARE", raising=False)
    monkeypatch.setattr(capture_budget, "LEAST_SAVED", 1e-9)
    monkeypatch.setattr(capture_budget, "SAVED", 1e-9)
    counted = []

    def wrapped(model):
        module = ORTModule(model)
        dispatcher = module._ortmodule
        own = dispatcher._in_engine
        dispatcher._in_engine = lambda *given: (counted.append(1), own(*given))[1]
        return module

    wrapped.calls = counted
    return wrapped


def check(module, eager, *args, **kwargs):
    grads = []
    for each in (module, eager):
        each.zero_grad()
        loss = each(*args, **kwargs)
        loss.backward()
        grads.append((loss.detach(), eager.linear.weight.grad.clone()))
    torch.testing.assert_close(*grads)


def test_a_waiting_call_is_looked_at_once(looked):
    eager = Model()
    module = looked(eager)
    check(module, eager, X)
    for _ in range(5):
        check(module, eager, X, mode="b")
    assert len(looked.calls) == 2
    report = explain(module)
    assert (report.engine_calls, report.pytorch_calls) == (1, 5)
    assert module._ortmodule.budget.waiting[0].waited == 5 and module._ortmodule.budget.waiting[0].eager > 0


def test_a_graph_that_there_is_runs(looked):
    eager = Model()
    module = looked(eager)
    for mode in "abababcacbca":
        check(module, eager, X, mode=mode)
    assert explain(module).engine_calls == 5


def test_other_sizes_of_what_waits(looked):
    eager = Model()
    module = looked(eager)
    check(module, eager, X)
    for rows in range(1, 5):
        check(module, eager, torch.randn(rows, 4), mode="b")
    assert len(looked.calls) == 2


def test_numbers_that_change_wait_together_and_those_of_a_graph_run(looked):
    eager = Model()
    module = looked(eager)
    for factor in (1.0, 2.0, 3.0, 4.0, 1.0, 5.0, 1.0):
        check(module, eager, X, "a", factor)
    assert explain(module).engine_calls == 3
    assert len(looked.calls) <= 5


def test_a_number_that_begins_to_change_is_looked_at(looked):
    eager = Model()
    module = looked(eager)
    for factor, rows in ((1.0, 2), (2.0, 2), (3.0, 2)):
        check(module, eager, torch.randn(rows, 4), "a", factor)
    check(module, eager, X, "a", 3)  # an integer is another kind of call
    assert len(looked.calls) == 3


def test_what_is_in_the_module_counts(looked):
    eager = Model()
    module = looked(eager)
    check(module, eager, X)
    check(module, eager, X, mode="b")
    check(module, eager, X, mode="b")
    eager.scale = 2.0
    check(module, eager, X, mode="b")
    eager.linear.weight.requires_grad_(False)
    assert module(X, mode="b").item() == eager(X, mode="b").item()
    assert len(looked.calls) == 4


def test_data_is_looked_at_each_time(looked):
    eager = Model()
    module = looked(eager)
    for x in (X.abs(), -X.abs(), X.abs(), -X.abs(), X.abs()):
        check(module, eager, x, by_data=True)
    assert explain(module).engine_calls >= 3


def test_deterministic_algorithms_count_calls(looked):
    eager = Model()
    module = looked(eager)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(OFTEN + 2):
            check(module, eager, X)
            check(module, eager, X, mode="b")
    finally:
        torch.use_deterministic_algorithms(False)
    assert explain(module).pytorch_calls == OFTEN and explain(module).exports == 2


def test_a_capture_follows_when_the_budget_allows_it(looked, monkeypatch):
    eager = Model()
    module = looked(eager)
    check(module, eager, X)
    for _ in range(3):
        check(module, eager, X, mode="b")
    module._ortmodule.budget.share = float("inf")
    check(module, eager, X, mode="b")
    check(module, eager, X, mode="b")
    assert (explain(module).engine_calls, explain(module).exports) == (3, 2)


def test_calls_that_a_checkpoint_repeats_are_looked_at(looked):
    eager = Model()
    module = looked(eager)
    check(module, eager, X)
    check(module, eager, X, mode="b")
    before = len(looked.calls)
    checkpoint(module, X, "b", use_reentrant=False).backward()
    assert len(looked.calls) > before


class Refused(Model):
    """A graph holds for no other call: Python reads all of the data."""

    def forward(self, x):
        total = 0.0
        for value in self.linear(x).flatten().tolist():
            total += math.sin(value) if hash(value) % 2 else math.cos(value)
        return self.linear(x).sum() * total


def test_a_refused_module_is_looked_at_once(looked):
    eager = Refused()
    module = looked(eager)
    for _ in range(4):
        check(module, eager, X)
    before = len(looked.calls)
    for _ in range(4):
        check(module, eager, X)
    assert explain(module).pytorch_calls >= 6 and len(looked.calls) == before


def test_nothing_of_a_call_stays(looked):
    eager = Model()
    module = looked(eager)
    check(module, eager, X.abs(), by_data=True)
    gc.disable()  # no cycle holds the tensors of a call that graphs were tried for in vain
    try:
        for sign in (1, -1, 1, -1):
            x = X.abs() * sign
            module(x, by_data=True)
            module(x, mode="b")
            left = weakref.ref(x)
            del x
            assert left() is None
    finally:
        gc.enable()
