"""Reads of a run are compared with those of the trace: sizes once a shape, data every time."""

import copy

import pytest
import torch

from ortmodule import ORTModule, explain
from ortmodule.capture.numbers.read_causes import DATA, SIZE
from ortmodule.capture.scalar_guards import Read
from ortmodule.core.errors import DoesNotHold
from ortmodule.runtime.tensors import read_checks
from ortmodule.runtime.tensors.read_checks import ReadChecks
from tests.twins import made, rows


class Traced:
    """What a trace says of itself."""

    nodes, seen, writes = (), (), ()

    def __init__(self, sizes=(), data=()):
        self.size_reads = [Read(None, value, SIZE, f"sizes.py:{i}") for i, value in enumerate(sizes)]
        self.data_reads = [Read(None, value, DATA, f"data.py:{i}", "layer") for i, value in enumerate(data)]


class Ran:
    known = None


def checks(**reads):
    return ReadChecks(Traced(**reads), None, Ran(), 1, {})


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


RESULT = torch.zeros(2)


def test_equal():
    checks(sizes=(3, 4), data=(0.5,)).check(((2,),), [RESULT, vector(3, 4), vector(0.5)])
    checks().check(((2,),), [RESULT])


def test_nan_is_nan():
    checks(data=(float("nan"),)).check((), [RESULT, vector(float("nan"))])


def test_other_data():
    with pytest.raises(DoesNotHold, match="data.py:1 found 3, and 2 when it was traced") as caught:
        checks(data=(1, 2, 5)).check((), [RESULT, vector(1, 3, 7)])
    error = caught.value
    assert (error.place, error.value, error.submodule) == ("data.py:1", 3.0, "layer")
    assert error.found == (("data.py:0", 1.0), ("data.py:1", 3.0))


def test_sizes_are_compared_once_a_shape():
    each = checks(sizes=(3,))
    with pytest.raises(DoesNotHold, match="sizes.py:0 found 4") as caught:
        each.check(((4,),), [RESULT, vector(4)])
    assert each.known == {((4,),): caught.value}
    each.check(((4,),), [RESULT, vector(4)])  # the caller looks into `known` before
    each.check(((3,),), [RESULT, vector(3)])
    assert each.known[((3,),)] is None


def test_data_is_compared_every_time():
    each = checks(data=(1,))
    each.check(((3,),), [RESULT, vector(1)])
    with pytest.raises(DoesNotHold):
        each.check(((3,),), [RESULT, vector(2)])


def test_what_is_known_is_bounded(monkeypatch):
    monkeypatch.setattr(read_checks, "MOST_SHAPES", 2)
    each = checks(sizes=(3,))
    for n in range(5):
        each.check(((n,),), [RESULT, vector(3)])
    assert ((4,),) in each.known and len(each.known) <= 2


def test_coming_first_is_worth_it_after_misses():
    each = checks(data=(1,))
    each.early, each._part = object(), 0.25  # a quarter of the graph
    assert not each.come_first(1, 3) and each.come_first(2, 3)
    assert not checks(sizes=(3,)).come_first(9, 0)


def behind(choose):
    """A module whose rows are chosen by ``choose``, and of which Python reads how many there are."""

    def forward(self, x):
        y = x[choose(x.shape[0])]
        return self.linear(y.topk(min(3, y.shape[0]), 0)[0])

    return made(forward)


CHOICES = {
    "randperm": lambda n: torch.randperm(n),
    "multinomial": lambda n: torch.multinomial(torch.ones(n), 4),
    "poisson": lambda n: torch.poisson(torch.ones(n)) > 0,
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_what_is_drawn_for_a_read_is_not_drawn_again(choose):
    """PyTorch draws as often as eager, so results and the generator are eager's."""
    eager = behind(choose)
    ours = ORTModule(copy.deepcopy(eager))
    for number, n in enumerate((8, 9, 8, 12, 8)):
        found = []
        for module in (ours, eager):
            torch.manual_seed(number)
            found.append((module(rows(n, 4)), torch.rand(())))
        torch.testing.assert_close(*found)
    assert explain(ours).captured, explain(ours).fallback
