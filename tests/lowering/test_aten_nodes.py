"""Operators that nothing says in ONNX: PyTorch runs them inside the graph, with its own backward, at any size."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.core import devices, pytree
from ortmodule.core.errors import Disagrees
from ortmodule.host.host_node import Calls, Known, Modes, Node
from ortmodule.lowering.aten_nodes import _each_its_own, _Program


class Between(nn.Module):
    """A linear layer, the operator, and a sum that tells the elements of its result apart."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6).double(), function

    def forward(self, x):
        y = self.function(self.linear(x))
        return (y * torch.linspace(1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)).sum()


def square(x):
    """Symmetric, positive definite."""
    return x @ x.mT + torch.eye(x.shape[-2], dtype=x.dtype)


FUNCTIONS = {
    "there and back": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=0), n=x.shape[0], dim=0),
    "a length from a length": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=0), dim=0),
    "of real numbers": lambda x: torch.fft.irfftn(x, dim=0),
    "moduli": lambda x: torch.fft.fft2(x).abs(),
    "complex arithmetic": lambda x: (torch.complex(x, x.roll(1, 0)) ** 2).real,
    "eigenvalues": lambda x: torch.linalg.eigvalsh(square(x)),
    "factors": lambda x: torch.linalg.cholesky(square(x)),
    "a solution": lambda x: torch.linalg.solve(square(x), x),
    "singular values": lambda x: torch.linalg.svdvals(x @ torch.eye(6, 4, dtype=x.dtype)),
    "a size that is a number": lambda x: nn.functional.interpolate(
        torch.linspace(0, 1, 36, dtype=x.dtype).reshape(1, 1, 6, 6) * x.sum(),
        size=(x.shape[0] // 2, x.shape[0]),
        mode="bicubic",
        antialias=True,
    ),
    "a size that decides, too": lambda x: nn.functional.interpolate(
        torch.linspace(0, 1, 36, dtype=x.dtype).reshape(1, 1, 6, 6) * (x.sum() if x.shape[0] > 2 else x[0, 0]),
        size=(x.shape[0] + 1, 5),
        mode="bicubic",
        antialias=True,
    ),
    "lengths that are tensors": lambda x: nn.functional.ctc_loss(
        x.log_softmax(-1)[:, None], torch.tensor([[1, 2]]), torch.full((1,), x.shape[0]), torch.full((1,), 2)
    ).reshape(1),
    "erfcx": torch.special.erfcx,
    "i1": torch.special.i1,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_runs_inside_the_graph_at_any_size(name):
    eager = Between(FUNCTIONS[name])
    ours = ORTModule(Between(FUNCTIONS[name]))
    ours.load_state_dict(eager.state_dict())
    for step, n in enumerate((8, 5, 11, 8, 4)):
        x = torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        results = []
        for module in (ours, eager):
            module.zero_grad()
            operand = x.clone().requires_grad_()
            result = module(operand)
            result.backward()
            results.append([result, operand.grad, *[p.grad for p in module.parameters()]])
        torch.testing.assert_close(*results)
    report = explain(ours)
    assert report.captured, report.fallback
    assert report.aten_ops and not report.python_ops


def test_numbers_inside_are_compared_between_traces():
    """The length of an inverse transform is a number of one trace, unless a second one says the same."""
    ours = ORTModule(Between(lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=0), dim=0)))
    for n in (8, 12, 8, 12):
        ours(torch.randn(n, 6, dtype=torch.float64))
    assert explain(ours).exports == 2  # one for each length, and none for a length seen before


FORMS = {
    "the largest of a bag": lambda x: nn.functional.embedding_bag(
        torch.arange(x.shape[0]) % 3, x, torch.tensor([0, 2]), mode="max"
    ),
    "the nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc").reshape(1),
    "the spectral norm": lambda x: torch.linalg.matrix_norm(x, 2).reshape(1),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_that_a_definition_does_not_have(name):
    """They are left to PyTorch, not the module."""
    eager, ours = Between(FORMS[name]), ORTModule(Between(FORMS[name]))
    ours.load_state_dict(eager.state_dict())
    for n in (8, 5, 8):
        x = torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        results = []
        for module in (ours, eager):
            module.zero_grad()
            result = module(x)
            result.backward()
            results.append([result, *[p.grad for p in module.parameters()]])
        torch.testing.assert_close(*results)
    assert explain(ours).captured, explain(ours).fallback


