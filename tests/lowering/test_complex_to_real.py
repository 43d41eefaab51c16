"""Complex numbers in a graph are pairs of real ones, also where they come from outside, with PyTorch's gradients."""

import copy
import os
from unittest import mock

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.debug.verify import Verifier
from tests.selection import each


class Between(nn.Module):
    """A linear layer, complex numbers made of its result, and a sum that tells all elements apart."""

    def __init__(self, function, dtype=torch.float64):
        super().__init__()
        self.linear, self.function = nn.Linear(6, 8).to(dtype), function

    def forward(self, x):
        y = self.function(torch.view_as_complex(self.linear(x).unflatten(-1, (4, 2))))
        y = torch.view_as_real(y) if y.is_complex() else y
        return (y * torch.linspace(1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)).sum()


def angles(z):
    return torch.arange(z.shape[-1], dtype=z.real.dtype) * 0.7


def assigned(z, index, value):
    z = z * 1
    z[index] = value
    return z * 2


def filtered(z):
    """The first frequencies alone, as in Fourier neural operators."""
    found = torch.fft.fft(z, dim=1)
    kept = torch.zeros(found.shape, dtype=z.dtype)
    kept[:, :2] = found[:, :2] * angles(z)
    kept[:, -1:] = found[:, -1:] * 1j
    return torch.fft.ifft(kept, dim=1)


#: Of complex numbers [rows, length, 4]. None of these needs PyTorch.
FUNCTIONS = {
    "itself": lambda z: z,
    "its parts": lambda z: torch.cat([z.real, z.imag * 2], -1),
    "times another": lambda z: z * z.flip(1),
    "times itself": lambda z: z * z,
    "times its conjugate": lambda z: z * z.conj(),
    "times a real number": lambda z: z * 2.5,
    "times an imaginary number": lambda z: 2j * z,
    "times a complex number": lambda z: z * (1 - 2j),
    "times real numbers": lambda z: z * angles(z),
    "real numbers times it": lambda z: angles(z).float() * z,
    "times integers": lambda z: z * torch.arange(4),
    "times a rotation": lambda z: z * torch.polar(torch.ones(4, dtype=z.real.dtype), angles(z)),
    "a rotation by itself": lambda z: torch.polar(z.real, z.imag),
    "a broadcast rotation": lambda z: torch.polar(z.real[:, :1].abs(), z.imag) * torch.polar(angles(z), z.real),
    "of two": lambda z: torch.complex(z.imag, z.real),
    "plus another": lambda z: z + z.flip(0),
    "plus a real number": lambda z: z + 3,
    "plus an imaginary number": lambda z: z - 3j,
    "a number minus it": lambda z: 1 - z,
    "plus real numbers": lambda z: z + angles(z),
    "over a number": lambda z: z / 3,
    "over real numbers": lambda z: z / (angles(z) + 1),
    "minus": lambda z: -z,
    "exponential": lambda z: z.exp(),
    "broadcast": lambda z: z[:, :1] * z[:1],
    "transposed": lambda z: z.transpose(1, 2) * z.mT,
    "permuted": lambda z: z.permute(2, -3, 1),
    "more dimensions": lambda z: z.unsqueeze(-1) * z.unsqueeze(2),
    "fewer": lambda z: z[:, :1].squeeze(1),
    "parts of it": lambda z: z[..., 1:] + z[..., :-1],
    "one of it": lambda z: z[..., -1],
    "reshaped": lambda z: z.reshape(z.shape[0], -1),
    "viewed": lambda z: z.view(z.shape[0], z.shape[1], 2, 2).flatten(-2),
    "flattened": lambda z: z.flatten(),
    "expanded": lambda z: z[:, :, None].expand(-1, -1, 3, -1),
    "repeated": lambda z: z.repeat(1, 2, 1),
    "joined": lambda z: torch.cat([z, z * 1j], dim=-1),
    "stacked": lambda z: torch.stack([z, z.conj()], dim=-1),
    "chosen": lambda z: z.index_select(1, torch.tensor([0, 2, 2])),
    "indexed": lambda z: z[:, torch.tensor([0, 2, 2])],
    "in two": lambda z: z.chunk(2, -1)[1] * z.chunk(2, dim=2)[0],
    "one by one": lambda z: z.unbind(-1)[2],
    "with constants": lambda z: z * torch.tensor([1j, 2, 3 - 1j, 0.5]),
    "in double precision": lambda z: z.to(torch.complex128).to(z.dtype),
    "copied": lambda z: z.contiguous().clone(),
    "without a gradient": lambda z: z * z.detach(),
    "a part of it assigned": lambda z: assigned(z, (slice(None), slice(2)), z[:, :2] * 1j),
    "a row of it assigned": lambda z: assigned(z, (slice(None), 0), z[:1, 1]),
    "all of it assigned": lambda z: assigned(z, ..., z.flip(-1)),
    "a column of another": lambda z: assigned(z, (..., 1), z[..., 0].conj()),
}
#: PyTorch computes one operator of them.
PARTLY = {
    "absolute": lambda z: (z * 2).abs(),
    "angle": lambda z: z.angle(),
    "a transform between": lambda z: torch.fft.ifft(torch.fft.fft(z, dim=1) * angles(z), dim=1) * 1j,
    "a filter": filtered,
    "over another": lambda z: z / (z.flip(0) + 3),
    "a square": lambda z: z**2,
    "a sum": lambda z: z.sum(1),
    "a product": lambda z: z @ z.mT,
}


