"""How long a step takes is said from what its plan does and what this machine does in a second."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, memory
from ortmodule.engine import rates
from ortmodule.engine.memory_goal import ALL_AGAIN, MemoryGoal
from tests.engine.test_recomputation import IDS, MODELS


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("autocast", [False, True])
def test_work_of_a_product(autocast):
    """Forward and the gradient of the weight; the input has none."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        work = memory.PredictedStep(Product(), ((torch.ones(4, 8),), {}), "none").plan().work
    each = 2 * 4 * 8 * 16
    assert work[:3] == ((0, 2 * each, 0) if autocast else (2 * each, 0, 0))
    assert work[3] >= 4 * (4 * 8 + 8 * 16 + 16 + 4 * 16) and work[4] == 0


def test_rates_are_measured_once():
    first = rates.rates(None)
    assert all(rate > 0 for rate in first) and rates.rates(None) is first


@pytest.mark.parametrize("byte, narrow, expected", [(16, 1, (1, 16)), (11, 0.6, (0.5**0.5, 2**3.5)), (1, 90, (4, 4))])
def test_costs_come_in_steps_near_the_usual(byte, narrow, expected, monkeypatch):
    monkeypatch.setattr(rates, "rates", lambda gpu: rates.Rates(1e-11, narrow * 1e-11, 2e-11, byte * 1e-11, 1))
    narrow, others, byte = rates.costs()
    assert (narrow, byte) == pytest.approx(expected) and others == pytest.approx(2)


def test_a_budget_chooses_by_what_this_machine_is_good_at(monkeypatch):
    """Where bytes are dear products run again, where they are cheap what only moves bytes."""
    model, products = ORTModule(MODELS["layers"]()), []
    for byte in (4, 64):
        monkeypatch.setattr(rates, "rates", lambda gpu, byte=byte: rates.Rates(1, 1, 2, byte, 8 * byte))
        step = memory.PredictedStep(model, ((IDS,), {}), "none")
        most, least = (step.peak(goal).total for goal in (MemoryGoal(0, 1 << 40), MemoryGoal(ALL_AGAIN, 0)))
        plan = step.plan(MemoryGoal(0, most - (most - least) // 4))
        again = [row[0] for row in plan.graph() if row[8]]
        products.append(sum(kind.startswith("MatMul") for kind in again) / len(again))
    assert products[0] < products[1]


def test_prices_say_how_long_a_step_takes(monkeypatch):
    """In proportion to the estimated work, where the machine is as csrc/plan/cost.c takes it to be."""
    monkeypatch.setattr(rates, "rates", lambda gpu: rates.Rates(1, 1, 2, 16, 128))
    prices = memory.pareto(ORTModule(MODELS["layers"]()), (IDS,))
    assert len(prices) > 2
    first, last = prices[0], prices[-1]
    assert [price.seconds for price in prices] == sorted(price.seconds for price in prices)
    assert last.seconds / first.seconds - 1 == pytest.approx(last.extra_work, rel=0.5)
    plan = memory.PredictedStep(MODELS["layers"](), ((IDS,), {}), "none").plan()
    assert rates.seconds_of(plan, None) == pytest.approx(
        plan.work[0] + plan.work[1] + 2 * plan.work[2] + 16 * plan.work[3]
    )
