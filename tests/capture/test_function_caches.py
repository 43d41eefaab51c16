"""Functions with a cache that are given sizes have one graph, and nothing of a trace stays in the cache."""

import functools
import sys
import types

import einops
import pytest
import torch
from einops import _backends
from einops.layers.torch import Rearrange
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.capture.calls import function_caches
from ortmodule.guards.writes import holders


@functools.cache
def half(n):
    return n // 2


@functools.cache
def flat(shape):
    return (shape[0], -1)


@functools.cache
def quarter(n: str):
    """In a library such a cache would stay in place."""
    return n // 4


def cached_unless(asks):
    """A decorator whose cache is a variable of the function that it returns."""

    def decorator(function):
        cached = functools.lru_cache(maxsize=8)(function)

        @functools.wraps(function)
        def call(*args):
            return function(*args) if asks() else cached(*args)

        return call

    return decorator


@cached_unless(bool)
def positions(n, device):
    return torch.arange(n, device=device), torch.ones(n, 1)


class Sizes:
    @cached_unless(bool)
    def positions(self, n):
        return torch.arange(n), torch.ones(n, 1)

    @staticmethod
    @functools.lru_cache
    def third(n):
        return n // 3

    @functools.lru_cache  # noqa: B019
    def double(self, *, n):
        return 2 * n


SIZES = Sizes()
FUNCTIONS = {
    "a function": lambda x: x[:, : half(x.shape[1])],
    "a wrong annotation": lambda x: x[:, : quarter(x.shape[1])],
    "a shape": lambda x: x.reshape(flat(x.shape)),
    "a static method": lambda x: x[:, : Sizes.third(x.shape[1])],
    "a method": lambda x: x.new_ones(SIZES.double(n=x.shape[1])).cumsum(0)[: x.shape[1], None] * x,
    "a decorator's": lambda x: x * positions(x.shape[1], x.device)[0][:, None] + positions(x.shape[1], x.device)[1],
    "a method's decorator's": lambda x: x * SIZES.positions(x.shape[1])[0][:, None],
    "heads": lambda x: einops.rearrange(x, "b n (h d) -> b h n d", h=2).sin(),
    "rows": lambda x: einops.rearrange(x, "b n d -> (b n) d").sin(),
    "repeat": lambda x: einops.repeat(x, "b n d -> b (r n) d", r=2),
    "reduce": lambda x: einops.reduce(x, "b (n two) d -> b n d", "mean", two=2),
    "a largest": lambda x: einops.reduce(x, "b n (h d) -> b n h", "max", h=4),
    "a layer": Rearrange("b n (h d) -> b (n h) d", h=2),
    "einsum": lambda x: einops.einsum(x, x, "b n d, b m d -> b n m"),
    "pack": lambda x: einops.pack([x, x], "b * d")[0],
}


class Module(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.linear(x))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sizes(name):
    torch.manual_seed(0)
    eager = Module(FUNCTIONS[name]).double()
    module = ORTModule(eager)
    for batch, length in ((2, 6), (3, 12), (5, 18), (2, 24), (3, 6)):
        x = torch.randn(batch, length, 8, dtype=torch.float64)
        expected, found = eager(x), module(x)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(y.square().sum(), eager.linear.weight)[0] for y in (expected, found)]
        torch.testing.assert_close(*gradients)
    report = explain(module)
    assert report.captured and report.exports == 1


def test_einops_at_its_first_call_in_a_process(monkeypatch):
    """Its dictionary of backends and its caches are filled while it is traced: that is no other graph."""
    monkeypatch.setattr(_backends, "_type2backend", {})
    caches = [each for each in vars(einops.einops).values() if hasattr(each, "cache_clear")]
    for cache in caches:
        cache.cache_clear()
    torch.manual_seed(0)
    eager = Module(FUNCTIONS["heads"])
    module = ORTModule(eager)
    for batch in (2, 3):
        x = torch.randn(batch, 6, 8)
        torch.testing.assert_close(module(x), eager(x))
        assert explain(module).captured and explain(module).exports == 1
    assert caches and list(_backends._type2backend) == [torch.Tensor]


def test_nothing_of_a_trace_stays():
    half.cache_clear()
    module = ORTModule(Module(FUNCTIONS["a function"]))
    module(torch.randn(2, 6, 8))
    assert half.cache_info().currsize == 1  # of the check, which has numbers
    assert half(10) == 5 and half.cache_info().currsize == 2


def test_what_refers_to_a_cache_is_not_looked_through(monkeypatch):
    """Each look is one at all objects of the process."""
    looks = []

    def counted(objects, original=holders.referrers):
        looks.append(len(objects))
        return original(objects)

    @functools.lru_cache
    def ones(n):
        return torch.ones(n), torch.ones(n)

    kept = [[ones] for _ in range(300)]
    monkeypatch.setattr(holders, "referrers", counted)
    module = ORTModule(Module(lambda x: x * kept[0][0](x.shape[1])[0][:, None]))
    for length in (6, 12):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(module(x), module._ortmodule.module(x))
    assert len(looks) < 100


def test_other_arguments_are_cached_in_a_trace():
    calls = []

    @functools.lru_cache
    def slow(n):
        calls.append(n)
        return n

    Sizes.slow = staticmethod(slow)
    module = ORTModule(Module(lambda x: x * Sizes.slow(3)))
    module(torch.randn(2, 6, 8))
    assert calls == [3]


def test_a_cache_without_parameters_stays_in_place(monkeypatch):
    """It gets no sizes; libraries import such ones by name into hundreds of modules."""

    @functools.lru_cache
    def installed():
        return True

    @functools.lru_cache
    def of_sizes(*sizes):
        return sizes

    monkeypatch.setattr(function_caches, "_known", {})
    monkeypatch.setattr(function_caches, "_latest", ([], []))
    for cache in installed, of_sizes:
        monkeypatch.setattr(Sizes, cache.__wrapped__.__name__, staticmethod(cache), raising=False)
    with function_caches.left_out():
        assert Sizes.installed is installed and Sizes.of_sizes is not of_sizes
    assert Sizes.of_sizes is of_sizes


def found_in_a_library(monkeypatch, source):
    """The names of a library's module whose functions are replaced."""
    library = types.ModuleType("a_library")
    library.__file__ = torch.__file__
    exec(source, vars(library))
    monkeypatch.setitem(sys.modules, "a_library", library)
    before = dict(vars(library))
    with function_caches.left_out():
        return {name for name, value in before.items() if vars(library)[name] is not value}


TEXTS = ("version: str", "strict=False", "name: 'str | None' = None", "version: str, *, strict: bool = True")
OTHERS = (
    "n",
    "version: str, n: int",
    "version: str, *sizes",
    "n: 'int | None' = None",
    "n=8",
    "items: tuple[str, ...]",
)


@pytest.mark.parametrize("parameters", [*TEXTS, *OTHERS])
def test_a_librarys_cache_of_texts_stays_in_place(monkeypatch, parameters):
    """They would be hundreds in each trace. One of the user's takes what it is given, whatever it says."""
    source = f"import functools\n@functools.lru_cache\ndef cached({parameters}):\n    return None\n"
    assert found_in_a_library(monkeypatch, source) == ({"cached"} if parameters in OTHERS else set())
