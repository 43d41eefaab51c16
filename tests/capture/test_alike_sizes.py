"""A second trace has sizes at which Python reads from sizes what it has read in the first."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.capture.alike_sizes import alike
from ortmodule.capture.scalar_guards import Read
from ortmodule.core.size_expr import _ARITHMETIC, SizeFormula, _constant, _size
from tests.selection import each
from tests.twins import step

DIM = (0, 1)


def read(size, *operations, place="here"):
    """What comes of a size by operators, each with a number."""
    steps = [(_size, 0)]
    for kind, number in operations:
        steps += [(_constant, number), (_ARITHMETIC[f"aten::{kind}"], (len(steps) - 1, len(steps)))]
    formula = SizeFormula((size,), tuple(steps))
    return Read(None, float(formula.at([size])), 1, place, None, formula)


def parts(size, length):
    return read(size, ("add", length - 1), ("floor_divide", length))


def chosen(first, other, reads, others):
    found = alike({DIM: first}, {DIM: other}, frozenset({DIM}), reads, others)
    return None if found is None else found[DIM]


def test_the_same_number_of_parts():
    n = chosen(8, 6, [parts(8, 3)], [parts(6, 3)])
    assert n in (7, 9)
    assert chosen(8, 6, [parts(8, 3)], None) == n  # the second has failed


def test_a_size_of_something_computed():
    """`x[:, 1:]` and twice as much."""
    assert chosen(8, 6, [parts(7, 3)], [parts(5, 3)]) in (9, 10)
    assert chosen(8, 6, [parts(16, 5)], [parts(12, 5)]) in (9, 10)


def test_one_side_of_a_comparison():
    assert chosen(5, 3, [read(5, ("gt", 4))], [read(3, ("gt", 4))]) > 5


def test_no_other_size_is_like_it():
    assert chosen(8, 6, [read(8)], [read(6)]) is None
    assert chosen(8, 6, [read(8, ("eq", 8))], [read(6, ("eq", 8))]) is None


def test_traces_that_differ_in_something_else():
    assert chosen(8, 6, [parts(8, 8)], [parts(6, 8)]) is None
    assert chosen(8, 6, [parts(8, 3)], [read(6, place="there")]) is None


class Cut(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.scale, self.use = nn.Parameter(torch.randn(6)), use

    def forward(self, x):
        return self.use(x * self.scale)


def unpacked(h):
    a, b, c = h.split(3, 1)
    return torch.cat([a * 2, b, c * c.shape[1]], 1)


#: What Python does with a length, for lengths with which it does the same, and a trace at fewer has failed or differs.
USES = {
    "a bound": (lambda h: h * 2 if h.shape[1] > 5 else h.tanh(), (6, 7, 8, 12)),
    "two bounds": (lambda h: h * 2 if 6 < h.shape[1] <= 9 else h.tanh(), (7, 8, 9)),
    "the larger": (lambda h: h * max(h.shape[1], 5), (6, 7, 8, 20)),
    "unpacked": (unpacked, (7, 8, 9)),
    "a number of rounds": (lambda h: sum(h * i for i in range(int(h.shape[1] // 4))) + h, (8, 9, 10, 11)),
    "an error": (lambda h: h[:, : 7 + int(h.shape[1] >= 7)] if h.shape[1] >= 7 else h.nothing, (7, 8, 9)),
    "odd": (lambda h: h * 2 if h.shape[1] % 2 else h.tanh(), (7, 9, 11, 5)),
    "two lengths": (lambda h: h * 2 if h.shape[1] > 6 and h.shape[0] > 2 else h.tanh(), (7, 8, 12)),
}


@pytest.mark.filterwarnings("ignore")
@each("name", USES, ("a bound", "unpacked"))
def test_one_graph(name, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    torch.manual_seed(0)
    use, lengths = USES[name]
    eager = Cut(use)
    ours = ORTModule(copy.deepcopy(eager))
    for n in lengths:
        x = torch.randn(4, n, 6)
        torch.testing.assert_close(step(ours, x.clone()), step(eager, x.clone()), rtol=1e-4, atol=1e-5)
    report = explain(ours)
    assert report.captured and not report.pytorch_calls and report.exports <= 1 + (name == "two lengths"), report
