"""One seed is that of all generators that a training draws from."""

import random

import numpy
import torch

from ortmodule.compat.seed import set_seed


def drawn():
    return random.random(), numpy.random.rand(), torch.rand(1).item()


def test_all_generators():
    set_seed(5)
    first = drawn()
    set_seed(6)
    second = drawn()
    assert all(a != b for a, b in zip(first, second, strict=True))
    set_seed(5)
    assert drawn() == first


def test_a_seed_that_numpy_does_not_take():
    set_seed(2**40 + 1)
    first = drawn()
    set_seed(2**40 + 1)
    assert drawn() == first
