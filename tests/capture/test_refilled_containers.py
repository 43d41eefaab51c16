"""What forward sets in lists, deques, dictionaries and objects that attributes hold is as in PyTorch."""

import copy
import itertools
import types
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Fields:
    h: object = None
    maps: list = field(default_factory=list)
    scale: float = 2.0


class Plain:
    def __init__(self):
        self.h, self.maps, self.scale = None, [], 2.0


class Owner:
    """With a property, and a container further inside."""

    def __init__(self):
        self.inner, self.maps, self.scale = Plain(), [], 2.0

    h = property(lambda self: self.inner.h, lambda self, value: setattr(self.inner, "h", value))


class Slots:
    __slots__ = ("h", "maps", "scale")

    def __init__(self):
        self.h, self.maps, self.scale = None, [], 2.0


def space():
    return types.SimpleNamespace(h=None, maps=[], scale=2.0)


class Part(nn.Module):
    """``use``: what forward does with ``held`` and a hidden value."""

    def __init__(self, held, use):
        super().__init__()
        self.layer, self.held, self.use = nn.Linear(8, 8), held, use

    def forward(self, x):
        return self.use(self, self.layer(x))


class Two(nn.Module):
    """One submodule fills what the other, and the module itself, read."""

    def __init__(self, held, fill, read):
        super().__init__()
        self.held, self.first, self.second = held, Part(held, fill), Part(held, read)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def held_in(value, depth=0):
    """What is left in the containers and objects of a module, tensors without their graphs."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: held_in(each, depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [held_in(each, depth + 1) for each in value]
    if isinstance(value, (Fields, Plain, Owner, types.SimpleNamespace)):
        return held_in(vars(value), depth + 1)
    return [value.h, *value.maps] if isinstance(value, Slots) else value


def compare(model, change=lambda model, step: None, lengths=(4, 4, 6, 4, 5, 4), trains=True):
    """``change``: what a script does to both before a step. Returns the report."""
    torch.manual_seed(0)
    wrapped, expected = ORTModule(copy.deepcopy(model)), model
    sides = ((wrapped, wrapped._ortmodule.module), (expected, expected))
    for step, length in enumerate(lengths):
        x, found = torch.randn(2, length, 8), []
        for each, own in sides:
            change(own, step)
            own.zero_grad()
            held = own.held
            with torch.set_grad_enabled(trains):
                y = each(x.clone())
            if trains:
                y.sum().backward()
            assert own.held is held
            grads = [None if p.grad is None else p.grad.clone() for p in own.parameters()]
            found.append([y.detach(), held_in([own.held]), grads])
        same(*found)
    return explain(wrapped)


def same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        same(list(ours.values()), list(theirs.values()))
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        assert ours == theirs


# --- lists and deques -------------------------------------------------------------------------------------------------

CLEARS = {
    "clear": lambda held: held.clear(),
    "slice": lambda held: held.__delitem__(slice(None)),
    "assigned": lambda held: held.__setitem__(slice(None), []),
    "popped": lambda held: [held.pop() for _ in range(len(held))],
}
FILLS = {
    "append": lambda held, h: (held.append(h), held.append(h.mean())),
    "extend": lambda held, h: held.extend([h, (h * 2, {"a": h.sum()}), None, 3]),
    "of no gradient": lambda held, h: held.append(h.detach()),
    "in": lambda held, h: held.__iadd__([h.tanh()]),
    "none": lambda held, h: None,
}
READS = {
    "nothing": lambda held, h: h,
    "first": lambda held, h: h + held[0].mean() if held else h,
    "sum": lambda held, h: h + sum(t.mean() for t in held if isinstance(t, torch.Tensor)),
    "count": lambda held, h: h * (1 + len(held)),
}


def refilling(clear, fill, read):
    def use(part, h):
        clear(part.held)
        fill(part.held, h)
        return read(part.held, h)

    return use


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(
    "kind, clear", [*itertools.product([list], CLEARS), *itertools.product([deque], ["clear", "popped"])]
)
def test_cleared_and_filled(kind, clear, fill, read, trains):
    report = compare(Part(kind(), refilling(CLEARS[clear], FILLS[fill], READS[read])), trains=trains)
    assert report.captured and report.exports <= 2 and report.pytorch_calls == 0, report


def keeps(part, h):
    """It goes on with what an earlier call has left."""
    before = part.held[-1] if part.held else None
    part.held.clear()
    part.held.append(h.detach())
    return h if before is None else h + before.mean()


def kept_elsewhere(part, h):
    part.before = part.held[-1] if part.held else None
    part.held.clear()
    part.held.append(h)
    return h


def asks(part, h):
    found = 2.0 if part.held and part.held[-1].shape[1] == 4 else 3.0
    part.held.clear()
    part.held.append(h.detach())
    return h * found


def first_call(part, h):
    if not part.held:
        part.held.append(h.detach())
        return h * 3
    part.held.clear()
    part.held.append(h.detach())
    return h


def counts(part, h):
    n = len(part.held)
    part.held.clear()
    part.held.append(h)
    return h * n


def grows(part, h):
    part.held.append(h.detach())
    return h + len(part.held)


def window(part, h):
    part.held.append(h.detach().mean())
    if len(part.held) > 2:
        part.held.pop(0) if isinstance(part.held, list) else part.held.popleft()
    return h + sum(part.held)


def returned(part, h):
    part.held.clear()
    part.held.append(h)
    part.again = part.held
    return h


def exchanged(part, h):
    part.held.reverse()
    part.held.append(h.mean()) if len(part.held) < 3 else part.held.pop()
    return h


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("kind", [list, deque, lambda: deque(maxlen=2)])
@pytest.mark.parametrize("use", [keeps, kept_elsewhere, asks, first_call, counts, grows, window, returned, exchanged])
def test_what_earlier_calls_left_counts(use, kind, trains):
    compare(Part(kind(), use), trains=trains)


SCRIPTS = {
    "cleared": lambda model, step: model.held.clear(),
    "one more": lambda model, step: model.held.append(torch.ones(3) * step),
    "a number": lambda model, step: model.held.append(step),
    "another": lambda model, step: setattr(model, "held", type(model.held)()),
    "a copy": lambda model, step: setattr(model, "held", copy.copy(model.held)),
}


REFILLS = refilling(CLEARS["clear"], FILLS["append"], READS["sum"])


@pytest.mark.parametrize("use, name", [
    *itertools.product([first_call, counts, grows, REFILLS], SCRIPTS),
    *((keeps, name) for name in SCRIPTS if name != "a number"),  # which has no mean
])  # fmt: skip
@pytest.mark.parametrize("kind", [list, deque])
def test_what_a_script_changes_between_calls(kind, use, name):
    script = SCRIPTS[name]
    compare(Part(kind(), use), lambda model, step: script(model, step) if step in (2, 4) else None)


# --- dictionaries -----------------------------------------------------------------------------------------------------

DICTIONARIES = [dict, OrderedDict, lambda: defaultdict(list)]


def by_number(part, h):
    for i in range(3):
        part.held[i] = h = torch.tanh(h)
    return h + sum(part.held.values())


def by_tuple(part, h):
    part.held["a", 1] = h
    return h * part.held["a", 1]


def taken_out(part, h):
    part.held.pop("h", None)
    part.held["h"] = h
    return part.held["h"] * 2


def cleared(part, h):
    part.held.clear()
    part.held["h"] = h
    part.held["g"] = [h.mean()]
    return part.held["h"] + part.held["g"][0]


def updated(part, h):
    part.held.update(h=h, g=h.mean())
    return part.held["h"] + part.held["g"]


@pytest.mark.parametrize("use", [by_number, by_tuple, taken_out, cleared, updated])
@pytest.mark.parametrize("kind", DICTIONARIES)
def test_dictionaries(kind, use):
    report = compare(Part(kind(), use))
    assert report.captured and report.exports <= 2 and report.pytorch_calls == 0, report


# --- objects ----------------------------------------------------------------------------------------------------------


def sets_field(part, h):
    part.held.h = h
    return torch.tanh(part.held.h) * part.held.scale


def fills_field(part, h):
    part.held.maps.clear()
    part.held.maps.append(h)
    part.held.h = h.mean()
    return part.held.maps[0] + part.held.h


def replaces_field(part, h):
    part.held.maps = [h, h.mean()]
    return h + part.held.maps[1]


def reads_before(part, h):
    before = part.held.h
    part.held.h = h.detach()
    return h if before is None else h + before.mean()


def new_field(part, h):
    part.held.other = h
    return h + part.held.other.mean()


def by_local(part, h):
    state = part.held
    state.h = h
    return state.h * state.scale


OBJECTS = [Fields, Plain, Owner, space]


@pytest.mark.parametrize("use", [sets_field, fills_field, replaces_field, by_local])
@pytest.mark.parametrize("kind", OBJECTS)
def test_fields(kind, use):
    report = compare(Part(kind(), use))
    assert report.captured and report.exports <= 2 and report.pytorch_calls == 0, report


@pytest.mark.parametrize("use", [reads_before, new_field])
@pytest.mark.parametrize("kind", OBJECTS)
def test_fields_that_are_read_before(kind, use):
    compare(Part(kind(), use))


@pytest.mark.parametrize("use", [sets_field, fills_field, reads_before])
def test_slots(use):
    compare(Part(Slots(), use))


FIELD_SCRIPTS = {
    "a setting": lambda model, step: setattr(model.held, "scale", float(step)),
    "what forward sets": lambda model, step: setattr(model.held, "h", torch.ones(3) * step),
    "another list": lambda model, step: setattr(model.held, "maps", []),
    "another object": lambda model, step: setattr(model, "held", copy.copy(model.held)),
}


@pytest.mark.parametrize("name", FIELD_SCRIPTS)
@pytest.mark.parametrize("use", [sets_field, fills_field, reads_before, by_local])
@pytest.mark.parametrize("kind", [Fields, Plain, space])
def test_fields_that_a_script_changes(kind, use, name):
    script = FIELD_SCRIPTS[name]
    compare(Part(kind(), use), lambda model, step: script(model, step) if step in (2, 4) else None)


# --- what two modules share -------------------------------------------------------------------------------------------

SHARED = {
    "dictionary": (dict, lambda part, h: part.held.__setitem__("h", h.mean()) or h, lambda part, h: h + part.held["h"]),
    "list": (list, refilling(CLEARS["clear"], FILLS["append"], READS["nothing"]), lambda part, h: h + part.held[1]),
    "deque": (deque, refilling(CLEARS["clear"], FILLS["append"], READS["nothing"]), lambda part, h: h + part.held[1]),
    "object": (Plain, sets_field, lambda part, h: h + part.held.h.mean()),
    "namespace": (space, sets_field, lambda part, h: h + part.held.h.mean()),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared(name):
    kind, fill, read = SHARED[name]
    report = compare(Two(kind(), fill, read))
    assert report.captured and report.exports <= 2 and report.pytorch_calls == 0, report


def apart(model, which):
    """The module's, or a submodule's, is another one from now on."""
    owner = model if which == "held" else getattr(model, which)
    held = owner.held
    items = held if isinstance(held, (dict, list, deque)) else vars(held)
    for key, value in list(items.items() if isinstance(items, dict) else enumerate(items)):
        items[key] = value.detach() if isinstance(value, torch.Tensor) else value
    owner.held = copy.copy(held)


@pytest.mark.parametrize("name", SHARED)
def test_shared_from_now_on(name):
    kind, fill, read = SHARED[name]

    def both(part, h):
        h = fill(part, h)
        return read(part, h)

    model = Two(kind(), both, both)
    model.second.held = kind()

    def share(model, step):
        if step == 3:
            model.second.held = model.first.held

    compare(model, share)


def test_one_after_the_other():
    """What is kept of a call is not changed by the next one, and carries gradients."""
    torch.manual_seed(0)
    model = Part([], refilling(CLEARS["clear"], FILLS["append"], READS["nothing"]))
    wrapped, kept = ORTModule(copy.deepcopy(model)), []
    for each, own in ((wrapped, wrapped._ortmodule.module), (model, model)):
        for seed in range(3):
            torch.manual_seed(seed)
            y = each(torch.randn(2, 4, 8))
            assert own.held[0] is y
            kept.append(own.held[0])
            (own.held[0].square().sum() + own.held[1] + y.sum()).backward()
    for ours, theirs in zip(kept[:3], kept[3:], strict=True):
        torch.testing.assert_close(ours, theirs)
    for p, q in zip(wrapped.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert explain(wrapped).captured


def test_modes_alternate():
    model = Part([], refilling(CLEARS["clear"], FILLS["append"], READS["sum"]))
    modes = itertools.cycle([True, True, False])
    compare(model, lambda each, step: each.train(next(modes) if each is model else each.training), [4] * 9)
