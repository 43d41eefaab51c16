"""What forward decides by chance or by time is decided anew at each call, wherever the generator is held."""

import contextvars
import datetime
import gc
import importlib
import os
import random
import secrets
import time
import types
import uuid
from random import random as bare_random

import numpy
import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

GENERATORS = {
    "random.Random": lambda: random.Random(5),
    "RandomState": lambda: numpy.random.RandomState(5),
    "default_rng": lambda: numpy.random.default_rng(5),
    "Philox": lambda: numpy.random.Generator(numpy.random.Philox(5)),
}
PLACES = ("global", "attribute", "list", "dictionary", "object", "closure", "class")
HELD = types.SimpleNamespace(generator=None, items=[None], table={"generator": None})
_global = None


class Holder:
    generator = None


class Decides(nn.Module):
    """Takes one of two ways by what ``decides(generator)`` says; ``get`` finds the generator."""

    def __init__(self, get, decides):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.get, self.decides = get, decides

    def forward(self, x):
        x = self.linear(x)
        return x.sin() if self.decides(self.get(self)) else x


def global_generator(module):
    return _global


def held_by(place, generator, module):
    """Puts it there, and returns how it is found."""
    global _global
    if place == "global":
        _global = generator
        return global_generator
    if place == "attribute":
        module.generator = generator
        return lambda self: self.generator
    if place == "list":
        HELD.items[0] = generator
        return lambda self: HELD.items[0]
    if place == "dictionary":
        HELD.table["generator"] = generator
        return lambda self: HELD.table["generator"]
    if place == "object":
        HELD.generator = generator
        return lambda self: HELD.generator
    if place == "class":
        Holder.generator = generator
        return lambda self: Holder.generator
    return lambda self: generator


def ways(module, count=60):
    x = torch.ones(2, 4)
    return [round(module(x).sum().item(), 4) for _ in range(count)]


def same_ways(make, place, decides, count=60):
    """PyTorch's results, beside those of the engine with a generator of the same seed."""
    found = []
    for wrap in (lambda module: module, ORTModule):
        torch.manual_seed(0)
        module = Decides(None, decides)
        module.get = held_by(place, make(), module)
        random.seed(3), numpy.random.seed(3)
        found.append(ways(wrap(module), count))
    assert found[0] == found[1]
    assert len(set(found[0])) == 2


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", GENERATORS)
def test_generators(name, place):
    same_ways(GENERATORS[name], place, lambda generator: generator.random() < 0.3)


DECISIONS = {
    "seldom": lambda _: random.random() < 0.1,
    "bare": lambda _: bare_random() < 0.4,
    "randint": lambda _: random.randint(0, 9) == 7,
    "choice": lambda _: random.choice((True, False, False)),
    "sample": lambda _: random.sample(range(9), 1)[0] < 3,
    "shuffle": lambda _: (items := list(range(5)), random.shuffle(items))[0][0] == 2,
    "gauss": lambda _: random.gauss(0, 1) > 1,
    "betavariate": lambda _: random.betavariate(2, 2) > 0.6,
    "uniform": lambda _: random.uniform(-1, 1) > 0.7,
    "numpy's normal": lambda _: numpy.random.normal() > 1,
    "numpy's randint": lambda _: numpy.random.randint(9) == 3,
    "numpy's choice": lambda _: numpy.random.choice([0, 1, 1]) == 0,
    "numpy's permutation": lambda _: numpy.random.permutation(5)[0] == 3,
    "numpy's uniform": lambda _: numpy.random.uniform() < 0.2,
    "a number computed with": lambda _: int(random.random() * 10) == 3,
    "rounded": lambda _: round(random.random()) == 1,
    "in an array": lambda _: numpy.random.rand(3).max() > 0.9,
}


@pytest.mark.parametrize("name", DECISIONS)
def test_global_generators(name):
    same_ways(lambda: None, "attribute", DECISIONS[name], 100)


