"""What is compared before a graph is used: modules that do something else when they are traced, and rounding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.core.tolerance import is_rounding

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter


class Attention(nn.Module):
    """Asks whether it is traced, and leaves out a part of its result, or computes another one."""

    def __init__(self, ask, less):
        super().__init__()
        self.linear, self.ask, self.less = nn.Linear(8, 8), ask, less

    def forward(self, x):
        y = F.scaled_dot_product_attention(self.linear(x), x, x)
        traced = self.ask()
        if self.less:
            return {"y": y} if traced else {"y": y, "kept": y * 2}
        return {"y": y * 2 if traced else y * 3}


@pytest.mark.parametrize("less", [True, False])
def test_a_module_need_not_know_that_it_is_traced(less):
    torch.manual_seed(0)
    eager = Attention(lambda: torch.jit.is_tracing(), less)
    ours = ORTModule(eager)
    x = torch.randn(2, 5, 8)
    expected, found = eager(x), ours(x)
    assert explain(ours).captured, explain(ours).fallback
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize("less", [True, False])
def test_one_that_knows_is_left_to_pytorch(less):
    torch.manual_seed(0)
    eager = Attention(lambda: torch._C._get_tracing_state() is not None, less)
    ours = ORTModule(eager)
    x = torch.randn(2, 5, 8)
    expected, found = eager(x), ours(x)
    assert not explain(ours).captured and "does not compute what the module does" in explain(ours).fallback
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


class Gated(nn.Module):
    """Does something else when it is traced, which zeros hide from its result at first."""

    def __init__(self, of, hidden=True, held=False):
        super().__init__()
        self.linear, self.last, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.zeros(()))
        self.of, self.hidden = of, hidden
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        self.list = [self.last.weight, self.scale] if held else None

    def forward(self, x):
        y = self.linear(x)
        traced = self.hidden and torch._C._get_tracing_state() is not None
        weight, scale = self.list or (self.last.weight, self.scale)
        z = y * (2 if traced else 3)
        return x + (F.linear(z, weight) if self.of == "matrix" else torch.cat([scale[None], scale[None]])[0] * z)


@pytest.mark.parametrize("of", ["matrix", "number"])
def test_zeros_hide_nothing(of):
    torch.manual_seed(0)
    eager, x = Gated(of), torch.randn(2, 5, 8)
    ours, state = ORTModule(eager), torch.get_rng_state()
    torch.testing.assert_close(ours(x), eager(x))
    assert not explain(ours).captured and "does not compute what the module does" in explain(ours).fallback
    assert torch.equal(state, torch.get_rng_state())
    assert not any(p.any() for p in (eager.last.weight, eager.last.bias, eager.scale))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("of", ["matrix", "number"])
def test_zeros_stay(of, held):
    """Also where forward has them from elsewhere than its module, and they cannot be other values for a while."""
    torch.manual_seed(0)
    eager, x = Gated(of, hidden=False, held=held), torch.randn(2, 5, 8)
    ours = ORTModule(eager)
    torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).captured, explain(ours).fallback
    assert torch.equal(ours(x), x)


def test_rounding_is_told_from_another_result():
    torch.manual_seed(0)
    expected = torch.randn(100)
    moved = expected + 1e-3 * torch.randn(100)
    assert is_rounding(expected + 2e-3 * torch.randn(100), expected, moved)
    assert not is_rounding(expected + 1e-1 * torch.randn(100), expected, moved)
    assert not is_rounding(expected * torch.nan, expected, moved)
    assert not is_rounding(expected[:50], expected, moved)


def test_a_bool_is_scattered():
    class Chosen(nn.Module):
        def forward(self, x):
            taken = torch.ones_like(x, dtype=torch.bool).scatter(-1, x.topk(2, -1).indices, False)
            taken = taken.index_fill(0, torch.tensor([0]), True)
            return x.masked_fill(taken, 0.0)

    x = torch.randn(3, 6)
    ours = ORTModule(Chosen())
    torch.testing.assert_close(ours(x), Chosen()(x))
    assert explain(ours).captured, explain(ours).fallback


def test_what_is_left_of_weights_is_rounding():
    """Nothing but roundings, and numbers only among the parameters."""

    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.linear = nn.Embedding(20, 64), nn.Linear(64, 64)

        def forward(self, ids):
            y = self.linear(self.table(ids)).tanh()
            return (y - y.mean(-1, keepdim=True)).mean(-1)

    torch.manual_seed(0)
    ours = ORTModule(Centered())
    ours(torch.arange(12).view(3, 4)).sum().backward()
    assert explain(ours).captured, explain(ours).fallback


def test_types_are_compared_where_numbers_are_drawn():
    """What is drawn differs, but neither types nor sizes; data may decide the sizes of what is selected."""

    class Noisy(nn.Module):
        def __init__(self, wide):
            super().__init__()
            self.linear, self.wide = nn.Linear(8, 8), wide

        def forward(self, x):
            y = self.linear(x + torch.randn_like(x))
            return y.double() if self.wide and torch._C._get_tracing_state() is None else y

    class Some(nn.Module):
        def forward(self, x):
            return x[torch.rand(x.shape[0]) < 0.5] * 2

    torch.manual_seed(0)
    for wide in (False, True):
        ours = ORTModule(Noisy(wide))
        assert ours(torch.randn(3, 8)).dtype is (torch.float64 if wide else torch.float32)
        assert explain(ours).captured is not wide
    assert "is float32[" in explain(ours).fallback
    ours = ORTModule(Some())
    ours(torch.randn(30, 8))
    assert explain(ours).captured, explain(ours).fallback


def test_float32_inside_of_float64():
    """Sums in another order differ by roundings of float32."""

    class Narrower(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64).double()

        def forward(self, x):
            y = self.linear(x).float()
            return torch.einsum("ij,kj->ik", y, y).double(), y.std(-1).double()

    for seed in range(3):
        torch.manual_seed(seed)
        ours = ORTModule(Narrower())
        ours(torch.randn(16, 64).double())
        assert explain(ours).captured, explain(ours).fallback


@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_memory_that_is_not_written_yet(value):
    """The first call of a pipeline's stage has such inputs: what is not finite says nothing of its graph."""
    eager = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    ours = ORTModule(eager)
    x = torch.randn(4, 8)
    ours(torch.where(x > 0, x, value))
    torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).captured, explain(ours).fallback
