"""Functions that forward maps over a batch by torch.vmap: PyTorch's results and gradients, from the engine."""

import copy

import pytest
import torch

from ortmodule import ORTModule
from tests.selection import each
from tests.twins import both, made, rows, step

v = torch.vmap


def padding_mask(x):
    """As transformers makes its masks: a function of indices, mapped over each of them."""

    def allowed(row, query, key):
        return (query >= key) & (row >= 0)

    for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
        allowed = v(allowed, in_dims=dims)
    return (x[:, None] * allowed(*map(torch.arange, (x.shape[0], x.shape[1], x.shape[1]))).to(x.dtype)).sum(-1)


def written_into(x):
    allowed = v(v(lambda a, b: a >= b, (None, 0)), (0, None))(torch.arange(4), torch.arange(4))
    allowed &= torch.ones_like(allowed)
    allowed[0] = True
    return x @ allowed.to(x.dtype)


FUNCTIONS = {
    "scale, twice": lambda x: v(v(lambda a: a * 2))(x),
    "function, twice": lambda x: v(v(lambda a: torch.sin(a) + a.pow(2)))(x),
    "outer": lambda x: v(v(lambda a, b: a * b, in_dims=(None, 0)), in_dims=(0, None))(x[:, 0], x[0]),
    "size": lambda x: v(lambda a: a * a.size(0))(x),
    "size by name": lambda x: v(lambda a: a * a.size(dim=-1))(x),
    "shape": lambda x: v(lambda a: a.view(a.shape[0], 1)[:, 0] * a.shape[-1])(x),
    "length": lambda x: v(lambda a: a / len(a))(x),
    "count": lambda x: v(lambda a: a / a.numel() / torch.numel(a))(x),
    "over columns": lambda x: v(lambda a: a.cumsum(0) * a.shape[0], in_dims=1, out_dims=1)(x),
    "shape, twice": lambda x: v(v(lambda a: (a.view(1, *a.shape) + a.shape[0]).mean()))(x[..., None].expand(-1, -1, 3)),
    "arange": lambda x: v(lambda a, i: a + torch.arange(a.shape[0]) * i)(x, torch.arange(x.shape[0])),
    "new zeros": lambda x: v(lambda a: a.new_zeros(a.shape) + a)(x),
    "chunks": lambda x: v(lambda a: a * a.size(0), chunk_size=2)(x),
    "mask": padding_mask,
    "written into": written_into,
    "a part written into": lambda x: v(v(lambda a: a * 2))(x).index_fill_(1, torch.tensor([0]), 0.0),
}  # fmt: skip


def model(function):
    return made(lambda self, x: self.linear(function(self.linear(x))))


@each("name", FUNCTIONS, ("shape, twice", "mask"))
def test_mapped(name):
    both(model(FUNCTIONS[name]), lambda m: [step(m, rows(n, 4)) for n in (3, 5, 3)])


def test_what_the_tracer_cannot_record():
    eager = model(lambda x: v(lambda a: torch.stack(a.unbind()))(x))
    ours, x = ORTModule(copy.deepcopy(eager)), torch.randn(3, 4)
    with pytest.warns(UserWarning, match=r"test_batched_sizes\.py:\d+ calls an operator of .* of torch\.vmap"):
        torch.testing.assert_close(ours(x), eager(x))
