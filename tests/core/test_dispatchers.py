"""Tests that the dispatcher of an ORTModule is found, and that other objects have none."""

import copy

import pytest
from torch import nn

from ortmodule import ORTModule
from ortmodule.core.objects.dispatchers import dispatcher_of


def test_of_a_wrapped_module():
    plain = nn.Linear(2, 2)
    wrapped = ORTModule(plain)
    assert dispatcher_of(wrapped).module is plain
    assert dispatcher_of(copy.deepcopy(wrapped)).module is not plain


@pytest.mark.parametrize("other", [nn.Linear(2, 2), nn.Linear, ORTModule, None, "text"], ids=str)
def test_of_others(other):
    assert dispatcher_of(other) is None


class Watched(nn.Linear):
    def __getattribute__(self, name):
        assert name != "_ortmodule", "asked for"
        return super().__getattribute__(name)


def test_the_module_is_not_asked():
    assert dispatcher_of(Watched(2, 2)) is None
    assert isinstance(dispatcher_of(ORTModule(Watched(2, 2))).module, Watched)
