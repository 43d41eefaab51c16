"""Plain arguments are taken apart in one step, and their kinds tell apart what graphs are for."""

import contextlib
import itertools
import sys

import pytest
import torch

from ortmodule import ORTModule
from ortmodule.core import pytree
from ortmodule.core.errors import NotInEngine
from ortmodule.runtime.dispatcher import _flattened
from ortmodule.runtime.variants.plain_arguments import kind_of, modes

X, Y = torch.randn(2, 3), torch.randn(4)


def kind(*args, **kwargs):
    return kind_of(args, kwargs)[0]


@pytest.mark.parametrize("args", [(X, 1, "a", None), (X, X), (X, 0.5), ([X, Y], {"a": 1})], ids=str)
def test_flattened_is_what_flatten_gives(args):
    for _ in range(2):  # the second time it is remembered
        tensors, structure = _flattened(args, {"k": Y})
        expected, other = pytree.flatten((args, {"k": Y}))
        assert structure == other and [id(t) for t in tensors] == [id(t) for t in expected]


def test_what_cannot_be_taken_in():
    with pytest.raises(NotInEngine):
        _flattened((sys.stdout,), {})


DIFFERENT = {
    "a tensor": lambda: kind(X),
    "another rank": lambda: kind(Y),
    "another type": lambda: kind(X.double()),
    "a gradient": lambda: kind(X.clone().requires_grad_()),
    "by name": lambda: kind(x=X),
    "by another name": lambda: kind(y=X),
    "a float": lambda: kind(X, 0.5),
    "an integer": lambda: kind(X, 2),
    "true": lambda: kind(X, True),
    "false": lambda: kind(X, False),
    "a word": lambda: kind(X, "a"),
    "another word": lambda: kind(X, "b"),
    "none": lambda: kind(X, None),
    "two": lambda: kind(X, Y),
    "the other way round": lambda: kind(Y, X),
}


def test_kinds_that_differ():
    kinds = {name: make() for name, make in DIFFERENT.items()}
    with torch.no_grad():
        kinds["without gradients"] = kind(X)
    with torch.autocast("cpu"):
        kinds["autocast"] = kind(X)
    for (a, first), (b, second) in itertools.combinations(kinds.items(), 2):
        assert first != second, (a, b)


def test_values_of_numbers_and_sizes_are_no_part_of_it():
    assert kind(X, 0.5) == kind(X[:1], -1.0) and kind(X, 2) == kind(X, 3)
    assert kind_of((X, 2, 0.5), {"k": 3})[2] == [2, 0.5, 3]


NEGATIVE = torch.view_as_complex(torch.randn(2, 2)).conj().imag


@pytest.mark.parametrize("value", [[X], X.to_sparse(), torch.empty(0), NEGATIVE, 1j], ids=lambda v: type(v).__name__)
def test_what_is_not_plain(value):
    assert NEGATIVE.is_neg() and kind_of((value,), {}) is None


def test_a_tensor_that_is_there_twice():
    assert kind_of((X, X), {}) is None


def test_modes():
    outside = modes()
    with torch.inference_mode():
        assert modes() != outside
    assert modes() == outside


def test_modes_are_those_of_a_key():
    module = ORTModule(torch.nn.Linear(3, 3))
    for context in (contextlib.nullcontext(), torch.no_grad(), torch.autocast("cpu")):
        with context:
            module(X)
            assert any(key[2 : 2 + len(modes())] == modes() for key in module._ortmodule.graphs)