def compared(eager, ours, *batches, **tolerance):
    """Results and gradients of both over some batches, of parameters and of inputs."""
    for batch in batches:
        found = []
        for module in (ours, eager):
            module.zero_grad()
            given = [t.detach().clone().requires_grad_(t.requires_grad) for t in batch]
            result = module(*given)
            result.backward()
            found.append([result, *[t.grad for t in given], *[p.grad for p in module.parameters()]])
        torch.testing.assert_close(*found, **tolerance)
    assert explain(ours).captured, explain(ours).fallback


def lengths(dtype=torch.float64):
    make = torch.Generator().manual_seed(3)
    return [(torch.randn(2, n, 6, dtype=dtype, generator=make).requires_grad_(),) for n in (5, 7, 5)]


@pytest.mark.parametrize("name", FUNCTIONS)
@each("dtype", [torch.float64, torch.float32], [torch.float64])
def test_arithmetic_is_the_engines(name, dtype):
    eager = Between(FUNCTIONS[name], dtype)
    ours = ORTModule(copy.deepcopy(eager))
    compared(eager, ours, *lengths(dtype))
    report = explain(ours)
    assert not report.aten_ops and not report.python_ops and report.exports == 1


@pytest.mark.parametrize("name", PARTLY)
def test_what_has_no_rule_is_a_node_by_itself(name):
    eager = Between(PARTLY[name])
    ours = ORTModule(copy.deepcopy(eager))
    compared(eager, ours, *lengths())
    assert explain(ours).aten_ops and "aten::linear" not in explain(ours).aten_ops


def test_a_change_in_place_is_seen_through_other_views():
    def function(z):
        z = z * 1
        other = z.view(-1)
        z.mul_(2)
        return other * z.flatten()

    eager = Between(function)
    compared(eager, ORTModule(copy.deepcopy(eager)), *lengths())


class Rotary(nn.Module):
    """Queries and keys that complex numbers turn, kept as models keep them."""

    def __init__(self, kept, plain=False):
        super().__init__()
        self.query, self.key, self.kept, self.plain = nn.Linear(8, 8).double(), nn.Linear(8, 8).double(), kept, plain
        turns = torch.outer(torch.arange(16).double(), torch.tensor([1, 0.1, 0.01, 0.001]).double())
        turns = torch.polar(torch.ones_like(turns), turns)
        if kept == "parameter":
            self.turns = nn.Parameter(turns)
        elif kept == "buffer":
            self.register_buffer("turns", turns, persistent=False)
        elif kept == "attribute":
            self.turns = turns
        elif kept == "conjugate":
            self.turns = turns.conj()

    def forward(self, x, turns=None):
        turns = self.turns if turns is None else turns
        if self.plain:
            turns = torch.view_as_complex(torch.view_as_real(turns) * 2)
        turns = turns[: x.shape[1]].unsqueeze(0)
        q, k = self.turned(self.query(x), turns), self.turned(self.key(x), turns)
        return (q @ k.mT).softmax(-1).square().sum()

    def turned(self, x, turns):
        pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(2).type_as(x)


@pytest.mark.parametrize("kept", ["buffer", "attribute", "conjugate", "parameter", "input"])
@pytest.mark.parametrize("plain", [False, True])
def test_complex_numbers_from_outside(kept, plain):
    if kept == "conjugate" and plain:
        pytest.skip("PyTorch takes no real view of a conjugate")
    eager = Rotary(kept, plain)
    ours = ORTModule(copy.deepcopy(eager))
    make = torch.Generator().manual_seed(1)
    batches = []
    for n in (5, 9, 5):
        batch = [torch.randn(2, n, 8, dtype=torch.float64, generator=make).requires_grad_()]
        if kept == "input":
            batch.append(torch.randn(n, 4, dtype=torch.complex128, generator=make).requires_grad_())
        batches.append(batch)
    compared(eager, ours, *batches)
    report = explain(ours)
    assert not report.aten_ops and report.exports == 1


@pytest.mark.parametrize("kept", ["parameter", "input"])
def test_second_gradients(kept):
    eager = Rotary(kept)
    ours = ORTModule(copy.deepcopy(eager))
    make = torch.Generator().manual_seed(1)
    found = []
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=make)
    turns = torch.randn(5, 4, dtype=torch.complex128, generator=make)
    for module in (ours, eager):
        given = [x.clone().requires_grad_()] + [turns.clone().requires_grad_()] * (kept == "input")
        leaves = [*given, *module.parameters()]
        first = torch.autograd.grad(module(*given), leaves, create_graph=True)
        slope = sum(torch.view_as_real(g).square().sum() if g.is_complex() else g.square().sum() for g in first)
        found.append([*first, *torch.autograd.grad(slope, leaves)])
    torch.testing.assert_close(*found)
    assert explain(ours).captured, explain(ours).fallback


def test_verification_compares_complex_gradients():
    with mock.patch.dict(os.environ, ORTMODULE_VERIFY="1"):
        ours = ORTModule(Rotary("parameter"))
    for n in (5, 7):
        ours(torch.randn(2, n, 8, dtype=torch.float64)).backward()
    verifier = ours._ortmodule.observers.one(Verifier)
    assert verifier.compared == verifier.gradients == 2 and not verifier.findings


def test_a_new_complex_buffer_is_followed():
    eager = Rotary("buffer")
    ours = ORTModule(copy.deepcopy(eager))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    for factor in (1, 2j):
        for module in (eager, ours):
            module.turns = module.turns * factor
        compared(eager, ours, [x])
