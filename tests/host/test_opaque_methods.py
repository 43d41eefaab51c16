"""A method of a submodule that no trace can follow is one node that PyTorch runs; the rest is the engine's."""

import copy
import itertools

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain


class Part(nn.Module):
    """Positions count anew behind every change of the kind: what Python loops find out."""

    def __init__(self):
        super().__init__()
        self.table, self.linear, self.last = nn.Embedding(64, 8), nn.Linear(8, 8), None

    def forward(self, x, kinds):
        return self.linear(x + self.table(self.positions(kinds)))

    def positions(self, kinds):
        return torch.tensor([self.counted(row) for row in kinds.tolist()])

    def counted(self, row):
        return [i for _, group in itertools.groupby(row) for i, _ in enumerate(group)]


class Nested(Part):
    def positions(self, kinds):
        return self.found(kinds) * 1

    def found(self, kinds):
        return super().positions(kinds)


class Sets(Part):
    def positions(self, kinds):
        self.last = super().positions(kinds)
        return self.last


class Pairs(Part):
    def forward(self, x, kinds):
        (places, none), found = self.several(kinds, offset=1)
        assert none is None
        return self.linear(x + self.table(places) * found[..., None])

    def several(self, kinds, offset):
        return (super().positions(kinds) + offset, None), [(kinds > 0).float() for _ in kinds.tolist()][0]


class Differentiable(Part):
    """What it computes carries a gradient, of a parameter that it finds itself."""

    def forward(self, x, kinds):
        return self.linear(x + self.looked_up(kinds))

    def looked_up(self, kinds):
        return self.table(super().positions(kinds))


class Numbers(Part):
    def positions(self, kinds):
        return super().positions(kinds) * self.longest(kinds)

    def longest(self, kinds):
        return max(max(self.counted(row)) for row in kinds.tolist())


class Whole(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 8), part, nn.Linear(8, 3)

    def forward(self, x, kinds):
        return self.last(self.part(self.first(x), kinds).tanh()).square().mean()


def batch(rows, length, seed):
    make = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, 8, generator=make), torch.randint(0, 2, (rows, length), generator=make)


def compared(part):
    """The report after some batches that came out as in PyTorch, and both modules."""
    torch.manual_seed(0)
    eager = Whole(part())
    ours = ORTModule(copy.deepcopy(eager))
    for seed, (rows, length) in enumerate([(2, 12), (3, 20), (2, 12), (2, 9)]):
        x, kinds = batch(rows, length, seed)
        found = []
        for module in (ours, eager):
            module.zero_grad()
            operand = x.clone().requires_grad_()
            loss = module(operand, kinds)
            loss.backward()
            found.append([loss, operand.grad, *[p.grad for p in module.parameters()]])
        torch.testing.assert_close(*found)
        if part is Sets:
            torch.testing.assert_close(ours.part.last, eager.part.last)
    report = explain(ours)
    assert report.captured, report.fallback
    return report


@pytest.mark.parametrize(
    ("part", "name"),
    [(Part, "positions"), (Nested, "found"), (Sets, "positions"), (Pairs, "several")],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.filterwarnings("ignore:.*PyTorch runs")
def test_it_alone_is_left_to_pytorch(part, name):
    report = compared(part)
    assert report.python_ops == [f"part.{name}"] and report.exports == 1


@pytest.mark.parametrize("part", [Differentiable, Numbers], ids=lambda part: part.__name__)
@pytest.mark.filterwarnings("ignore:.*PyTorch runs")
def test_what_gives_more_than_tensors_without_a_gradient_is_not(part):
    assert compared(part).python_ops in (["part"], ["part.positions"])


def test_the_warning_names_it():
    with pytest.warns(UserWarning, match="PyTorch runs the method part.positions inside the graph: .*takes the values"):
        ORTModule(Whole(Part()))(*batch(2, 12, 0))


@pytest.mark.filterwarnings("ignore:.*PyTorch runs")
def test_an_error_in_it_is_the_callers():
    class Raises(Part):
        def positions(self, kinds):
            if kinds.max() > 1 and torch._C._get_tracing_state() is None:
                raise KeyError("no such kind")
            return super().positions(kinds)

    ours = ORTModule(Whole(Raises()))
    x, kinds = batch(2, 12, 0)
    ours(x, kinds)
    with pytest.raises(KeyError, match="no such kind"):
        ours(x, kinds + 1)
    ours(x, kinds).backward()
    assert explain(ours).captured


@pytest.mark.filterwarnings("ignore:.*PyTorch runs")
def test_classes_are_as_they_were():
    ours = ORTModule(Whole(Part()))
    before = dict(vars(Part))
    ours(*batch(2, 12, 0)).backward()
    assert explain(ours).captured and dict(vars(Part)) == before
