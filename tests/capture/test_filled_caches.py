"""Masks and tables of positions that forward keeps in attributes, and makes larger when a longer sequence comes."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each
from tests.twins import step_in_mode as step

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 16
LENGTHS = (8, 12, 5, 20, 8, 33, 12, 7, 20, 33)


def rotated(n):
    return torch.outer(torch.arange(n).float(), 1 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)).repeat(1, 2)


def turned(h, table):
    a, b = h.chunk(2, -1)
    return h * table.cos() + torch.cat((-b, a), -1) * table.sin()


def masked(h, mask):
    return torch.softmax(h @ h.transpose(1, 2) / 4 + mask, -1) @ h


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.mix(self.first(x)))


class GrownMask(Block):
    mask = None

    def mix(self, h):
        n = h.shape[1]
        if self.mask is None or self.mask.shape[0] < n:
            self.mask = torch.full((n, n), -1e9).triu(1)
        return masked(h, self.mask[:n, :n])


class ExactMask(Block):
    """For the length of now alone."""

    def __init__(self):
        super().__init__()
        self.mask = None

    def mix(self, h):
        n = h.shape[1]
        if self.mask is None or self.mask.size(0) != n:
            self.mask = torch.full((n, n), -1e9).triu(1)
        return masked(h, self.mask)


class BufferMask(Block):
    """Registered anew in forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", None, persistent=False)

    def mix(self, h):
        n = h.shape[1]
        if self.mask is None or self.mask.shape[-1] < n:
            self.register_buffer("mask", torch.ones(n, n, dtype=torch.bool).triu(1), persistent=False)
        return torch.softmax((h @ h.transpose(1, 2) / 4).masked_fill(self.mask[:n, :n], -1e9), -1) @ h


class RotaryBuffers(Block):
    """With the length beside them, computed from a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", 1 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH), persistent=False)
        self.build(4)

    def build(self, n):
        self.longest = n
        table = torch.outer(torch.arange(n).float(), self.frequencies)
        self.register_buffer("table", torch.cat((table, table), -1), persistent=False)

    def mix(self, h):
        if h.shape[1] > self.longest:
            self.build(h.shape[1])
        return turned(h, self.table[: h.shape[1]])


class RotaryAttributes(Block):
    """The length decides before the tables are looked at."""

    def __init__(self):
        super().__init__()
        self.longest, self.table = 0, None

    def mix(self, h):
        n = h.shape[1]
        if n > self.longest or self.table is None or self.table.dtype != h.dtype:
            self.longest, self.table = n, rotated(n)
        return turned(h, self.table[:n])


class Missing(Block):
    """The attribute is not there at first."""

    def mix(self, h):
        n = h.shape[1]
        if not hasattr(self, "positions") or self.positions.shape[0] < n:
            self.positions = torch.arange(n).float().sin()[:, None]
        return h + self.positions[:n]


class FromTheEnd(Block):
    """ALiBi's biases, of which the last rows and columns are taken."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", None, persistent=False)

    def mix(self, h):
        n = h.shape[1]
        if self.bias is None or self.bias.shape[-1] < n:
            bias = -(torch.arange(n)[None] - torch.arange(n)[:, None]).abs().float() / 2
            self.register_buffer("bias", bias[None], persistent=False)
        return masked(h, self.bias[..., -n:, -n:])


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([GrownMask(), BufferMask(), RotaryAttributes()])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


CASES = (GrownMask, ExactMask, BufferMask, RotaryBuffers, RotaryAttributes, Missing, FromTheEnd, Nested)
#: Where each length makes another mask PyTorch runs the calls that do.
EACH_LENGTH = (ExactMask,)


def state(module):
    held = {
        f"{path}.{k}": v for path, m in module.named_modules() for k, v in (*m.__dict__.items(), *m._buffers.items())
    }
    return {key: value for key, value in held.items() if type(value) in (int, torch.Tensor)}


