"""The tensors that are made while a submodule runs by itself, whatever the garbage collector is told meanwhile."""

import gc
import threading

import pytest
import torch

from ortmodule.host.escapes import Young


@pytest.fixture(autouse=True)
def nothing_stays_frozen():
    before = gc.get_freeze_count()
    yield
    assert gc.get_freeze_count() <= before  # the interpreter has some of its own, from 3.12 on


def test_new_ones_alone():
    before = torch.ones(2)
    young = Young()
    after, gone = torch.ones(3), torch.ones(4)
    del gone
    gc.collect()
    found = young.tensors()
    assert any(t is after for t in found) and not any(t is before for t in found)
    assert all(t.shape != (4,) for t in found)


def test_two_at_a_time():
    old = torch.ones(2)
    first, second = Young(), Young()
    new = torch.ones(3)
    for young in (second, first):
        found = young.tensors()
        assert any(t is new for t in found) and not any(t is old for t in found)


def test_a_program_that_has_frozen_objects():
    old = torch.ones(2)
    gc.freeze()
    frozen = gc.get_freeze_count()
    young = Young()
    new = torch.ones(3)
    found = young.tensors()
    assert any(t is new for t in found) and not any(t is old for t in found)
    assert gc.get_freeze_count() == frozen
    gc.unfreeze()


def test_closed_after_an_error():
    young = Young()
    young.close()
    young.close()
    worker = threading.Thread(target=lambda: Young().close())
    worker.start()
    worker.join()
