"""A graph in which hidden states decide sizes is cut there: nothing runs twice, and results are PyTorch's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortmodule import ORTModule, explain
from ortmodule.debug.verify import Verifier
from ortmodule.runtime.broken_graph import BrokenGraph
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 16


@pytest.fixture(autouse=True)
def captures_cost_nothing(monkeypatch):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")


class Layer(nn.Module):
    def __init__(self, chosen, norm=None, rate=0.0):
        super().__init__()
        self.score, self.norm, self.chosen, self.rate = nn.Linear(WIDTH, 1), norm or nn.Identity(), chosen, rate
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        y = x + F.dropout(self.norm(self.inner(x)), self.rate, self.training)
        return self.chosen(y, self.score(y).squeeze(-1))


def of_a_mask(y, scores):
    return y[scores > 0] * scores[scores > 0, None].sigmoid()


def of_indices(y, scores):
    (rows,) = torch.nonzero(scores > scores.mean(), as_tuple=True)
    return y.index_select(0, rows)


def of_a_number(y, scores):
    return y[: int((scores > 0).sum()) + 1]


def put_back(y, scores):
    """As a mixture of experts: some rows go through something, and back to their places."""
    found = torch.zeros_like(y)
    for sign in (1, -1):
        (rows,) = torch.where(sign * scores > 0)
        found[rows] = found[rows] + (y[rows] * sign).tanh()
    return y + found


def by_its_size(y, scores):
    """Python decides by how many are left."""
    y = y[scores > -0.5]
    return y * 2 if len(y) > 10 else y


def by_data(y, scores):
    y = y[scores > 0]
    return y * 2 if scores.sum() > 0 else y


CHOSEN = {f.__name__: f for f in (of_a_mask, of_indices, of_a_number, put_back, by_its_size, by_data)}


class Pruned(nn.Module):
    def __init__(self, chosen, layers=3, **options):
        super().__init__()
        made = [Layer(CHOSEN[chosen], **options) for _ in range(layers)]
        self.layers, self.last = nn.ModuleList(made), nn.Linear(WIDTH, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def rows(number):
    return torch.randn(24 + 8 * (number % 3), WIDTH, generator=torch.Generator().manual_seed(number))


def made(*args, **options):
    torch.manual_seed(0)
    module = Pruned(*args, **options).double()
    return ORTModule(copy.deepcopy(module)), module


def step(model, x):
    model.zero_grad()
    result = model(x)
    result.square().sum().backward()
    return result.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def pieces(model):
    latest = model._ortmodule.latest
    return len(latest.pieces) if isinstance(latest, BrokenGraph) else 1


@pytest.mark.parametrize("chosen", CHOSEN)
def test_results_and_gradients(chosen):
    model, module = made(chosen)
    for number in range(9):
        x = rows(number).double()
        torch.testing.assert_close(step(model, x), step(module, x))
    assert explain(model).captured
    if explain(model).python_ops:  # Python decides in other ways
        assert chosen.startswith("by")
        return
    assert pieces(model) >= 3
    # No plan but the first piece's runs what is in front of it again.
    for piece in model._ortmodule.latest.pieces:
        ahead = [found.plan for found in piece.plans.values() if found.plan.prologue]
        assert all(sum(plan.work[:3]) < 0.05 * 3 * 24 * 8 * WIDTH * WIDTH for plan in ahead)


@pytest.mark.parametrize("chosen", ["of_a_mask", "by_data"])
def test_without_gradients_and_in_evaluation(chosen):
    model, module = made(chosen)
    for number in range(6):
        x = rows(number).double()
        for each_one in (model, module):
            each_one.train(number % 2 == 0)
        with torch.no_grad():
            torch.testing.assert_close(model(x), module(x))


def test_nothing_is_chosen():
    model, module = made("of_a_mask")
    for number, bias in enumerate((0, 0, -100, 0, -100)):
        for each_one in (model, module):
            each_one.layers[1].score.bias.data.fill_(bias)
        x = rows(number).double()
        torch.testing.assert_close(step(model, x), step(module, x))


@each("chosen", CHOSEN, ("of_a_mask", "by_data"))
def test_what_is_dropped(chosen, monkeypatch):
    """ORTMODULE_VERIFY gives PyTorch what the engine drew."""
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    model, _ = made(chosen, rate=0.3)
    for number in range(6):
        step(model, rows(number).double())
    verifier = model._ortmodule.observers.one(Verifier)
    assert not verifier.findings, [str(each_one) for each_one in verifier.findings]
    assert verifier.compared or explain(model).python_ops
    assert pieces(model) >= 3 or chosen != "put_back"
    if not explain(model).python_ops:
        torch.manual_seed(3)
        first = model(rows(0).double())
        torch.manual_seed(3)
        assert torch.equal(first, model(rows(0).double()))


class Normed(Pruned):
    def __init__(self, chosen):
        super().__init__(chosen)
        for layer in self.layers:
            layer.norm = nn.BatchNorm1d(WIDTH)


@pytest.mark.parametrize("chosen", ["of_a_mask", "by_its_size", "by_data"])
def test_buffers_that_change(chosen):
    """They change once in each step, also in those that another graph has to take over."""
    torch.manual_seed(0)
    module = Normed(chosen).double()
    model = ORTModule(copy.deepcopy(module))
    for number in range(9):
        x = rows(number).double()
        torch.testing.assert_close(step(model, x), step(module, x))
        for ours, theirs in zip(model.buffers(), module.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_gradients_of_gradients():
    model, module = made("of_a_mask")
    found = []
    for each_one in (model, module):
        x = rows(1).double().requires_grad_()
        (grad,) = torch.autograd.grad(each_one(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        found.append([x.grad, *(p.grad for p in each_one.parameters())])
    torch.testing.assert_close(*found)


def test_a_mask_of_inputs_does_not_cut_the_graph():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

        def forward(self, x, labels):
            return self.last(self.first(x).relu()[labels != -100]).sum()

    model = ORTModule(Masked())
    for number in range(3):
        model(rows(number), torch.arange(len(rows(number))) % 3 * -50).backward()
    assert pieces(model) == 1 and explain(model).captured


class Recurrent(nn.Module):
    """A loop over a length, whose graphs of other lengths follow from a template, and choices behind it."""

    def __init__(self, chosen):
        super().__init__()
        self.cell, self.layers = nn.Linear(2 * WIDTH, WIDTH), nn.Sequential(Layer(chosen), Layer(chosen))

    def forward(self, x):
        state, states = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = self.cell(torch.cat([x[:, step], state], -1)).tanh()
            states.append(state)
        return self.layers(torch.stack(states, 1).flatten(0, 1))


@each("chosen", CHOSEN, ("put_back",))
def test_beside_a_loop_over_a_length(chosen):
    torch.manual_seed(0)
    eager = Recurrent(CHOSEN[chosen]).double()
    ours = ORTModule(copy.deepcopy(eager))
    for number, (count, length) in enumerate([(2, 5), (3, 9), (2, 7), (1, 12), (3, 9)]):
        x = torch.randn(count, length, WIDTH, generator=torch.Generator().manual_seed(number)).double()
        torch.testing.assert_close(step(ours, x), step(eager, x))
    assert explain(ours).captured, explain(ours).fallback
