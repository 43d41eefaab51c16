"""Writes through views: results, gradients and what is left of buffers and inputs are PyTorch's."""

import copy
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ortmodule import ORTModule, explain
from tests.twins import made, rows, same


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def run(module, x):
    x = x.clone().requires_grad_()
    results = module(x)
    results = results if isinstance(results, tuple) else (results,)
    seen = [y for y in results if y.requires_grad]
    weights = [torch.arange(1.0, y.numel() + 1).view(y.shape) for y in seen]
    grads = torch.autograd.grad(seen, x, weights, allow_unused=True) if seen else (None,)
    grad = torch.zeros_like(x) if grads[0] is None else grads[0]
    return [y.detach() for y in results], [y.requires_grad for y in results], grad


def check(function, sizes=((4, 6), (4, 6), (5, 8), (3, 6)), dtype=torch.float32):
    """The same as PyTorch at these sizes; returns the report."""
    ours, eager = ORTModule(Function(function)), Function(function)
    for seed, size in enumerate(sizes):
        x = rows(*size, seed=seed).to(dtype)
        torch.testing.assert_close(run(ours, x), run(eager, x), rtol=1e-5, atol=1e-5, equal_nan=True)
    return explain(ours)


#: Statements about `y`, a result of the graph's own, and `x`.
PROGRAMS = {
    "transposed": "y.t()[0].mul_(3); y.mT[:, 1] = 0.5",
    "flat": "y.view(-1)[::2] += 1; y.view(-1)[torch.tensor([1, 2])] = 9.0",
    "flattened": "y.flatten()[1] = 0; y.reshape(-1, 2)[0].exp_()",
    "a diagonal": "y.diagonal().add_(x[0, 0]); y.diagonal(1).zero_(); y.fill_diagonal_(2.0)",
    "a column": "y[:, 0].zero_(); y.select(1, 1).copy_(x[:, 2]); y[:, -1].mul_(2)",
    "a row, lines later": "v = y[1]\n    w = v * 2\n    v.copy_(w)\n    v = y[:, 1:]\n    v.fill_(2.0)",
    "a range": "y[1:, 2:4].sub_(0.5); y.narrow(1, 3, 2).mul_(0.5); y[:-1].clamp_(min=0); y[-2:] *= x[-2:]",
    "every second": "y[::2].neg_(); y[:, 1::2].copy_(x[:, ::2])",
    "computed bounds": "n = x.shape[1] // 2; y[:, n:].copy_(x[:, :n]); y[:, :n].add_(1)",
    "an empty range": "y[3:1].add_(1); y[:, 2:2] = 5; y[100:].zero_()",
    "behind a written one": "a = y[0]; b = y[:, 0]; a.mul_(2); b.add_(a.sum()); y = y + a[0] + b[0]",
    "of the whole": "a = y.view(-1); y.mul_(2); a = a * 1; y = y + a.sum()",
    "with an index": "y[:, torch.tensor([0, 2])] = x[:, :1]; y[torch.tensor([0, 1]), 1:3] = x[0, :2]",
    "of a mask": "y[:, 1:][y[:, 1:] > 0] = 0.25; y.t().masked_fill_(y.t() < 0, 0.125)",
    "reshaped in place": "y.t_(); y[0].mul_(2); y.unsqueeze_(0); y[:, 1].add_(1)",
    "parts": "z = torch.zeros(4, 6); z.chunk(2, 1)[1].add_(1); z.unbind(0)[2].fill_(3); y = y[:3] * z[:3, :6].sum()",
    "permuted": "y.unflatten(1, (2, -1)).permute(1, 0, 2)[0].mul_(3); y[:, :, None].movedim(0, -1)[0].zero_()",
    "into memory": "z = torch.empty_like(x); torch.mul(x.detach(), 2, out=z); y = y + z",
    "broadcast": "a = y[:, 1]; a.copy_(x[0, 0]); y = y + a.sum()",
    "other types": "z = torch.zeros(y.shape, dtype=torch.int64); z[0].add_(3); z.view(-1)[1] = 7; y = y * z",
    "detached of no gradient": "z = x.detach().clone(); z.detach()[0].mul_(2); z.data[1] = 3; y = y * z",
    "loops": "h = x[:, 0]\n    for i in range(1, 4):\n        h = (h + x[:, i]).tanh(); y[:, i].copy_(h).mul_(2)",
}


