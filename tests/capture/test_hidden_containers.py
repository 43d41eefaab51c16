"""A captured module hides as much as PyTorch's, where neither its code nor attributes show it.

Each call: the same values with the same gradients, and nothing of a trace stays there.
"""

import collections
import contextvars
import functools
import itertools
import logging
import queue
import threading
import types

import numpy
import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")

# --- containers, and the ways in --------------------------------------------------------------------------------------


class Tracker:
    shared: list = []
    latest = None

    def __init__(self):
        self.clear()

    def clear(self):
        self.losses, self.last, self.table = [], None, collections.defaultdict(list)

    def save(self, value):
        self.losses.append(value)

    def put(self, value):
        self.table["losses"].append((value,))

    def keep(self, value):
        self.last = value

    def __setitem__(self, key, value):
        self.last = value

    def __call__(self, value):
        self.losses += [value]

    current = property(lambda self: self.last, lambda self, value: setattr(self, "last", value))

    @classmethod
    def share(cls, value):
        cls.shared.append(value)

    @classmethod
    def note(cls, value):
        cls.latest = value


class Slot:
    __slots__ = ("value",)

    def keep(self, value):
        self.value = value


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


def store(where, value):
    where.append(value)


def closed_over():
    held = Tracker()

    def put(value):
        held.save(value)

    put.held = held
    return put


def remember(value, kept=[]):  # noqa: B006  # that is the way in
    kept.append(value)


def remember_last(value):
    remember_last.value = value


def endless():
    kept = None
    while True:
        kept = yield kept


TRACKER, TRACKERS, SLOT, SPACE, LOCAL = Tracker(), [Tracker()], Slot(), types.SimpleNamespace(x=None), threading.local()
PARTIAL, CLOSURE, GENERATOR = functools.partial(store, []), closed_over(), endless()
QUEUE: queue.Queue = queue.Queue()
OBJECTS = numpy.empty(1, dtype=object)
VARIABLE: contextvars.ContextVar = contextvars.ContextVar("variable", default=None)
LISTED: contextvars.ContextVar = contextvars.ContextVar("listed")
LISTED.set([])
RECORDS, LOGGER = Records(), logging.getLogger("tests.hidden")
LOGGER.addHandler(RECORDS)
LOGGER.propagate = False
LOGGER.setLevel(logging.INFO)

#: (how something gets in, what is in it)
CONTAINERS = {
    "a method": (lambda v: TRACKER.save(v), lambda: TRACKER.losses),
    "an attribute": (lambda v: TRACKER.keep(v), lambda: [TRACKER.last]),
    "a property": (lambda v: setattr(TRACKER, "current", v), lambda: [TRACKER.last]),
    "an item": (lambda v: TRACKER.__setitem__(0, v), lambda: [TRACKER.last]),
    "a call": (lambda v: TRACKER(v), lambda: TRACKER.losses),
    "a defaultdict": (lambda v: TRACKER.put(v), lambda: [each for (each,) in TRACKER.table["losses"]]),
    "an object in a list": (lambda v: TRACKERS[0].save(v), lambda: TRACKERS[0].losses),
    "a partial": (lambda v: PARTIAL(v), lambda: PARTIAL.args[0]),
    "a closure": (lambda v: CLOSURE(v), lambda: CLOSURE.held.losses),
    "a class's list": (lambda v: Tracker.share(v), lambda: Tracker.shared),
    "a class's attribute": (lambda v: Tracker.note(v), lambda: [Tracker.latest]),
    "a slot": (lambda v: SLOT.keep(v), lambda: [SLOT.value]),
    "a namespace": (lambda v: setattr(SPACE, "x", v), lambda: [SPACE.x]),
    "a thread's": (lambda v: setattr(LOCAL, "x", v), lambda: [LOCAL.x]),
    "a context variable": (lambda v: VARIABLE.set(v), lambda: [VARIABLE.get()]),
    "a context variable's list": (lambda v: LISTED.get().append(v), lambda: LISTED.get()),
    "a logging handler": (lambda v: LOGGER.info("%s", v), lambda: [each.args[0] for each in RECORDS.records]),
    "a queue": (lambda v: QUEUE.put(v), lambda: list(QUEUE.queue)),
    "an array of objects": (lambda v: OBJECTS.__setitem__(0, v), lambda: [OBJECTS[0]]),
    "a default": (remember, lambda: remember.__defaults__[0]),
    "a function's attribute": (remember_last, lambda: [remember_last.value]),
    "a generator": (lambda v: GENERATOR.send(v), lambda: [GENERATOR.gi_frame.f_locals["kept"]]),
    "a bound method": (TRACKER.save, lambda: TRACKER.losses),
    "a list's method": (Tracker.shared.append, lambda: Tracker.shared),
}
VALUES = {
    "a loss": lambda y: y.square().mean(),
    "a constant tensor": lambda y: y.detach().mean(),
    "a number": lambda y: y.sum().item(),
    "a size": lambda y: y.shape[0],
    "a count": lambda y: 1,
}


