"""Sizes that a graph may vary together alone, or with other values alone: an adjacency matrix, offsets of bags."""

import copy

import torch
from torch import nn

from ortmodule import ORTModule, explain


class Graph(nn.Module):
    """Attention over the neighbours in a graph, as its adjacency matrix has them."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x, adjacent):
        h = self.layer(x)
        weights = torch.where(adjacent > 0, h @ h.T, -9e15).softmax(1)
        return self.head(weights @ h)


class Bags(nn.Module):
    """Means of rows of a table; offsets say where each begins, and the first begins at 0."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.EmbeddingBag(9, 4), nn.Linear(4, 3)

    def forward(self, x, indices, offsets):
        return self.layer(self.table(indices, offsets)) * x


def compare(model, calls):
    """Results and gradients of the module and its twin in the engine; the twin."""
    ours = ORTModule(copy.deepcopy(model))
    for args in calls:
        found = []
        for each in (model, ours):
            each.zero_grad()
            y = each(*args)
            y.square().sum().backward()
            found.append([y.detach(), *(p.grad for p in each.parameters())])
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    return ours


def test_adjacency_matrices_of_all_sizes_have_one_graph():
    torch.manual_seed(0)
    calls = [(torch.randn(n, 8), (torch.rand(n, n) < 0.5).float() + torch.eye(n)) for n in (10, 20, 15, 2)]
    report = explain(compare(Graph(), calls))
    assert (report.captured, report.exports) == (True, 1), report.fallback


def test_sizes_that_have_to_be_equal():
    """Where they are not PyTorch's error is the caller's, and the graph stays."""
    torch.manual_seed(0)
    model = ORTModule(Graph())
    model(torch.randn(10, 8), torch.eye(10))
    try:
        model(torch.randn(10, 8), torch.eye(7))
    except RuntimeError as error:
        assert "size" in str(error)
    else:
        raise AssertionError("PyTorch refuses these sizes")
    model(torch.randn(12, 8), torch.eye(12))
    report = explain(model)
    assert (report.captured, report.exports) == (True, 1), report.fallback


def test_offsets_of_all_sizes_have_one_graph():
    torch.manual_seed(0)
    calls = [(torch.rand(n, 3), torch.randint(9, (2 * n,)), torch.arange(n) * 2) for n in (4, 6, 3, 9)]
    report = explain(compare(Bags(), calls))
    assert (report.captured, report.exports) == (True, 1), report.fallback
