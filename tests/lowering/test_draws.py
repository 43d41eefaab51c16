"""The engine runs every sampler of PyTorch, and given what it drew PyTorch computes the same (ORTMODULE_VERIFY).

In place or not, with numbers or tensors, training or not, forward and backward.
"""

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.debug.verify import Verifier

pytestmark = pytest.mark.filterwarnings("ignore")


def empty(x, *sizes, dtype=None):
    return x.new_empty(sizes or x.shape, dtype=dtype)


def whole(x):
    return empty(x, dtype=torch.int64)


def column(x):
    return empty(x, x.shape[0], 1)


def some(x):
    """Probabilities."""
    return x.detach().sigmoid()


def written_in_part(x):
    mask = torch.ones_like(x)
    mask[:, 1:].bernoulli_(0.5)
    return mask


ENGINE = {
    "bernoulli_(p)": lambda x: x * empty(x).bernoulli_(0.7),
    "bernoulli_()": lambda x: x * empty(x).bernoulli_(),
    "bernoulli_(tensor)": lambda x: x * empty(x).bernoulli_(some(x)),
    "bernoulli_(scalar tensor)": lambda x: x * empty(x).bernoulli_(torch.tensor(0.7)),
    "bernoulli_ of bool": lambda x: x * empty(x, dtype=torch.bool).bernoulli_(0.7),
    "bernoulli_ of int64": lambda x: x * whole(x).bernoulli_(0.7),
    "bernoulli_ of a slice": lambda x: x * written_in_part(x),
    "bernoulli_ of what was written": lambda x: x * (x.detach() * 2).bernoulli_(0.5),
    "stochastic depth": lambda x: x * column(x).bernoulli_(0.7).div_(0.7),
    "bernoulli": lambda x: x * torch.bernoulli(some(x)),
    "bernoulli(p)": lambda x: x * torch.bernoulli(x.detach(), 0.7),
    "normal_": lambda x: x * empty(x).normal_(),
    "normal_(numbers)": lambda x: x * empty(x).normal_(1, 0.1),
    "normal(numbers)": lambda x: x * torch.normal(1.0, 0.1, x.shape),
    "normal(tensors)": lambda x: x * torch.normal(x.detach(), some(x)),
    "normal(tensor, number)": lambda x: x * torch.normal(x.detach(), 0.5),
    "normal(number, tensor)": lambda x: x * torch.normal(1.0, some(x)),
    "normal(row, column)": lambda x: x * torch.normal(x.detach()[:1], some(x)[:, :1]),
    "uniform_": lambda x: x + empty(x).uniform_(),
    "uniform_(numbers)": lambda x: x * empty(x).uniform_(0.5, 1.5),
    "uniform_ of float64": lambda x: x + empty(x, dtype=torch.float64).uniform_(-0.1, 0.1),
    "exponential_": lambda x: x * empty(x).exponential_(2.0),
    "rand": lambda x: x * torch.rand(x.shape),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x * torch.randn(x.shape),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint": lambda x: x * torch.randint(0, 5, x.shape),
    "randint(low)": lambda x: x * torch.randint(-2, 9, x.shape[:1])[:, None],
    "randint(size)": lambda x: x[torch.randint(0, x.shape[0], x.shape[:1])],
    "randint of many": lambda x: x + torch.randint(0, 2**40, x.shape) * 1e-12,
    "randint_like": lambda x: x * torch.randint_like(x.detach(), 5),
    "randint_like(low)": lambda x: x * torch.randint_like(x.detach(), 2, 5),
    "one_hot of a draw": lambda x: x + F.one_hot(torch.randint(0, 3, x.shape[:1]), 3).float(),
    "multinomial": lambda x: x * torch.multinomial(some(x), 1),
    "multinomial again": lambda x: x * torch.multinomial(some(x), 3, replacement=True),
    "multinomial of a row": lambda x: x * torch.multinomial(some(x)[0], 1),
    "multinomial of a row again": lambda x: x * torch.multinomial(some(x)[0], 3, replacement=True),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[:, :, None], 0.3, True),
    "dropout1d": lambda x: F.dropout1d(x[None], 0.3),
    "dropout2d": lambda x: F.dropout2d(x[None, :, :, None], 0.3),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "gumbel_softmax hard": lambda x: F.gumbel_softmax(x, hard=True),
    "sorted": lambda x: x.gather(1, torch.rand_like(x).argsort(1)[:, :2]),
    "the largest": lambda x: x * torch.randn(x.shape).argmax(1)[:, None],
    "two kinds": lambda x: x * column(x).bernoulli_(0.7) + empty(x).normal_() * torch.rand_like(x),
}