OF_THE_SYSTEM = {
    "SystemRandom": lambda: random.SystemRandom().random() < 0.5,
    "secrets": lambda: secrets.randbelow(2) == 0,
    "urandom": lambda: os.urandom(1)[0] < 128,
    "uuid4": lambda: uuid.uuid4().int % 2 == 0,
    "a generator without a seed": lambda: random.Random().random() < 0.5,
    "NumPy's without a seed": lambda: numpy.random.default_rng().random() < 0.5,
    "time": lambda: time.time_ns() // 1000 % 2 == 0,
    "perf_counter": lambda: time.perf_counter_ns() // 1000 % 2 == 0,
    "now": lambda: datetime.datetime.now().microsecond % 2 == 0,
}


@pytest.mark.parametrize("name", OF_THE_SYSTEM)
def test_what_the_system_gives(name):
    module = ORTModule(Decides(lambda self: None, lambda _: OF_THE_SYSTEM[name]()))
    assert len(set(ways(module, 200))) == 2


@pytest.mark.parametrize(
    "make", [lambda: random.Random(4), lambda: numpy.random.default_rng(4)], ids=["Python", "NumPy"]
)
def test_a_generator_with_a_seed_made_in_forward(make):
    """It gives the same at each call."""
    module = ORTModule(Decides(lambda self: make(), lambda generator: generator.random() < 0.5))
    assert len(set(ways(module, 5))) == 1
    assert explain(module).captured


HELD_BY_ALL = random.Random(5)


def seeded_meanwhile():
    state = random.getstate()
    random.seed(3)
    number = random.random()
    random.setstate(state)
    return number


#: What forward seeds, and which number it takes then.
SEEDED = {
    "global": lambda: (random.seed(4), 1.0)[1],
    "global, and drawn": lambda: (random.seed(4), random.random())[1],
    "meanwhile": seeded_meanwhile,
    "by the system": lambda: (random.seed(), 1.0)[1],
    "held": lambda: (HELD_BY_ALL.seed(4), HELD_BY_ALL.random())[1],
    "state": lambda: (HELD_BY_ALL.setstate(random.Random(9).getstate()), 1.0)[1],
    "NumPy's": lambda: (numpy.random.seed(4), numpy.random.rand())[1],
}


@pytest.mark.parametrize("name", SEEDED)
def test_generators_that_forward_seeds(name):
    """A graph repeats no seed, and what is drawn later follows from it."""
    found = []
    for wrap in (lambda module: module, ORTModule):
        random.seed(0), numpy.random.seed(0), HELD_BY_ALL.seed(0), torch.manual_seed(0)
        module = wrap(Scales(SEEDED[name]))
        results = [module(torch.ones(2, 4)).detach() for _ in range(3)]
        later = random.random() if name != "by the system" else 0, HELD_BY_ALL.random(), numpy.random.rand()
        found.append((results, later))
    torch.testing.assert_close(found[1], found[0])
    assert not explain(module).captured


class Scales(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), number

    def forward(self, x):
        return self.linear(x) * self.number()


def test_a_generator_that_forward_makes_and_seeds():
    def number():
        generator = random.Random()
        generator.seed(5)
        return generator.random()

    module = ORTModule(Scales(number))
    torch.testing.assert_close(module(torch.ones(2, 4)), module.module(torch.ones(2, 4)))
    assert explain(module).captured


RATES = {
    "random": (lambda: random.random() < 0.0, True),
    "uniform": (lambda: random.uniform(0, 1) < 0, True),
    "numpy": (lambda: numpy.random.random() < 0.0, True),
    "at least 0": (lambda: not numpy.random.uniform(0, 1) >= 0, True),
    "always": (lambda: random.random() <= 1, True),
    "a bound": (lambda: random.uniform(0, 1) <= 0, False),
    "some": (lambda: random.random() < 0.0001, False),
}


