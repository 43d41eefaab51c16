"""Tables that forward keeps in dictionaries under sizes: `self.masks[x.shape[1]]`."""

import copy
import functools

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each
from tests.twins import step

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 8
LENGTHS = (5, 12, 7, 20, 9)


def triangle(n):
    return torch.full((n, n), -1e9).triu(1)


def rotations(n):
    angles = torch.outer(torch.arange(n).float(), 1 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)).repeat(1, 2)
    return angles.cos(), angles.sin()


def attend(h, mask):
    return torch.softmax(h @ h.transpose(1, 2) / 4 + mask, -1) @ h


def turn(h, tables):
    a, b = h.chunk(2, -1)
    return h * tables[0] + torch.cat((-b, a), -1) * tables[1]


def is_in(self, h):
    n = h.shape[1]
    if n not in self.memo:
        self.memo[n] = triangle(n)
    return attend(h, self.memo[n])


def asked_twice(self, h):
    if h.size(1) not in self.memo:
        self.memo[h.size(1)] = triangle(h.size(1))
    return attend(h, self.memo[h.shape[-2]])


def got(self, h):
    mask = self.memo.get(h.shape[1])
    if mask is None:
        mask = self.memo[h.shape[1]] = triangle(h.shape[1])
    return attend(h, mask)


def tried(self, h):
    try:
        mask = self.memo[h.shape[1]]
    except KeyError:
        mask = self.memo[h.shape[1]] = triangle(h.shape[1])
    return attend(h, mask)


def with_device(self, h):
    key = (h.shape[1], h.device, h.dtype)
    if key not in self.memo:
        self.memo[key] = triangle(h.shape[1])
    return attend(h, self.memo[key])


def nested_key(self, h):
    key = ("mask", (h.shape[1], 1))
    if key not in self.memo:
        self.memo[key] = triangle(h.shape[1])
    return attend(h, self.memo[key])


def computed_key(self, h):
    key = h.shape[1] * 2 + 1
    if key not in self.memo:
        self.memo[key] = triangle(key // 2)
    return attend(h, self.memo[key])


def two_sizes(self, h):
    key = (h.shape[0], h.shape[1])
    if key not in self.memo:
        self.memo[key] = torch.arange(h.shape[0] * h.shape[1]).reshape(key).cos()
    return h * self.memo[key][..., None]


def a_shape(self, h):
    if h.shape[:2] not in self.memo:
        self.memo[h.shape[:2]] = torch.arange(h.shape[0] * h.shape[1]).reshape(h.shape[:2]).cos()
    return h * self.memo[h.shape[:2]][..., None]


def pair(self, h):
    n = h.shape[1]
    if n not in self.memo:
        self.memo[n] = rotations(n)
    return turn(h, self.memo[n])


def two_tables(self, h):
    n = h.shape[1]
    for name, make in (("turn", lambda n: rotations(n)[0]), ("mask", triangle)):
        if (name, n) not in self.memo:
            self.memo[name, n] = make(n)
    return attend(h * self.memo["turn", n], self.memo["mask", n])


def halves(self, h):
    n = h.shape[1] // 2
    if n not in self.memo:
        self.memo[n] = rotations(n)
    return turn(h[:, :n], self.memo[n])


TABLES = (is_in, asked_twice, got, tried, with_device, nested_key, computed_key, two_sizes, a_shape, pair, two_tables,
          halves)  # fmt: skip
SHORT = (is_in, tried, with_device, pair)
# --- no tables: PyTorch's results all the same


def limited(self, h):
    """All of it goes when there are too many."""
    n = h.shape[1]
    if n not in self.memo:
        if len(self.memo) > 2:
            self.memo.clear()
        self.memo[n] = triangle(n)
    return attend(h, self.memo[n])


def counted(self, h):
    self.memo[h.shape[1]] = self.memo.get(h.shape[1], 0) + 1
    return h * self.memo[h.shape[1]]


def summed(self, h):
    n = h.shape[1]
    self.memo[n] = self.memo.get(n, torch.zeros(n, 1)) + torch.ones(n, 1)
    return h * self.memo[n]


def written(self, h):
    n = h.shape[1]
    if n not in self.memo:
        self.memo[n] = torch.ones(n, 1)
    self.memo[n] += 1
    return h * self.memo[n]


def of_data(self, h):
    """A state for each length."""
    n = h.shape[1]
    last = self.memo.get(n)
    self.memo[n] = h.detach().mean(0)
    return h if last is None else h + last


def first_of_data(self, h):
    n = h.shape[1]
    if n not in self.memo:
        self.memo[n] = h.detach().mean(0)
    return h + self.memo[n]


def not_filled(self, h):
    """Only what the script has put there."""
    return h * self.memo.get(h.shape[1], 2.0)


def all_of_it(self, h):
    n = h.shape[1]
    if n not in self.memo:
        self.memo[n] = triangle(n)
    return attend(h, self.memo[n]) * sum(each.shape[0] for each in self.memo.values())


def drawn(self, h):
    n = h.shape[1]
    if n not in self.memo:
        self.memo[n] = torch.rand(n, 1)
    return h * self.memo[n]


def of_weights(self, h):
    n = h.shape[1]
    if n not in self.memo:
        self.memo[n] = self.last.weight.detach().sum(0).expand(n, WIDTH).clone()
    return h * self.memo[n]


OTHERS = (limited, counted, summed, written, of_data, first_of_data, not_filled, all_of_it, drawn, of_weights)


class Block(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.memo, self.use = {}, use

    def forward(self, x):
        h = self.first(x)
        return self.last(self.use(self, h))


class Stack(nn.Module):
    def __init__(self, *uses):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, uses))

    def forward(self, x):
        for block in self.blocks:
            x = block(x) + x
        return x


