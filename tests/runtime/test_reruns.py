"""Calls that PyTorch ran are known again in backward, by the generators' states and the memory of their inputs."""

import pytest
import torch

from ortmodule.runtime.calls import reruns
from ortmodule.runtime.calls.reruns import Reruns


@pytest.fixture
def backward(monkeypatch):
    """Sets whether backward is under way."""

    def set_(value):
        monkeypatch.setattr(reruns, "in_backward", lambda: value)

    set_(False)
    return set_


def noted(x, draws=0):
    known = Reruns()
    with torch.no_grad(), known.noting([x]):
        torch.rand(draws or 1) if draws else None
    return known


def test_the_same_call(backward):
    x = torch.ones(3)
    known = noted(x)
    backward(True)
    assert known.is_rerun([x]) and known.is_rerun([x])
    assert not known.is_rerun([x.clone()]) and not known.is_rerun([x[1:]])


def test_other_states_of_generators(backward):
    x = torch.ones(3)
    known = noted(x)
    torch.rand(1)
    backward(True)
    assert not known.is_rerun([x])


def test_a_call_that_has_drawn_is_known_by_its_state(backward):
    state = torch.get_rng_state()
    known = noted(torch.ones(3), draws=2)
    torch.set_rng_state(state)  # as a checkpoint does
    backward(True)
    assert known.is_rerun([torch.zeros(5)])


def test_a_call_of_its_own_is_forgotten(backward):
    x = torch.ones(3)
    known = noted(x)
    assert not known.is_rerun([x])  # outside of backward
    backward(True)
    assert not known.is_rerun([x])


def test_what_is_not_noted(backward):
    known, x = Reruns(), torch.ones(3)
    with known.noting(None):
        pass
    with known.noting([x]):  # gradients, and no checkpoint
        pass
    backward(True)
    with torch.no_grad(), known.noting([x]):
        pass
    assert not known.calls


def test_the_latest_stay(backward, monkeypatch):
    monkeypatch.setattr(reruns, "MOST_CALLS", 2)
    known, tensors = Reruns(), [torch.ones(3) for _ in range(3)]
    for x in tensors:
        with torch.no_grad(), known.noting([x]):
            pass
    backward(True)
    assert [known.is_rerun([x]) for x in tensors] == [False, True, True]
