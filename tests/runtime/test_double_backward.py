"""`create_graph=True`: gradients that can be differentiated again, with the engine's masks."""

import copy
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, explain
from tests.twins import both, made, rows, same

x = rows(3, 4)


def dropout_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 4), nn.Dropout(0.3))


class Drawing(nn.Module):
    """Is left to PyTorch, and draws."""

    def forward(self, x):
        if x.detach().numpy().shape:  # nothing that can be traced
            x = F.dropout(x, 0.3, self.training)
        return F.dropout(x * 2, 0.2, self.training)


def partly_opaque_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), Drawing(), nn.Tanh(), nn.Linear(8, 4), nn.Dropout(0.3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("net", [dropout_net, partly_opaque_net])
def test_create_graph_with_dropout(net):
    """The gradient is that of the engine's masks: as a function of the input it is differentiated numerically."""
    ours = ORTModule(net().double())
    a = rows(3, 4).double().requires_grad_()

    def first(a, create_graph):
        torch.manual_seed(5)
        return torch.autograd.grad(ours(a).pow(2).sum(), a, create_graph=create_graph)[0]

    torch.testing.assert_close(first(a, True), first(a, False))
    direction = rows(3, 4, seed=3).double()
    second, bias = torch.autograd.grad((first(a, True) * direction).sum(), [a, ours[0].bias])
    step = 1e-6
    for i in range(4):
        moved = torch.zeros(3, 4).double()
        moved[1, i] = step
        expected = ((first(a + moved, False) - first(a - moved, False)) * direction).sum() / (2 * step)
        torch.testing.assert_close(second[1, i], expected, rtol=1e-5, atol=1e-6)
    assert bias.abs().sum() > 0
    assert explain(ours).captured


def test_create_graph_leaves_everything_alone():
    torch.manual_seed(0)
    ours = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)))
    calls = []
    ours[0].weight.register_hook(lambda g: calls.append(1))
    a = rows(5, 4).requires_grad_()
    value = ours(a).pow(2).sum()
    ours.eval()
    before = [torch.get_rng_state(), *map(torch.clone, ours.buffers())]
    (g,) = torch.autograd.grad(value, a, create_graph=True)
    same([torch.get_rng_state(), *ours.buffers()], before)
    assert not ours[1].training and not calls
    g.pow(2).sum().backward()
    assert len(calls) == 1


def test_create_graph_with_buffers_that_moved_on():
    """The second forward changes what the first one read."""

    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, a):
            h = self.linear(a).pow(2) * self.scale.clone()
            self.scale += 1
            return h

    def scenario(module):
        a = x.clone().requires_grad_()
        first, second = module(a).sum(), module(a).sum()
        found = []
        for value in (first, second):
            (g,) = torch.autograd.grad(value, a, create_graph=True)
            g.pow(2).sum().backward()
            found.append(g)
        return found, a.grad, module.scale

    torch.manual_seed(0)
    both(Scales(), scenario)


def test_create_graph_under_autocast():
    def scenario(module):
        a = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = module(a)
        (g,) = torch.autograd.grad(out.float().pow(2).sum(), a, create_graph=True)
        g.sum().backward()
        return g.dtype, out.dtype

    eager = made(lambda self, a: self.linear(a).tanh())
    assert scenario(ORTModule(copy.deepcopy(eager))) == scenario(eager) == (torch.float32, torch.bfloat16)


def test_create_graph_through_weights_in_a_list():
    """A recurrent network holds its parameters twice."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(4, 3, batch_first=True)
            self.again = [self.rnn.weight_ih_l0]

        def forward(self, a):
            return self.rnn(a)[0] * self.again[0].sum() + self.rnn.weight_ih_l0.mean()

    def scenario(module):
        grads = torch.autograd.grad(module(rows(2, 3, 4)).pow(2).sum(), list(module.parameters()), create_graph=True)
        sum(g.pow(2).sum() for g in grads).backward()
        return grads

    torch.manual_seed(0)
    eager = Net()
    ours, results = ORTModule(copy.deepcopy(eager)), []
    for module in (ours, eager):
        results.append((scenario(module), [p.grad for p in module.parameters()]))
    torch.testing.assert_close(*results)


def test_create_graph_with_respect_to_parameters_that_have_hooks():
    def scenario(module):
        handles = [p.register_hook(lambda g: g * 2) for p in module.parameters()]
        (g,) = torch.autograd.grad(module(x).pow(2).sum(), module.linear.weight, create_graph=True)
        g.pow(2).sum().backward()
        for handle in handles:
            handle.remove()
        return g

    both(made(lambda self, a: self.linear(a).tanh()), scenario)


class DrawsNumbers(nn.Module):
    """PyTorch runs it, and it draws from both global generators."""

    def forward(self, x):
        if x.detach().numpy().shape:
            x = x * random.uniform(0.5, 1.5)
        return x * numpy.random.uniform(0.5, 1.5)


class Multiplied(nn.Module):
    """By what ``draw`` gives, in every call."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw, self.opaque = nn.Linear(4, 4), draw, DrawsNumbers()
        self.held, self.legacy = numpy.random.default_rng(3), numpy.random.RandomState(4)

    def forward(self, x):
        return (self.linear(x) * self.draw(self, x)).tanh()


#: Draws of Python's and NumPy's generators, whose numbers are operands of the graph, or an island's.
DRAWS = {
    "random": lambda self, x: random.random() + 0.5,
    "beta": lambda self, x: random.betavariate(2, 2),
    "numpy": lambda self, x: numpy.random.uniform(0.5, 1.5),
    "an array": lambda self, x: torch.from_numpy(numpy.random.randn(4)).float(),
    "a held generator": lambda self, x: self.held.normal(1.0, 0.1),
    "a held state": lambda self, x: self.legacy.beta(2, 2) + 0.2,
    "two": lambda self, x: random.random() + numpy.random.rand(),
    "an island": lambda self, x: self.opaque(x),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_create_graph_with_drawn_numbers(draw):
    """What the second gradient goes through has the numbers of the forward, and no generator moves by it."""

    def steps(module, inner):
        random.seed(1)
        numpy.random.seed(1)
        found = []
        for n in (3, 5, 3):
            a = rows(n, 4).requires_grad_()
            out = module(a)
            random.random()  # others draw before backward, too
            (g,) = torch.autograd.grad(out.sum(), a, create_graph=True)
            module.zero_grad()
            g.square().sum().backward()
            found += [out.detach(), g.detach(), a.grad, module.linear.weight.grad.clone()]
        left = random.random(), numpy.random.rand(), inner.held.random(), inner.legacy.rand()
        return [*found, torch.tensor(left)]

    torch.manual_seed(0)
    eager = Multiplied(draw)
    other = copy.deepcopy(eager)
    ours = ORTModule(other)
    for found, expected in zip(steps(ours, other), steps(eager, eager), strict=True):
        torch.testing.assert_close(found, expected)
    assert explain(ours).captured, explain(ours).fallback