class Shared(Stack):
    """One dictionary of two submodules."""

    def __init__(self, *uses):
        super().__init__(*uses)
        self.blocks[1].memo = self.blocks[0].memo


def held(module):
    return [dict(m.memo) for m in module.modules() if isinstance(m, Block)]


def compare(make, lengths=LENGTHS, rounds=4, between=lambda module, i: None):
    torch.manual_seed(0)
    eager = make()
    ours = ORTModule(copy.deepcopy(eager))
    for i, n in enumerate(lengths * rounds):
        x = torch.randn(2 + i // len(lengths) % 2, n, WIDTH)
        found = []
        for module in (eager, ours):
            torch.manual_seed(i)
            between(module, i)
            found.append(step(module, x.clone()))
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(held(ours), held(eager))
    return explain(ours)


@each("use", TABLES, SHORT)
@pytest.mark.parametrize("share", ("0", "inf"))
def test_one_graph_for_all_sizes(use, share, monkeypatch):
    """PyTorch runs the first call with each key."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", share)
    report = compare(functools.partial(Block, use))
    keys = len(LENGTHS) * (2 if use in (two_sizes, a_shape) else 1)
    assert report.captured and report.exports == 1 and not report.python_ops, report
    assert report.pytorch_calls <= keys + 1, report


@pytest.mark.parametrize("use", OTHERS)
def test_what_is_no_table(use):
    compare(functools.partial(Block, use))


@pytest.mark.parametrize("make", [
    functools.partial(Stack, is_in, pair), functools.partial(Shared, is_in, got),
    functools.partial(Stack, got, limited),
])  # fmt: skip
def test_several_dictionaries(make):
    assert compare(make).captured


def test_evaluation_and_training():
    def between(module, i):
        module.train(i % 3 > 0)

    report = compare(functools.partial(Block, pair), between=between)
    assert report.captured and report.exports == 2 and report.pytorch_calls == len(LENGTHS), report


def changed(module, i):
    if i == 7:
        for table in module.memo.values():
            table.mul_(0.5)
    elif i == 11:
        module.memo.clear()
    elif i == 14:
        module.memo = {n: torch.zeros(n, n) for n in LENGTHS}
    elif i == 17:
        module.memo[12] = module.memo[12].half()


def test_what_the_script_changes():
    """Its tables are those that count."""
    report = compare(functools.partial(Block, is_in), rounds=5, between=changed)
    assert report.captured and report.pytorch_calls <= 12, report


@each("use", TABLES, (pair,))
def test_nothing_is_found_by_verify(use, monkeypatch):
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    report = compare(functools.partial(Block, use), rounds=3)
    assert report.captured


def test_strict_refuses(monkeypatch):
    """A graph cannot fill the dictionary, and PyTorch must not."""
    monkeypatch.setenv("ORTMODULE_STRICT", "1")
    with pytest.raises(Exception, match="attribute"):
        ORTModule(Block(is_in))(torch.randn(2, 5, WIDTH))