def empty():
    for tracker in (TRACKER, *TRACKERS, CLOSURE.held):
        tracker.clear()
    for held in (PARTIAL.args[0], Tracker.shared, LISTED.get(), RECORDS.records, QUEUE.queue, remember.__defaults__[0]):
        held.clear()
    Tracker.latest = SLOT.value = SPACE.x = LOCAL.x = OBJECTS[0] = remember_last.value = None
    VARIABLE.set(None)


next(GENERATOR)

# --- places -----------------------------------------------------------------------------------------------------------


class Hides(nn.Module):
    def __init__(self, put, value):
        super().__init__()
        self.linear, self.value = nn.Linear(4, 4), value
        self.put = put

    def forward(self, x):
        y = self.linear(x).tanh()
        self.put(self.value(y))
        return y


class Decides(Hides):
    """What it does depends on values: PyTorch runs it."""

    def forward(self, x):
        y = super().forward(x)
        return y * (2.0 if y.detach().abs().sum().item() >= 0 else 0.5)


class Inside(Hides):
    """The submodule hides it in the submodule."""

    def __init__(self, put, value):
        super().__init__(lambda v: None, value)
        self.inner = Hides(put, value)

    def forward(self, x):
        return super().forward(x) + self.inner(x)


class Model(nn.Module):
    def __init__(self, kind, put, value):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 12)
        self.part = kind(put, value)

    def forward(self, x):
        return self.last(self.part(self.second(self.first(x).relu()))).square().mean()


class Itself(Model):
    """The module itself hides it."""

    def __init__(self, put, value):
        super().__init__(Hides, lambda v: None, value)
        self.put, self.value = put, value

    def forward(self, x):
        loss = super().forward(x)
        self.put(self.value(loss[None]))
        return loss


PLACES = {cls.__name__: functools.partial(Model, cls) for cls in (Hides, Decides, Inside)} | {"Itself": Itself}


def run(wrap, container, value, place):
    put, kept = CONTAINERS[container]
    empty()
    torch.manual_seed(0)
    module = wrap(PLACES[place](put, VALUES[value]).double())
    found = []
    for step in range(3):
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = module(x)
        held = list(kept())
        latest = held[-1]
        (loss + latest if value == "a loss" else loss).backward()
        found.append([loss.detach(), *(float(each) for each in held)])
        assert not any(isinstance(each, torch.Tensor) for each in held) or "tensor" in value or "loss" in value
    empty()
    return module, [*found, [p.grad for p in module.parameters()]]


ALL = list(itertools.product(CONTAINERS, VALUES, PLACES))
SHORT = [
    ("a method", "a loss", "Hides"),
    ("a logging handler", "a loss", "Hides"),
    ("a class's attribute", "a number", "Inside"),
    ("a queue", "a constant tensor", "Decides"),
    ("a closure", "a count", "Itself"),
]
#: What is there already is written, and nothing else: a graph that leaves it out is right while it is there.
SAME_AGAIN = {("a namespace", "a count"), ("a thread's", "a count")}
#: Why PyTorch runs what hides something.
REASONS = (
    "around the module", "keeps a tensor", "takes the next of an iterator", "changes what is in the attribute put"
)  # fmt: skip
#: Where capture learns only of tensors, by what keeps them: libraries' objects and frames.
TENSORS_ALONE = {"a logging handler", "a queue", "a generator"}


@each("container, value, place", ALL, SHORT)
def test_what_is_hidden(container, value, place):
    if container in TENSORS_ALONE and value == "a count":
        pytest.skip("a number that nothing made, in an object of a library's")
    _, eager = run(lambda module: module, container, value, place)
    module, ours = run(ORTModule, container, value, place)
    torch.testing.assert_close(ours, eager, rtol=1e-7, atol=1e-9)
    report = explain(module)
    if place == "Itself" and (container, value) in SAME_AGAIN:
        assert report.engine_calls == 2
    elif place == "Itself" or container == "a generator":
        assert not report.captured and any(reason in report.fallback for reason in REASONS)
    else:
        assert report.captured, report.fallback


# --- what is read there -----------------------------------------------------------------------------------------------


class Scale:
    def __init__(self):
        self.table, self.factor = {}, 1.0

    def of(self, n):
        if n not in self.table:
            self.table[n] = torch.arange(4, dtype=torch.float64) * n
        return self.table[n]


SCALE = Scale()


class Fills(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * SCALE.of(3)


class Filled(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.last = Fills(), nn.Linear(4, 8)

    def forward(self, x):
        return self.last(self.part(x))


def test_a_table_that_is_filled_once():
    SCALE.table.clear()
    eager = Filled().double()
    module = ORTModule(eager)
    x = torch.randn(5, 4, dtype=torch.float64)
    for _ in range(3):
        torch.testing.assert_close(module(x), eager(x))
    assert list(SCALE.table) == [3] and explain(module).captured


class Prints(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        print("forward")
        return self.linear(x)


def test_lines_that_print_are_named():
    module = ORTModule(Prints())
    with pytest.warns(UserWarning, match=r"forward prints, or writes to a file \(.*test_hidden_containers.py:\d+\)"):
        module(torch.ones(2, 4))
    assert explain(module).captured
