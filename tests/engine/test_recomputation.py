"""Backward computes again what it is told, or what a budget takes: the same bits, in less memory."""

import gc
import re

import pytest
import torch
from torch import nn

from ortmodule import Config, ORTModule, explain
from ortmodule.engine.session import Session
from tests.selection import each

MB = 1 << 20
FREE = 1 / 32  # of a step's work, what is computed again unasked (NEXT_TO_NOTHING in csrc/plan/recompute.c)
PLENTY = 1 << 40  # a budget in which everything can be kept


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.out_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.narrow(nn.functional.gelu(self.wide(self.out_norm(x)))))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layers, self.head = (
            nn.Embedding(50, 32), nn.Sequential(*[Layer(32) for _ in range(5)]), nn.Linear(32, 50)
        )  # fmt: skip

    def forward(self, ids):
        return nn.functional.cross_entropy(self.head(self.layers(self.words(ids))).flatten(0, 1), ids.flatten())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cells, self.head = nn.Embedding(50, 16), nn.LSTM(16, 16, 2, dropout=0.3), nn.Linear(16, 3)

    def forward(self, ids):
        return self.head(torch.tanh(self.cells(self.words(ids))[0])).square().mean()


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2))
            for _ in range(4)
        )

    def forward(self, ids):
        x = self.first(ids.float()[:, None, None])
        for block in self.blocks:
            x = x + block(x)
        return x.mean()


class PostNorm(nn.Module):
    """Of what one layer gives to the next, autocast's copies are read in backward, and not the value itself."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 128, 0.1, batch_first=True) for _ in range(6))

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Pointwise(nn.Module):
    """Layers that are one chain, which holds nothing but its input and its result."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, ids):
        x = ids * self.scale
        for _ in range(12):
            x = torch.sigmoid(torch.tanh(x))
        return x.sum()


MODELS = {"layers": Layers, "recurrent": Recurrent, "convolutions": Convolutions}
IDS = torch.arange(8 * 24).reshape(8, 24) % 50


def steps(make, autocast=False, ids=IDS, count=2, **config):
    """(losses, gradients, buffers) of some steps, and the plan of the last."""
    torch.manual_seed(0)
    model = ORTModule(make(), config=Config(**config))
    losses = []
    for step in range(count):
        torch.manual_seed(10 + step)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(ids)
        loss.backward()
        losses.append(loss.detach())
    assert explain(model).captured, explain(model).fallback
    plan = plan_of(model)
    tensors = [*losses, *(p.grad for p in model.parameters()), *model.buffers()]
    return tensors, plan


def plan_of(model):
    graph = model._ortmodule.latest
    return next(plan for plan in reversed(graph.session.plans.values()) if plan.differentiates)


def pytorch_takes(make):
    """Under autocast to bfloat16, of which oneDNN has an LSTM with AVX-512 alone."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            make()(IDS)
    except RuntimeError:
        return False
    return True


def same_bits(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_what_costs_next_to_nothing_is_computed_again(name, autocast):
    """Unasked, and with the same bits as a step that keeps everything."""
    if autocast and not pytorch_takes(MODELS[name]):
        pytest.skip("PyTorch cannot run this on this CPU")
    kept, plan = steps(MODELS[name], autocast, memory_budget=PLENTY)
    again, usual = steps(MODELS[name], autocast)
    assert same_bits(kept, again)
    assert plan.recomputed == (0, 0.0) and usual.recomputed[1] <= FREE
    if usual.recomputed[0]:
        assert usual.arena_bytes < plan.arena_bytes
    assert usual.recomputed[0] or name != "layers"


class WideConvolutions(nn.Module):
    """Whose work is products of convolutions, or nearly."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(6))

    def forward(self, ids):
        x = ids.float()[:, None, None, :].expand(-1, 64, 8, -1)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return x.mean()


def test_batch_norms_are_computed_again_from_their_moments():
    stored, _ = steps(WideConvolutions, memory_budget=PLENTY)
    again, plan = steps(WideConvolutions, memory_opt_level=2)
    assert same_bits(stored, again)
    assert any(row[0] == "BatchNormInfer" and row[8] for row in plan.graph())


def test_work_of_gradients_counts():
    """Of three convolutions, that of forward and two of backward, one runs twice."""
    _, plan = steps(WideConvolutions, memory_opt_level=1)
    assert any(row[0] == "Conv" and row[8] for row in plan.graph())
    assert 0.1 < plan.recomputed[1] < 0.34


