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


class Kept:
    """A plan of so many bytes."""

    def __init__(self, size):
        self.size, self.asked = size, 0

    def bytes(self):
        self.asked += 1
        return self.size


def cache_of(*sizes):
    cache, plans = plan_cache.PlanCache(Kept.bytes), [Kept(size) for size in sizes]
    return cache, plans, [cache.add((number,), plan) for number, plan in enumerate(plans)]


@pytest.mark.parametrize(
    "most, limit, left", [(10, 100, 4), (10, 90, 3), (10, 42, 2), (10, 0, 1), (2, 100, 2), (2, 41, 2), (2, 40, 1)]
)
def test_the_first_go(monkeypatch, most, limit, left):
    monkeypatch.setattr(plan_cache, "MOST_PLANS", most)
    monkeypatch.setattr(plan_cache, "MOST_PLAN_BYTES", limit)
    cache, plans, dropped = cache_of(20, 30, 40, 1)
    assert list(cache.values()) == plans[-left:] and sum(dropped, []) == plans[:-left]


def test_those_that_are_used_stay(monkeypatch):
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 2)
    cache, (a, b), _ = cache_of(1, 1)
    cache.move_to_end((0,))
    assert cache.add((2,), Kept(1)) == [b] and next(iter(cache.values())) is a


def test_another_plan_costs_the_same_however_many_there_are(monkeypatch):
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 50)
    cache, plans, _ = cache_of(*range(1, 500))
    assert len(cache) == 50 and max(plan.asked for plan in plans) <= 3


def test_plans_that_are_let_go_take_nothing(monkeypatch):
    """Those that were taken out in other ways are counted where they would be too many."""
    monkeypatch.setattr(plan_cache, "MOST_PLAN_BYTES", 100)
    cache, (a, b, c), _ = cache_of(30, 30, 30)
    cache.discard(b), cache.discard(b), cache.discard(Kept(30))
    assert list(cache.values()) == [a, c]
    assert cache.add((3,), d := Kept(30)) == [] and list(cache.values()) == [a, c, d]
    cache.pop((2,))
    assert cache.add((4,), e := Kept(30)) == [] and list(cache.values()) == [a, d, e]
    assert cache.add((5,), f := Kept(30)) == [a] and list(cache.values()) == [d, e, f]
    cache.clear()
    assert [cache.add((n,), Kept(30)) for n in range(4)][:3] == [[], [], []] and len(cache) == 3
    cache.discard(d)  # another one has its place
    assert len(cache) == 3


def test_a_plan_that_two_threads_have_made():
    cache, (a, b), _ = cache_of(1, 1)
    assert cache.add((0,), c := Kept(1)) == [] and list(cache.values()) == [b, c]
    cache.discard(a)
    assert list(cache.values()) == [b, c]


def test_plans_that_are_exchanged(monkeypatch):
    monkeypatch.setattr(plan_cache, "MOST_PLAN_BYTES", 100)
    cache, (a, b), _ = cache_of(40, 40)
    first = cache.exchange({})
    assert first == {(0,): a, (1,): b} and not cache
    assert cache.add((0,), c := Kept(90)) == []
    assert cache.exchange(first) == {(0,): c} and list(cache.values()) == [a, b]
    cache.discard(c)
    assert cache.add((2,), d := Kept(40)) == [a]
    cache.discard(b)
    assert list(cache.values()) == [d]


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
