"""Errors that carry something carry it to where they are caught."""

import gc
import weakref

import pytest

from ortmodule.core import errors
from ortmodule.core.errors import Cause
from ortmodule.core.settings.setting_types import FALLBACK_POLICY


def test_the_submodule_that_is_to_blame():
    with pytest.raises(errors.NotTraceable) as caught, errors.blaming("layer.1"):
        raise errors.NotTraceable("it reads a clock")
    assert caught.value.submodule == "layer.1"
    with pytest.raises(errors.ExportError), errors.blaming("layer.1"):
        raise errors.ExportError("of another kind")


def test_a_call_that_the_engine_cannot_run():
    error = errors.NotInEngine(Cause.DATA, "an input is on another device", key="k")
    assert (error.cause, error.reason, error.key) == (Cause.DATA, str(error), "k")
    assert error.warning is error.guards is error.finish is None


def test_what_waits():
    error = errors.Waits("variant", "there is no graph yet", "said once")
    assert isinstance(error, errors.NotInEngine) and error.cause is Cause.TORCH_MODEL
    assert (error.variant, error.inputs, error.warning, error.key) == ("variant", None, "said once", None)


def test_handlers_of_user_code_do_not_take_it():
    for kind in (errors.FillsCache, errors.CallsOwn):
        assert not issubclass(kind, Exception)
    error = errors.FillsCache("forward fills a cache", ["slot"], tables=["table"])
    assert (error.slots, error.numbers, error.tables) == (["slot"], (), ["table"])


def test_policies_allow_every_cause():
    for cause in Cause:
        assert FALLBACK_POLICY.parse(cause.value) == {cause.value}


class Held:
    pass


def test_an_error_does_not_hold_who_asked():
    held = Held()
    alive = weakref.ref(held)

    def fails(held):
        raise errors.DoesNotHold("another value", "a.py:3", 2.0, (("a.py:1", 1.0),), "layer")

    try:
        fails(held)
    except errors.DoesNotHold as error:
        assert (error.place, error.value, error.found, error.submodule) == ("a.py:3", 2.0, (("a.py:1", 1.0),), "layer")
    del held
    gc.collect()
    assert alive() is None
