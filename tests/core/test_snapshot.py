"""What is kept is put back: containers, attributes, elements of tensors."""

from collections import OrderedDict, deque

import numpy
import pytest
import torch
from torch import nn

from ortmodule.core.snapshot import Attribute, Elements, Items, SlotItems, Snapshot


class Counting(dict):
    """As registries do, it does not store what it is given."""

    def __setitem__(self, key, value):
        super().__setitem__(f"{key}!", value)

    def items(self):
        raise AssertionError("a method of the user's is called")


CONTAINERS = {
    "dict": ({"a": 1}, lambda c: c.update(a=2)),
    "longer": ({"a": 1}, lambda c: c.update(b=2)),
    "ordered": (OrderedDict(a=1, b=2), lambda c: c.popitem()),
    "derived": (Counting(a=1), lambda c: c.clear()),
    "list": ([1, 2], lambda c: c.append(3)),
    "set": ({1, 2}, lambda c: c.discard(1)),
    "deque": (deque([1, 2]), lambda c: c.rotate()),
    "bytes": (bytearray(b"ab"), lambda c: c.extend(b"c")),
    "array": (numpy.arange(3), lambda c: c.fill(7)),
}


def contents(container):
    return dict.copy(container) if isinstance(container, dict) else list(container)


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(name):
    container, change = CONTAINERS[name]
    kept, before = Items(container), contents(container)
    assert not kept.changed()
    change(container)
    assert kept.changed() and contents(container) != before
    kept.put_back()
    assert not kept.changed() and contents(container) == before


def test_the_dictionaries_of_a_scripted_module():
    module = torch.jit.script(nn.Linear(2, 2))
    weight, kept = module.weight, Items(module._parameters)
    module._parameters["weight"] = nn.Parameter(torch.zeros(2, 2))
    assert kept.changed()
    kept.put_back()
    assert module.weight is weight and not kept.changed()


def test_an_attribute_and_a_cell():
    owner, value = nn.Linear(2, 2), 1
    kept = [Attribute(owner, "in_features"), Attribute((lambda: value).__closure__[0], "cell_contents")]
    owner.in_features, value = 3, 2
    assert all(each.changed() for each in kept)
    for each in kept:
        each.put_back()
    assert (owner.in_features, value) == (2, 1)


@pytest.mark.parametrize("always", [False, True])
def test_elements(always):
    tensor = torch.zeros(3)
    kept = Elements(tensor, tensor.clone(), always)
    assert not kept.changed()
    tensor.add_(1)
    assert kept.changed()
    kept.put_back()
    assert not tensor.any()
    tensor.numpy()[:] = 1  # no version tells
    kept = Elements(tensor, torch.zeros(3), always)
    kept.put_back()
    assert tensor.any() != always


class Kept:
    def __init__(self, order, number, error=None):
        self.order, self.number, self.error = order, number, error

    def changed(self):
        return self.number > 1

    def put_back(self):
        self.order.append(self.number)
        if self.error is not None:
            raise self.error


def test_all_is_put_back_in_reverse_order():
    order = []
    snapshot = Snapshot([Kept(order, 1)])
    assert snapshot.changed() is None
    snapshot.add_named("two", Kept(order, 2, ValueError("the second")))
    snapshot.add_named("three", Kept(order, 3, ValueError("the third")))
    assert snapshot.changed() == "two"
    with pytest.raises(ValueError, match="the third"), snapshot.around():
        assert not order
    assert order == [3, 2, 1]


def test_attributes_in_slots():
    class Held:
        __slots__ = ("a", "b")

    held = Held()
    held.a = 1
    kept = SlotItems(held)
    held.b = 2
    assert kept.changed() and [*kept.items()] == [1, 2]
    held.a = 3
    kept.put_back()
    assert held.a == 1 and not hasattr(held, "b") and not kept.changed()
