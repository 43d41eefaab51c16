"""Containers inside of attributes are found again by the way to them, and their items are set there."""

from collections import deque

import pytest
import torch

from ortmodule.guards.inventory import Slot
from ortmodule.guards.reads.inside_slots import InsideSlot, Way, are_found, steps_to
from ortmodule.guards.reads.item_reads import FIELD, ITEM


class Thing:
    pass


def nested():
    thing = Thing()
    thing.rows = [1, {"deep": deque([5])}]
    return {"state": thing}


def way(holder, *steps):
    return Way(Slot("module.state", holder, "state"), steps)


def test_the_shortest_way():
    holder = nested()
    thing = holder["state"]
    assert steps_to(thing, thing.rows) == ((FIELD, "rows"),)
    assert steps_to(thing, thing.rows[1]["deep"]) == ((FIELD, "rows"), (ITEM, 1), (ITEM, "deep"))
    assert steps_to(thing, vars(thing)) == ()
    thing.again = thing.rows[1]["deep"]
    assert steps_to(thing, thing.again) == ((FIELD, "again"),)
    assert steps_to(thing, []) is None


def test_circles_end():
    thing = Thing()
    thing.own = thing
    assert steps_to(thing, {}) is None


def test_tensors_are_not_looked_into():
    x = torch.ones(2)
    x.extra = []
    assert steps_to([x], x.extra) is None


def test_found_and_named():
    holder = nested()
    path = way(holder, (FIELD, "rows"), (ITEM, 1), (ITEM, "deep"))
    assert path.find() is holder["state"].rows[1]["deep"]
    assert path.label() == "module.state.rows[1]['deep']"
    assert way(holder).find() is vars(holder["state"])
    with pytest.raises(LookupError):
        way(holder, (FIELD, "columns")).find()


def slot(holder, key, *steps, number=0, whole=False):
    return InsideSlot("state", {}, key, (way(holder, *steps),), number, whole)


def test_items_are_set():
    holder = nested()
    item = slot(holder, "deep", (FIELD, "rows"), (ITEM, 1))
    assert item.get() is holder["state"].rows[1]["deep"]
    item.set(7)
    assert holder["state"].rows[1] == {"deep": 7}
    assert slot(holder, "none", (FIELD, "rows"), (ITEM, 1)).find(3) == 3


def test_a_whole_container_is_filled():
    holder = nested()
    rows = holder["state"].rows
    whole = slot(holder, "rows", (FIELD, "rows"), whole=True)
    assert whole.get() is rows
    whole.set([8, 9])
    assert rows == [8, 9] and holder["state"].rows is rows


def test_are_found():
    holder = nested()
    rows, deep = ((FIELD, "rows"),), ((FIELD, "rows"), (ITEM, 1))
    one, other = slot(holder, 0, *rows, number=0), slot(holder, "deep", *deep, number=1)
    assert are_found([one, other, Slot("plain", {}, "x")])
    assert not are_found([one, slot(holder, 0, *rows, number=1)])  # two numbers for one container
    assert not are_found([one, slot(holder, "deep", *deep, number=0)])  # one number for two
    holder["state"].rows = []
    assert not are_found([one, other])