@pytest.mark.parametrize("name", RATES)
def test_a_draw_that_decides_nothing(name):
    """The engine runs the module, and generators go on as in PyTorch."""
    decides, captured = RATES[name]
    states = []
    for wrap in (lambda module: module, ORTModule):
        random.seed(3), numpy.random.seed(3)
        module = wrap(Decides(lambda self: None, lambda _: decides()))
        ways(module, 5)
        states.append((random.random(), numpy.random.random()))
    assert states[0] == states[1]
    assert explain(module).captured == captured


DRAWS_OF_TORCH = {
    "randn": lambda x, g: x * torch.randn(4, generator=g),
    "bernoulli": lambda x, g: x * torch.bernoulli(torch.full((4,), 0.5), generator=g),
    "bernoulli_": lambda x, g: x * torch.empty(4).bernoulli_(0.5, generator=g),
    "normal_": lambda x, g: x * torch.empty(4).normal_(generator=g),
    "randperm": lambda x, g: x[:, torch.randperm(4, generator=g)],
    "multinomial": lambda x, g: x[:, torch.multinomial(torch.ones(4), 2, generator=g)],
    "a decision": lambda x, g: x if torch.rand(1, generator=g).item() < 0.3 else x.sin(),
}


class Drawing(nn.Module):
    def __init__(self, get, draws):
        super().__init__()
        self.linear, self.get, self.draws = nn.Linear(4, 4), get, draws

    def forward(self, x):
        y = nn.functional.pad(self.draws(self.linear(x), self.get(self)), (0, 4))
        return y[:, :4] * torch.arange(1.0, 5)


@pytest.mark.parametrize("place", ("global", "attribute", "closure"))
@pytest.mark.parametrize("name", DRAWS_OF_TORCH)
def test_generators_of_torch(name, place):
    found = []
    for wrap in (lambda module: module, ORTModule):
        torch.manual_seed(0)
        module = Drawing(None, DRAWS_OF_TORCH[name])
        module.get = held_by(place, torch.Generator().manual_seed(3), module)
        found.append(ways(wrap(module), 8))
    assert found[0] == found[1]


class Blocks(nn.Module):
    """A stack in which one block decides by chance."""

    def __init__(self, decides):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.block = Decides(lambda self: None, decides)

    def forward(self, x):
        return self.last(self.block(self.first(x)))


@pytest.mark.parametrize("decides", [lambda _: random.randint(0, 3) == 1, lambda _: numpy.random.randint(4) == 1],
                         ids=["Python", "NumPy"])  # fmt: skip
def test_only_the_submodule_that_draws_is_left_to_pytorch(decides):
    torch.manual_seed(0)
    eager = Blocks(decides)
    module = ORTModule(eager)
    found = []
    for run in (eager, module):
        random.seed(1), numpy.random.seed(1)
        found.append(ways(run))
    assert found[0] == pytest.approx(found[1], rel=1e-4) and len(set(found[0])) == 2
    report = explain(module)
    assert report.captured and report.python_ops == ["block"]


def test_what_only_tells_the_time_is_no_decision(caplog):
    import logging

    def decides(_):
        logging.getLogger("tells").warning("a record has the time")
        return True

    module = ORTModule(Decides(lambda self: None, decides))
    ways(module, 3)
    assert explain(module).captured


def test_a_callback_of_the_garbage_collector_is_no_part_of_forward():
    times = []

    def callback(phase, info):
        times.append(time.perf_counter())

    def decides(_):
        gc.collect()
        return True

    gc.callbacks.append(callback)
    try:
        module = ORTModule(Decides(lambda self: None, decides))
        ways(module, 2)
    finally:
        gc.callbacks.remove(callback)
    assert times and explain(module).captured


LOADED = """
import random, time, uuid
NAME, FACTOR, PARTS = uuid.uuid4(), random.random() * 2, [random.randint(1, 9) for _ in range(3)]
BEGAN = time.time()
"""