def program(text):
    names = {"torch": torch}
    exec(f"def function(x):\n    y = x * 1\n    {text}\n    return y", names)  # noqa: S102
    return names["function"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    report = check(program(PROGRAMS[name]))
    assert report.captured, report.fallback
    assert not report.aten_ops


@pytest.mark.parametrize(
    "text",
    [
        "with torch.no_grad(): y.mul_(2)",
        "with torch.no_grad(): y[0] = 1.0",
        "with torch.no_grad(): y[0] = x[1]",
    ],
)
def test_what_autograd_does_not_see(text):
    """A gradient flows as if nothing had been written: PyTorch runs such a module."""
    with pytest.warns(UserWarning, match="PyTorch runs this module"):
        report = check(program(text))
    assert "changes a tensor" in report.fallback


@pytest.mark.parametrize(
    "text",
    [
        "y.detach()[0] = 5.0",
        "y.data.mul_(2)",
        "y.detach().view(-1)[1:].add_(3)",
        "with torch.no_grad(): y[:, 0].mul_(2)",
        "with torch.no_grad(): y.view(-1)[::2].add_(1); y.t()[0].copy_(x[:, 1])",
    ],
)
def test_writes_through_a_detached_view(text):
    """The graph has the new values, and the gradient of what they stand for. A view made under no_grad is one."""
    for then in ("", "\n    y = y * x.exp()"):
        report = check(program(text + then))
        assert report.captured, report.fallback


VIEWS = (
    "v.t() if v.dim() == 2 else v", "v.view(-1) if v.is_contiguous() else v", "v[0] if v.dim() > 1 else v", "v[1:]",
    "v[..., -2:]", "v[..., ::2]", "v.diagonal() if v.dim() == 2 else v", "v[None]", "v.reshape(v.shape[0], -1)",
    "v.permute(*reversed(range(v.dim())))", "v.narrow(0, 1, 1)", "v.select(-1, 1)", "v.movedim(0, -1)", "v[:-1]",
)  # fmt: skip
WRITES = (
    "v.mul_(2)", "v.add_(x.sum())", "v.zero_()", "v.copy_(v.detach() * 3)", "v.copy_(x[0, 0])", "v[0] = 7.0",
    "v.masked_fill_(v > 0, -1.0)", "v[..., 0] += 1", "v.clamp_(min=0)", "v[torch.tensor([0, 1])] = 0.25",
    "v.sub_(v.mean())", "v.copy_(v.flip(0))",
)  # fmt: skip


@given(st.data())
def test_drawn_programs(data):
    lines, names = [], ["y"]
    for i in range(data.draw(st.integers(2, 5), label="lines")):
        lines.append(f"v = {data.draw(st.sampled_from(names))}")
        if data.draw(st.booleans(), label="looks"):
            names.append(f"v{i}")
            lines.append(f"v{i} = {data.draw(st.sampled_from(VIEWS))}")
        else:
            lines.append(data.draw(st.sampled_from(WRITES)))
    lines.append(f"y = y + {data.draw(st.sampled_from(names))}.sum()")
    function = program("\n    ".join(lines))
    try:
        for size in ((4, 6), (5, 8)):
            run(Function(function), rows(*size))
    except (RuntimeError, IndexError):
        return  # PyTorch does not take it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = check(function, ((4, 6), (5, 8)), torch.float64)  # numbers grow and cancel
    assert report.captured, report.fallback


def test_buffers_and_inputs():
    def forward(self, x, state):
        self.c[1] = x.detach().sum()
        self.d.view(-1)[2:].add_(1)
        state.t()[0].mul_(2)
        return self.linear(x) * self.c.sum() + self.d.sum() + state.sum()

    eager = made(forward, {"c": torch.zeros(3), "d": torch.ones(2, 2)})
    ours = ORTModule(copy.deepcopy(eager))
    for step in range(4):
        found = []
        for module in (ours, eager):
            module.zero_grad()
            state = torch.ones(2, 3)
            y = module(rows(2 + step, 4, seed=step), state)
            y.sum().backward()
            found.append([y, state, dict(module.named_buffers()), module.linear.weight.grad])
        same(*found, rtol=1e-5, atol=1e-5)
    assert explain(ours).captured, explain(ours).fallback


def test_with_random_numbers():
    """A graph that draws cannot be compared: it has to be right by itself."""

    def forward(self, x):
        y = x * 1
        y.t()[0].mul_(3)
        y.view(-1)[-1] = 4
        return y + 0 * torch.rand_like(y), torch.rand_like(y)

    eager = made(forward)
    ours = ORTModule(copy.deepcopy(eager))
    for n in (3, 5):
        x = rows(n, 4)
        torch.testing.assert_close(ours(x)[0], eager(x)[0])
    assert explain(ours).captured, explain(ours).fallback
