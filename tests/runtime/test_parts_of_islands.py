"""PyTorch runs a submodule inside the graph; submodules of several layers in it are graphs of their own."""

import copy
import math
import random

import numpy
import pytest
import torch
from torch import nn

from ortmodule import Config, LogLevel, ORTModule, explain
from ortmodule.core.errors import Waits
from ortmodule.core.logger import Log
from ortmodule.debug.verify import Verifier
from ortmodule.runtime.calls import capture_budget, parts
from tests.runtime.test_bypasses import AT_ONCE

WIDTH, LAYERS, STEPS = 8, 4, 12


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(parts, "LEAST_CALLS", 1)
    monkeypatch.setattr(parts, "LEAST_SECONDS", 0.0)


def drawn_list(layers):
    """As vit-pytorch's CaiT does it."""
    dropped = torch.zeros(len(layers)).uniform_(0.0, 1.0) < 0.4
    if all(dropped):
        dropped[random.randrange(len(layers))] = False
    return [layer for layer, drop in zip(layers, dropped, strict=True) if not drop]


#: What of the layers runs, by chance.
CHOICES = {
    "torch, a tensor": lambda layers: [layer for layer in layers if torch.rand([]) >= 0.4],
    "torch, an item": lambda layers: [layer for layer in layers if torch.rand(1).item() >= 0.4],
    "NumPy": lambda layers: [layer for layer in layers if numpy.random.uniform(0, 1) >= 0.4],
    "Python": lambda layers: [layer for layer in layers if random.random() >= 0.4],
    "a list": drawn_list,
    "an order": lambda layers: random.sample(list(layers), 2),
}


