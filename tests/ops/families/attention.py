"""Cases of csrc/ops/attention.c."""

import math

import torch

from tests.ops.cases import Case, bools, t, value
from tests.ops.families.softmax import denormal


def masked_softmax(x, allowed=None):
    """A row in which nothing is left is zeros, and so is its gradient."""
    allowed = torch.ones_like(x, dtype=torch.bool) if allowed is None else allowed.expand_as(x)
    left = (allowed & (x != -math.inf)).any(-1, keepdim=True)
    scores = torch.where(left, torch.where(allowed, x, -math.inf), 0.0)
    return torch.where(left, scores.softmax(-1), 0.0)


def case(name, x, *mask, **kwargs):
    return Case("ortmodule::MaskedSoftmax", [x, *mask], masked_softmax, name=name, **kwargs)


def dropped(name, x, *mask, rate=1e-15, **kwargs):
    """With a dropout that leaves nothing to chance."""
    first = 1 + len(mask)
    nodes = (
        ("ortmodule::MaskedSoftmax", "x0 x1" if mask else "x0", "p"),
        ("Dropout", f"p x{first} x{first + 1}", "y0"),
    )

    def ref(x, *others):
        return masked_softmax(x, *others[:-2]) * (0 if rate == 1 else 1)

    inputs = [x, *mask, value(rate, "float32"), value(True, "bool")]
    const = (first, first + 1)
    return Case("ortmodule::MaskedSoftmaxDropout", inputs, ref, name=name, nodes=nodes, const=const, **kwargs)


INF = math.inf
ROWS = [[True, False, True], [False, False, False], [True, True, True]]

CASES = [
    case("open", t(2, 3, 5)),
    case("open", value([[0.5, -INF, 1.0], [-INF, -INF, -INF], [-INF, 3.0, -INF]]), grad=False, resize=False),
    case("special", t(4, 14, special=True), bools(4, 14)),
    case("same", t(2, 3, 5), bools(2, 3, 5)),
    case("empty-rows", t(2, 3, 3), value(ROWS, "bool"), resize=False),
    case("heads", t(2, 4, 3, 70), bools(2, 1, 3, 70), fd=False),
    case("columns", t(2, 3, 5), bools(5)),
    case("whole-rows", t(2, 3, 5), bools(2, 3, 1)),
    case("nothing", t(2, 3), value([False], "bool"), resize=False),
    case("everything", t(2, 3), value(True, "bool"), resize=False),
    case("vector", t(9), bools(9)),
    case("long", t(3, 3000), bools(3, 3000), fd=False, resize=False),
    case("no-rows", t(0, 4), bools(0, 4), resize=False),
    case("no-columns", t(4, 0), bools(4, 0), grad=False, resize=False),
    dropped("open", t(2, 3, 5)),
    dropped("open", value([[0.5, -INF, 1.0], [-INF, -INF, -INF], [-INF, 3.0, -INF]]), grad=False, resize=False),
    dropped("special", t(4, 14, special=True), bools(4, 14)),
    dropped("empty-rows", t(2, 3, 3), value(ROWS, "bool"), resize=False),
    dropped("heads", t(2, 4, 3, 70), bools(2, 1, 3, 70), fd=False),
    dropped("whole-rows", t(2, 3, 5), bools(2, 3, 1)),
    dropped("nothing-left", t(2, 3, 5), bools(5), rate=1.0),
    dropped("vector", t(9), bools(9)),
    dropped("long", t(3, 3000), bools(3, 3000), fd=False, resize=False),
    dropped("no-rows", t(0, 4), bools(0, 4), resize=False),
    dropped("no-columns", t(4, 0), bools(4, 0), grad=False, resize=False),
]
CASES += denormal("ortmodule::MaskedSoftmax", 9)
