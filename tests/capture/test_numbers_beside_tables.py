"""Numbers that forward keeps beside tables, in ways that could be mistaken: as PyTorch has them after every call."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each
from tests.twins import step_in_mode as step

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 8


def column(n):
    """A table whose values say for how many rows it is."""
    return torch.linspace(0.5, n / 4, n)[:, None]


class Block(nn.Module):
    """The length is dimension 0, the batch dimension 1."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.known, self.table = 0, None

    def forward(self, x):
        h = self.first(x)
        return self.last(self.mix(h, h.shape[0], h.shape[1]))

    def fill(self, n):
        if n != self.known:
            self.known, self.table = n, column(n)
        return self.table[:, None]

    def mix(self, h, n, rows):
        return h * self.fill(n)


class Steps(Block):
    """A counter beside it that is a length at times, and is compared and multiplied."""

    steps = 10

    def mix(self, h, n, rows):
        self.steps += 1
        h = h * self.fill(n) * self.steps
        return h / 2 if self.steps < 13 else h - self.steps


class Epoch(Block):
    """The script's own, compared with a size."""

    epoch = 0

    def mix(self, h, n, rows):
        h = h * self.fill(n)
        return h * 2 if self.epoch == n else h * self.epoch + rows


class Heads(Block):
    """A constant that is a length at times."""

    heads = 4

    def mix(self, h, n, rows):
        y = h.reshape(n, rows, self.heads, -1).softmax(-1).reshape(n, rows, -1) * self.fill(n)
        return y * 2 if n == self.heads else y


class AlsoFactor(Block):
    def mix(self, h, n, rows):
        return h * self.fill(n) * self.known + self.known


class OfRows(Block):
    """The table is for the batch."""

    def mix(self, h, n, rows):
        return h * self.fill(rows).transpose(0, 1)


class OfBoth(Block):
    """Two tables, each with its number."""

    def __init__(self):
        super().__init__()
        self.rows, self.other = 0, None

    def mix(self, h, n, rows):
        if self.rows != rows:
            self.rows, self.other = rows, column(rows).transpose(0, 1)[..., None]
        return h * self.fill(n) + self.other


class Sum(Block):
    """The number is a formula of sizes."""

    def formula(self, n, rows):
        return 2 * n + 1

    def mix(self, h, n, rows):
        if self.known != self.formula(n, rows):
            self.known, self.table = self.formula(n, rows), column(n)
        return h * self.table[:, None] + self.known


class Product(Sum):
    def formula(self, n, rows):
        return n * rows


class Half(Sum):
    """A fraction."""

    def formula(self, n, rows):
        return n / 2


class AsFloat(Sum):
    def formula(self, n, rows):
        return float(n)


class Rounded(Sum):
    """For several lengths."""

    def formula(self, n, rows):
        return (n + 3) // 4 * 4

    def mix(self, h, n, rows):
        size = self.formula(n, rows)
        if self.known != size:
            self.known, self.table = size, column(size)
        return h * self.table[:n, None] + self.known


class Converted(Block):
    def mix(self, h, n, rows):
        return h * self.fill(int(n))


class Flag(Block):
    """`True == 1`."""

    known = None

    def __init__(self):
        super().__init__()
        self.known = True
        self.table = column(1)


class InList(Block):
    def __init__(self):
        super().__init__()
        self.numbers = [0]

    def fill(self, n):
        if n != self.numbers[0]:
            self.numbers[0], self.table = n, column(n)
        return self.table[:, None]


class InDictionary(Block):
    def __init__(self):
        super().__init__()
        self.numbers = {"n": 0}

    def fill(self, n):
        if n != self.numbers["n"]:
            self.numbers["n"], self.table = n, column(n)
        return self.table[:, None]


class InObject(Block):
    def __init__(self):
        super().__init__()
        self.numbers = SimpleNamespace(n=0)

    def fill(self, n):
        if n != self.numbers.n:
            self.numbers.n, self.table = n, column(n)
        return self.table[:, None]


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.known, self.table = 0, None

    forward = Block.fill


