"""Every operator of torch and every distribution that draws is in a graph, and right given what was drawn."""

import inspect

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ortmodule import ORTModule
from tests.lowering import test_draws
from tests.lowering.test_draws import Draws, beside_pytorch, column, empty, some, verified, whole
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")
by_name = torch.ops.aten


@pytest.fixture(autouse=True)
def _verify(monkeypatch):
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    torch.manual_seed(0)


FUNCTIONS = {
    "dropout3d": lambda x: F.dropout3d(x[None, :, :, None, None], 0.3),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "torch.dropout_": lambda x: torch.dropout_(x * 1, 0.3, True),
    "torch.feature_dropout": lambda x: torch.feature_dropout(x[..., None], 0.3, True),
    "torch.feature_dropout_": lambda x: torch.feature_dropout_(x[..., None] * 1, 0.3, True),
    "torch.alpha_dropout_": lambda x: torch.alpha_dropout_(x * 1, 0.3, True),
    "torch.feature_alpha_dropout_": lambda x: torch.feature_alpha_dropout_(x[..., None] * 1, 0.3, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "rrelu_": lambda x: F.rrelu(x * 1, training=True, inplace=True),
    "torch.rrelu_": lambda x: torch.rrelu_(x * 1, 0.1, 0.3, True),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x[None], (2, 2), output_ratio=(0.5, 0.7)),
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(
        x[None, None].expand(-1, 4, -1, -1), 1, output_ratio=(0.5, 0.5, 0.7)
    ),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3),
    "kaiming_uniform_": lambda x: x @ nn.init.kaiming_uniform_(empty(x, 3, 3)),
    "xavier_normal_": lambda x: x @ nn.init.xavier_normal_(empty(x, 3, 3)),
    "rand out": lambda x: x * torch.rand(x.shape, out=empty(x)),
    "randn out": lambda x: x * torch.randn(x.shape, out=empty(x)),
    "normal out": lambda x: x * torch.normal(x.detach(), some(x), out=empty(x)),
    "bernoulli out": lambda x: x * torch.bernoulli(some(x), out=empty(x)),
    "randint out": lambda x: x * torch.randint(0, 4, x.shape, out=whole(x)),
    "multinomial out": lambda x: x * torch.multinomial(some(x), 1, out=whole(column(x))),
    "randperm out": lambda x: x[torch.randperm(x.shape[0], out=torch.empty(x.shape[0], dtype=torch.int64))],
    "as_strided": lambda x: x * torch.rand(3, 1).expand(3, 3).t()[:1],
    "by name, bernoulli": lambda x: x * by_name.bernoulli.p(x.detach(), 0.7),
    "by name, cauchy": lambda x: x * by_name.cauchy(x.detach()).tanh(),
    "by name, exponential": lambda x: x * by_name.exponential(x.detach()),
    "by name, geometric": lambda x: x * by_name.geometric(x.detach(), 0.5),
    "by name, log_normal": lambda x: x * by_name.log_normal(x.detach(), 0.0, 0.1),
    "by name, normal_functional": lambda x: x * by_name.normal_functional(x.detach()),
    "by name, random": lambda x: x * by_name.random.to(x.detach(), 5),
    "by name, uniform": lambda x: x * by_name.uniform(x.detach(), 0.5, 1.5),
    "by name, rrelu": lambda x: by_name.rrelu(x, 0.1, 0.3, True),
}

DISTRIBUTIONS = {
    "GeneralizedPareto": lambda x: D.GeneralizedPareto(x, x.exp(), 0.3).rsample(),
    "Independent": lambda x: D.Independent(D.Normal(x, 1.0), 1).rsample(),
    "LKJCholesky": lambda x: x @ D.LKJCholesky(3, 1.5).sample(),
    "TransformedDistribution": lambda x: D.TransformedDistribution(
        D.Normal(x, 1.0), [D.TanhTransform(), D.AffineTransform(1.0, 2.0)]
    ).rsample(),
}


#: These draw again until what they have drawn fits: PyTorch runs the module.
DECIDE = {
    "VonMises": lambda x: x * D.VonMises(x.detach(), x.detach().exp()).sample(),
    "Wishart": lambda x: x @ D.Wishart(torch.tensor(5.0), torch.eye(3)).rsample(),
    "trunc_normal_": lambda x: x * nn.init.trunc_normal_(empty(x), 1.0, 0.2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    verified(ORTModule(Draws(FUNCTIONS[name])))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_other_distributions(name):
    verified(ORTModule(Draws(DISTRIBUTIONS[name])))


@pytest.mark.parametrize("name", DECIDE)
def test_what_draws_until_it_fits(name):
    report = beside_pytorch(DECIDE[name])
    assert not report.captured and report.fallback


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 1, 0), (0, 2, 1)])
@pytest.mark.parametrize("name", ["cauchy_", "log_normal_", "geometric_", "random_"])
def test_pytorch_draws_in_the_order_of_memory(name, order, monkeypatch):
    monkeypatch.delenv("ORTMODULE_VERIFY")
    given = {"geometric_": (0.5,), "random_": (5,)}.get(name, ())

    def function(x):
        memory = x.new_empty([(x.shape[0], 2, 3)[i] for i in order])
        drawn = memory.permute([order.index(i) for i in range(3)])
        return (x[:, None] * getattr(drawn, name)(*given).clamp(-5, 5)).sum(1)

    assert beside_pytorch(function).captured


