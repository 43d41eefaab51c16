"""Activations wait in pinned memory on the emulated GPU: copies beside computation, the same bits."""

import gc

import pytest
import torch
from torch import nn

from ortmodule import Config, ORTModule, _core
from tests.cuda.failing_calls import FailingCalls
from tests.cuda.test_emulated import driver, gpt2  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        rows = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2))]
        self.layers = nn.Sequential(*rows)

    def forward(self, x):
        return self.layers(x).square().sum()


ROWS = torch.arange(24.0 * 32).reshape(24, 32).sin()


def plan_of(model):
    plans = model._ortmodule.latest.session.plans.values()
    return next(plan for plan in reversed(plans) if plan.differentiates)


def steps(make, call, runs=3, **config):
    """(losses and gradients of some steps, the plan)."""
    torch.manual_seed(0)
    model, found = ORTModule(make(), config=Config(**config)), []
    for step in range(runs):
        torch.manual_seed(step)
        model.zero_grad()
        loss = call(model)
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return found, plan_of(model)


def once(model):
    loss = model(ROWS)
    loss.backward()
    return loss


def overlapping(model):
    """Two forwards before their backwards, one of them twice, and one whose backward never comes."""
    first, second, _ = model(ROWS), model(ROWS.flip(0)), model(ROWS.flip(1))
    second.backward(retain_graph=True)
    first.backward()
    second.backward()
    return first


def train_gpt2(model):
    tokens = torch.arange(18).reshape(2, 9)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return loss


@pytest.fixture(params=["late", "early"])
def copies(driver, request):  # noqa: F811
    """Copies are as late as they may be, or as early."""
    driver.fake_copies_early(request.param == "early")
    yield driver
    driver.fake_copies_early(0)


@pytest.mark.parametrize("segments", ["0", "1"])
def test_the_same_bits(copies, segments):
    for call in (once, overlapping):
        stored, plan = steps(Small, call, enable_mem_efficient_grad_mgmt=segments)
        before = copies.fake_copies()
        moved, smaller = steps(Small, call, enable_mem_efficient_grad_mgmt=segments, memory_offload=True)
        assert all(torch.equal(a, b) for a, b in zip(stored, moved, strict=True))
        assert smaller.offloaded and smaller.arena_bytes < plan.arena_bytes
        assert copies.fake_copies() - before >= 2 * 3 * smaller.offloaded
        assert smaller.graphs == (0, 0, 0)  # steps are not recorded: copies are on another stream


def test_gpt2_with_dropout(copies):
    stored, plan = steps(gpt2, train_gpt2, 2)
    moved, smaller = steps(gpt2, train_gpt2, 2, memory_offload=True)
    assert all(torch.equal(a, b) for a, b in zip(stored, moved, strict=True))
    assert smaller.offloaded and smaller.arena_bytes < plan.arena_bytes


def test_copies_go_on_beside_other_work(driver):  # noqa: F811
    """Between the start of a copy and the wait for it are other instructions, mostly."""
    _, plan = steps(Small, once, 1, memory_offload=True)
    names = [row[0] for row in plan.code()]
    distances = []
    for begin, end in (("Offload", "OffloadEnd"), ("Reload", "ReloadEnd")):
        starts = [i for i, name in enumerate(names) if name == begin]
        ends = [i for i, name in enumerate(names) if name == end]
        assert len(starts) == len(ends) == plan.offloaded
        for start, stop, following in zip(starts, ends, [*starts[1:], len(names)], strict=True):
            assert start < stop < following  # one at a time
            distances.append(stop - start - 1)
    assert sum(distance > 0 for distance in distances) > len(distances) // 2


def test_pinned_memory_is_given_back(driver):  # noqa: F811
    steps(Small, once, 1, memory_offload=True)
    gc.collect()
    held = driver.fake_held()
    steps(Small, overlapping, 2, memory_offload=True)
    gc.collect()
    assert driver.fake_held() == held


def test_a_refused_call_of_the_driver(driver):  # noqa: F811
    """Whichever call fails: an exception, or PyTorch computes it; the next step is right."""
    torch.manual_seed(0)
    model = ORTModule(Small().eval(), config=Config(memory_offload=True))
    once(model)
    expected = [p.grad.clone() for p in model.parameters()]
    driver.fake_fail_at(0)
    once(model)
    for attempt in FailingCalls(driver, every=7):
        model.zero_grad()
        with attempt:
            once(model)
        model.zero_grad()
        once(model)
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, grad)


def test_a_capture_of_the_users(driver):  # noqa: F811
    model = ORTModule(Small(), config=Config(memory_offload=True))
    once(model)
    driver.fake_captured_by_others(1)
    try:
        with pytest.raises(RuntimeError, match="no activations can be offloaded"):
            model(ROWS)
    finally:
        driver.fake_captured_by_others(0)
    once(model)
