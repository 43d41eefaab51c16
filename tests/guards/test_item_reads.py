"""Dictionaries and namespaces that forward reads: a graph rests on the items that were read, not on the others."""

import dataclasses
import sys
import types
from collections import OrderedDict

import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each
from tests.twins import made, rows

HERE = sys.modules[__name__]
OPTIONS = {}
ARGS = types.SimpleNamespace()


def options():
    return {"scale": 2.0, "note": 1.0, "inner": {"k": 3.0, "z": 1.0}}


def namespace():
    inner = types.SimpleNamespace(k=3.0, z=1.0)
    return types.SimpleNamespace(scale=2.0, note=1.0, inner=inner)


def by_local(self, x):
    held = self.held
    inner = held["inner"]
    return self.linear(x) * held["scale"] * inner["k"]


def by_local_field(self, x):
    args = self.held
    return self.linear(x) * args.scale * args.inner.k


def in_a_loop(self, x):
    y = self.linear(x)
    for i in range(3):
        y = y * self.held["scale"] if i % 2 else y * self.held["inner"]["k"]
    return y


def set_twice(self, x):
    held = self.held
    if x.dim() > 3:
        held = {}
    return self.linear(x) * held["scale"] * held["inner"]["k"]


def in_a_closure(self, x):
    held = self.held
    return self.linear(x) * (lambda: held["scale"] * held["inner"]["k"])()


def given(held):
    return held["scale"] * held["inner"]["k"]


def unpacked(scale, inner, **others):
    return scale * inner["k"]


#: How forward reads `scale`, and `k` of `inner`; and whether it is seen that it reads nothing else.
READS = {
    "subscript": (lambda self, x: self.linear(x) * self.held["scale"] * self.held["inner"]["k"], True),
    "get": (lambda self, x: self.linear(x) * self.held.get("scale") * self.held.get("inner").get("k", 1.0), True),
    "local": (by_local, True),
    "loop": (in_a_loop, True),
    "comprehension": (lambda self, x: sum([self.linear(x) * self.held["scale"] for _ in (1, 2)]), True),
    "a variable, set twice": (set_twice, False),
    "closure": (in_a_closure, False),
    "argument": (lambda self, x: self.linear(x) * given(self.held), False),
    "keywords": (lambda self, x: self.linear(x) * unpacked(**self.held), False),
    "values": (lambda self, x: self.linear(x) * sum(v for v in self.held.values() if isinstance(v, float)), False),
    "len": (lambda self, x: self.linear(x) * len(self.held) * self.held["scale"], False),
    "in": (lambda self, x: self.linear(x) * (self.held["scale"] if "new" in self.held else 7.0), False),
    "getattr": (lambda self, x: self.linear(x) * getattr(self, "held")["scale"], False),  # noqa: B009
    "vars": (lambda self, x: self.linear(x) * vars(self)["held"]["scale"], False),
    "copy": (lambda self, x: self.linear(x) * dict(self.held)["scale"], False),
}
FIELDS = {
    "field": (lambda self, x: self.linear(x) * self.held.scale * self.held.inner.k, True),
    "local": (by_local_field, True),
    "getattr": (lambda self, x: self.linear(x) * getattr(self.held, "scale", 1.0), False),
    "hasattr": (lambda self, x: self.linear(x) * (self.held.scale if hasattr(self.held, "new") else 7.0), False),
    "vars": (lambda self, x: self.linear(x) * sum(v for v in vars(self.held).values() if isinstance(v, float)), False),
}


def put(held, name, value):
    if isinstance(held, dict):
        held[name] = value
    else:
        setattr(held, name, value)


def inner(held):
    return held["inner"] if isinstance(held, dict) else held.inner


#: What is changed, in this order; and whether forward reads it.
CHANGES = [
    (lambda held: put(held, "note", 5.0), False),
    (lambda held: put(held, "scale", 3.0), True),
    (lambda held: put(held, "new", 1.0), False),
    (lambda held: put(inner(held), "z", 4.0), False),
    (lambda held: put(inner(held), "k", 6.0), True),
    (lambda held: put(held, "note", 6.0), False),
]


def follow(eager, held, seen):
    """Changes what is held step by step. ``seen``: is it known what forward reads?"""
    ours, x = ORTModule(eager), rows(3, 4)
    torch.testing.assert_close(ours(x), eager(x))
    for change, _ in CHANGES:
        change(held)
        torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).captured
    assert explain(ours).exports <= (1 + sum(read for _, read in CHANGES) if seen else 1 + len(CHANGES))
    if not seen:
        assert explain(ours).exports > 1


@each(
    "read,cls",
    [(read, cls) for read in READS for cls in (dict, OrderedDict)],
    lambda case: case[0] in ("subscript", "local", "argument") and case[1] is dict,
)
def test_a_dictionary(read, cls):
    forward, seen = READS[read]
    eager = made(forward, held=cls(options()))
    follow(eager, eager.held, seen)


