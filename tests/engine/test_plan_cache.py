"""Plans that are kept are bounded by their number and by their bytes; one that went is made again."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from ortmodule import ORTModule
from ortmodule.engine import plan_cache


@pytest.mark.parametrize(
    "most, limit, left",
    [
        (10, 100, [20, 30, 40, 1]),  # all of them: 91 bytes
        (10, 90, [30, 40, 1]),
        (10, 42, [40, 1]),
        (10, 0, [1]),  # the latest stays
        (2, 100, [40, 1]),
    ],
)
def test_the_oldest_go(monkeypatch, most, limit, left):
    monkeypatch.setattr(plan_cache, "MOST_PLANS", most)
    monkeypatch.setattr(plan_cache, "MOST_PLAN_BYTES", limit)
    kept = OrderedDict(enumerate([20, 30, 40, 1]))
    dropped = plan_cache.drop_oldest(kept, int)
    assert list(kept.values()) == left and dropped + left == [20, 30, 40, 1]


def test_plans_of_a_module_are_bounded_in_bytes(monkeypatch):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    model = ORTModule(plain)

    def step(rows):
        x = torch.randn(rows, 4)
        grads = []
        for module in (model, plain):
            plain.zero_grad()
            module(x).square().sum().backward()
            grads.append([p.grad.clone() for p in plain.parameters()])
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs)

    step(2), step(3)
    graph = model._ortmodule.latest
    session, ready = graph.session, graph.executables.plans
    each = max(plan.host_bytes for plan in session.plans.values())
    monkeypatch.setattr(plan_cache, "MOST_PLAN_BYTES", 4 * each)
    for rows in range(4, 20):
        step(2)  # stays, as it is used again and again
        step(rows)
        assert sum(plan.host_bytes for plan in session.plans.values()) <= 4 * each
        assert {id(kept.plan) for kept in ready.values()} >= {id(plan) for plan in session.plans.values()}
    made = session.plans_made
    step(2), step(19)
    assert session.plans_made == made, "the latest two were kept"
    step(3)
    assert session.plans_made > made
    monkeypatch.setattr(plan_cache, "MOST_PLAN_BYTES", 0)
    step(30)
    assert len(ready) == len(session.plans) == 1
