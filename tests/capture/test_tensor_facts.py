"""Forward asks how its tensors lie in memory, and what autograd knows of them: its answer is always PyTorch's."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.twins import made, rows


def transposed():
    return rows(4, 4).t().contiguous().t()


def with_gradient():
    x = rows(4, 4).requires_grad_()
    x.grad = torch.ones(4, 4)
    return x


QUESTIONS = {
    "is_contiguous": (lambda x: x.is_contiguous(), lambda: rows(4, 4), transposed),
    "stride": (lambda x: x.stride(0) == 4, lambda: rows(4, 4), transposed),
    "storage_offset": (lambda x: x.storage_offset() == 0, lambda: rows(4, 4), lambda: rows(5, 4)[1:]),
    "_version": (lambda x: x._version == 0, lambda: rows(4, 4), lambda: rows(4, 4).add_(0)),
    "_base": (lambda x: x._base is None, lambda: rows(4, 4), lambda: rows(4, 4)[:]),
    "is_leaf": (
        lambda x: x.is_leaf, lambda: rows(4, 4).requires_grad_(), lambda: rows(4, 4).requires_grad_() * 1,
    ),
    "grad_fn": (
        lambda x: x.grad_fn is None, lambda: rows(4, 4).requires_grad_(), lambda: rows(4, 4).requires_grad_() * 1,
    ),
    "grad": (lambda x: x.grad is None, lambda: rows(4, 4).requires_grad_(), with_gradient),
}  # fmt: skip


@pytest.mark.parametrize("name", QUESTIONS)
def test_another_answer(name):
    question, first, second = QUESTIONS[name]
    eager = made(lambda self, x: self.linear(x) * (2.0 if question(x) else 3.0))
    ours = ORTModule(eager)
    for make in (first, first, second, second, first):
        torch.testing.assert_close(ours(make()), eager(make()))


def test_what_types_without_gradients_answer():
    """It is the same of the caller's tensors and of the trace's, arguments, results and attributes of a module."""

    def forward(self, x, ids):
        for tensor in (ids, ids + 1, x.detach().argmax(1), x > 0, self.places):
            assert tensor.grad_fn is None and tensor.is_leaf and tensor.output_nr == 0 and not tensor.retains_grad
        return self.linear(x) * ids[:, None]

    eager = made(forward)
    eager.places = torch.arange(3)
    ours = ORTModule(eager)
    torch.testing.assert_close(ours(rows(3, 4), torch.arange(3)), eager(rows(3, 4), torch.arange(3)))
    assert explain(ours).captured and explain(ours).engine_calls == 1


def test_a_layout_costs_no_graph():
    """Models ask before they call `contiguous()`: calls whose inputs lie alike share a graph, at all sizes."""
    eager = made(lambda self, x: self.linear(x if x.is_contiguous() else x.contiguous()))
    ours = ORTModule(eager)
    for n in (4, 5, 7):
        torch.testing.assert_close(ours(rows(n, 4)), eager(rows(n, 4)))
    assert explain(ours).captured and explain(ours).exports == 1
    ours(transposed())
    ours(rows(3, 4))
    assert explain(ours).captured


def test_a_submodule_that_asks():
    """What PyTorch would run inside of a graph has leaves where PyTorch has results."""

    class Asks(nn.Module):
        def forward(self, x):
            return x * (2.0 if x.is_leaf else 3.0)

    eager = nn.Sequential(nn.Linear(4, 4), Asks(), nn.Linear(4, 4))
    ours, x = ORTModule(eager), rows(3, 4)
    torch.testing.assert_close(ours(x), eager(x))
    assert "asks whether a tensor is a leaf, which only the caller's own tensors tell" in explain(ours).fallback


def test_what_torch_asks_is_no_matter():
    """Its own Python code asks for gradients and leaves, and decides nothing with it that a graph would not do."""
    eager = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.MultiheadAttention(8, 2).out_proj)
    ours = ORTModule(eager)
    torch.testing.assert_close(ours(rows(3, 4)), eager(rows(3, 4)))
    assert explain(ours).captured