class Repeats(nn.Module):
    """How often is computed from sizes, and a tensor in the trace."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, y):
        return self.linear(x).repeat_interleave(y.shape[1] // x.shape[1], dim=1) * y[:, :, None]


def test_a_number_of_repeats():
    eager, ours = Repeats(), ORTModule(Repeats())
    ours.load_state_dict(eager.state_dict())
    for n in (2, 3, 5):
        x, y = torch.randn(n, 4, 6), torch.randn(n, 12)
        results = []
        for module in (ours, eager):
            module.zero_grad()
            result = module(x, y)
            result.sum().backward()
            results.append([result, module.linear.weight.grad])
        torch.testing.assert_close(*results)
    assert explain(ours).captured and explain(ours).exports == 1


class Unread(Between):
    """The operator's result is no node's operand; its size is asked for."""

    def forward(self, x):
        y = self.linear(x)
        z = self.function(y)
        return y.tanh().sum() if z.shape[0] < 100 else z.sum()


def test_results_that_are_not_read():
    """There is nothing to run for them, in backward neither, and one backward is all there is without retain_graph."""
    eager, ours = Unread(torch.special.i1), ORTModule(Unread(torch.special.i1))
    ours.load_state_dict(eager.state_dict())
    for n in (2, 3, 8, 5, 2):
        x = torch.randn(n, 6, dtype=torch.float64)
        for module in (ours, eager):
            module.zero_grad()
            loss = module(x)
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
        torch.testing.assert_close(ours.linear.weight.grad, eager.linear.weight.grad)
    assert explain(ours).captured


def test_results_that_are_operands_become_views():
    """`x.to(x.dtype)` is x: a node has as many results whatever has nothing to do."""
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    found = _each_its_own([x, y, y], [x])
    assert len({id(t) for t in (x, *found)}) == 4 and found[1] is y
    for tensor, expected in zip(found, (x, y, y), strict=True):
        assert torch.equal(tensor, expected)
    assert torch.equal(torch.autograd.grad(sum(found).sum(), x)[0], torch.full((3,), 5.0))


def test_an_operator_that_changes_its_operand():
    """The graph goes on with its result; what it was given stays as it was."""

    def forward(x):
        large = x > 0.5
        large |= x < -0.5
        large |= (x * 100).long() % 2 == 0
        return x * large

    eager = Between(forward)
    ours = ORTModule(Between(forward))
    ours.load_state_dict(eager.state_dict())
    for n in (8, 5, 8):
        x = torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        results = []
        for module in (ours, eager):
            module.zero_grad()
            result = module(x)
            result.backward()
            results.append([result, *[p.grad for p in module.parameters()]])
        torch.testing.assert_close(*results)
    assert explain(ours).captured, explain(ours).fallback


class Solves(nn.Module):
    """PyTorch solves a system with a parameter, which its backward needs."""

    def __init__(self):
        super().__init__()
        self.matrix, self.linear = nn.Parameter(torch.eye(6) * 3), nn.Linear(6, 6)

    def forward(self, x):
        return torch.linalg.solve(self.matrix, self.linear(x).mT).sum()


def test_inputs_of_the_graph_are_not_copied(monkeypatch):
    """Operators get parameters as they are, and what the graph computes as copies of it."""
    own, given = _Program.__call__, []
    monkeypatch.setattr(_Program, "__call__", lambda self, *t: (given.extend(t), own(self, *t))[1])
    module = ORTModule(Solves())
    for _ in range(2):
        given.clear()
        module(torch.randn(3, 6)).backward()
    assert [t.data_ptr() == module.matrix.data_ptr() for t in given].count(True) == 1 and len(given) == 2
    assert module.matrix.grad is not None and all(t.requires_grad for t in given)


def test_a_parameter_that_changes_before_backward():
    """PyTorch's own error, not gradients of something else."""
    for module in (Solves(), ORTModule(Solves())):
        for _ in range(2):
            loss = module(torch.randn(3, 6))
            with torch.no_grad():
                module.matrix.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_what_is_changed_in_place_is_a_copy():
    known = Known([_node("aten::add_"), _node("aten::add")])
    assert known.shared == {1} and Calls(known).shared == {1}


def _node(name):
    arguments = pytree.flatten(((torch.empty(0),), {}))[1]
    modes = Modes(True, devices.autocast_off())
    return Node("aten", name, _Program, arguments, [0], [True], frozenset(), modes, clones=name.endswith("_"))


def test_another_kind_of_result_is_noticed():
    node = _node("aten::add")
    node.function = lambda x: [x + 1]
    for _ in range(2):
        (result,) = node.run([torch.zeros(2)])[1]
        assert result.tolist() == [1, 1] and result.requires_grad
    node.function = lambda x: [None]
    with pytest.raises(Disagrees, match="another kind of result"):
        node.run([torch.zeros(2)])


def test_modes_are_those_of_the_trace():
    modes = Modes(True, devices.autocast_off())
    with modes.set():
        assert torch.is_grad_enabled()
    with torch.no_grad(), torch.autocast("cpu"):
        with modes.set():
            assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
