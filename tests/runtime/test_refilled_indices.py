"""A loader that refills the memory of labels or indices between forward and backward, for each function that has them.

Far beyond any memory: backward raises, or gives the gradients of what forward was given. The kernels alone, with each
tensor between fences: tests/ops/test_changed_indices.py.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import Error, ORTModule
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")


def set_rows(w, x, i):
    rows = w * 1
    rows[i] = x
    return rows


def places(i, width=1):
    """A row of indices for each row of x."""
    return i.view(4, 1).expand(4, width)


#: Of a weight [10, 6], x [4, 6] and four integers from 1 to 4.
FUNCTIONS = {
    "nll_loss": lambda w, x, i: F.nll_loss(x.log_softmax(-1), i),
    "nll_loss each": lambda w, x, i: F.nll_loss(x.log_softmax(-1), i, reduction="none"),
    "nll_loss pictures": lambda w, x, i: F.nll_loss(x.view(4, 6, 1, 1).log_softmax(1), i.view(4, 1, 1)),
    "cross_entropy": lambda w, x, i: F.cross_entropy(x, i),
    "cross_entropy each": lambda w, x, i: F.cross_entropy(x, i, reduction="none"),
    "cross_entropy weights": lambda w, x, i: F.cross_entropy(x, i, weight=w[0].abs().detach()),
    "cross_entropy smoothed": lambda w, x, i: F.cross_entropy(x, i, label_smoothing=0.1),
    "cross_entropy pictures": lambda w, x, i: F.cross_entropy(x.view(4, 6, 1), i.view(4, 1)),
    "cross_entropy of a product": lambda w, x, i: F.cross_entropy(x @ w.t(), i),
    "multi_margin_loss": lambda w, x, i: F.multi_margin_loss(x, i),
    "gaussian_nll_loss": lambda w, x, i: F.gaussian_nll_loss(x, w[i], w[i].abs() + 1),
    "ctc_loss": lambda w, x, i: F.ctc_loss(
        x.view(4, 1, 6).log_softmax(-1), i.view(1, 4)[:, :2], torch.tensor([4]), torch.tensor([2])
    ),
    "embedding": lambda w, x, i: F.embedding(i, w) * x,
    "embedding int32": lambda w, x, i: F.embedding(i.int(), w) * x,
    "embedding padding": lambda w, x, i: F.embedding(i, w, padding_idx=1) * x,
    "embedding and norm": lambda w, x, i: F.layer_norm(F.embedding(i, w) + x, (6,)),
    "embedding and loss": lambda w, x, i: F.cross_entropy(F.embedding(i, w) @ w.t(), i),
    "embedding_bag": lambda w, x, i: F.embedding_bag(i.view(2, 2), w),
    "gather": lambda w, x, i: x.gather(1, places(i)),
    "gather in a chain": lambda w, x, i: (x.gather(1, places(i)) * 2).tanh(),
    "gather of argsort": lambda w, x, i: x.gather(0, places(i.argsort(), 6)),
    "take_along_dim": lambda w, x, i: torch.take_along_dim(x, places(i), 1),
    "take": lambda w, x, i: torch.take(x, i),
    "index_select": lambda w, x, i: w.index_select(0, i) * x,
    "w[i]": lambda w, x, i: w[i] * x,
    "w[i, i]": lambda w, x, i: w[i, i] * x[:, 0],
    "w[i % 10]": lambda w, x, i: w[i % 10] * x,
    "w[searchsorted]": lambda w, x, i: w[torch.searchsorted(torch.arange(6), i)] * x,
    "x[i > 2]": lambda w, x, i: x[i > 2],
    "scatter": lambda w, x, i: torch.zeros_like(x).scatter(1, places(i), x[:, :1]),
    "scatter_add": lambda w, x, i: torch.zeros_like(x).scatter_add(1, places(i), x[:, :1]),
    "scatter_reduce": lambda w, x, i: x.scatter_reduce(1, places(i), x[:, :1] * 2, "amax"),
    "masked_scatter": lambda w, x, i: x.masked_scatter(places(i > 2, 6), w[:4]),
    "index_add": lambda w, x, i: w.index_add(0, i, x),
    "index_copy": lambda w, x, i: w.index_copy(0, i, x),
    "index_fill": lambda w, x, i: w.index_fill(0, i, 0.5),
    "index_reduce": lambda w, x, i: w.index_reduce(0, i, x, "mean"),
    "index_put": lambda w, x, i: w.index_put((i,), x),
    "index_put adds": lambda w, x, i: w.index_put((i,), x, accumulate=True),
    "w[i] = x": set_rows,
    "one_hot": lambda w, x, i: F.one_hot(i, 6) * x,
    "repeat_interleave": lambda w, x, i: x.repeat_interleave(i, 0),
    "max_unpool1d": lambda w, x, i: F.max_unpool1d(x.view(1, 4, 6), places(i, 6).view(1, 4, 6), 2),
}


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.linspace(-1, 1, 60).cos().view(10, 6))

    def forward(self, x, i):
        return self.function(self.weight, x, i)


def step(wrap, function, refill):
    """The gradients of x and the weight."""
    model = Of(function)
    wrapped = wrap(model)
    memory = torch.tensor([1, 2, 3, 4]).numpy()
    for change in (None, refill):  # what is saved may differ in a first step
        x = torch.linspace(-2, 2, 24).sin().view(4, 6).requires_grad_()
        model.zero_grad()
        y = wrapped(x, torch.from_numpy(memory))
        if change is not None:
            memory[1] = change
        y.sum().backward()
    return [x.grad, model.weight.grad]


@each("refill", [100_000, 1 << 40, -(1 << 40)], [100_000, -(1 << 40)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_far(name, refill, monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    expected = step(lambda model: model, FUNCTIONS[name], None)
    try:
        found = step(ORTModule, FUNCTIONS[name], refill)
    except (Error, IndexError, RuntimeError) as error:
        assert "out of range" in str(error) or "out of bounds" in str(error)
        return
    for a, b in zip(found, expected, strict=True):
        if a is None or b is None:
            assert all(grad is None or not grad.any() for grad in (a, b))
        else:
            torch.testing.assert_close(a, b)


class Tied(nn.Module):
    """A table that is the weight of the last layer, too: of the kernels with indices those that passes make."""

    def __init__(self):
        super().__init__()
        self.table, self.places = nn.Embedding(1100, 8), nn.Parameter(torch.randn(1200, 8))
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, ids, labels):
        hidden = self.layer(self.norm(self.table(ids) + self.places))
        return F.cross_entropy(hidden @ self.table.weight.t(), labels)


MADE_BY_PASSES = {"EmbeddingNorm", "LinearCrossEntropy", "GatherGradAdd"}


@pytest.mark.parametrize("which", ["ids", "labels"])
@pytest.mark.parametrize("refill", [100_000, 1 << 40, -(1 << 40)])
def test_far_in_kernels_that_passes_make(which, refill, monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    model = Tied()
    wrapped = ORTModule(model)
    memory = {name: torch.arange(1200).remainder(1100).numpy() for name in ("ids", "labels")}
    given = {name: torch.from_numpy(numbers) for name, numbers in memory.items()}
    wrapped(**given).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    graphs = [graph for variants in wrapped._ortmodule.graphs.values() for graph in variants]
    plans = [executable.plan for graph in graphs for executable in graph.plans.values()]
    assert {row[0] for plan in plans for row in plan.code()} >= MADE_BY_PASSES
    model.zero_grad()
    loss = wrapped(**given)
    memory[which][700] = refill
    try:
        loss.backward()
    except (Error, IndexError, RuntimeError) as error:
        assert "out of range" in str(error)
        return
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)  # forward has left the gradients of the labels behind
