"""Tensors are tiled and cut in parts by numbers and sizes: one graph for all sizes, PyTorch's results and gradients."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each

FORMS = {
    "fewer times than dimensions": lambda w, z, x: x + w.tile((x.shape[2] // 2, x.shape[3] // 2)),
    "numbers": lambda w, z, x: (x * z).tile((2, 2)),
    "one number": lambda w, z, x: (x * z).tile((x.shape[0],)),
    "no number": lambda w, z, x: (x * z).tile(()),
    "more times than dimensions": lambda w, z, x: (x * z).tile((2, x.shape[0], 1, 1, 1, 2)),
    "no copy": lambda w, z, x: (x * z).tile((0, 1, 1, 1)).sum() + x.sum(),
    "a scalar": lambda w, z, x: z.tile((x.shape[0], 2)) * x.sum(),
    "a scalar, no number": lambda w, z, x: z.tile(()) * x,
    "whole numbers": lambda w, z, x: x + torch.arange(x.shape[3]).tile(x.shape[2], 1),
    "sizes of what is interpolated": lambda w, z, x: _by_interpolated(w, x[..., ::2, ::2] * z),
}


def _by_interpolated(w, x):
    h, width = x.shape[2:]
    places = nn.functional.interpolate(w, size=(h, width), mode="bicubic")
    return x + places + w.tile((places.shape[-2] // w.shape[-2], places.shape[-1] // w.shape[-1]))


class Net(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.w, self.z, self.form = nn.Parameter(torch.randn(1, 3, 2, 2)), nn.Parameter(torch.randn(())), form

    def forward(self, x):
        return self.form(self.w, self.z, x)


@pytest.mark.parametrize("form", FORMS)
def test_tile(form):
    torch.manual_seed(0)
    module = Net(FORMS[form]).double()
    model = ORTModule(module)
    for size in (8, 12):
        x = torch.randn(2, 3, size, size, dtype=torch.float64)
        results = []
        for run in (module, model):
            given = x.clone().requires_grad_()
            result = run(given)
            operands = [given, module.w, module.z]
            results.append([result, *torch.autograd.grad(result.sin().sum(), operands, allow_unused=True)])
        torch.testing.assert_close(results[1], results[0])
    assert explain(model).captured and explain(model).exports == 1


class Cut(nn.Module):
    """Has a result of each part that ``cut`` gives."""

    def __init__(self, cut):
        super().__init__()
        self.scale, self.cut = nn.Parameter(torch.randn(6)), cut

    def forward(self, x):
        return [part.sin() * (i + 1) for i, part in enumerate(self.cut(x * self.scale))]


def compare(module, model, rows, length):
    x, results = torch.randn(rows, length, 6, dtype=torch.float64), []
    for run in (module, model):
        given = x.clone().requires_grad_()
        parts = run(given)
        grads = torch.autograd.grad(sum(p.square().sum() for p in parts), [given, module.scale])
        results.append([*parts, *grads])
    torch.testing.assert_close(results[1], results[0])


#: How many parts are asked for, of which dimension; lengths that have as many; the number of graphs, one for each where
#: features are cut; another length, which has fewer.
CHUNKS = [
    (3, 1, (7, 8, 9), 1, 4),
    (3, -2, (9, 12, 7), 1, 4),
    (1, 1, (3, 5, 8), 1, 2),
    (4, 1, (10, 16, 13), 1, 5),
    (3, 2, (5, 6, 9), 1, 7),
]


@pytest.mark.parametrize("count,dim,lengths,graphs,other", CHUNKS)
def test_chunk(count, dim, lengths, graphs, other, monkeypatch):
    """A graph fits all lengths that have as many parts."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    torch.manual_seed(0)
    module = Cut(lambda x: x.chunk(count, dim)).double()
    model = ORTModule(module)
    for length in lengths:
        compare(module, model, 2, length)
    assert explain(model).exports == graphs
    compare(module, model, 2, other)
    assert explain(model).captured and not explain(model).pytorch_calls


