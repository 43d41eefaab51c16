"""Values of torch.Generators among arguments and in attributes are those that PyTorch draws from that very generator.

It goes on as in PyTorch.
"""

import copy
import random

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")

#: What is drawn beside an activation of shape (batch, 4).
DRAWS = {
    "rand": lambda x, g: torch.rand(x.shape, generator=g),
    "rand of sizes": lambda x, g: torch.rand(x.shape[0], 1, generator=g, dtype=torch.float64).float(),
    "randn": lambda x, g: torch.randn(x.size(0), x.size(1), generator=g),
    "randint": lambda x, g: torch.randint(1, 5, x.shape, generator=g).float(),
    "randperm": lambda x, g: x[torch.randperm(x.shape[0], generator=g)],
    "randperm of 4": lambda x, g: x[:, torch.randperm(4, generator=g)],
    "bernoulli": lambda x, g: torch.bernoulli(torch.full_like(x, 0.4), generator=g),
    "of probabilities": lambda x, g: torch.bernoulli(x.detach().sigmoid(), generator=g),
    "normal": lambda x, g: torch.normal(0.0, 2.0, x.shape, generator=g),
    "normal of tensors": lambda x, g: torch.normal(x.detach(), 0.1, generator=g),
    "multinomial": lambda x, g: x.gather(1, torch.multinomial(x.detach().softmax(-1), 2, generator=g)).sum(-1, True),
    "bernoulli_": lambda x, g: x.new_empty(x.shape[0], 1).bernoulli_(0.6, generator=g) / 0.6,
    "normal_": lambda x, g: torch.empty_like(x).normal_(generator=g),
    "uniform_": lambda x, g: torch.zeros_like(x).uniform_(-1, 1, generator=g),
    "exponential_": lambda x, g: torch.ones_like(x).exponential_(0.5, generator=g),
    "random_": lambda x, g: torch.zeros_like(x).random_(0, 7, generator=g),
    "a part": lambda x, g: _filled(x, g),
    "twice": lambda x, g: torch.rand(4, generator=g) - torch.randn(4, generator=g),
}


def _filled(x, g):
    noise = torch.zeros_like(x)
    noise[1:].normal_(generator=g)
    return noise


class Noisy(nn.Module):
    def __init__(self, draw, own=None):
        super().__init__()
        self.first, self.last, self.draw, self.own = nn.Linear(4, 4), nn.Linear(4, 2), draw, own

    def forward(self, x, generator=None, others=()):
        h = self.first(x)
        for one in (generator, self.own, *others):
            if one is not None:
                h = h * (1 + self.draw(h, one))
        return self.last(h)


def generator(seed):
    return torch.Generator().manual_seed(seed)


#: Where generators are: what the module holds, and what a call gives.
PLACES = {
    "argument": (lambda: None, lambda: {"generator": generator(5)}),
    "attribute": (lambda: generator(6), dict),
    "list": (lambda: None, lambda: {"others": [generator(1), generator(2)]}),
    "all": (lambda: generator(6), lambda: {"generator": generator(5), "others": (generator(1),)}),
}


def generators(module, given):
    return [g for g in (module.own, given.get("generator"), *given.get("others", ())) if g is not None]


SHORT = {("rand", "argument"), ("bernoulli_", "attribute"), ("randperm", "list")}


@each("draw, place", [(draw, place) for draw in DRAWS for place in PLACES], SHORT)
def test_draws(draw, place):
    torch.manual_seed(0)
    own, given = PLACES[place]
    modules = [Noisy(DRAWS[draw], own()) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    sides = [(modules[0], modules[0], given()), (modules[1], ORTModule(modules[1]), given())]
    for rows in (3, 5, 3):
        x, found = torch.randn(rows, 4), []
        before = torch.get_rng_state()
        for module, called, kwargs in sides:
            leaf = x.clone().requires_grad_()
            module.zero_grad()
            y = called(leaf, **kwargs)
            y.square().sum().backward()
            states = [g.get_state() for g in generators(module, kwargs)]
            found.append([y, leaf.grad, *[p.grad for p in module.parameters()], *states])
        torch.testing.assert_close(found[1], found[0])
        assert torch.equal(torch.get_rng_state(), before)
    report = explain(sides[1][1])
    assert report.captured and report.pytorch_calls == 0 and report.exports == 1, report


def test_another_generator_at_each_call():
    eager = Noisy(DRAWS["randn"])
    wrapped = ORTModule(copy.deepcopy(eager))
    x = torch.randn(3, 4)
    for seed in (1, 2, 1):
        torch.testing.assert_close(wrapped(x, generator(seed)), eager(x, generator(seed)))
    assert explain(wrapped).exports == 1


def seeded(x, g):
    g.manual_seed(3)
    return torch.rand(4, generator=g)


def asked(x, g):
    return torch.rand(4, generator=g) + g.initial_seed()


def made(x, g):
    return torch.rand(4, generator=torch.Generator().manual_seed(2))


def columns(x, g):
    """Its memory tells in which order PyTorch fills it."""
    noise = torch.zeros_like(x)
    noise[:, 1:3].normal_(generator=g)
    return noise


def decides(x, g):
    return x if torch.rand(1, generator=g).item() < 0.4 else x.sin()


@pytest.mark.parametrize("draw", [seeded, asked, made, columns, decides])
def test_other_uses_are_pytorchs(draw):
    eager = Noisy(draw)
    wrapped = ORTModule(copy.deepcopy(eager))
    for seed in (1, 2, 3, 4, 5):
        ours, theirs = generator(seed), generator(seed)
        torch.testing.assert_close(wrapped(torch.ones(3, 4), ours), eager(torch.ones(3, 4), theirs))
        assert torch.equal(ours.get_state(), theirs.get_state())


class Inside(nn.Module):
    """A submodule that is left to PyTorch, as data decides in it, is given the generator."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Decides(), nn.Linear(4, 2)

    def forward(self, x, generator):
        return self.last(self.inner(self.first(x), generator) + torch.rand(4, generator=generator))


class Decides(nn.Module):
    def forward(self, x, generator):

        return x + torch.randn(4, generator=generator) * (1 if random.random() < 2 * random.random() else 2)


def test_an_island_draws_from_the_callers():

    eager = Inside()
    wrapped = ORTModule(copy.deepcopy(eager))
    generators = generator(1), generator(1)
    for _ in range(3):
        state = random.getstate()
        theirs = eager(torch.ones(3, 4), generators[0])
        random.setstate(state)
        torch.testing.assert_close(wrapped(torch.ones(3, 4), generators[1]), theirs)
        assert torch.equal(generators[0].get_state(), generators[1].get_state())
    assert explain(wrapped).captured, explain(wrapped)


def test_gradients_of_gradients_are_refused():
    wrapped = ORTModule(Noisy(DRAWS["rand"]))
    x = torch.randn(3, 4, requires_grad=True)
    y = wrapped(x, generator(1)).sum()
    with pytest.raises(RuntimeError, match="create_graph=True: forward draws from a torch.Generator"):
        torch.autograd.grad(y, x, create_graph=True)
