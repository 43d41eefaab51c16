"""A smaller budget of a step takes no more memory, and no less work, than a larger one."""

import pytest
import torch
from torch import nn

from benchmarks import alive
from ortmodule import memory
from ortmodule.engine.memory_goal import ALL_AGAIN, MemoryGoal
from tests.engine.test_recomputation import MODELS, Layer

BUDGETS = 41
KEPT = 1 << 40  # a budget in which everything can be kept
IDS = torch.arange(4 * 128).reshape(4, 128) % 50
WIDTH = 256  # so that gradients of weights are large: these have places in the arena


class TiedHead(nn.Module):
    """As BERT for masked words: the gradient of the head's weights is large, and waits for that of the first layer."""

    def __init__(self):
        super().__init__()
        self.words, self.layers = nn.Embedding(8000, WIDTH), nn.Sequential(*[Layer(WIDTH) for _ in range(6)])
        self.between = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 8000)
        self.head.weight = self.words.weight

    def forward(self, ids):
        logits = self.head(self.between(self.layers(self.words(ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


EACH = dict(MODELS, tied_head=TiedHead)


def step_of(name, autocast=False):
    torch.manual_seed(0)
    with torch.device("meta"):
        model = EACH[name]().train()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return memory.PredictedStep(model, ((IDS,), {}), "none")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", EACH)
def test_a_smaller_budget_takes_no_more_memory_and_no_less_work(name, autocast):
    step = step_of(name, autocast)
    most, least = (step.peak(goal).total for goal in (MemoryGoal(0, KEPT), MemoryGoal(ALL_AGAIN, 0)))
    before, work = most, 0.0
    for i in range(BUDGETS):
        budget = most - (most - least) * i // (BUDGETS - 1)
        peak = step.peak(MemoryGoal(0, budget))
        assert peak.total <= min(budget, before)
        assert peak.extra_work >= work
        before, work = peak.total, peak.extra_work
    with pytest.raises(MemoryError, match="memory budget"):
        step.peak(MemoryGoal(0, least - least // 16))


def test_a_large_gradient_waits_while_activations_go():
    """That of the head's weights is made when some activations are gone, not beside all of them and the logits'."""
    step = step_of("tied_head")
    plan = step.plan(MemoryGoal(0, KEPT))
    assert plan.order == "depth first" and plan.orders["depth first"] < plan.orders["as written"] * 31 / 32


def without_optimizer(peak):
    """What a budget counts."""
    return peak.total - peak.optimizer


@pytest.mark.parametrize("name", [*EACH, "resnet-18"])
def test_offloading_reaches_what_is_reached_without(name, tmp_path):
    """What is read back waits for its reader: the least so may be more than of what is computed again."""
    step = step_of(name) if name in EACH else alive.step_of(name, False)
    least = without_optimizer(step.peak(MemoryGoal(ALL_AGAIN, 0)))
    for goal in (MemoryGoal(0, least, offload=str(tmp_path)), MemoryGoal(ALL_AGAIN, 0, offload=str(tmp_path))):
        assert without_optimizer(step.peak(goal)) <= least