CUTS = {
    "chunk": lambda x: x.chunk(3, 1),
    "torch.chunk": lambda x: torch.chunk(x, 4, dim=-2),
    "unsafe_chunk": lambda x: x.unsafe_chunk(3, 1),
    "chunk of rows": lambda x: x.chunk(3),
    "chunk of all": lambda x: x.reshape(-1).chunk(5),
    "chunk of a slice": lambda x: x[:, 1:].chunk(3, 1),
    "chunk by a size": lambda x: x.chunk(x.shape[0] + 1, 1),
    "split": lambda x: x.split(3, 1),
    "split of rows": lambda x: torch.split(x, 2),
    "split by a size": lambda x: x.split((x.shape[1] + 1) // 2, 1),
    "unsafe_split": lambda x: x.unsafe_split(3, 1),
    "tensor_split": lambda x: x.tensor_split(3, 1),
    "tensor_split at": lambda x: x.tensor_split((1, 4), 1),
    "split of a chunk": lambda x: [part for half in x.chunk(2, 1) for part in half.split(2, 1)],
    "split of a slice": lambda x: x[:, 1:].split(3, 1),
    "split of a copy": lambda x: torch.split_copy(x, 3, 1),
    "split by a size, or unbound": lambda x: x.split((x.shape[1] + 2) // 3, 1) if x.shape[1] > 4 else x.unbind(1),
    "split into one": lambda x: x.split(100, 1),
    "split by named lengths": lambda x: torch.split(x, split_size_or_sections=4, dim=1),
    "split of given lengths": lambda x: x.split([1, x.shape[1] - 1], 1),
    "hsplit": lambda x: x.reshape(-1, 6).hsplit(3),
    "vsplit": lambda x: x.repeat(2, 1, 1).vsplit(2),
    "tensor_split by a size": lambda x: x.tensor_split(x.shape[0] + 1, 1),
    "unbind": lambda x: x.unbind(1),
    "iteration": lambda x: list(x.transpose(0, 1)),
}
SIZES = ((2, 7), (2, 8), (2, 9), (4, 9), (6, 9), (5, 9), (2, 4), (2, 5), (2, 10), (2, 2), (1, 7), (7, 3))


#: Captures beyond one for each number of parts: of the small part of a batch that is looked at first, where it has
#: another number of them; of a length, where the parts are counted by two sizes together, that is captured for each.
MORE = {"split of rows": 1, "split of a chunk": 1, "split by a size, or unbound": 1, "chunk by a size": 6}


@each("cut", CUTS, ("chunk by a size", "split", "split by a size", "split of a chunk", "tensor_split", "unbind"))
def test_there_are_as_many_parts_as_in_pytorch(cut, monkeypatch):
    """Sizes decide how many: where there are others than in the trace its graph does not hold."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    torch.manual_seed(0)
    module = Cut(CUTS[cut]).double()
    model = ORTModule(module)
    counts = set()
    for rows, length in SIZES:
        compare(module, model, rows, length)
        counts.add(len(module(torch.randn(rows, length, 6, dtype=torch.float64))))
    assert explain(model).captured and not explain(model).pytorch_calls
    assert explain(model).exports <= len(counts) + MORE.get(cut, 0)


@pytest.mark.parametrize("split", ["hsplit", "vsplit", "dsplit"])
def test_what_does_not_fit_into_equal_parts(split):
    """PyTorch's error."""
    axis = {"hsplit": 1, "vsplit": 0, "dsplit": 2}[split]
    module = Cut(lambda x: getattr(torch, split)(x[None].movedim(2, axis), 2)).double()  # the length is cut
    model = ORTModule(module)
    for length in (4, 6):
        compare(module, model, 2, length)
    with pytest.raises(RuntimeError, match="divisible|split"):
        model(torch.randn(2, 5, 6, dtype=torch.float64))


def test_why_a_graph_does_not_hold(monkeypatch):
    """A line, and two numbers of parts."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "0")
    module = Cut(CUTS["split of a chunk"]).double()
    model = ORTModule(module)
    for _ in range(2):
        for length in (8, 16, 16):
            compare(module, model, 2, length)
    assert "test_shape_symbolics.py" in explain(model).fallback, explain(model).fallback
    assert " found " in explain(model).fallback, explain(model).fallback
