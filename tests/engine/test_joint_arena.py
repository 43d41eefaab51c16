"""Gradients in the arena of the step that makes them: the same bits, less memory, and whatever holds them meanwhile."""

import gc
import resource
import sys
import threading

import pytest
import torch
from torch import nn

from ortmodule import Config, ORTModule, _core, explain, memory
from ortmodule.engine import memory_goal
from ortmodule.runtime.grad_buckets import LOOKS
from tests.twins import rows

MB, WIDTH, ROWS = 1 << 20, 512, 128
PAGE = 4096


class Layers(nn.Module):
    """Wide layers over few rows: gradients are most of what a step takes."""

    def __init__(self, dropout=0.1, tied=True):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        if tied:
            self.layers[4].weight = self.layers[1].weight

    def forward(self, x):
        for layer in self.layers:
            x = self.dropout(nn.functional.gelu(layer(x))) + x
        return self.norm(x).square().mean()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A megabyte of gradients is large."""
    monkeypatch.setattr(memory_goal, "JOINT_FROM", MB)
    monkeypatch.setattr(memory_goal, "SEGMENT_BYTES", 2 * MB)
    gc.collect()


def made(joint=True, monkeypatch=None, config=None, **kwargs):
    torch.manual_seed(0)
    model = ORTModule(Layers(**kwargs), config=config)
    if not joint:
        monkeypatch.setattr(memory_goal, "JOINT_FROM", 0)
        model(rows(ROWS, WIDTH))
        monkeypatch.setattr(memory_goal, "JOINT_FROM", MB)
    return model


@pytest.fixture
def pair(monkeypatch):
    """(with gradients in the arena, with gradients of their own)."""
    return made(), made(False, monkeypatch)


def plan_of(model, adds=False):
    """That of steps that make their gradients, or of those that add to earlier ones."""
    report = explain(model)
    assert report.captured and not report.fallback
    plans = [p for p in model._ortmodule.latest.session.plans.values() if p.differentiates]
    assert len(plans) <= 2
    return sorted(plans, key=lambda plan: plan.joint_bytes)[0 if adds else -1]


def grads(model):
    return [p.grad for p in model.parameters()]


def in_an_arena(model):
    """Do all gradients lie as the plan says?"""
    return lie_as_in(plan_of(model), model)


def lie_as_in(plan, model):
    offsets = sorted(row[0] for row in plan.blocks(True) if row[4][0] == "gradient")
    found = sorted(t.data_ptr() for t in grads(model) if t is not None)
    return [at - found[0] for at in found] == [at - offsets[0] for at in offsets]


def step(model, seed=0, x=None):
    torch.manual_seed(seed)
    loss = model(rows(ROWS, WIDTH, seed=seed) if x is None else x)
    loss.backward()
    return loss.detach()


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def used():
    gc.collect()
    return _core.memory()["used"]


# --- the same bits, less memory ---------------------------------------------------------------------------------------


def test_same_bits(pair):
    for seed in range(3):
        losses = [step(model, seed) for model in pair]
        assert torch.equal(*losses)
        assert_same(*map(grads, pair))
        assert in_an_arena(pair[0]) and not plan_of(pair[1]).joint_bytes
        for model in pair:
            model.zero_grad()


def test_same_as_pytorch():
    torch.manual_seed(0)
    eager, ours = Layers(0.0), made(dropout=0.0)
    for seed in range(2):
        torch.testing.assert_close(step(eager, seed), step(ours, seed))
        torch.testing.assert_close(grads(eager), grads(ours))
        eager.zero_grad(), ours.zero_grad()


def taken(model):
    """(the most bytes of a step above what there was before it, those that are in use behind it)."""
    before = used()
    _core.memory_most()
    step(model)
    return _core.memory_most() - before, _core.memory()["used"] - before


def test_a_smaller_step_holds_less_in_the_same_block():
    """As with a shorter batch, or once logits are not computed: the block of the step before has the rest to spare."""
    model, small = made(), rows(ROWS * 6, WIDTH)
    for batch in (rows(ROWS * 8, WIDTH), small):
        model.zero_grad()
        gc.collect()
        before = _core.memory()["used"]
        loss = model(batch)
        held = _core.memory()["used"] - before
        loss.backward()
        block = memory.predict(model, batch).block
        assert block <= held <= block + 2 * PAGE


@pytest.mark.skipif("asan" in sys.argv, reason="nothing is kept")
def test_a_step_takes_less(monkeypatch):
    """As much as the plan says, and gradients alone are in use when it is over. Nothing is computed again."""
    everything = Config(memory_budget=1 << 40)
    pair = made(config=everything), made(False, monkeypatch, config=everything)
    for model in pair:
        step(model)
        model.zero_grad()
    (joint, _), (apart, _) = map(taken, pair)
    plan = plan_of(pair[0])
    size = sum(t.nbytes for t in grads(pair[0]))
    assert plan.joint_bytes <= joint <= plan.joint_bytes + MB + MB // 4  # and what threads have for themselves
    assert apart >= plan_of(pair[1]).arena_bytes + 0.9 * size  # small ones come from malloc
    assert joint < 0.8 * apart
    pair[1].zero_grad()
    assert size <= used() <= size + 2 * PAGE * (len(grads(pair[0])) + 1)
    pair[0].zero_grad()
    assert used() <= PAGE


def test_the_plan_is_within_its_bounds():
    model = made()
    step(model)
    plan = plan_of(model)
    size = sum(t.nbytes for t in grads(model))
    assert max(plan.arena_bytes, size) < plan.joint_bytes < 0.85 * (plan.arena_bytes + size)
    assert plan.peak(True)[1] <= plan.joint_bytes <= 1.05 * plan.peak(True)[1] + 128 * len(plan.blocks(True))
    assert memory.predict(model, rows(ROWS, WIDTH)).total >= plan.joint_bytes


def test_prediction():
    x = rows(ROWS, WIDTH)
    model = made()
    peak = memory.predict(model, x)
    assert used() <= PAGE
    step(model, x=x)
    plan = plan_of(model)
    assert peak.gradients + peak.activations + peak.workspace == plan.joint_bytes
    assert peak.total == plan.joint_bytes + peak.parameters + peak.inputs + peak.outputs
    assert peak.total == sum(tensor.bytes for tensor in peak.tensors) and all(t.bytes >= 0 for t in peak.tensors)
    size = sum(t.nbytes for t in grads(model))
    assert 0 < peak.gradients <= size
    assert memory.predict(model, rows(16 * ROWS, WIDTH)).gradients < size  # those alone that are there at the peak
    assert explain(model).peak.total == peak.total
    with_states = memory.predict(model, x, optimizer="adam")
    assert with_states.optimizer == 2 * size


def test_where_gradients_wait_for_nothing_they_are_not_predicted_in_it():
    """A hook on a parameter, or a setting, has them handed over in segments, with memory of their own."""
    x, model = rows(ROWS, WIDTH), made()
    less = memory.predict(model, x).total
    handle = next(model.parameters()).register_hook(lambda grad: None)
    assert memory.predict(model, x).total > less
    handle.remove()
    assert memory.predict(model, x).total == less
    setting = made(config=Config(enable_mem_efficient_grad_mgmt="1"))
    assert memory.predict(setting, x).total > less


def test_with_hooks_the_plan_of_their_steps_is_predicted():
    """At level 2 what is computed again depends on who holds the gradients."""
    x, model = rows(ROWS, WIDTH), made(config=Config(memory_opt_level=2))
    next(model.parameters()).register_hook(lambda grad: None)
    peak = memory.predict(model, x)
    for _ in range(2):
        step(model, x=x)
        model.zero_grad()
    plan = plan_of(model)
    assert plan.joint_bytes == 0 and peak.activations + peak.workspace == plan.arena_bytes


def test_pages_stay_from_step_to_step():
    model = made()
    for _ in range(3):
        step(model)
        model.zero_grad()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        step(model)
        assert in_an_arena(model)
        model.zero_grad()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < plan_of(model).joint_bytes // PAGE // 4


# --- who holds gradients, and for how long ----------------------------------------------------------------------------


def test_gradients_that_are_added_to_earlier_ones(pair):
    for seed in range(4):
        for model in pair:
            step(model, seed)
        assert_same(*map(grads, pair))
        assert in_an_arena(pair[0])  # the sums are where the first were
    before = used()
    _core.memory_most()
    step(pair[0])
    most, counts = _core.memory_most() - before, [t.nbytes for t in grads(pair[0])]
    beside = memory_goal.segment_bytes(sum(counts)) + max(counts)  # a segment, and the gradient that completes it
    assert (
        most < plan_of(pair[0], adds=True).arena_bytes + beside + MB + MB // 4
    )  # and what threads have for themselves
    assert most < plan_of(pair[0]).arena_bytes + 4 * MB  # no more than by the plan of steps that make gradients


def test_micro_batches_do_without():
    """Only the first of a round would find no gradients, and have an arena of another kind than the others."""
    model = made()
    step(model)
    assert in_an_arena(model)
    for _ in range(2):
        step(model)
        model.zero_grad()
        step(model)
        assert not in_an_arena(model)


def test_held_gradients_keep_what_they_are():
    model, held = made(), []
    for seed in range(3):
        step(model, seed)
        held.append((grads(model), [t.clone() for t in grads(model)]))
        model.zero_grad()
    for mine, copies in held:
        assert_same(mine, copies)
    state = _core.memory()
    assert state["used"] + state["kept"] <= state["peak"]
    step(model, 3)
    held.clear()
    del mine, copies
    model.zero_grad()
    assert used() <= PAGE


def test_one_that_is_held_holds_no_more():
    model = made()
    step(model)
    one = model._ortmodule.module.layers[2].weight.grad
    copy = one.clone()
    model.zero_grad()
    assert one.nbytes <= used() <= one.nbytes + 2 * PAGE * len(grads(model))  # pages that two of them shared
    for seed in range(2):
        step(model, seed)
        model.zero_grad()
    assert torch.equal(one, copy)
    one = None
    assert used() <= PAGE


def test_two_forwards_wait(pair):
    found = []
    for model in pair:
        torch.manual_seed(5)
        losses = [model(rows(ROWS, WIDTH, seed=seed)) for seed in range(2)]
        for loss in reversed(losses):
            loss.backward()
        found.append(grads(model))
    assert_same(*found)


def test_the_second_arena_is_plain():
    model = made()
    step(model)
    model.zero_grad()
    plan, before = plan_of(model), used()
    losses = [model(rows(ROWS, WIDTH)) for _ in range(2)]
    both = used() - before
    assert abs(both - plan.joint_bytes - plan.arena_bytes) < MB // 4
    del losses
    assert used() <= PAGE


def test_a_forward_whose_backward_never_comes():
    model = made()
    loss = model(rows(ROWS, WIDTH))
    assert used() >= plan_of(model).joint_bytes
    del loss
    assert used() <= PAGE


def test_retained(pair):
    found = []
    for model in pair:
        torch.manual_seed(1)
        loss = model(rows(ROWS, WIDTH))
        for last in (False, False, True):
            loss.backward(retain_graph=not last)
        found.append(grads(model))
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_same(*found)


def test_retained_and_taken_apart(pair):
    """Each backward has gradients of its own."""
    x = rows(ROWS, WIDTH)
    for model in pair:
        params = list(model.parameters())
        loss = model(x)
        one = torch.autograd.grad(loss, params, retain_graph=True)
        copies = [t.clone() for t in one]
        two = torch.autograd.grad(loss, params)
        assert_same(one, two)
        assert_same(one, copies)
        assert not {t.data_ptr() for t in one} & {t.data_ptr() for t in two}


def test_gradients_of_inputs(pair):
    found = []
    for model in pair:
        x = rows(ROWS, WIDTH).requires_grad_()
        step(model, x=(x * 1.0))
        found.append([x.grad, *grads(model)])
    assert_same(*found)


def test_double_backward():
    eager, ours = (torch.manual_seed(0), Layers(0.0))[1], made(dropout=0.0)
    found = []
    for model in (eager, ours):
        params = list(model.parameters())
        first = torch.autograd.grad(model(rows(ROWS, WIDTH)), params, create_graph=True)
        sum(g.square().sum() for g in first).backward()
        found.append(grads(model))
    torch.testing.assert_close(*found)


def test_a_hook_that_raises(pair):
    """A hook that was not there when hooks were looked for."""
    model = pair[0]
    for _ in range(5):
        step(model)
        model.zero_grad()

    def refuse(grad):
        raise ValueError("not this one")

    handle = model._ortmodule.module.layers[3].weight.register_hook(refuse)
    with pytest.raises(ValueError, match="not this one"):
        step(model)
    handle.remove()
    for each in pair:
        each.zero_grad()
        step(each, 7)
    assert_same(*map(grads, pair))
    for each in pair:
        each.zero_grad()
    assert used() <= PAGE


def test_backward_in_another_thread():
    model = made()
    loss = model(rows(ROWS, WIDTH))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert in_an_arena(model)
    copies = [t.clone() for t in grads(model)]
    model.zero_grad()
    step(model, 1)
    model.zero_grad()
    del loss
    assert used() <= PAGE and copies


@pytest.mark.parametrize("count", range(3))
def test_memory_that_runs_out(count, pair):
    model = pair[0]
    step(model)
    model.zero_grad()
    _core.fail_memory(count)
    try:
        step(model)
    except MemoryError:
        pass
    finally:
        _core.fail_memory(-1)
    model.zero_grad()
    assert used() <= PAGE
    for each in pair:
        step(each, 3)
    assert_same(*map(grads, pair))


SETTINGS = {
    "budget": {"memory_budget": 0},
    "level 2": {"memory_opt_level": 2},
    "offload": {"memory_offload": True},
    "segments": {"enable_mem_efficient_grad_mgmt": "1"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_with_other_settings(name, pair, tmp_path):
    settings = dict(SETTINGS[name])
    x = rows(16 * ROWS, WIDTH) if name == "budget" else rows(ROWS, WIDTH)  # so many that activations make the peak
    peak = memory.predict(pair[0], x)
    if name == "budget":
        settings["memory_budget"] = peak.total - (peak.total - memory.pareto(pair[0], x)[-1].peak) // 2
    if name == "offload":
        settings["memory_offload_path"] = str(tmp_path)
    model = made(config=Config(**settings))
    for each in (model, pair[1]):
        step(each, x=x)
    assert_same(grads(model), grads(pair[1]))
    if name == "budget":
        assert memory.predict(model, x).total <= settings["memory_budget"] < peak.total


# --- what is no arena of the plan's -----------------------------------------------------------------------------------


def test_what_is_no_joint_arena():
    model = made()
    step(model)
    plan = plan_of(model)
    model.zero_grad()
    arena = plan.joint_arena(torch.Tensor)
    assert arena.nbytes == plan.joint_bytes and plan.joint_arena(torch.Tensor) is None
    other = torch.empty(plan.joint_bytes, dtype=torch.uint8)
    apart = [t for t in plan.empty_input_grads(torch.Tensor, other) if t is not None]
    inside = [t for t in plan.empty_input_grads(torch.Tensor, arena) if t is not None]
    again = [t for t in plan.empty_input_grads(torch.Tensor, arena) if t is not None]
    start, end = arena.data_ptr(), arena.data_ptr() + arena.nbytes
    assert all(start <= t.data_ptr() < end for t in inside)
    for t in (*apart, *again):
        assert not start <= t.data_ptr() < end
    del arena
    assert plan.joint_arena(torch.Tensor) is None  # its gradients are held
    for t in inside:
        t.fill_(1)
    del inside, t
    assert plan.joint_arena(torch.Tensor) is not None
    with pytest.raises(ValueError, match="bytes"):
        plan.forward(other[: plan.joint_bytes // 2], [None] * 14, [], [], 0, joint=True)
    with pytest.raises(TypeError):
        plan.empty_input_grads(torch.Tensor, 3)


# --- budgets ----------------------------------------------------------------------------------------------------------


MANY = 1024  # rows: activations are as much as gradients, for a budget to choose among


def limited(budget):
    torch.manual_seed(0)
    return ORTModule(Layers(), config=Config(memory_budget=budget))


def wide_step(model, seed=0):
    return step(model, seed, rows(MANY, WIDTH, seed=seed))


def test_every_price_can_be_had():
    prices = memory.pareto(Layers(), (rows(MANY, WIDTH),))
    assert len(prices) >= 4
    torch.manual_seed(0)
    stored = ORTModule(Layers())
    wide_step(stored)
    for price in prices:
        model = limited(price.peak)
        wide_step(model)
        assert memory.predict(model, rows(MANY, WIDTH)).total <= price.peak
        assert in_an_arena(model)
        assert_same(grads(stored), grads(model))


def test_a_choice_counts_gradients_where_they_are():
    """What is kept until gradients have taken its place costs nothing: a choice that does not see them goes on."""
    prices = memory.pareto(Layers(), (rows(MANY, WIDTH),))
    apart = memory.pareto(ORTModule(Layers(), config=Config(enable_mem_efficient_grad_mgmt="1")), (rows(MANY, WIDTH),))
    assert prices[-1].peak < apart[-1].peak
    within = [price for price in prices if price.peak <= apart[-1].peak]
    assert within and within[0].extra_work < apart[-1].extra_work


def room_for_adding(model):
    """Bytes beside a run's arena of a step that adds to gradients, at most."""
    counts = [p.nbytes for p in model.parameters()]
    on_their_way = min(sum(counts), memory_goal.segment_bytes(sum(counts)) + max(counts))
    return 2 * sum(counts) + on_their_way + MANY * WIDTH * 4


