"""PyTorch runs a module that cannot be captured; submodules of several layers in it are graphs of their own."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from ortmodule import BypassError, Config, ORTModule, explain
from ortmodule.runtime.calls import parts
from ortmodule.runtime.calls.capture_budget import Budget
from tests.runtime.test_bypasses import AT_ONCE


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(parts, "LEAST_CALLS", 0)
    monkeypatch.setattr(parts, "LEAST_SECONDS", 0.0)


def block():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


class Decides(nn.Module):
    """As a detection model does: how often it goes on depends on data."""

    def __init__(self, count=2):
        super().__init__()
        self.first, self.rest, self.single = block(), nn.ModuleList(block() for _ in range(count)), nn.Linear(4, 4)
        self.dropped = nn.Dropout(0.0)

    def forward(self, x):
        x = self.first(x)
        for layer in self.rest:
            x = layer(x) if max(map(max, x.tolist())) < 100 else x
        return self.dropped(self.single(x))


def rows():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def pair(module, **settings):
    return ORTModule(copy.deepcopy(module), config=Config(**AT_ONCE | settings)), module


def assert_alike(ours, theirs, steps=3):
    for model in (ours, theirs):
        model.losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(rows()).square().mean()
            loss.backward()
            optimizer.step()
            model.losses.append(loss.detach())
    torch.testing.assert_close(ours.losses, theirs.losses)
    torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


def test_parts_are_graphs():
    ours, theirs = pair(Decides())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_alike(ours, theirs)
    assert len([w for w in caught if "ORTModule" in str(w.message)]) == 1
    report = explain(ours)
    assert (report.captured, report.engine_calls, report.pytorch_calls, report.unreached_steps) == (False, 0, 3, 0)
    assert set(report.parts) == {"first", "rest.0", "rest.1"}
    assert all((part.engine_calls, part.pytorch_calls) == (3, 0) for part in report.parts.values())
    assert 1.0 > report.weights_in_engine > 0.9 and "part       rest.0: 3 calls in the engine" in str(report)
    assert ours.state_dict().keys() == theirs.state_dict().keys()


class Passes(nn.Module):
    """Forward calls what is inside of a submodule, and not that: `self.model.decoder(x)`."""

    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict({"decoder": Decides()})
        self.around = nn.Sequential()
        self.around.decoder = Decides()

    def forward(self, x):
        return self.around.decoder(self.model["decoder"](x)) if max(map(max, x.tolist())) < 100 else x


def test_a_submodule_that_is_not_called_makes_way_for_what_is_inside():
    ours, theirs = pair(Passes())
    steps = parts.LEAST_UNMET + 3
    assert_alike(ours, theirs, steps)
    report = explain(ours)
    assert set(report.parts) == {"model.decoder", "around.decoder"}
    for path, calls in (("model.decoder", steps), ("around.decoder", 2)):
        inner = report.parts[path].parts
        assert set(inner) == {"first", "rest.0", "rest.1"}
        assert all((part.engine_calls, part.pytorch_calls) == (calls, 0) for part in inner.values()), str(report)


def test_a_submodule_that_waits_stays(monkeypatch):
    """It is not called as its capture does not fit yet, and would be otherwise."""
    ours, theirs = pair(Decides())
    monkeypatch.setattr(Budget, "may_capture_part", lambda budget: False)
    assert_alike(ours, theirs, 2 * parts.LEAST_UNMET + 3)
    assert set(explain(ours).parts) == {"first", "rest.0", "rest.1"}


def test_parts_of_parts():
    ours, theirs = pair(nn.Sequential(Decides(), nn.Linear(4, 4)))
    outer = ORTModule(Outer(ours[0]), config=Config(**AT_ONCE))
    assert_alike(outer, Outer(theirs[0]))
    assert explain(outer).parts["inner"].parts["first"].engine_calls == 3


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x * (1 if max(map(max, x.tolist())) < 100 else 2))


def hooked(model):
    model.first.register_forward_hook(lambda module, args, result: result * 2)


def replaced(model):
    torch.manual_seed(0)
    model.first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize("change", [hooked, replaced])
def test_a_part_that_changes(change):
    ours, theirs = pair(Decides())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_alike(ours, theirs)
        change(ours), change(theirs)
        assert_alike(ours, theirs)
    counts = {path: part.engine_calls for path, part in explain(ours).parts.items()}
    assert counts == {"first": 3, "rest.0": 6, "rest.1": 6}  # PyTorch runs one with hooks; another one begins anew


def test_evaluation_and_other_modes():
    ours, theirs = pair(Decides())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model in (ours, theirs):
            model.eval()
        with torch.no_grad():
            torch.testing.assert_close(ours(rows()), theirs(rows()))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(ours(rows()), theirs(rows()), rtol=2e-2, atol=2e-2)


SHORT, FEW = ("LEAST_SECONDS", math.inf), ("LEAST_CALLS", 4)


@pytest.mark.parametrize("limit", [SHORT, FEW, None])
def test_where_there_are_none(limit, monkeypatch):
    """Calls are short, or not yet many; there are too many parts; a policy leaves everything to PyTorch."""
    if limit is not None:
        monkeypatch.setattr(parts, *limit)
    cases = [(2, {})] if limit else [(parts.MOST, {}), (2, {"fallback_policy": "FALLBACK_FORCE_TORCH_FORWARD"})]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for count, settings in cases:
            ours, theirs = pair(Decides(count), **settings)
            assert_alike(ours, theirs)
            assert not explain(ours).parts
        if limit is FEW:
            assert_alike(ours, theirs)
            assert explain(ours).parts["first"].engine_calls == 2


def test_strict():
    ours, _ = pair(Decides(), strict=True)
    with pytest.raises(BypassError):
        ours(rows())
