"""Tensors inside of what attributes hold are inputs of graphs, once others have taken their places."""

import copy
import dataclasses
import itertools
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ortmodule import Config, ORTModule, explain
from ortmodule.guards.reads.held_tensors import held_in
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")


class Plain:
    def __init__(self, h, c):
        self.h, self.c, self.size = h, c, 8


@dataclasses.dataclass
class Data:
    h: torch.Tensor
    c: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    h: torch.Tensor
    c: torch.Tensor


class Slots:
    __slots__ = ("h", "c")

    def __init__(self, h, c):
        self.h, self.c = h, c


class Named(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


def of(value):
    return value.h, value.c


#: What an attribute holds, and how forward takes two tensors out of it.
HELD: dict[str, tuple[Any, Any]] = {
    "tuple": (lambda h, c: (h, c), lambda state: state),
    "list": (lambda h, c: [h, c], lambda state: state),
    "dictionary": (lambda h, c: {"h": h, "c": c}, lambda state: (state["h"], state["c"])),
    "tuples": (lambda h, c: ((h,), (c, 1)), lambda state: (state[0][0], state[1][0])),
    "list of tuples": (lambda h, c: [(h, c)], lambda state: state[0]),
    "named tuple": (Named, of),
    "object": (Plain, of),
    "dataclass": (Data, of),
    "frozen": (Frozen, of),
    "slots": (Slots, of),
    "namespace": (lambda h, c: types.SimpleNamespace(h=h, c=c), of),
    "object in a list": (lambda h, c: [Plain(h, c)], lambda state: of(state[0])),
    "list in an object": (lambda h, c: types.SimpleNamespace(s=[h, c]), lambda state: state.s),
}


class Recurrent(nn.Module):
    """``sets``: forward sets its state."""

    def __init__(self, kind, sets):
        super().__init__()
        self.cell, self.kind, self.sets = nn.LSTMCell(4, 4), kind, sets
        self.state = HELD[kind][0](torch.zeros(2, 4), torch.zeros(2, 4))

    def forward(self, x):
        make, take = HELD[self.kind]
        h, c = self.cell(x, tuple(take(self.state)))
        if self.sets:
            self.state = make(h.detach(), c.detach())
        return h


def trained(kind, who, wrap, steps=5):
    torch.manual_seed(0)
    module, found = wrap(Recurrent(kind, who == "forward")), []
    for step in range(steps):
        if who == "script":
            module.state = HELD[kind][0](torch.full((2, 4), step / 4), torch.full((2, 4), -step / 4))
        x = torch.randn(2, 4, requires_grad=True)
        y = module(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad, *[t.clone() for t in HELD[kind][1](module.state)]]
    return module, [*found, *(p.grad for p in module.parameters())]


def at_once(module):
    return ORTModule(module, config=Config(capture_share=float("inf")))


@each("kind, who", list(itertools.product(HELD, ("forward", "script"))), lambda case: case[1] == "forward")
def test_one_graph_beside_that_of_the_first_call(kind, who, monkeypatch):
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    _, eager = trained(kind, who, lambda module: module)
    module, ours = trained(kind, who, at_once)
    torch.testing.assert_close(ours, eager)
    assert explain(module).exports == 2 and explain(module).pytorch_calls == 0


class Reads(nn.Module):
    """``read``: of the module's attribute ``held``."""

    def __init__(self, read):
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read
        self.held = [torch.zeros(4), torch.zeros(4)]

    def forward(self, x):
        return self.read(self, self.linear(x))


OTHER = {}


def compare(read, states, exports=None, grad=False):
    torch.manual_seed(0)
    eager = Reads(read)
    ours = at_once(copy.deepcopy(eager))
    for state in states:
        results = []
        for module in (eager, ours):
            module.held = state()
            OTHER["t"] = module.held[0]
            y = module(torch.ones(2, 4))
            module.zero_grad()
            y.square().sum().backward()
            held = [t.detach().clone() for t in module.held]
            results.append([y.detach(), *held, *(p.grad for p in module.parameters())])
            if grad:
                results[-1] += [t.grad for t in module.held]
        torch.testing.assert_close(*reversed(results))
    if exports is not None:
        assert explain(ours).exports == exports and explain(ours).captured, explain(ours)
    return ours


def pairs(count, first=1.0, **options):
    return [
        lambda i=i: [torch.full((4,), first + i, **options), torch.full((4,), first - i, **options)]
        for i in range(count)
    ]


def test_gradients_of_what_is_held():
    compare(lambda m, h: h * m.held[0] + m.held[1], pairs(4, requires_grad=True), 2, grad=True)


def test_other_types_and_sizes_are_other_graphs():
    states = [*pairs(3), *pairs(2, dtype=torch.float64), *pairs(2, 5.0)]
    states += [lambda: [torch.ones(1), torch.ones(4)], lambda: [torch.ones(1) * 2, torch.ones(4)]]
    compare(lambda m, h: h * m.held[0] + m.held[1], states, 4)


def test_one_tensor_in_two_places():
    def same():
        t = torch.full((4,), 3.0)
        return [t, t]

    def read(m, h):
        return h * m.held[0] * (2 if m.held[0] is m.held[1] else 1) + m.held[1]

    compare(read, [*pairs(3), same, *pairs(2), same, same])


def test_what_is_around_the_module_too_stays_by_itself():
    """Forward has the tensor from a global, which goes on to hold the first one."""
    torch.manual_seed(0)
    eager = Reads(lambda m, h: h * OTHER["t"] + m.held[1])
    ours = at_once(copy.deepcopy(eager))
    first = torch.full((4,), 2.0)
    OTHER["t"] = first
    for i in range(5):
        for module in (eager, ours):
            module.held = [first if i < 3 else torch.zeros(4), torch.full((4,), float(i))]
        torch.testing.assert_close(ours(torch.ones(2, 4)), eager(torch.ones(2, 4)))


def test_what_forward_writes_into_is_pytorchs():
    def read(m, h):
        m.held[0].add_(1)
        return h * m.held[0]

    ours = compare(read, pairs(5))
    assert "in place" in explain(ours).fallback or "changes a tensor" in explain(ours).fallback


def test_fewer_and_other_things_inside():
    states = [*pairs(3), lambda: [torch.ones(4)] * 3, lambda: [torch.ones(4) * 2, torch.ones(4), 7], *pairs(2)]
    torch.manual_seed(0)
    eager = Reads(lambda m, h: h * m.held[0] + len(m.held))
    ours = at_once(copy.deepcopy(eager))
    for state in states:
        eager.held = ours.held = state()
        torch.testing.assert_close(ours(torch.ones(2, 4)), eager(torch.ones(2, 4)))


def test_places():
    module = nn.Module()
    t = torch.ones(2)
    module.value = {"a": [t, 1], "b": types.SimpleNamespace(c=(t, {"d": t}))}
    slots = list(held_in("m.value", module.__dict__, "value"))
    assert [slot.name for slot in slots] == ["m.value['a'][0]", "m.value['b'].c[0]", "m.value['b'].c[1]['d']"]
    for i, slot in enumerate(slots):
        slot.set(torch.full((1,), float(i)))
    assert [slot.get().item() for slot in slots] == [0, 1, 2]
    module.value["a"] = []
    assert slots[0].find() is None
    with pytest.raises(KeyError):
        slots[0].get()
    module.value = object()
    assert not list(held_in("m.value", module.__dict__, "value"))