class Shared(Block):
    """One table for two blocks, which are given other lengths."""

    def __init__(self):
        super().__init__()
        self.one = Reader(Table())
        self.two = Reader(self.one.rows)

    def mix(self, h, n, rows):
        return self.two(self.one(h)[: n // 2 + 1])


class Reader(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def forward(self, h):
        return h * self.rows(h.shape[0]) * self.rows.known


class Limited(Block):
    """Some lengths alone are possible: traces at others fail."""

    def mix(self, h, n, rows):
        if n not in (5, 9):
            raise ValueError(n)
        return h * self.fill(n)


class Refused(Block):
    """What a capture of it leaves behind is nothing."""

    def mix(self, h, n, rows):
        h = h * self.fill(n)
        return h * 2 if torch.rand(()) < 2 else h


class Backwards(Block):
    """The table is not for the number."""

    def mix(self, h, n, rows):
        if self.known > n or self.table is None:
            self.table = torch.full((1, 1), float(n))
        self.known = n
        return h * self.table[:, None] + self.known


KINDS = (
    Block, Steps, Epoch, Heads, AlsoFactor, OfRows, OfBoth, Sum, Product, Half, AsFloat, Rounded, Converted, Flag,
    InList, InDictionary, InObject, Shared, Limited, Refused, Backwards,
)  # fmt: skip
#: Sizes of (length, batch), and a change by the script before a call.
ORDERS = {
    "one length": [(9, 2)] * 5 + [(9, 4), (9, 3)],
    "two lengths": [(9, 2), (9, 3), (5, 2), (5, 2), (9, 3), (5, 4), (5, 3), (9, 2)],
    "a batch as long": [(5, 5), (5, 5), (5, 3), (9, 5), (5, 9), (9, 9), (9, 5), (5, 5)],
    "as wide": [(8, 2), (8, 3), (8, 8), (4, 8), (4, 3), (8, 4), (8, 2)],
    "as many as steps": [(11, 2), (12, 2), (13, 2), (14, 2), (14, 2), (16, 2), (17, 3)],
    "of one": [(1, 2), (1, 3), (2, 1), (1, 1), (2, 2), (1, 3)],
}


def longer(module):
    """The table stays the old one."""
    module.known = 9


def rounded_up(module):
    module.known = float(module.known)


def forgotten(module):
    """The table is made anew in the next call."""
    module.known, module.table = 0, None
    numbers = getattr(module, "numbers", None)
    if isinstance(numbers, SimpleNamespace):
        numbers.n = 0
    elif numbers is not None:
        numbers["n" if isinstance(numbers, dict) else 0] = 0


def doubled(module):
    if module.table is not None:
        module.table = module.table * 2


def as_next_epoch(module):
    module.epoch = module.epoch + 9 if hasattr(module, "epoch") else 0


CHANGES = (longer, rounded_up, forgotten, doubled, as_next_epoch)


def held(module):
    """What is in attributes, with its types."""
    found = {}
    for path, each_one in module.named_modules():
        for key, value in vars(each_one).items():
            value = vars(value) if isinstance(value, SimpleNamespace) else value
            if isinstance(value, (bool, int, float, torch.Tensor)) and not key.startswith("_"):
                found[f"{path}.{key}"] = value
            elif key == "numbers":
                found[f"{path}.{key}"] = [*(value.values() if isinstance(value, dict) else value)]
    return found


def compare(make, order, modes, monkeypatch, change=None, share="inf"):
    """Values, all gradients and attributes after each call; the report."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", share)
    torch.manual_seed(0)
    eager = make()
    ours = ORTModule(copy.deepcopy(eager))
    for i, sizes in enumerate(order):
        if change is not None and i % 2:
            change(eager)
            change(ours._ortmodule.module)
        for training in modes:
            x = torch.randn(*sizes, WIDTH)
            try:
                expected = step(eager, x.clone(), training)
            except (ValueError, RuntimeError) as error:
                with pytest.raises(type(error)):
                    step(ours, x.clone(), training)
            else:
                torch.testing.assert_close(step(ours, x.clone(), training), expected, rtol=1e-4, atol=1e-5)
            ours_now, now = held(ours._ortmodule.module), held(eager)
            torch.testing.assert_close(ours_now, now)
            assert {k: type(v) for k, v in ours_now.items()} == {k: type(v) for k, v in now.items()}, i
    return explain(ours)


SHORT = (
    (Steps, "as many as steps"), (OfRows, "a batch as long"), (Product, "two lengths"), (Rounded, "two lengths"),
    (Shared, "two lengths"), (Limited, "two lengths"), (Heads, "as wide"), (Flag, "of one"), (InObject, "one length"),
)  # fmt: skip


#: Kinds that the engine runs where lengths come again (how many calls are PyTorch's at most, of a graph each): the
#: others keep the number where no graph takes it in, or do what PyTorch alone does.
IN_ENGINE = (
    Block, Steps, AlsoFactor, OfRows, OfBoth, Sum, Product, Half, AsFloat, Converted, Shared, Epoch, Heads, Limited,
)  # fmt: skip


@each("kind", IN_ENGINE, (Block, Product, Converted))
def test_the_engine_runs_calls_that_find_a_table(kind, monkeypatch):
    """Two calls that fill it at most are PyTorch's, and those that make it anew where no graph is captured for that."""
    order = [(9, 3)] * 8
    report = compare(kind, order, (True,), monkeypatch, share="0")
    assert report.captured and report.pytorch_calls <= 2 and not report.python_ops, report
    assert report.exports == 1, report


@each("kind,order", [(kind, order) for kind in KINDS for order in ORDERS], SHORT)
def test_as_pytorch_has_it(kind, order, monkeypatch):
    compare(kind, ORDERS[order], (True,), monkeypatch)


@each("kind", KINDS, (OfBoth, Epoch))
def test_training_and_evaluation(kind, monkeypatch):
    compare(kind, ORDERS["two lengths"], (True, False), monkeypatch)


@each("kind,change", [(kind, change) for kind in KINDS for change in CHANGES], ((AlsoFactor, longer), (Sum, rounded_up), (Block, forgotten), (Epoch, as_next_epoch)))  # fmt: skip  # noqa: E501
def test_changes_by_the_script(kind, change, monkeypatch):
    compare(kind, ORDERS["two lengths"], (True,), monkeypatch, change)
