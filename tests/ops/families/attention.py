"""Cases of csrc/ops/attention.c."""

import math

import torch

from tests.ops.cases import Case, bools, t, value


def masked_softmax(x, allowed=None):
    """A row in which nothing is left is zeros, and so is its gradient."""
    allowed = torch.ones_like(x, dtype=torch.bool) if allowed is None else allowed.expand_as(x)
    left = (allowed & (x != -math.inf)).any(-1, keepdim=True)
    scores = torch.where(left, torch.where(allowed, x, -math.inf), 0.0)
    return torch.where(left, scores.softmax(-1), 0.0)


def case(name, x, *mask, **kwargs):
    return Case("ortmodule::MaskedSoftmax", [x, *mask], masked_softmax, name=name, **kwargs)


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
]
