"""New contents go where a write says: a new object, new memory, or the same memory."""

import pytest
import torch

from ortmodule.capture.trace_record import Source, Write
from ortmodule.guards.inventory import Slot
from ortmodule.runtime.tensors.shared_memory import overlap, put

BUFFER = Source("state", "buffer")


def test_in_place():
    held = {"buffer": torch.zeros(3)}
    before, slot = held["buffer"], Slot("buffer", held, "buffer")
    put(slot, Write(BUFFER, 0, replaces=False), torch.ones(3), [])
    assert held["buffer"] is before and before.tolist() == [1, 1, 1]
    put(slot, None, torch.full((3,), 2.0), [])
    assert held["buffer"] is before and before.tolist() == [2, 2, 2]


def test_a_new_object():
    held = {"buffer": torch.zeros(3)}
    before, new = held["buffer"], torch.ones(2)
    put(Slot("buffer", held, "buffer"), Write(BUFFER, 0, replaces=True), new, [])
    assert held["buffer"] is new and before.tolist() == [0, 0, 0]


def test_new_memory():
    held = {"buffer": torch.zeros(3)}
    before, new = held["buffer"], torch.ones(2)
    put(Slot("buffer", held, "buffer"), Write(BUFFER, 0, replaces=False, data=True), new, [])
    assert held["buffer"] is before and before.data_ptr() == new.data_ptr()


@pytest.mark.parametrize("replaces", [False, True])
def test_an_input_stays_the_callers(replaces):
    inputs = [torch.zeros(2), torch.zeros(2)]
    put(1, Write(Source("input", 1), 0, replaces=replaces), torch.ones(2), inputs)
    assert [t.tolist() for t in inputs] == [[0, 0], [1, 1]]


def test_overlap():
    x = torch.zeros(4, 4)
    assert overlap(x, x[2]) and overlap(x[:, 1], x[:, 2])  # from the first element to the last
    assert not overlap(x[:2], x[2:]) and not overlap(x, x.clone())
    assert not overlap(x[1:1], x)
