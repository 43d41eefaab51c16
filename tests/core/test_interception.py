"""Replacements of attributes: in place for a while, undone in any order, also after an error."""

import threading

import pytest

from ortmodule.core.objects.interception import Replacement, as_found, original, replaced


class Base:
    def name(self):
        return "base"


class Derived(Base):
    def own(self):
        return "own"


def test_the_latest_is_called_and_each_is_undone():
    before = dict(vars(Derived))
    with replaced([Replacement(Derived, "own", lambda self: "first")]):
        assert Derived().own() == "first" and original(Derived, "own") is before["own"]
        with replaced([Replacement(Derived, "own", lambda self: "second")]):
            assert Derived().own() == "second"
        assert Derived().own() == "first"
    assert dict(vars(Derived)) == before


def test_what_was_inherited_is_inherited_again():
    with replaced([Replacement.around(Derived, "name", lambda function: lambda self: function(self) + "!")]):
        assert Derived().name() == "base!" and Base().name() == "base"
    assert "name" not in vars(Derived) and Derived().name() == "base"


def test_what_was_not_there_goes_away():
    with replaced([Replacement(Derived, "__len__", lambda self: 3)]):
        assert len(Derived()) == 3
    assert not hasattr(Derived, "__len__")


def test_all_are_undone_after_an_error():
    class Closed(type):
        def __setattr__(cls, name, value):
            raise TypeError("closed")

    class Fixed(metaclass=Closed):
        pass

    before = dict(vars(Derived))
    with (
        pytest.raises(TypeError, match="closed"),
        replaced([Replacement(Derived, "own", None), Replacement(Fixed, "own", None)]),
    ):
        raise AssertionError("nothing is inside")
    assert dict(vars(Derived)) == before
    with pytest.raises(KeyError), replaced([Replacement(Derived, "own", None)]):
        raise KeyError
    assert dict(vars(Derived)) == before


def test_two_threads_may_end_in_any_order():
    """The first to begin ends first: what the other has put in place stays, and the original comes back after it."""
    before, entered, left = vars(Derived)["own"], threading.Event(), threading.Event()

    def other():
        with replaced([Replacement(Derived, "own", lambda self: "other")]):
            entered.set()
            assert left.wait(10)

    with replaced([Replacement(Derived, "own", lambda self: "mine")]):
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10) and Derived().own() == "other"
    assert Derived().own() == "other"
    left.set()
    thread.join()
    assert vars(Derived)["own"] is before


def test_as_found():
    with replaced([Replacement(Derived, "own", lambda self: "new")]):
        with as_found(Derived, "own"):
            assert Derived().own() == "own"
        assert Derived().own() == "new"
    with as_found(Derived, "own"):
        assert Derived().own() == "own"