# --- the lists are complete -------------------------------------------------------------------------------------------

#: Operators that draw, and that other operators of the lists are made of, or that a CPU does not have.
ELSEWHERE = {
    "aten::_fused_dropout", "aten::_no_grad_normal_", "aten::_no_grad_uniform_", "aten::rrelu_with_noise_functional",
}  # fmt: skip
ABSTRACT = {"Distribution", "ExponentialFamily"}


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.met = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.met.add(function._schema.name)
        return function(*args, **(kwargs or {}))


def test_every_operator_that_takes_a_generator():
    schemas = torch._C._jit_get_all_schemas()
    draws = {
        schema.name for schema in schemas
        if schema.name.startswith("aten::") and any(a.name == "generator" for a in schema.arguments)
    }  # fmt: skip
    for group in (test_draws.ENGINE, test_draws.PYTORCH, test_draws.DISTRIBUTIONS, FUNCTIONS):
        for function in group.values():
            with Names() as names:
                function(torch.randn(4, 3, requires_grad=True))
            draws -= names.met
    called = "\n".join(inspect.getsource(function) for function in FUNCTIONS.values())
    composed = {name for name in draws if f"{name.removeprefix('aten::')}(" in called}  # of others, which were met
    assert draws - composed == ELSEWHERE


def test_every_distribution():
    classes = {name for name, cls in vars(D).items() if inspect.isclass(cls) and issubclass(cls, D.Distribution)}
    tried = {name.partition(".")[0] for name in (*test_draws.DISTRIBUTIONS, *DISTRIBUTIONS, *DECIDE)}
    assert classes - ABSTRACT == tried - {"trunc_normal_"}


def test_every_fill():
    fills = {name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")}
    draws = {name for name in fills if "generator" in str(getattr(by_name, name, None) and schema_of(name))}
    assert draws - {"rrelu_"} == set(test_draws.FILLS)


def schema_of(name):
    packet = getattr(by_name, name)
    return [getattr(packet, overload)._schema for overload in packet.overloads()]


# --- variations -------------------------------------------------------------------------------------------------------

#: A fill, by what says how it draws: numbers, a tensor.
FILLS = {
    "bernoulli_": {"a number": (0.7,), "a tensor": (torch.full((3,), 0.7),), "none": ()},
    "normal_": {"a number": (1.0, 0.5), "none": ()},
    "uniform_": {"a number": (0.5, 1.5), "none": ()},
    "exponential_": {"a number": (2.0,), "none": ()},
    "cauchy_": {"a number": (1.0, 0.1), "none": ()},
    "log_normal_": {"a number": (0.0, 0.1), "none": ()},
    "geometric_": {"a number": (0.5,)},
    "random_": {"a number": (1, 4), "none": ()},
}
PLACES = {
    "new": lambda x, kind, fill: fill(x.new_empty(x.shape, dtype=kind)),
    "empty_like": lambda x, kind, fill: fill(torch.empty_like(x, dtype=kind)),
    "zeros, in part": lambda x, kind, fill: with_part(torch.ones(x.shape, dtype=kind), fill),
    "a transpose": lambda x, kind, fill: fill(torch.empty(3, x.shape[0], dtype=kind).t()),
    "what was computed": lambda x, kind, fill: fill((x.detach() * 2).to(kind)),
    "twice": lambda x, kind, fill: fill(fill(x.new_empty(x.shape, dtype=kind)) * 1) + 1,
}
KINDS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "int64": torch.int64}
WHOLE = ("bernoulli_", "geometric_", "random_")


def with_part(tensor, fill):
    fill(tensor[:, :1] if tensor.dim() else tensor)
    return tensor


def variations():
    for name, ways in FILLS.items():
        for way in ways:
            for place in PLACES:
                for kind in KINDS:
                    if (kind != "int64" or name in WHOLE) and not (way == "a tensor" and place == "zeros, in part"):
                        yield name, way, place, kind


ALL = list(variations())


@each("name, way, place, kind", ALL, ALL[::13])
def test_fills(name, way, place, kind):
    given = FILLS[name][way]

    def function(x):
        drawn = PLACES[place](x, KINDS[kind], lambda tensor: getattr(tensor, name)(*given))
        return x * drawn.to(x.dtype).clamp(-5, 5)

    verified(ORTModule(Draws(function)))