PYTORCH = {
    "cauchy_": lambda x: x * empty(x).cauchy_(),
    "log_normal_": lambda x: x * empty(x).log_normal_(0.0, 0.1),
    "geometric_": lambda x: x * empty(x).geometric_(0.5),
    "random_": lambda x: x * whole(x).random_(),
    "random_(to)": lambda x: x * whole(x).random_(5),
    "random_(from, to)": lambda x: x * empty(x).random_(2, 5),
    "randint of all": lambda x: x + torch.randint(0, 2**62, x.shape) * 1e-18,
    "randperm": lambda x: x[torch.randperm(x.shape[0])],
    "multinomial without replacement": lambda x: x * torch.multinomial(some(x), 3),
    "poisson": lambda x: x * torch.poisson(some(x)),
    "binomial": lambda x: x * torch.binomial(torch.full_like(x, 5.0).detach(), some(x)),
    "several": lambda x: x[torch.randperm(x.shape[0])] * torch.poisson(some(x)) * empty(x).normal_(),
}

DISTRIBUTIONS = {
    "Bernoulli": lambda x: x * D.Bernoulli(logits=x).sample(),
    "Beta": lambda x: D.Beta(x.exp(), x.exp()).rsample(),
    "Binomial": lambda x: x * D.Binomial(5, logits=x.detach()).sample(),
    "Categorical": lambda x: x * D.Categorical(logits=x).sample()[:, None],
    "Cauchy": lambda x: D.Cauchy(x, 1.0).rsample(),
    "Chi2": lambda x: D.Chi2(x.exp()).rsample(),
    "ContinuousBernoulli": lambda x: D.ContinuousBernoulli(logits=x).rsample(),
    "Dirichlet": lambda x: D.Dirichlet(x.exp()).rsample(),
    "Exponential": lambda x: D.Exponential(x.exp()).rsample(),
    "FisherSnedecor": lambda x: D.FisherSnedecor(x.exp() + 1, x.exp() + 1).rsample(),
    "Gamma": lambda x: D.Gamma(x.exp(), 1.0).rsample(),
    "Geometric": lambda x: x * D.Geometric(logits=x.detach()).sample(),
    "Gumbel": lambda x: D.Gumbel(x, 1.0).rsample(),
    "HalfCauchy": lambda x: D.HalfCauchy(x.exp()).rsample(),
    "HalfNormal": lambda x: D.HalfNormal(x.exp()).rsample(),
    "InverseGamma": lambda x: D.InverseGamma(x.exp(), 1.0).rsample(),
    "Kumaraswamy": lambda x: D.Kumaraswamy(x.exp(), x.exp()).rsample(),
    "Laplace": lambda x: D.Laplace(x, 1.0).rsample(),
    "LogNormal": lambda x: D.LogNormal(x, 1.0).rsample(),
    "LogisticNormal": lambda x: D.LogisticNormal(x, torch.ones(3)).rsample()[:, :3],
    "LowRankMultivariateNormal": lambda x: D.LowRankMultivariateNormal(x, torch.ones(3, 1), torch.ones(3)).rsample(),
    "MixtureSameFamily": lambda x: x * D.MixtureSameFamily(
        D.Categorical(logits=x.detach()), D.Normal(x.detach(), 1.0)
    ).sample()[:, None],
    "Multinomial": lambda x: x * D.Multinomial(5, logits=x.detach()).sample(),
    "MultivariateNormal": lambda x: D.MultivariateNormal(x, torch.eye(3)).rsample(),
    "NegativeBinomial": lambda x: x * D.NegativeBinomial(5.0, logits=x.detach()).sample(),
    "Normal": lambda x: D.Normal(x, 1.0).rsample(),
    "Normal.sample": lambda x: x * D.Normal(x.detach(), 1.0).sample(),
    "OneHotCategorical": lambda x: x * D.OneHotCategorical(logits=x).sample(),
    # Times x: samples of these two sum up to 1, so the gradient of their sum would be nothing but rounding.
    "OneHotCategoricalStraightThrough": lambda x: x * D.OneHotCategoricalStraightThrough(logits=x).rsample(),
    "Pareto": lambda x: D.Pareto(x.exp(), 1.0).rsample(),
    "Poisson": lambda x: x * D.Poisson(x.exp().detach()).sample(),
    "RelaxedBernoulli": lambda x: D.RelaxedBernoulli(1.0, logits=x).rsample(),
    "RelaxedOneHotCategorical": lambda x: x * D.RelaxedOneHotCategorical(1.0, logits=x).rsample(),
    "StudentT": lambda x: D.StudentT(x.exp() + 1).rsample(),
    "Uniform": lambda x: D.Uniform(x, x + 1).rsample(),
    "Weibull": lambda x: D.Weibull(x.exp(), 1.0).rsample(),
}  # fmt: skip


