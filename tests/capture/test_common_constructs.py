"""The engine runs constructs of public training programs, or all but named submodules, as PyTorch does."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import Config, ORTModule, explain

pytestmark = pytest.mark.filterwarnings("ignore")


class Around(nn.Module):
    """A submodule between two layers."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


# --- what a submodule does that a graph cannot ------------------------------------------------------------------------


class Annealed(Inner):
    """A counter that is read: a temperature."""

    def __init__(self):
        super().__init__()
        self.step = 0

    def forward(self, x):
        self.step += 1
        return self.b(self.a(x) / (1 + 1 / self.step))


class Remembering(Inner):
    """A dictionary that is filled as sizes come."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def forward(self, x):
        if len(x) not in self.known:
            self.known[len(x)] = torch.arange(len(x)).float()[:, None]
        return self.b(self.a(x) + self.known[len(x)])


class Checkpointed(Inner):
    def forward(self, x):
        return self.b(torch.utils.checkpoint.checkpoint(lambda t: self.a(t).relu(), x, use_reentrant=False))


class Experts(Inner):
    """A loop over the experts that were hit."""

    def forward(self, x):
        chosen, y = (x.sum(-1) > 0).long(), torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = torch.where(chosen == number)[0]
            y = y.index_add(0, rows, (self.a, self.b)[number](x[rows]))
        return y


class Adaptive(Inner):
    """Steps as long as an error allows."""

    def forward(self, x):
        time, step = 0.0, 0.3
        while time < 1:
            slope = self.a(x).tanh()
            error = (self.a(x + step * slope).tanh() - slope).abs().max().item()
            if error < 0.2:
                x, time = x + step * slope, time + step
            step = min(max(step * 0.2 / (error + 1e-6), 0.1), 0.5)
        return self.b(x)


class Force(Inner):
    """A gradient taken inside forward."""

    def forward(self, x):
        energy = self.b(self.a(x).tanh()).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


ISLANDS = (Adaptive, Force)


@pytest.mark.parametrize(
    "inner", [*ISLANDS, Remembering, Checkpointed, Annealed, Experts], ids=lambda cls: cls.__name__
)
def test_a_submodule_is_an_island_at_most(inner):
    torch.manual_seed(0)
    eager = Around(inner())
    wrapped = ORTModule(copy.deepcopy(eager))
    for rows in (3, 5, 3, 6, 5):
        x = torch.randn(rows, 4)
        results = []
        for module in (eager, wrapped):
            module.zero_grad()
            y = module(x)
            y.square().sum().backward()
            results.append([y.detach(), *(p.grad for p in module.parameters())])
        torch.testing.assert_close(*reversed(results))
    assert explain(wrapped).captured, explain(wrapped).fallback
    assert explain(wrapped).python_ops == (["inner"] if inner in ISLANDS else [])


# --- samples ----------------------------------------------------------------------------------------------------------


class Sampled(nn.Module):
    """A policy: an action is drawn from a distribution, which looks whether it can be one of its own."""

    def __init__(self, distribution):
        super().__init__()
        self.layer, self.distribution = nn.Linear(4, 4), distribution

    def forward(self, x):
        distribution = self.distribution(self.layer(x))
        action = distribution.sample()
        return distribution.log_prob(action).sum(), action, distribution.entropy()


DISTRIBUTIONS = {
    "categorical": lambda y, **given: torch.distributions.Categorical(logits=y, **given),
    "normal": lambda y: torch.distributions.Normal(y, 1.0),
    "bernoulli": lambda y: torch.distributions.Bernoulli(logits=y),
    "exponential": lambda y: torch.distributions.Exponential(y.exp()),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_samples_with_their_probability(name):
    wrapped = ORTModule(Sampled(DISTRIBUTIONS[name]), config=Config(verify=1))
    for rows in (3, 3, 5):
        wrapped(torch.randn(rows, 4))[0].backward()
    assert explain(wrapped).captured and not explain(wrapped).python_ops, explain(wrapped)


def test_a_sample_that_is_none():
    class Wrong(Sampled):
        def forward(self, x):
            distribution = self.distribution(self.layer(x), validate_args=True)  # torch.compile changes the default
            return distribution.log_prob(distribution.sample() + x.max()).sum()

    wrapped = ORTModule(Wrong(DISTRIBUTIONS["categorical"]))
    wrapped(torch.zeros(2, 4))
    assert explain(wrapped).captured
    with pytest.raises(ValueError, match="to be within the support"):
        wrapped(torch.full((2, 4), 5.0))


class Scale(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


#: Modules that forward makes, with what the trace has computed in them: they are gone when it is over.
MADE = {
    "a loss that ignores a size": lambda x: nn.CrossEntropyLoss(ignore_index=x.shape[0])(x, x.detach().argmax(1)),
    "a loss with weights": lambda x: nn.CrossEntropyLoss(weight=x.detach().abs().mean(0))(x, x.detach().argmax(1)),
    "a module of the user's": lambda x: Scale(x.detach().sum())(x).sum(),
    "a sequence": lambda x: nn.Sequential(Scale(x.shape[0]), nn.Tanh())(x).sum(),
    "one that is read": lambda x: Scale(x.detach().mean()).scale * x.sum(),
}


@pytest.mark.parametrize("name", MADE)
def test_a_module_that_forward_makes(name):
    class Makes(Inner):
        def forward(self, x):
            return MADE[name](self.a(x))

    eager = Makes()
    wrapped = ORTModule(copy.deepcopy(eager))
    for rows in (3, 5, 3):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        for module in (eager, wrapped):
            module.zero_grad()
            loss = module(x)
            loss.backward()
        torch.testing.assert_close(wrapped.a.weight.grad, eager.a.weight.grad)
        torch.testing.assert_close(loss, eager(x))
    assert explain(wrapped).captured, explain(wrapped).fallback