@each("name, autocast", [(n, a) for n in MODELS for a in (False, True)], [("layers", False), ("layers", True)])
@pytest.mark.parametrize("level", [1, 2])
def test_levels_give_the_same_bits(name, autocast, level):
    stored, plan = steps(MODELS[name], autocast)
    again, smaller = steps(MODELS[name], autocast, memory_opt_level=level)
    assert same_bits(stored, again)
    assert plan.recomputed[1] <= FREE
    if name == "layers" or level == 2:
        assert smaller.recomputed[0] and 0 < smaller.recomputed[1] < 0.5
        assert smaller.arena_bytes < (0.75 if name == "layers" else 1) * plan.arena_bytes


def test_the_first_layers_alone():
    """Between none and all: as much again as layers are asked for, with the same bits."""
    stored, plan = steps(MODELS["layers"], memory_opt_level=0)
    sizes = [plan.arena_bytes]
    for layers in (1, 2, 0):
        again, smaller = steps(MODELS["layers"], memory_opt_level=1, memory_opt_layers=layers)
        assert same_bits(stored, again) and smaller.recomputed[0]
        sizes.append(smaller.arena_bytes)
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4


def held_by(model, ids=IDS):
    """Bytes of parameters, buffers, inputs and gradients."""
    parameters = sum(p.nbytes for p in model.parameters())
    return 2 * parameters + sum(b.nbytes for b in model.buffers()) + ids.nbytes


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_run_again_one_by_one(autocast):
    """Not all of them before the last one's backward."""
    stored, plan = steps(PostNorm, autocast)
    again, smaller = steps(PostNorm, autocast, memory_opt_level=1)
    assert same_bits(stored, again)
    assert smaller.recomputed[0] and smaller.arena_bytes < 0.5 * plan.arena_bytes


@pytest.mark.parametrize("level", [1, 2])
def test_levels_never_take_more_memory(level):
    stored, plan = steps(Pointwise)
    again, smaller = steps(Pointwise, memory_opt_level=level)
    assert same_bits(stored, again)
    assert smaller.arena_bytes <= plan.arena_bytes


def test_each_budget_is_kept_and_takes_no_more_work_than_a_smaller_one():
    stored, plan = steps(Layers)
    held, work = held_by(Layers()), []
    for share in (2, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        budget = held + int(share * plan.arena_bytes)
        again, smaller = steps(Layers, memory_budget=budget)
        assert same_bits(stored, again)
        assert smaller.arena_bytes <= share * plan.arena_bytes
        # With everything kept, to the budget, to what the first estimate missed, and once more as level 1 has it.
        assert smaller.compiles <= 4
        work.append(smaller.recomputed[1])
    assert work[0] == 0 and work == sorted(work) and work[-1] > 0


@pytest.mark.parametrize("share", [0.01, 0.0, -1])
def test_a_budget_that_cannot_be_kept(share):
    _, plan = steps(Layers)
    torch.manual_seed(0)
    module = Layers()
    before = [p.clone() for p in module.parameters()]
    model = ORTModule(module, config=Config(memory_budget=max(1, held_by(module) + int(share * plan.arena_bytes))))
    for _ in range(2):
        with pytest.raises(MemoryError, match="memory budget"):
            model(IDS)
    assert same_bits(before, list(model.parameters())) and all(p.grad is None for p in model.parameters())
    with torch.no_grad():  # inference keeps nothing, and fits
        model.eval()(IDS)
    if share > 0:
        model.train()(IDS[:1, :2]).backward()  # a smaller batch does, too


def test_the_sentence_says_what_can_be_reached():
    _, plan = steps(Layers)
    budget = held_by(Layers()) + plan.arena_bytes // 100
    model = ORTModule(Layers(), config=Config(memory_budget=budget))
    with pytest.raises(MemoryError, match=r"needs \d+ bytes for activations.*leaves \d+") as caught:
        model(IDS)
    least, left = map(int, re.findall(r"\d+", str(caught.value))[:2])
    _, smaller = steps(Layers, memory_budget=budget - left + least)
    assert smaller.arena_bytes <= least


def test_backward_twice():
    torch.manual_seed(0)
    eager, model = Layers().eval(), ORTModule(Layers(), config=Config(memory_opt_level=2)).eval()
    model.load_state_dict(eager.state_dict())
    for module in (eager, model):
        loss = module(IDS)
        loss.backward(retain_graph=True)
        loss.backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_new_lengths_under_a_budget():
    _, plan = steps(Layers)
    torch.manual_seed(0)
    model = ORTModule(Layers(), config=Config(memory_budget=held_by(Layers()) + plan.arena_bytes // 2))
    for length in (24, 12, 20, 24):
        model(IDS[:, :length]).backward()
    gc.collect()
    plans = [p for s in gc.get_objects() if type(s) is Session and s.memory.budget for p in s.plans.values()]
    assert len({p.recomputed[0] for p in plans if p.differentiates}) > 1  # more for longer ones
