"""How long a step takes is said from what its plan does and what this machine does in a second."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, memory
from ortmodule.engine import rates
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