def compare(eager, ours, lengths=LENGTHS):
    module = ours._ortmodule.module
    for i, n in enumerate(lengths):
        for training in (True, False):
            x = torch.randn(2 + i % 3, n, WIDTH)
            expected = step(eager, x.clone(), training)
            torch.testing.assert_close(step(ours, x.clone(), training), expected, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(state(module), state(eager))
    return explain(ours)


def pair(kind):
    torch.manual_seed(0)
    eager = kind()
    return eager, ORTModule(copy.deepcopy(eager))


@each("kind", CASES, (GrownMask, RotaryAttributes, FromTheEnd))
def test_one_graph_for_each_mode(kind, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "0")
    report = compare(*pair(kind))
    assert report.captured and report.exports == 2 and not report.python_ops, report
    assert report.pytorch_calls <= (10 if kind in EACH_LENGTH else 4), report


@each("kind", CASES, (RotaryBuffers,))
def test_calls_that_fill_a_cache_may_have_a_graph_too(kind, monkeypatch):
    """Where every graph is made at once: two that fill, one that finds, of each mode."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    report = compare(*pair(kind))
    assert report.captured and report.exports <= 6 and report.pytorch_calls <= 2, report


@each("kind", CASES, (BufferMask,))
def test_nothing_is_found_by_verify(kind, monkeypatch):
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    compare(*pair(kind))


@pytest.mark.parametrize("kind", (GrownMask, RotaryBuffers))
def test_strict_captures_the_first_call(kind, monkeypatch):
    monkeypatch.setenv("ORTMODULE_STRICT", "1")
    assert compare(*pair(kind), LENGTHS[:3]).pytorch_calls == 0


def test_a_cache_that_was_filled_before(monkeypatch):
    """The first time that it grows its sizes are seen to vary."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    eager, ours = pair(GrownMask)
    for each_one in (eager, ours._ortmodule.module):
        each_one(torch.randn(2, 6, WIDTH))
    assert compare(eager, ours).exports <= 6


def test_a_table_that_the_script_replaces(monkeypatch):
    """By others of other sizes: a codebook, class weights."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")

    class Table(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.randn(4, WIDTH))
            self.more = torch.randn(3, WIDTH)

        def mix(self, h):
            return (h @ self.codes.t()).softmax(-1) @ self.codes + (h @ self.more.t()).sum(-1, keepdim=True)

    eager, ours = pair(Table)
    for i in range(8):
        for each_one in (eager, ours._ortmodule.module):
            torch.manual_seed(i)
            each_one.codes, each_one.more = torch.randn(4 + i % 5, WIDTH), torch.randn(3 + i, WIDTH)
        report = compare(eager, ours, LENGTHS[:1])
    assert report.captured and report.exports <= 6


def test_a_cache_that_the_script_takes_away():
    eager, ours = pair(GrownMask)
    compare(eager, ours, LENGTHS[:3])
    for each_one in (eager, ours._ortmodule.module):
        each_one.mask = None
    compare(eager, ours, LENGTHS[:3])
    for each_one in (eager, ours._ortmodule.module):
        each_one.mask = torch.zeros(64, 64)  # with other values than forward would put there
    assert compare(eager, ours, LENGTHS[:3]).captured


class State(Block):
    """Not a cache: what a call leaves for the next one."""

    def __init__(self):
        super().__init__()
        self.state = None

    def mix(self, h):
        h = h if self.state is None else h + self.state.mean()
        self.state = h.detach()
        return h


def test_a_state_of_forward_is_none():
    """Its first call is captured."""
    eager, ours = pair(State)
    step(ours, torch.randn(2, 3, WIDTH), True)
    assert explain(ours).captured
    eager, ours = pair(State)
    compare(eager, ours, (4, 4, 6, 4))


class Windows(Block):
    """Swin's: the number in an attribute comes of torch's functions where code is traced."""

    def __init__(self):
        super().__init__()
        self.window = 8

    def mix(self, h):
        sizes = (h.shape[1], 2 * h.shape[1])
        if min(sizes) <= self.window:
            self.window = torch.min(torch.tensor(sizes)) if torch.jit.is_tracing() else min(sizes)
        return h + h[:, : self.window].mean(1, keepdim=True)


def test_a_number_is_no_table():
    """PyTorch fills nothing."""
    eager, ours = pair(Windows)
    for n in (8, 12, 8, 8):
        x = torch.randn(2, n, WIDTH)
        torch.testing.assert_close(step(ours, x, True), step(eager, x, True))
        assert ours._ortmodule.module.window == eager.window
    assert explain(ours).captured and not explain(ours).pytorch_calls