@each("read", list(FIELDS), ["field", "hasattr"])
def test_a_namespace(read):
    forward, seen = FIELDS[read]
    eager = made(forward, held=namespace())
    follow(eager, eager.held, seen)


def by_global_local(self, x):
    held = OPTIONS
    return self.linear(x) * held["scale"] * held["inner"]["k"]


GLOBALS = {
    "subscript": (lambda self, x: self.linear(x) * OPTIONS["scale"] * OPTIONS["inner"]["k"], True),
    "local": (by_global_local, True),
    "whole": (lambda self, x: self.linear(x) * len(OPTIONS) * OPTIONS["scale"], False),
    "by the module": (lambda self, x: self.linear(x) * HERE.OPTIONS["scale"], False),
    "globals()": (lambda self, x: self.linear(x) * globals()["OPTIONS"]["scale"] * len(OPTIONS), False),
    "argument": (lambda self, x: self.linear(x) * given(OPTIONS), False),
}


@each("read", list(GLOBALS), ["subscript", "by the module"])
def test_a_global_dictionary(read, monkeypatch):
    monkeypatch.setattr(HERE, "OPTIONS", options())
    forward, seen = GLOBALS[read]
    follow(made(forward), OPTIONS, seen)


def test_a_global_namespace(monkeypatch):
    monkeypatch.setattr(HERE, "ARGS", namespace())
    follow(made(lambda self, x: self.linear(x) * ARGS.scale * ARGS.inner.k), ARGS, True)


def test_items_that_are_missing():
    eager = made(lambda self, x: self.linear(x) * self.held.get("scale", 5.0), held={"note": 1})
    ours, x = ORTModule(eager), rows(3, 4)
    for scale in (None, 2.0, None, 3.0, 2.0):
        eager.held.pop("scale", None)
        if scale is not None:
            eager.held["scale"] = scale
        eager.held["note"] += 1
        torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).exports == 3


def test_another_dictionary_in_its_place():
    eager = made(READS["subscript"][0], held=options())
    ours, x = ORTModule(eager), rows(3, 4)
    for scale, kind in ((2.0, dict), (2.0, dict), (3.0, dict), (3.0, OrderedDict), (2.0, dict)):
        eager.held = kind(options() | {"scale": scale, "note": object()})
        torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).captured and explain(ours).exports == 3


def test_values_that_are_no_numbers():
    """Tensors, functions and modules among the items are themselves."""
    eager = made(lambda self, x: self.held["f"](self.linear(x)) * self.held["t"] + self.held["m"](x))
    eager.held = {"f": torch.tanh, "t": torch.ones(4), "m": nn.Linear(4, 4), "other": 1}
    ours, x = ORTModule(eager), rows(3, 4)
    for change in ({}, {"other": 2}, {"f": torch.sigmoid}, {"t": torch.zeros(4)}, {"m": nn.Linear(4, 4)}, {"other": 3}):
        eager.held.update(change)
        torch.testing.assert_close(ours(x), eager(x))
    eager.held["t"].add_(1)
    torch.testing.assert_close(ours(x), eager(x))


def test_types_with_parameters():
    """`set[int]` has its class's attributes, which are no dictionary."""
    eager = made(lambda self, x: self.linear(x) * (2 if self.held["kind"] == set[int] else 3))
    eager.held = {"kind": set[int], "other": list[str], "either": int | str}
    ours, x = ORTModule(eager), rows(3, 4)
    for kind in (set[int], set[str], set[int]):
        eager.held["kind"] = kind
        torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).captured


def test_a_dataclass_that_forward_makes():
    """Its decorator reads dictionaries of types."""

    def forward(self, x):
        @dataclasses.dataclass
        class Output:
            loss: torch.Tensor
            kinds: set[int] | None = None

        return Output(self.linear(x)).loss

    eager = made(forward)
    ours = ORTModule(eager)
    for count in (2, 3):
        x = rows(count, 4)
        torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).captured and explain(ours).exports == 1


def test_a_class_attribute():
    class Module(nn.Module):
        held = options()

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        forward = READS["subscript"][0]

    follow(Module(), Module.held, False)  # other code may read it by way of the class


def test_the_item_is_named(monkeypatch):
    monkeypatch.delenv("ORTMODULE_CAPTURE_SHARE", raising=False)
    eager = made(READS["subscript"][0], held=options())
    ours = ORTModule(eager)
    ours(rows(3, 4))
    eager.held["inner"]["k"] = 9.0
    ours(rows(3, 4))
    assert "the attribute held['inner']['k'] is 9.0 now" in explain(ours).fallback


def test_methods_and_classes_that_read_all():
    """What forward sets in a dictionary is found as before."""

    def forward(self, x):
        self.held["calls"] = self.held.get("calls", 0) + 1
        return self.linear(x) * self.held["calls"]

    eager, twin = made(forward, held={}), made(forward, held={})
    ours, x = ORTModule(eager), rows(3, 4)
    for _ in range(3):
        torch.testing.assert_close(ours(x), twin(x))
    assert eager.held == twin.held
