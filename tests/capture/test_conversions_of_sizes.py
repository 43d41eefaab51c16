"""`int(n)`, `round(n)`, `float(n)` of sizes follow them as the sizes do: one graph is for all lengths."""

import copy
import math
from math import floor

import pytest
import torch
import torch.nn.functional as F

from ortmodule import ORTModule, explain
from tests.capture.blocks import Block
from tests.selection import each
from tests.twins import step

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 6
ROWS = (5, 3, 8, 5, 12, 2)


def counted_on(h):
    n = int(h.shape[0])
    m = n
    n += 1
    return h * n + m


def in_a_comprehension(h):
    return h.reshape([int(size) for size in h.shape])


def text_kept(h):
    key = f"{h.shape[0]}"
    return h * {"5": 2.0}.get(key, 3.0)


def text_for_an_error(h):
    text = f"{h.shape[0]} rows of {h.shape[1]}"
    if h.dim() != 2:
        raise ValueError(text)
    return h * 2


def number_for_an_error(h):
    text = "%d rows, %.2f" % (h.shape[0], h.shape[0] / 2)  # noqa: UP031
    if h.dim() != 2:
        raise ValueError(text)
    return h * 2


def in_an_inner_function(h):
    def rows(t):
        return int(t.shape[0])

    return h / rows(h)


FOLLOWS = {
    "view": lambda h: h.view(int(h.shape[0]), 2, -1).flip(1).reshape(int(h.size(0)), -1),
    "twice": lambda h: h / int(int(len(h))),
    "round": lambda h: h / round(h.shape[0]),
    "floor": lambda h: h / math.floor(h.shape[0]),
    "a global floor": lambda h: h / floor(h.shape[0]),
    "ceil": lambda h: h / math.ceil(h.shape[0] + len(h)),
    "trunc": lambda h: h / math.trunc(h.shape[0]),
    "of a quotient": lambda h: h + h[: int(h.shape[0] // 2) + 1].mean(0),
    "of all elements": lambda h: h.reshape(int(h.numel())).view(int(h.shape[0]), -1),
    "arange": lambda h: h + torch.arange(int(h.shape[0]))[:, None],
    "isinstance": lambda h: h * 2 if isinstance(int(h.shape[0]), int) else h,
    "counted on": counted_on,
    "comprehension": in_a_comprehension,
    "inner function": in_an_inner_function,
    "linspace": lambda h: h * torch.linspace(0, 1, int(h.shape[0]))[:, None],
    "exponent": lambda h: h * 2.0 ** -int(h.shape[0]),
    "index": lambda h: h + h[int(h.shape[0]) - 1],
    "bits": lambda h: h * (int(h.shape[0]) & 1) + int(h.shape[0]) % 2,
    "divmod": lambda h: h * divmod(int(h.shape[0]), 3)[0] + divmod(int(h.shape[0]), 3)[1],
    "tensor": lambda h: h * torch.tensor(int(h.shape[0])),
    "full": lambda h: torch.full((int(h.shape[0]), 1), int(h.shape[0])) * h,
    "interpolate": lambda h: F.interpolate(h[None], size=int(h.shape[0]) + 2)[0].mean() + h,
    "pad": lambda h: F.pad(h, (0, 0, 0, int(h.shape[0]))).mean() + h,
    "norm": lambda h: F.layer_norm(h.T, (int(h.shape[0]),)).T,
    "half": lambda h: h + h[: int(h.shape[0] / 2) + 1].mean(0),
    "root": lambda h: h / math.sqrt(int(h.shape[0])),
    "map": lambda h: h + torch.ones(tuple(map(int, h.shape))),
    "whole again": lambda h: h + int(float(len(h))),
    "text of an error": text_for_an_error,
    "number in an error": number_for_an_error,
    "float": lambda h: h / float(h.shape[0]),
    "float of a fraction": lambda h: h * float(h.shape[0]) ** -0.5 + float(h.shape[0] / 3) // 2,
    "float and half": lambda h: (h.half() / float(len(h))).float(),
    "float and integers": lambda h: h + torch.arange(6) / float(len(h)) + torch.arange(6) * float(len(h)),
    "float, filled": lambda h: h + torch.full((6,), float(len(h))),
    "float bounds": lambda h: h.clamp(-1 / float(len(h)), float(len(h)) / 9) * 1.0,
    "float slopes": lambda h: F.leaky_relu(h, 1 / float(len(h))) + F.elu(h, float(len(h))),
    "float exponents": lambda h: h.abs() ** (1 / float(len(h))) + torch.pow(float(len(h)), h),
    "float factors": lambda h: h.add(h, alpha=float(len(h))) + torch.lerp(h, h * 2, 1 / float(len(h))),
}
#: What Python does with these takes a number: a graph for each length, and the right one.
BY_VALUE = {
    "type": lambda h: h * 2 if type(int(h.shape[0])) is int else h,
    "type of a fraction": lambda h: h * 2 if type(float(h.shape[0])) is float else h,
    "text": lambda h: h * float(f"{int(h.shape[0])}"),
    "format": lambda h: h * float(f"{int(h.shape[0]):d}"),
    "key": lambda h: h * {5.0: 2.0}.get(float(len(h)), 3.0),
    "list": lambda h: h * torch.tensor([1.0] * int(h.shape[0]))[:, None],
    "text kept": text_kept,
    "chr": lambda h: h * ord(chr(int(h.shape[0]))),
}


SHORT = ("view", "a global floor", "counted on", "half", "map", "number in an error", "float", "float exponents")


def compare(use, rows=ROWS):
    torch.manual_seed(0)
    eager = Block(use, WIDTH)
    ours = ORTModule(copy.deepcopy(eager))
    for n in rows:
        x = torch.randn(n, WIDTH)
        torch.testing.assert_close(step(ours, x.clone()), step(eager, x.clone()), rtol=1e-4, atol=1e-5)
    report = explain(ours)
    assert report.captured and not report.python_ops and not report.pytorch_calls, report
    return report


@each(
    "name",
    FOLLOWS,
    ("view", "a global floor", "counted on", "half", "map", "number in an error", "float", "float exponents"),
)
def test_one_graph(name, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    assert compare(FOLLOWS[name]).exports == 1


@each("name", BY_VALUE, ("type", "text kept"))
def test_what_needs_a_number(name, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    assert compare(BY_VALUE[name], (5, 3, 5, 3)).exports == 2


def test_a_comparison_has_graphs_for_its_answers(monkeypatch):
    """Not for each length. The parts of the first batch that are traced may answer otherwise than the batch."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")

    def flag(h):
        return h * int(h.shape[0] > 3)

    assert compare(flag, (5, 3)).exports == compare(flag, (5, *range(2, 13))).exports <= 3


def test_functions_are_as_they_were():
    codes = [use.__code__ for use in (counted_on, FOLLOWS["round"], FOLLOWS["floor"])]
    compare(lambda h: counted_on(h) + FOLLOWS["round"](h) + FOLLOWS["floor"](h), (4, 4))
    assert [use.__code__ for use in (counted_on, FOLLOWS["round"], FOLLOWS["floor"])] == codes
    assert type(round(7)) is int and type(math.floor(2.5)) is int and int is int
