"""Objects of some types are found wherever they are held, whatever the garbage collector has done since."""

import gc
import random
import sys
import threading
import weakref

import numpy
import pytest

from ortmodule.core.objects.live_objects import LiveObjects, Noted
from ortmodule.core.rng_state import found, generators


class Own(random.Random):
    pass


BIT_GENERATOR = type(numpy.random.default_rng().bit_generator)
MADE = [random.Random, Own, BIT_GENERATOR, numpy.random.RandomState]


@pytest.fixture
def kinds():
    return LiveObjects((random.Random, numpy.random.BitGenerator, numpy.random.RandomState))


def assert_found(kinds, made):
    found = {id(each) for each in kinds.all()}
    assert all(id(each) in found for each in made)


@pytest.mark.parametrize("generation", [None, 1, 2])
@pytest.mark.parametrize("looked", [False, True], ids=["first look", "later look"])
def test_found_at_any_age(kinds, generation, looked):
    if looked:
        kinds.all()
    made = [make() for make in MADE]
    if generation is not None:
        gc.collect(generation)
    assert_found(kinds, made)
    gc.collect(1)
    assert_found(kinds, made)


@pytest.mark.parametrize("when", ["before", "between"])
def test_found_where_the_program_freezes_objects(kinds, when):
    if when == "between":
        kinds.all()
    made = [make() for make in MADE]
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        assert_found(kinds, made)
        assert_found(kinds, made)
        assert gc.get_freeze_count() > frozen / 2  # some have been let go of
    finally:
        gc.unfreeze()
    assert_found(kinds, made)


@pytest.mark.parametrize("make", MADE, ids=lambda kind: kind.__name__)
def test_not_kept(make):
    """By the one that captures ask (another would hold what knows no weak references as well)."""

    def count():
        with found():
            return len(generators())

    count()
    before = count()
    many = [make() for _ in range(300)]
    gc.collect(1)
    assert count() >= before + 300  # a RandomState has a BitGenerator
    del many
    count()
    assert count() <= before


def test_the_collector_calls_nothing_afterwards():
    before = list(gc.callbacks)
    noted = Noted((Own,))
    assert len(gc.callbacks) == len(before) + 1
    noted.close()
    noted.close()
    forgotten = weakref.ref(Noted((Own,)))
    assert gc.callbacks == before and forgotten() is None


def test_collections_while_it_is_asked():
    """In the same thread, and in others."""
    kinds, stop, errors = LiveObjects((Own,)), threading.Event(), []

    def work():
        try:
            while not stop.is_set():
                mine = [Own() for _ in range(200)]
                gc.collect(1)
                found = {id(each) for each in kinds.all()}
                assert all(id(each) in found for each in mine)
        except BaseException as error:
            errors.append(error)

    before = gc.get_threshold()
    gc.set_threshold(5, 2, 10)
    threads = [threading.Thread(target=work) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        stop.wait(1)
        stop.set()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
    assert not errors


def test_a_collection_where_there_are_no_builtins(monkeypatch):
    """The collector may run in a frame without them, as a named tuple's `__new__` is one."""
    errors = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    noted, kept = Noted((Own,)), Own()
    eval("lambda collect: collect(1)", {"__builtins__": {}})(gc.collect)
    assert not errors and any(each is kept for each in noted.all())
    noted.close()
