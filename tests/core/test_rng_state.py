"""States of generators are read, compared and put back, wherever the generators are held."""

import random

import numpy
import pytest
import torch

from ortmodule.core import rng_state

MAKE = {
    "Python's": lambda: random.Random(3),
    "a bit generator": lambda: numpy.random.PCG64(3),
    "a RandomState": lambda: numpy.random.RandomState(3),
    "Philox, whose state has arrays": lambda: numpy.random.Philox(3),
}
DRAW = {random.Random: lambda g: g.random(), numpy.random.RandomState: lambda g: g.rand()}


def draw(generator):
    return DRAW.get(type(generator), lambda g: g.random_raw())(generator)


@pytest.mark.parametrize("kind", MAKE)
def test_states_are_compared(kind):
    generator, twin = MAKE[kind](), MAKE[kind]()
    before = rng_state.state_of(generator)
    assert rng_state.equal(before, rng_state.state_of(twin))
    draw(generator)
    assert not rng_state.equal(before, rng_state.state_of(generator))


@pytest.mark.parametrize("kind", MAKE)
def test_put_back(kind):
    generator = MAKE[kind]()
    with rng_state.found():
        states = rng_state.States()
        first = [draw(generator), torch.rand(2), random.random(), numpy.random.rand()]
        states.put_back()
        again = [draw(generator), torch.rand(2), random.random(), numpy.random.rand()]
    assert [str(value) for value in first] == [str(value) for value in again]


def test_torchs_alone():
    states = rng_state.States(())
    first, others = torch.rand(2), random.random()
    assert states.moved() == []
    states.put_back()
    assert torch.equal(torch.rand(2), first)
    assert random.random() != others


def test_those_that_are_asked_for():
    """NumPy's here, and not Python's."""
    generator = numpy.random.RandomState(1)
    states = rng_state.States([generator])
    number, other = generator.rand(), random.random()
    assert states.moved() == [generator]
    states.put_back()
    assert states.moved() == [] and generator.rand() == number and random.random() != other


def test_found_are_those_that_were_alive():
    generator = numpy.random.RandomState(1)
    with rng_state.found():
        later = numpy.random.RandomState(2)
        ids = {id(each) for each in rng_state.of_numpy()}
        assert id(generator) in ids and id(later) not in ids


def test_a_generator_that_was_met_gets_its_state_back():
    generator = torch.Generator().manual_seed(5)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(5))
    with rng_state.found():
        rng_state.meet(generator)
        torch.rand(2, generator=generator)
        rng_state.meet(generator)  # it keeps the first state
    assert torch.equal(torch.rand(2, generator=generator), expected)
