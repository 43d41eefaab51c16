"""Whatever forward reads of plain objects counts: in attributes of its module, and around it.

However it was read; what forward did not read does not count.
"""

import argparse
import array
import collections
import contextvars
import ctypes
import dataclasses
import functools
import multiprocessing
import sys
import types
import weakref

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each
from tests.twins import made, rows

HERE = sys.modules[__name__]
SCALE = 1.0


class Inner:
    def __init__(self, value):
        self.held = value

    def get(self):
        return self.held


def assigned(self, value):
    self.a = value


def kept(make, change):
    """Sets the attribute `a` once to what `make` makes, and later changes it in place."""

    def put(self, value):
        if hasattr(self, "a"):
            change(self.a, value)
        else:
            self.a = make(value)

    return put


def of_class(self, value):
    type(self).a = value


def by_closure(self, value):
    def give():
        return value

    self.a = give


def by_variable(self, value):
    if hasattr(self, "change"):
        self.change(value)
        return
    now = value

    def change(value):
        nonlocal now
        now = value

    self.change, self.a = change, lambda: now


def missing(self, name):
    if name != "a":
        raise AttributeError(name)
    return object.__getattribute__(self, "behind")[name]


#: How a value is kept in an object, and how its method `value` reads it there.
KINDS = {
    "number": {"put": assigned},
    "text": {"put": lambda self, v: assigned(self, str(v)), "value": lambda self: float(self.a)},
    "flag": {"put": lambda self, v: assigned(self, v > 2), "value": lambda self: 3.0 if self.a else 2.0},
    "tensor": {"put": lambda self, v: assigned(self, torch.full((4,), v))},
    "tensor in place": {"put": kept(lambda v: torch.full((4,), v), lambda a, v: a.fill_(v))},
    "list": {"put": kept(lambda v: [v], lambda a, v: a.__setitem__(0, v)), "value": lambda self: self.a[0]},
    "dict": {"put": kept(lambda v: {"k": v}, lambda a, v: a.update(k=v)), "value": lambda self: self.a["k"]},
    "set": {
        "put": kept(lambda v: {v}, lambda a, v: (a.clear(), a.add(v))),
        "value": lambda self: 3.0 if 3.0 in self.a else 2.0,
    },
    "deque": {
        "put": kept(lambda v: collections.deque([v]), lambda a, v: a.__setitem__(0, v)),
        "value": lambda self: self.a[0],
    },
    "object": {"put": kept(Inner, lambda a, v: setattr(a, "held", v)), "value": lambda self: self.a.held},
    "object's method": {"put": kept(Inner, lambda a, v: setattr(a, "held", v)), "value": lambda self: self.a.get()},
    "another object": {"put": lambda self, v: assigned(self, Inner(v)), "value": lambda self: self.a.get()},
    "namespace": {
        "put": kept(lambda v: types.SimpleNamespace(held=v), lambda a, v: setattr(a, "held", v)),
        "value": lambda self: self.a.held,
    },
    "attribute of the class": {"a": 0.0, "put": of_class},
    "by the class": {"a": 0.0, "put": of_class, "value": lambda self: type(self).a},
    "class method": {"a": 0.0, "put": of_class, "value": classmethod(lambda cls: cls.a)},
    "property": {
        "put": lambda self, v: setattr(self, "_a", v), "b": property(lambda self: self._a),
        "value": lambda self: self.b,
    },
    "closure": {"put": by_closure, "value": lambda self: self.a()},
    "variable of a closure": {"put": by_variable, "value": lambda self: self.a()},
    "partial": {"put": lambda self, v: assigned(self, functools.partial(float, v)), "value": lambda self: self.a()},
    "slots": {"__slots__": ("a",), "put": assigned},
    "__getattr__": {"put": lambda self, v: setattr(self, "behind", {"a": v}), "__getattr__": missing},
    "__getattribute__": {
        "put": lambda self, v: setattr(self, "b", v),
        "__getattribute__": lambda self, name: object.__getattribute__(self, "b" if name == "a" else name),
    },
    "vars": {"put": assigned, "value": lambda self: vars(self)["a"]},
    "getattr": {"put": assigned, "value": lambda self: getattr(self, "ba"[1:])},
    "global": {"put": lambda self, v: setattr(HERE, "SCALE", v), "value": lambda self: SCALE},
    "method": {
        "put": lambda self, v: setattr(type(self), "value", (lambda self: 2.0) if v < 2.5 else (lambda self: 3.0)),
    },
}  # fmt: skip
RETURNING = {"tensor", "another object", "closure", "method"}  # another object for an equal value


