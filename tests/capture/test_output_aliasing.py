"""Views are found from how two traces' tensors lie in memory, and made again at other sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.capture.output_aliasing import agreed, sightings
from ortmodule.core.errors import Unclear


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def index(size):
    """Some part of a dimension; sizes are at least 4."""
    return st.sampled_from([slice(None), slice(1, None), slice(-2, None), slice(0, 3), slice(None, None, 2), 0, -1])


STEPS = {
    "slice": lambda t, d, part: t[(slice(None),) * d + (part,)],
    "transpose": lambda t, d, part: t.transpose(d, 0),
    "unsqueeze": lambda t, d, part: t.unsqueeze(d),
    "expand": lambda t, d, part: t.unsqueeze(d).expand(*t.shape[:d], 3, *t.shape[d:]),
    "flatten": lambda t, d, part: t.flatten() if t.is_contiguous() else t,
    "split": lambda t, d, part: t.unflatten(-1, (2, -1)) if t.dim() and t.shape[-1] == 6 else t,
    "diagonal": lambda t, d, part: t.diagonal() if t.dim() > 1 else t,
}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3), index(4)), min_size=1, max_size=4),
    st.sampled_from([((4, 5, 6), (5, 7, 6), (6, 4, 6)), ((2, 8), (5, 6), (4, 9)), ((5,), (8,), (4,))]),
)
def test_what_is_found_is_right(steps, sizes):
    """What is found for two sizes gives, at a third, the tensor that the steps give, or shows that it does not."""
    traces, tensors = [], []
    for size in sizes:
        base = torch.arange(torch.Size(size).numel()).reshape(size)
        view = base
        for name, d, part in steps:
            view = STEPS[name](view, min(d, view.dim() - 1), part) if view.dim() else view
        traces.append(sightings([view], [(("input", 0), base)]) if view is not base else {})
        tensors.append((base, view))
    try:
        found = agreed(*traces[:2])
    except Unclear:
        found = {}
    # A graph's results have the ranks that they had in its trace.
    if 0 in found and len({view.dim() for _, view in tensors}) == 1:
        base, expected = tensors[2]
        if found[0].fits(base.shape, expected.shape):
            made = found[0].make(base, expected.shape)
            assert made.shape == expected.shape
            if torch.equal(made, expected) and not traces[0][0].view.is_contiguous():
                strides = zip(made.stride(), expected.stride(), made.shape, strict=True)
                assert made.data_ptr() == expected.data_ptr()
                assert all(one == other for one, other, size in strides if size > 1)


def test_plain_views_are_found():
    def views(n):
        base = torch.arange(n * 6.0).view(n, 6)
        found = [base.view(-1), base.t(), base[0], base[:, 1:3], base[-1], base.detach(), base[1:], base[:, -2]]
        return base, [*found, base.view(-1, 3, 2)[:, 1], torch.zeros(n, 6)]

    def seen(n):
        base, results = views(n)
        return sightings(results, [(("state", "w"), base)])

    found, (base, results) = agreed(seen(4), seen(7)), views(5)
    assert found.keys() == set(range(9))
    for i, view in found.items():
        made = view.make(base, results[i].shape)
        assert torch.equal(made, results[i])
        assert (made.data_ptr(), made.stride()) == (results[i].data_ptr(), results[i].stride())


def test_the_largest_result_is_the_base():
    def seen(n):
        base = torch.zeros(n, 6)
        return sightings([base[0], base, base[1:]], [])

    found = agreed(seen(4), seen(7))
    assert {i: view.base for i, view in found.items()} == {0: ("graph", 1), 2: ("graph", 1)}


def test_neighbours_are_no_views():
    """Parts of one tensor that is no result share no elements: they stay tensors of their own."""

    def seen(n):
        return sightings(list(torch.zeros(n, 6).chunk(3, 1)), [])

    assert not agreed(seen(4), seen(7))


def test_what_depends_on_values_is_no_view():
    def seen(n, where):
        base = torch.zeros(n, 6)
        return sightings([base[where]], [(("input", 0), base)])

    assert agreed(seen(6, 1), seen(7, 1))
    with pytest.raises(Unclear, match="tensor 0 of the result shares memory"):
        agreed(seen(6, 1), seen(8, 2))


def test_a_view_of_no_dimension():
    """All of meshgrid's results are views, the one of a number too; there is nothing to go along."""
    numbers = torch.arange(3.0), torch.tensor(2.0)

    def module(a, b):
        return torch.meshgrid(a, b, indexing="ij")

    found, again = ORTModule(Function(module)), module(*numbers)
    for ours, eager in zip(found(*numbers), again, strict=True):
        torch.testing.assert_close(ours, eager)
    assert explain(found).captured


def test_a_view_whose_place_depends_on_a_size_is_pinned_to_it():
    """Half of an odd size is rounded: of two sizes it is not seen how. Each size has a graph of its own."""
    ours = ORTModule(Function(lambda x: x.chunk(2)))
    for n, exports in ((5, 1), (8, 2), (5, 2), (8, 2)):
        x = torch.arange(float(n))
        parts = ours(x)
        for part, eager in zip(parts, x.chunk(2), strict=True):
            torch.testing.assert_close(part, eager)
        parts[1].zero_()
        assert x[-1] == 0 and explain(ours).exports == exports
    assert explain(ours).captured
