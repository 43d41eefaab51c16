"""`_core.look_at_calls`: which calls of a thread are told, and what becomes of errors and of other profilers."""

import random
import sys
import threading
import time

import pytest

from ortmodule import _core


def plain():
    return len([])


def special():
    return plain()


def looked(body, *, called=None, began=None, functions=(time.time,), owners=(type,), bases=(random.Random,), trace=1):
    """What is told while ``body`` runs: names of functions of C's and of Python's; all code that has run."""
    told, ran = [], {}
    called = called or (lambda frame, function, owner: told.append((function.__name__, owner, frame.f_code.co_name)))
    began = began or (lambda frame: told.append(frame.f_code.co_name))
    seen = {id(special.__code__): True}
    _core.look_at_calls(called, began, set(functions), owners, bases, seen, ran, lambda: trace)
    try:
        body()
    finally:
        sys.setprofile(None)
    return told, ran


def test_what_is_told():
    generator = random.Random(0)

    def body():
        time.time()
        time.monotonic()
        generator.getrandbits(3)
        int.from_bytes(b"1", "big")
        [].append(1)
        for _ in range(2):
            special()

    told, ran = looked(body)
    assert told == [
        ("time", time, "body"), ("getrandbits", generator, "body"), ("from_bytes", int, "body"), "special", "special"
    ]  # fmt: skip
    assert ran == {body.__code__: globals(), plain.__code__: globals()}
    assert looked(body, trace=None) == (told, {})


def test_put_back_by_who_takes_it_away():
    def body():
        before = sys.getprofile()
        sys.setprofile(None)
        special()
        sys.setprofile(before)
        special()
        time.time()
        assert sys.getprofile() is not None

    assert looked(body)[0] == ["special", ("time", time, "body")]


def test_an_error_ends_the_looking():
    def refuse(*told):
        raise LookupError("refused")

    def body():
        with pytest.raises(LookupError, match="refused"):
            time.time()
        time.time()  # it is told no more
        assert sys.getprofile() is None

    looked(body, called=refuse)

    def begins():
        with pytest.raises(LookupError, match="refused"):
            special()
        special()

    looked(begins, began=refuse)


def test_other_threads_are_not_looked_at():
    def body():
        thread = threading.Thread(target=special)
        thread.start()
        thread.join()

    assert "special" not in looked(body)[0]


@pytest.mark.parametrize("given", [{"functions": [1], "owners": (int, 3)}, {"bases": ("random",)}])
def test_what_is_no_type_is_refused(given):
    with pytest.raises(TypeError, match="owners and bases are types"):
        looked(plain, **given)
    assert sys.getprofile() is None


def test_nothing_is_left():
    """What was given is let go of."""
    told, ran = looked(special)
    before = sys.getrefcount(ran), sys.getrefcount(time.time)
    for _ in range(100):
        looked(special)
    assert (sys.getrefcount(ran), sys.getrefcount(time.time)) == before