def test_steps_that_add_have_plans_within_the_budget():
    torch.manual_seed(0)
    stored = ORTModule(Layers())
    wide_step(stored)
    room = room_for_adding(stored)
    budget = room + plan_of(stored).arena_bytes * 3 // 4
    model = limited(budget)
    for seed in (0, 1, 2):
        wide_step(model, seed)
        if seed:
            wide_step(stored, seed)
    assert_same(grads(stored), grads(model))
    plans = [p for p in model._ortmodule.latest.session.plans.values() if p.differentiates]
    making, adding = sorted(plans, key=lambda plan: -plan.joint_bytes)
    assert making.joint_bytes and not adding.joint_bytes
    assert room + adding.arena_bytes <= budget and adding.recomputed[0]
    for later in range(LOOKS + 1):  # then the first plan has a use again
        model.zero_grad()
        wide_step(model, later)
    assert lie_as_in(making, model)
    assert len(model._ortmodule.latest.session.plans) == len(plans)


def test_a_budget_that_is_too_small_for_adding_says_so():
    torch.manual_seed(0)
    module = Layers()
    prices = memory.pareto(module, (rows(MANY, WIDTH),))
    model = limited(prices[-1].peak)
    wide_step(model)
    before = [g.clone() for g in grads(model)]
    with pytest.raises(MemoryError, match="memory budget"):
        wide_step(model, 1)
    assert_same(before, grads(model))
    model.zero_grad()
    with torch.no_grad():
        model(rows(MANY, WIDTH))