def tracker(kind):
    """An object that multiplies in several ways."""
    parts = {
        "value": lambda self: self.a,
        "scaled": lambda self, x: x * self.value(),
        "__call__": lambda self, x: x * self.value(),
        "__mul__": lambda self, x: x * self.value(),
    }
    found = type("Tracker", (), parts | KINDS[kind])()
    found.put(2.0)
    return found


TRACKER = BOUND = None
LISTED, NAMED = [], {}
VARIABLE = contextvars.ContextVar("tracker")


class Owner:
    tracker = None


def helper(tracker, x):
    return tracker.scaled(x)


def decorated(function):
    @functools.wraps(function)
    def call(self, x):
        return function(self, TRACKER.scaled(x))

    return call


def of_closure(tracker):
    return lambda self, x: self.linear(tracker.scaled(x))


def of_default(tracker):
    def forward(self, x, tracker=tracker):
        return self.linear(tracker.scaled(x))

    return forward


#: From where forward has the object: how it is put there, and forward.
PLACES = {
    "global": lambda t: lambda self, x: self.linear(TRACKER.scaled(x)),
    "called": lambda t: lambda self, x: self.linear(TRACKER(x)),
    "multiplied": lambda t: lambda self, x: self.linear(TRACKER * x),
    "argument of a function": lambda t: lambda self, x: self.linear(helper(TRACKER, x)),
    "list": lambda t: lambda self, x: self.linear(sum(each.scaled(x) for each in LISTED)),
    "dict": lambda t: lambda self, x: self.linear(NAMED["t"].scaled(x)),
    "closure": of_closure,
    "class": lambda t: lambda self, x: self.linear(Owner.tracker.scaled(x)),
    "default": of_default,
    "context variable": lambda t: lambda self, x: self.linear(VARIABLE.get().scaled(x)),
    "decorator": lambda t: decorated(lambda self, x: self.linear(x)),
    "bound method": lambda t: lambda self, x: self.linear(BOUND(x)),
    "attribute": lambda t: lambda self, x: self.linear(self.tracker.scaled(x)),
    "list in an attribute": lambda t: lambda self, x: self.linear(self.trackers[0].scaled(x)),
}
CASES = [(place, kind) for place in PLACES for kind in KINDS]


@each("place, kind", CASES, {case for case in CASES if case[0] == "global"} | set(CASES[::19]))
def test_what_methods_read(place, kind, monkeypatch):
    found, now = tracker(kind), 2.0
    for name, value in {"TRACKER": found, "BOUND": found.scaled, "LISTED": [found], "NAMED": {"t": found}}.items():
        monkeypatch.setattr(HERE, name, value)
    monkeypatch.setattr(HERE, "SCALE", 2.0)
    monkeypatch.setattr(Owner, "tracker", found)
    token = VARIABLE.set(found)
    try:
        module = made(PLACES[place](found), tracker=found, trackers=[found])
        ours, x = ORTModule(module), rows(3, 4)
        in_place = kind == "tensor in place"  # an input of the graph
        for value, exports in ((None, 1), (None, 1), (3.0, 2), (None, 2), (2.0, 3 if kind in RETURNING else 2)):
            if value is not None:
                found.put(now := value)
            torch.testing.assert_close(ours(x), nn.functional.linear(x * now, *module.parameters()))
            report = explain(ours)
            assert report.captured and report.exports == (1 if in_place else exports), report.fallback
    finally:
        VARIABLE.reset(token)


