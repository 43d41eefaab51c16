"""Hooks on results from which other results are computed: it is said what they do not see."""

import warnings

import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.core.logger import warn_once
from ortmodule.engine import memory_goal
from ortmodule.runtime.tensors.result_hooks import dependents_of
from tests.twins import rows

UNSEEN = "does not see the gradient that comes through another result"


class Model(nn.Module):
    """Hidden states, a loss of them, and a second head beside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.beside = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return hidden, self.head(hidden).square().mean(), self.beside(x)


@pytest.fixture(params=["0", "1"], ids=["one node", "a chain"])
def module(request, monkeypatch):
    monkeypatch.setenv("ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT", request.param)
    monkeypatch.setattr(memory_goal, "SEGMENT_BYTES", 100)
    warn_once.cache_clear()
    return ORTModule(Model())


def said(run):
    """Whether it is said in ``run()``."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        run()
    return any(UNSEEN in str(each.message) for each in given)


WATCH = {
    "retain_grad": lambda tensor: tensor.retain_grad(),
    "a hook": lambda tensor: tensor.register_hook(lambda grad: None),
}


@pytest.mark.parametrize("watch", WATCH)
def test_a_result_that_another_is_computed_from(watch, module):
    hidden, loss, _ = module(rows(4, 8))
    WATCH[watch](hidden)
    assert said(loss.backward) and explain(module).captured


def test_without_a_hook_nothing_is_said(module):
    hidden, loss, beside = module(rows(4, 8))
    loss.retain_grad(), beside.retain_grad()
    assert not said((loss + beside.sum()).backward)
    assert beside.grad is not None and hidden.grad_fn is not None


def test_a_loss_of_the_scripts_own_is_seen(module):
    """As in PyTorch, with a result that backward does not begin with."""
    eager, grads = Model(), []
    for model in (eager, module):
        hidden, _, beside = model(rows(4, 8))
        hidden.retain_grad()
        loss = hidden.pow(3).sum() + beside.sum()
        assert not said(loss.backward)
        grads.append(hidden.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_results_that_are_gone(module):
    _, loss, _ = module(rows(4, 8))
    assert not said(loss.backward)
    hidden, loss, _ = module(rows(4, 8))
    hidden.register_hook(lambda grad: None)
    del hidden
    assert not said(loss.backward)


def test_dependents():
    """Through other nodes, through a copy, and by an output that is read itself."""
    nodes = [
        helper.make_node("Tanh", ["x"], ["a"]),
        helper.make_node("Identity", ["a"], ["first"]),
        helper.make_node("Neg", ["a"], ["second"]),
        helper.make_node("Abs", ["second"], ["c"]),
        helper.make_node("ReduceSum", ["c"], ["third"]),
        helper.make_node("Sin", ["x"], ["fourth"]),
    ]
    outputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("first", "second", "third", "fourth")
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])]
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs))
    assert dependents_of(model, range(4)) == {0: [1, 2], 1: [2]}
    assert dependents_of(model, [0, 3]) == {}
