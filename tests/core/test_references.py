"""Python's references to tensors are counted apart from autograd's, and what refers to frozen objects is found."""

import gc
import weakref

import numpy
import pytest
import torch
from torch import nn

from ortmodule import ORTModule, _core
from ortmodule.core.objects import references
from ortmodule.core.objects.references import other_references, referrers


class Holder:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def in_a_circle(tensor):
    holder = [tensor]
    holder.append(holder)
    return holder


#: How something of Python's holds a tensor.
HOLDING = {
    "a list": lambda t: [t], "a tuple": lambda t: (t,), "a dictionary": lambda t: {0: t}, "a set": lambda t: {t},
    "a slot": Holder, "an attribute": lambda t: setattr(f := nn.Module(), "it", t) or f, "a circle": in_a_circle,
    "a closure": lambda t: lambda: t, "a default": lambda t: lambda x=t: x, "a name": lambda t: t,
    "a method": lambda t: t.add, "a generator": lambda t: (t for _ in range(2)),
}  # fmt: skip

#: How C++ holds one: another tensor, autograd's graph.
BESIDE = {
    "nothing": lambda t: None, "a view": lambda t: t.view(-1), "two views": lambda t: (t[0], t[1]), "exp": torch.exp,
    "a product": lambda t: t * t, "a gradient": lambda t: torch.autograd.grad(t.exp().sum(), t, create_graph=True),
    "a leaf's gradient": lambda t: t.pow(2).sum().backward(inputs=[t]) if t.is_leaf else None,
}  # fmt: skip


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("holding", [None, *HOLDING])
@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "result"])
def test_what_holds_a_tensor(leaf, holding, beside):
    tensors = [torch.rand(3, requires_grad=True) if leaf else torch.rand(3, requires_grad=True) * 2]
    kept = [BESIDE[beside](tensors[0])]
    if holding:
        kept.append(HOLDING[holding](tensors[0]))
    assert (other_references(tensors)[0] > 0) == (holding is not None), kept


def test_what_only_a_graph_holds():
    tensor = torch.rand(3, requires_grad=True).exp()  # which saves its result
    result, weak = tensor.exp() * tensor, weakref.ref(tensor)
    del tensor
    tensors = [weak()]
    assert other_references(tensors) == [0]
    again = tensors[0]
    assert other_references(tensors) == [1] and again is not result


def test_without_what_pytorch_tells(monkeypatch):
    """All of autograd's counts."""
    monkeypatch.setattr(references, "_COUNTED", False)
    tensors = [torch.ones(2), torch.ones(2)]
    view = tensors[1].view(-1)
    assert other_references(tensors) == [0, 1] and view is not None


@pytest.fixture
def frozen():
    """The number of objects that this program has frozen."""
    gc.collect()
    gc.freeze()
    try:
        yield gc.get_freeze_count()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("hold", [lambda value: {0: value}, lambda value: (value, 1), lambda value: [value]])
def test_referrers_of_what_is_frozen(hold):
    value = [Holder(None)]
    holder = hold(value)
    gc.freeze()
    count = gc.get_freeze_count()
    try:
        for _ in range(2):
            assert any(each is holder for each in referrers([value]))
            assert abs(gc.get_freeze_count() - count) < 50
    finally:
        gc.unfreeze()


def test_referrers_are_what_refers():
    """Neither the list of what is looked for, nor what the look itself makes."""
    value = [Holder(None)]
    holder = (value,)
    for _ in range(2):
        found = referrers([value])
        gc.freeze()
        assert [each for each in found if isinstance(each, (list, tuple))] == [holder]
    gc.unfreeze()
    with pytest.raises(TypeError, match="as a list"):
        referrers((value,))


class Circle:
    def __init__(self):
        self.own = self


def test_what_is_not_frozen_stays_so(frozen):
    """Circles of references that become garbage later, and those that are garbage at the time of the look."""
    kept, thrown = Circle(), Circle()
    weak = [weakref.ref(kept), weakref.ref(thrown)]
    del thrown
    for _ in range(3):
        assert referrers([kept])
        assert _core.objects((Circle,)) == [kept] or weak[1]() is not None
    assert gc.is_tracked(kept) and abs(gc.get_freeze_count() - frozen) < 200
    del kept
    gc.collect()
    assert [each() for each in weak] == [None, None]


@pytest.mark.filterwarnings("ignore")
def test_a_module_of_a_program_that_has_frozen_objects_goes(frozen):
    """With its graphs, for which such looks were taken."""
    ours = ORTModule(Keeps(4, 4))
    for rows in (2, 3):
        ours(torch.ones(rows, 4, requires_grad=True)).sum().backward()
    TRACKER.losses.clear()
    weak = weakref.ref(ours)
    del ours
    gc.collect()
    assert weak() is None


def closure():
    factor = 2.0

    def scale(x):
        return x * factor

    def put(value):
        nonlocal factor
        factor = value

    return scale, put


class Tracker:
    """What forward reads there shows only while it runs."""

    def __init__(self):
        self.scale, self.put = closure()
        self.functions, self.losses, self.random = {"scale": self.scale}, [], numpy.random.default_rng(0)


TRACKER = Tracker()


class Reads(nn.Linear):
    def forward(self, x):
        return next(iter(TRACKER.functions.values()))(super().forward(x))


class Draws(nn.Linear):
    def forward(self, x):
        return super().forward(x) * TRACKER.random.random()


class Keeps(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        TRACKER.losses.append(y.mean())
        return y


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [Reads, Draws, Keeps])
@pytest.mark.parametrize("when", ["never", "before", "between"])
def test_modules_of_a_program_that_freezes_objects(make, when):
    """Closures, generators and lists that only the collector knows the holders of."""
    torch.manual_seed(0)
    eager = make(4, 4)
    ours = ORTModule(eager)
    found = []
    try:
        for module in (eager, ours):
            TRACKER.random = numpy.random.default_rng(0)
            TRACKER.losses.clear()
            found.append([])
            for step, factor in enumerate((2.0, 3.0, 5.0)):
                if when == ("between" if step else "before"):
                    gc.freeze()
                TRACKER.put(factor)
                found[-1].append(module(torch.ones(2, 4) + step).detach().clone())
            found[-1] += [each.detach().clone() for each in TRACKER.losses]
    finally:
        gc.unfreeze()
        TRACKER.losses.clear()
    torch.testing.assert_close(found[1], found[0])
    assert make is not Keeps or len(found[0]) == 6