# --- other things that hold a value -----------------------------------------------------------------------------------


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.linear = 2.0, nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).detach() * self.scale * (1 if self.training else 2)


class Nested:
    class Inside:
        scale = 2.0


def with_attribute():
    return with_attribute.scale


def with_default(*, options={"scale": 2.0}):  # noqa: B006
    return options["scale"]


MADE = {
    "OBJECT": lambda: Inner(2.0),
    "TEACHER": Teacher,
    "TEACHERS": lambda: [Teacher()],
    "REFERENCE": lambda: weakref.ref(HERE.OBJECT),
    "REFERENCES": lambda: weakref.WeakValueDictionary(a=HERE.OBJECT),
    "ARRAY": lambda: array.array("d", [2.0]),
    "NUMBER": lambda: ctypes.c_double(2.0),
    "SHARED": lambda: multiprocessing.Value("d", 2.0),
    "PROXY": lambda: types.MappingProxyType(HERE.BEHIND),
    "USERS": lambda: collections.UserDict(scale=2.0),
    "CHAIN": lambda: collections.ChainMap({}, {"scale": 2.0}),
    "PARTIAL": lambda: functools.partial(torch.mul, other=2.0),
}
BEHIND = {"scale": 2.0}
OBJECT = TEACHER = TEACHERS = REFERENCE = REFERENCES = ARRAY = NUMBER = SHARED = PROXY = USERS = CHAIN = PARTIAL = None
OTHERS = {
    "a module's attribute": (lambda self, x: TEACHER(x), lambda: setattr(TEACHER, "scale", 3.0)),
    "a module's mode": (lambda self, x: TEACHER(x), lambda: TEACHER.eval()),
    "a module's submodule": (lambda self, x: TEACHER(x), lambda: setattr(TEACHER, "linear", nn.Linear(4, 4))),
    "a module's weight": (
        lambda self, x: TEACHER(x), lambda: setattr(TEACHER.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    ),
    "a listed module's attribute": (lambda self, x: TEACHERS[0](x), lambda: setattr(TEACHERS[0], "scale", 3.0)),
    "a reference": (lambda self, x: REFERENCE().held, lambda: setattr(OBJECT, "held", 3.0)),
    "references": (lambda self, x: REFERENCES["a"].held, lambda: setattr(OBJECT, "held", 3.0)),
    "an array": (lambda self, x: ARRAY[0], lambda: ARRAY.__setitem__(0, 3.0)),
    "a number of C": (lambda self, x: NUMBER.value, lambda: setattr(NUMBER, "value", 3.0)),
    "a number that processes share": (lambda self, x: SHARED.value, lambda: setattr(SHARED, "value", 3.0)),
    "a view of a dictionary": (lambda self, x: PROXY["scale"], lambda: BEHIND.update(scale=3.0)),
    "a user's dictionary": (lambda self, x: USERS["scale"], lambda: USERS.update(scale=3.0)),
    "a chain of dictionaries": (lambda self, x: CHAIN["scale"], lambda: CHAIN.update(scale=3.0)),
    "a partial function": (lambda self, x: PARTIAL(x), lambda: PARTIAL.keywords.update(other=3.0)),
    "a class in a class": (lambda self, x: Nested.Inside.scale, lambda: setattr(Nested.Inside, "scale", 3.0)),
    "an attribute of a function": (lambda self, x: with_attribute(), lambda: setattr(with_attribute, "scale", 3.0)),
    "a default": (lambda self, x: with_default(), lambda: with_default.__kwdefaults__["options"].update(scale=3.0)),
    "an attribute of a module": (lambda self, x: HERE.SCALE, lambda: setattr(HERE, "SCALE", 3.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_holds_a_value(name, monkeypatch):
    monkeypatch.setattr(HERE, "BEHIND", {"scale": 2.0})
    monkeypatch.setattr(HERE, "SCALE", 2.0)
    monkeypatch.setattr(Nested.Inside, "scale", 2.0)
    monkeypatch.setattr(with_attribute, "scale", 2.0, raising=False)
    monkeypatch.setitem(with_default.__kwdefaults__["options"], "scale", 2.0)
    for each_name, make in MADE.items():
        monkeypatch.setattr(HERE, each_name, make())
    function, change = OTHERS[name]
    eager = made(lambda self, x: self.linear(x) * function(self, x))
    ours, x = ORTModule(eager), rows(3, 4)
    for exports in (1, 1, 2, 2):
        if exports > explain(ours).exports > 0:
            change()
        torch.testing.assert_close(ours(x), eager(x))
        assert explain(ours).captured and explain(ours).exports == exports


# --- fields that forward does not read --------------------------------------------------------------------------------


@dataclasses.dataclass
class Data:
    scale: float = 2.0
    note: str = ""
    inner: object = None


class Slotted:
    __slots__ = ("inner", "note", "scale")

    def __init__(self, scale=2.0, note="", inner=None):
        self.scale, self.note, self.inner = scale, note, inner


class Checked:
    """As pydantic's: fields are checked when they are set, and kept elsewhere."""

    def __init__(self, scale=2.0, note="", inner=None):
        object.__setattr__(self, "values", {})
        self.scale, self.note, self.inner = scale, note, inner

    def __setattr__(self, name, value):
        if name == "scale" and not isinstance(value, float):
            raise TypeError("scale is a float")
        object.__setattr__(self, name, value)


class Renamed:
    """As transformers' configurations: a field may have another name."""

    names = {"scale": "factor"}

    def __init__(self, scale=2.0, note="", inner=None):
        self.scale, self.note, self.inner = scale, note, inner

    def __setattr__(self, name, value):
        super().__setattr__(type(self).names.get(name, name), value)

    def __getattribute__(self, name):
        return super().__getattribute__(super().__getattribute__("names").get(name, name))


class Items(dict):
    __setattr__ = dict.__setitem__

    def __getattr__(self, name):
        return self[name]


def through_property():
    class Given(Data):
        doubled = property(lambda self: self.scale / 2 * 2)

    return Given()


def made_of(cls):
    return cls(scale=2.0, note="", inner=None)


CONFIGURATIONS = {
    "dataclass": Data,
    "slots": Slotted,
    "checked": Checked,
    "renamed": Renamed,
    "property": through_property,
    "arguments": lambda: made_of(argparse.Namespace),
    "namespace": lambda: made_of(types.SimpleNamespace),
    "dict": lambda: made_of(Items),
}
AS_A_WHOLE = {"namespace", "dict"}  # which of their fields are read cannot be seen


def read_scale(config):
    return config.doubled if hasattr(type(config), "doubled") else config.scale


@pytest.mark.parametrize("inside", [False, True], ids=["", "inside"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_field_that_is_not_read(name, inside):
    config = CONFIGURATIONS[name]()
    held = Data(inner=config) if inside else config
    path = (lambda self: self.config.inner) if inside else (lambda self: self.config)
    module = made(lambda self, x: self.linear(x) * read_scale(path(self)))
    module.config = held
    ours, x = ORTModule(module), rows(3, 4)

    def check(scale):
        torch.testing.assert_close(ours(x), module.linear(x) * scale)
        assert explain(ours).captured
        return explain(ours).exports

    assert check(2.0) == 1
    config.note = "saved"
    assert check(2.0) == (2 if name in AS_A_WHOLE else 1)
    config.scale = 3.0
    before = check(3.0)
    assert before == (3 if name in AS_A_WHOLE else 2)
    config.scale, config.note = 2.0, "saved again"
    assert check(2.0) == before + (name in AS_A_WHOLE)


def test_fields_that_other_graphs_read():
    """A graph rests on what it read itself."""
    module = made(lambda self, x: self.linear(x) * (self.config.scale if self.training else self.config.factor))
    module.config = argparse.Namespace(scale=2.0, factor=3.0)
    ours, x = ORTModule(module), rows(3, 4)
    for training, expected in ((True, 2.0), (False, 3.0), (True, 2.0), (False, 3.0)):
        torch.testing.assert_close(ours.train(training)(x), module.linear(x) * expected)
    assert explain(ours).exports == 2
    module.config.factor = 4.0
    torch.testing.assert_close(ours.train()(x), module.linear(x) * 2.0)
    assert explain(ours).exports == 2
    torch.testing.assert_close(ours.eval()(x), module.linear(x) * 4.0)
    assert explain(ours).exports == 3


def test_all_fields_at_once():
    """A copy, a dictionary and a comparison read all fields."""
    module = made(lambda self, x: self.linear(x) * dataclasses.replace(self.config, scale=self.config.scale).scale)
    module.config = Data()
    other = made(lambda self, x: self.linear(x) * sum(len(name) for name in vars(self.config)), config=Data())
    ours, x = ORTModule(module), rows(3, 4)
    torch.testing.assert_close(ours(x), module.linear(x) * 2.0)
    module.config.scale = 3.0
    torch.testing.assert_close(ours(x), module.linear(x) * 3.0)
    ours = ORTModule(other)
    ours(x)
    other.config.extra = 1
    torch.testing.assert_close(ours(x), other(x))


class Past(Data):
    def past(self, name):
        return super().__getattribute__(name)


def test_reads_that_go_past_an_attribute():
    for function in (lambda self, x: self.linear(x) * self.config.past("scale"), lambda self, x: self.linear(x)):
        module = made(function)
        module.config = Past()
        ours, x = ORTModule(module), rows(3, 4)
        for scale in (2.0, 3.0):
            module.config.scale = scale
            torch.testing.assert_close(ours(x), module(x))
    assert explain(ours).exports == 1


def test_the_classes_are_as_they_were():
    module = made(lambda self, x: self.linear(x) * self.config.scale, config=Data())
    ORTModule(module)(rows(3, 4))
    assert "__getattribute__" not in vars(Data) and "__getattribute__" in vars(Renamed)


def test_objects_that_never_stay_cost_no_look(monkeypatch):
    """What changes beside the fields that were read is no reason to look at the module."""
    module = made(lambda self, x: self.linear(TRACKER.scaled(x)))
    monkeypatch.setattr(HERE, "TRACKER", tracker("number"))
    ours, x = ORTModule(module), rows(3, 4)
    ours(x), ours(x)
    state = ours._ortmodule.states.latest
    for step in range(3):
        TRACKER.step = step
        ours(x)
    assert ours._ortmodule.states.latest is state


def test_the_field_is_named(monkeypatch):
    monkeypatch.delenv("ORTMODULE_CAPTURE_SHARE", raising=False)
    module = made(lambda self, x: self.linear(x) * self.config.inner.scale)
    module.config = Data(inner=Data())
    ours = ORTModule(module)
    ours(rows(3, 4))
    module.config.inner.scale = 5.0
    ours(rows(3, 4))
    assert "the attribute config.inner.scale is 5.0 now" in explain(ours).fallback


def test_what_guards_cost():
    """Work of a call for a module that has not changed: the configuration's dictionary is all that is watched of it."""
    plain, config = (
        nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU()),
        made(lambda self, x: self.linear(x) * self.config.scale),
    )
    config.config = Data(inner=Data())
    for module, watched in ((plain, []), (config, [vars(config.config)])):
        ours, frames = ORTModule(module), []
        ours(rows(3, 4)), ours(rows(3, 4))
        containers, names = ours._ortmodule.states.latest.tree.attributes.watched()
        assert len(containers) == len(watched) and all(a is b for a, b in zip(containers, watched, strict=True))
        assert len(names) <= 3
        sys.setprofile(lambda frame, event, _: frames.append(frame) if event == "call" else None)  # noqa: B023
        ours._ortmodule.state()
        sys.setprofile(None)
        assert len(frames) == 1