@pytest.mark.parametrize("statement", ["import", "import_module"])
def test_what_a_module_draws_as_it_is_loaded_is_no_part_of_forward(statement, tmp_path, monkeypatch):
    (tmp_path / f"drawing_{statement}.py").write_text(LOADED)
    monkeypatch.syspath_prepend(tmp_path)

    class Imports(nn.Linear):
        def forward(self, x):
            if statement == "import":
                import drawing_import as drawing
            else:
                drawing = importlib.import_module("drawing_import_module")
            return super().forward(x) * len(drawing.PARTS)

    eager = Imports(4, 4)
    ours, x = ORTModule(eager), torch.ones(2, 4)
    torch.testing.assert_close(ours(x), nn.functional.linear(x, eager.weight, eager.bias) * 3)
    assert explain(ours).captured, explain(ours).fallback


def test_a_profiler_of_the_users_stays():
    import sys

    calls = []

    def profiler(frame, event, argument):
        calls.append(event)

    module = ORTModule(nn.Linear(4, 4))
    sys.setprofile(profiler)
    try:
        module(torch.ones(2, 4))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert calls and explain(module).captured


# --- the state of the process -----------------------------------------------------------------------------------------

CONTEXT = contextvars.ContextVar("scale", default=1.0)
READS = {
    "environ.get": lambda: float(os.environ.get("ORTMODULE_TEST_SCALE", "1")),
    "getenv": lambda: float(os.getenv("ORTMODULE_TEST_SCALE", "1")),
    "in": lambda: 2.0 if "ORTMODULE_TEST_SCALE" in os.environ else 3.0,
    "a context variable": lambda: CONTEXT.get(),
    "a context variable, a default": lambda: CONTEXT.get(2.0),
}


UNSET = contextvars.ContextVar("unset", default=[1.0])  # noqa: B039  # changed in place below


def test_a_default_of_a_context_variable():
    class Reads(nn.Module):
        def forward(self, x):
            return x * UNSET.get()[0]

    module = ORTModule(Reads())
    for value in (1.0, 2.0, 3.0):
        UNSET.get()[0] = value
        torch.testing.assert_close(module(torch.ones(2)), torch.full((2,), value))


def scale(monkeypatch, value):
    CONTEXT.set(1.0 if value is None else value)
    if value is None:
        monkeypatch.delenv("ORTMODULE_TEST_SCALE", raising=False)
    else:
        monkeypatch.setenv("ORTMODULE_TEST_SCALE", str(value))


@pytest.mark.parametrize("name", READS)
def test_state_of_the_process(name, monkeypatch):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) * READS[name]()

    eager = Scaled()
    module = ORTModule(eager)
    x = torch.ones(2, 4)
    for value in (None, 2.0, 3.0, 3.0, None, 2.0):
        scale(monkeypatch, value)
        torch.testing.assert_close(module(x), eager(x))
        assert explain(module).captured
    assert explain(module).exports <= 3


def test_a_context_variable_that_cannot_be_compared():
    variable = contextvars.ContextVar("large")
    variable.set(numpy.zeros(100_000))

    class Reads(nn.Module):
        def forward(self, x):
            return x * float(variable.get()[0])

    module = ORTModule(Reads())
    for value in (0.0, 1.0, 2.0):
        variable.get()[0] = value
        torch.testing.assert_close(module(torch.ones(2)), torch.full((2,), value))


def test_generators_that_nothing_draws_from_are_not_looked_for(monkeypatch):
    """To find what holds one takes a look at all live objects, which a large program has many of."""
    held, module = numpy.random.default_rng(0), ORTModule(nn.Linear(3, 3))
    x = torch.ones(2, 3)

    def looked(*objects):
        raise AssertionError("all live objects are looked at")

    monkeypatch.setattr(gc, "get_referrers", looked)
    torch.testing.assert_close(module(x), nn.functional.linear(x, *module.parameters()))
    assert explain(module).captured and held.random() > 0
