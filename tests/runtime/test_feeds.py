"""Tensors of a graph stand among the caller's inputs, by number, or in the module, by slot."""

import torch

from ortmodule.capture.trace_record import Source, Write
from ortmodule.core.names import INPUT, STATE
from ortmodule.guards.inventory import Slot
from ortmodule.runtime.tensors.feeds import dtensors_among, feed_of, target_of, written_in_place


class Tree:
    slots = {"layer.weight": Slot("layer.weight", {"weight": torch.ones(1)}, "weight")}


WEIGHT = Tree.slots["layer.weight"]


def test_by_name():
    assert feed_of(f"{INPUT}12", Tree) == 12
    assert feed_of(f"{STATE}layer.weight", Tree) is WEIGHT


def test_of_a_write():
    assert target_of(Source("input", 3), Tree) == 3
    assert target_of(Source("state", "layer.weight"), Tree) is WEIGHT


def test_written_in_place():
    source = Source("input", 0)
    writes = [
        (0, Write(source, 4, replaces=False, carries=True)),
        (1, Write(source, 5, replaces=False)),
        (WEIGHT, Write(source, 6, replaces=False, carries=True)),
        (2, Write(source, 7, replaces=True, carries=True)),
        (3, Write(source, None, replaces=False, carries=True)),
    ]
    assert written_in_place(writes) == ([0, 1, WEIGHT, 3], [(0, 4), (2, 7)])


def test_no_dtensors():
    assert dtensors_among([0, WEIGHT]) == []