class Draws(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3), function

    def forward(self, x):
        return self.function(self.layer(x))


def beside_pytorch(function):
    """With the same state of its generator."""
    ours, eager = ORTModule(Draws(function)), Draws(function)
    eager.load_state_dict(ours.state_dict())
    for seed, batch in enumerate((4, 6, 4)):
        x, found = torch.randn(batch, 3), []
        for module in (ours, eager):
            torch.manual_seed(seed)
            module.zero_grad()
            result = module(x)
            result.sum().backward()
            found.append([result.detach(), module.layer.weight.grad, torch.get_rng_state()])
        torch.testing.assert_close(*found)
    return explain(ours)


def verified(module, train=True):
    """What runs the module, after steps of three batches, each of which was compared."""
    module.train(train)
    for batch in (4, 6, 4):
        module.zero_grad()
        module(torch.randn(batch, 3)).sum().backward()
    verifier = module._ortmodule.observers.one(Verifier)
    assert explain(module).captured, explain(module).fallback
    assert (verifier.calls, verifier.compared, verifier.gradients) == (3, 3, 3), module._ortmodule.log._said
    assert not verifier.findings
    return explain(module)


@pytest.fixture(autouse=True)
def _verify(monkeypatch):
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ENGINE)
def test_drawn_by_the_engine(name):
    assert not verified(ORTModule(Draws(ENGINE[name]))).aten_ops


@pytest.mark.parametrize("name", PYTORCH)
def test_drawn_by_pytorch_inside_the_graph(name):
    assert verified(ORTModule(Draws(PYTORCH[name]))).aten_ops


@pytest.mark.parametrize("name", [name for name in PYTORCH if name != "several"])
def test_pytorch_draws_what_it_draws_without_the_engine(name, monkeypatch):
    """The state of its generator decides, at the first call, too; and gradients are PyTorch's."""
    monkeypatch.delenv("ORTMODULE_VERIFY")
    beside_pytorch(PYTORCH[name])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name):
    verified(ORTModule(Draws(DISTRIBUTIONS[name])))


class Depth(nn.Module):
    """A block that is left out for some samples, as timm and torchvision do it."""

    def __init__(self, fill):
        super().__init__()
        self.first, self.second, self.fill = nn.Linear(3, 3), nn.Linear(3, 3), fill

    def drop(self, x):
        return x * self.fill(x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1))) if self.training else x

    def forward(self, x):
        x = x + self.drop(self.first(x).tanh())
        return x + self.drop(self.second(x).tanh())


FILLS = {
    "bernoulli_": lambda t: t.bernoulli_(0.7).div_(0.7),
    "normal_": lambda t: t.normal_(1, 0.2),
    "uniform_": lambda t: t.uniform_(0.5, 1.5),
    "exponential_": lambda t: t.exponential_(),
    "cauchy_": lambda t: t.cauchy_(),
    "log_normal_": lambda t: t.log_normal_(0, 0.1),
    "geometric_": lambda t: t.geometric_(0.5),
    "random_": lambda t: t.random_(1, 4),
}


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FILLS)
def test_a_block_that_is_left_out(name, train):
    verified(ORTModule(Depth(FILLS[name])), train)


def test_a_wrong_draw_is_found(monkeypatch):
    """The comparison sees which numbers were drawn: with others it fails."""
    from ortmodule.runtime import rng_replay

    monkeypatch.setitem(rng_replay._FROM, "uniform_", lambda found, given: found)
    with pytest.raises(AssertionError):
        verified(ORTModule(Draws(lambda x: x * empty(x).uniform_(0.5, 1.5))))


@pytest.mark.parametrize("low, high", [(0, 5), (-3, 2), (7, 8)])
def test_integers_are_of_their_range_and_each_as_often(low, high, monkeypatch):
    monkeypatch.delenv("ORTMODULE_VERIFY")
    module = ORTModule(Draws(lambda x: x * 0 + torch.randint(low, high, x.shape)))
    drawn = module(torch.randn(7000, 3)).detach().reshape(-1).long()
    assert low <= drawn.min() and drawn.max() < high
    counts = torch.bincount(drawn - low, minlength=high - low) / drawn.numel()
    assert torch.allclose(counts, torch.full_like(counts, 1 / (high - low)), atol=0.02)


def test_numbers_of_a_fill_have_its_mean_and_deviation(monkeypatch):
    monkeypatch.delenv("ORTMODULE_VERIFY")
    module = ORTModule(Draws(lambda x: x * 0 + empty(x).normal_(3, 0.5) + column(x).bernoulli_(0.25)))
    drawn = module(torch.randn(7000, 3)).detach()
    assert abs(drawn.mean() - 3.25) < 0.03
    assert abs(drawn.var() - (0.25 + 0.25 * 0.75)) < 0.03