class Block(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.rate = rate

    def forward(self, x):
        x, given = self.first(self.norm(x)).tanh(), x
        return given + self.second(nn.functional.dropout(x, self.rate, self.training) if self.rate else x)


class Encoder(nn.Module):
    def __init__(self, choose, rate=0.0):
        super().__init__()
        self.layers, self.choose = nn.ModuleList(Block(rate) for _ in range(LAYERS)), choose

    def forward(self, x):
        for layer in self.choose(self.layers) if self.training else self.layers:
            x = layer(x)
        return x


class Skips(nn.Module):
    """Stochastic depth in each layer, of all rows at once."""

    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        if self.training and torch.rand(1) < 0.4:
            return x
        return self.inner(x)


class Net(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.first, self.encoder, self.last = nn.Linear(4, WIDTH), encoder, nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.last(self.encoder(self.first(x).tanh()))


ENCODERS = {name: lambda choose=choose: Encoder(choose) for name, choose in CHOICES.items()}
ENCODERS["in each layer"] = lambda: nn.Sequential(*[Skips() for _ in range(LAYERS)])


def rows(number):
    return torch.randn(3 + number % 2, 4, generator=torch.Generator().manual_seed(number))


def pair(encoder, **settings):
    torch.manual_seed(0)
    theirs = Net(encoder)
    return ORTModule(copy.deepcopy(theirs), config=Config(**AT_ONCE | settings)), theirs


def seeded(number):
    torch.manual_seed(number), random.seed(number), numpy.random.seed(number)


def trained(model, loss_of=lambda model, x: model(x).square().mean()):
    """Losses, and the gradients of every step."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    for number in range(STEPS):
        seeded(number)
        optimizer.zero_grad()
        loss = loss_of(model, rows(number))
        loss.backward()
        found.append((loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]))
        optimizer.step()
    return found


def assert_alike(ours, theirs, **how):
    for (loss, grads), (expected, others) in zip(trained(ours, **how), trained(theirs, **how), strict=True):
        torch.testing.assert_close(loss, expected)
        assert [g is None for g in grads] == [g is None for g in others]
        torch.testing.assert_close([g for g in grads if g is not None], [g for g in others if g is not None])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENCODERS)
def test_layers_that_chance_chooses(name):
    ours, theirs = pair(ENCODERS[name]())
    assert_alike(ours, theirs)
    report = explain(ours)
    assert report.captured and report.weights_in_engine == 1.0 and report.pytorch_calls == 0
    assert len(report.parts) == LAYERS and all(part.engine_calls for part in report.parts.values())
    assert not any(part.pytorch_calls for part in report.parts.values())
    assert all(path.startswith("encoder.") for path in report.parts) and "part       encoder." in str(report)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(rows(0)), theirs(rows(0)))
    assert not explain(ours).python_ops  # nothing is drawn then


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_gradients():
    def loss_of(model, x):
        x.requires_grad_()
        result = model(x).square().sum()
        slope = torch.autograd.grad(result, x, create_graph=True)[0]
        return result + slope.square().sum()

    ours, theirs = pair(Encoder(CHOICES["Python"]))
    assert_alike(ours, theirs, loss_of=loss_of)
    assert len(explain(ours).parts) == LAYERS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_verified(rate):
    """Where parts draw, the whole cannot be drawn again; each of them is compared."""
    ours, _ = pair(Encoder(CHOICES["torch, a tensor"], rate), verify=1)
    trained(ours)
    whole = ours._ortmodule.observers.one(Verifier)
    inner = [unit._ortmodule.observers.one(Verifier) for unit in ours._ortmodule.parts.found(False).values()]
    assert len(inner) == LAYERS and all(each.compared == each.calls > 0 for each in inner)
    assert not any(each.findings for each in (whole, *inner))
    assert whole.compared == (STEPS if not rate else 1)  # the first has no parts yet


CALLS = 100


@pytest.mark.filterwarnings("ignore")
def test_dropout_in_parts():
    """Losses are those of dropout: as many zeros, and the same mean."""
    ours, theirs = pair(Encoder(CHOICES["Python"], 0.5))
    for model in (ours, theirs):
        model.losses = []
        for number in range(CALLS):
            seeded(number)
            model.losses.append(model(rows(0)).square().mean().item())
    ours, theirs = torch.tensor(ours.losses), torch.tensor(theirs.losses)
    assert abs(ours.mean() - theirs.mean()) < 4 * theirs.std() / CALLS**0.5 * 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "limit", [("LEAST_CALLS", STEPS + 1), ("LEAST_SECONDS", 1e9), ("LEAST_WEIGHTS", 1.1), ("MOST", LAYERS - 1)]
)
def test_where_there_are_none(limit, monkeypatch):
    """Calls are few, or short; the parts are a small share of the module, or too many."""
    monkeypatch.setattr(parts, *limit)
    ours, theirs = pair(Encoder(CHOICES["Python"]))
    assert_alike(ours, theirs)
    report = explain(ours)
    assert report.captured and not report.parts and report.python_ops == ["encoder"] and not report.breaks
    assert report.exports == 1


@pytest.mark.filterwarnings("ignore")
def test_where_the_island_could_be_no_break(monkeypatch):
    """It stays the node that it was."""
    monkeypatch.setattr("ortmodule.runtime.broken_graph.MOST_OUTSIDE", -1)
    ours, theirs = pair(Encoder(CHOICES["Python"]))
    assert_alike(ours, theirs)
    report = explain(ours)
    assert report.captured and report.pytorch_calls == 0 and report.python_ops == ["encoder"] and not report.parts


class Clock:
    """Each look at it takes a second."""

    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("share", [0.1, math.inf])
def test_captures_of_parts_take_their_share(share, monkeypatch):
    """Their first graphs, too, wait for the time in steps of the module around them."""
    clock = Clock()
    monkeypatch.setattr(capture_budget, "clock", clock)
    log = Log("Net", LogLevel.FATAL)
    whole, *inner = [capture_budget.Budget(share, True, log) for _ in range(4)]
    for part in inner:
        whole.share_with(part)

    def ask(part):
        variant = part.variant("key", lambda: ("its first call", ""), 1)
        part.ask(variant, "training")
        with part.capturing(variant):
            clock.now += 9.0

    ask(inner[0])  # nothing is known of what it will take
    assert whole.bounded_seconds == inner[0].seconds == 10.0
    whole.refused.seconds = 199.0
    if share == math.inf:
        ask(inner[1])
    else:
        with pytest.raises(Waits):
            ask(inner[1])
    whole.refused.seconds = 400.0
    ask(inner[2])
    assert whole.bounded_seconds == (30.0 if share == math.inf else 20.0)


@pytest.mark.filterwarnings("ignore")
def test_a_part_that_changes():
    ours, theirs = pair(Encoder(CHOICES["Python"]))
    assert_alike(ours, theirs)
    for model in (ours, theirs):
        torch.manual_seed(1)
        model.encoder.layers[1] = Block()
        model.encoder.layers[2].register_forward_hook(lambda module, args, result: result * 2)
    assert_alike(ours, theirs)
