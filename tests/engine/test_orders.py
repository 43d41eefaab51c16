"""Nodes run in another order than the written one where that takes less memory, with the same results."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain, memory
from tests.engine.test_recomputation import IDS, MODELS, same_bits

WRITTEN = "as written"
BRANCHES, WIDE, ROWS = 12, 2048, 64
ONE = ROWS * WIDE * 4  # bytes of a branch


class Branches(nn.Module):
    """All of them are made before the first is read, unless it ``turns`` from one to the next."""

    def __init__(self, turns=False):
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(32, WIDE) for _ in range(BRANCHES))
        self.read = nn.Linear(WIDE, 4).requires_grad_(False)  # so no branch is kept for backward
        self.turns, self.drop = turns, nn.Dropout(0.2)

    def forward(self, x):
        made = (self.drop(layer(x)) for layer in self.wide)
        read = [self.read(y) for y in (made if self.turns else list(made))]
        return torch.stack(read).square().sum()


def run(training, turns=False):
    """(loss and gradients, the plan)"""
    torch.manual_seed(0)
    model, x = ORTModule(Branches(turns)).train(training), torch.randn(ROWS, 32)
    with torch.set_grad_enabled(training):
        torch.manual_seed(1)
        loss = model(x)
    if training:
        loss.backward()
    assert explain(model).captured and not explain(model).fallback
    (plan,) = (p for p in model._ortmodule.latest.session.plans.values() if not p.prologue)
    return [loss.detach(), *(p.grad for p in model.parameters() if training and p.requires_grad)], plan


@pytest.mark.parametrize("training", [False, True])
def test_branches_are_read_as_they_are_made(training):
    """In the memory, and with the bits, of a module that does so itself."""
    found, plan = run(training)
    assert plan.order != WRITTEN and plan.orders[WRITTEN] >= BRANCHES * ONE
    assert plan.orders[plan.order] == min(plan.orders.values())
    expected, in_turns = run(training, turns=True)
    assert in_turns.order == WRITTEN
    assert same_bits(found, expected) and plan.arena_bytes <= in_turns.arena_bytes < 4 * ONE


def test_the_written_order_stays_where_no_other_takes_less():
    for make in MODELS.values():
        plan = memory.PredictedStep(make(), ((IDS,), {}), "none").plan()
        least = min(plan.orders.values())
        assert plan.order == WRITTEN or plan.orders[plan.order] == least < (1 - 1 / 32) * plan.orders[WRITTEN]
