"""Definitions of pointwise operators give PyTorch's results, at the edges of their types, too."""

import math

import pytest
import torch

from tests.lowering.definitions import check, check_kept

EDGES = torch.tensor([-math.inf, -2.5, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 1.5, 30.0, math.inf, math.nan])
OTHER = torch.tensor([1.0, -0.5, 0.0, 2.0, 0.0, -1.0, 0.5, math.nan, 3.0, 0.25, math.inf, 1.0])
HALF = torch.linspace(0.05, 0.95, 7)
X = torch.linspace(-3, 3, 12).reshape(3, 4)


@pytest.mark.parametrize(
    "kind", ["special_entr", "logit", "log2", "log10", "sinc", "special_log_ndtr", "nan_to_num", "softshrink"]
)
def test_of_one(kind):
    check(kind, EDGES if kind not in ("logit",) else HALF)


@pytest.mark.parametrize("kind", ["logaddexp", "logaddexp2", "fmax", "fmin", "heaviside", "copysign", "xlogy"])
def test_of_two(kind):
    check(kind, EDGES, OTHER)


CASES = {
    "floor": (torch.tensor([1, -2]),), "logit": (HALF, 0.2), "special_xlog1py": (OTHER.abs(), HALF[:1]),
    "round": (X, ), "lerp": (X, X + 1, 0.25), "float_power": (X.abs(), 2.5), "threshold": (X, 0.5, -1.0),
    "hardshrink": (X, 0.7), "addcmul": (X, X, X + 1), "addcdiv": (X, X, X + 7), "isclose": (X, X + 1e-9),
    "permute": (torch.rand(2, 3, 4), [-1, 0, 1]), "movedim": (torch.rand(2, 3, 4), [0, -1], [1, 0]),
    "addr": (X, X[:, 0], X[0]), "linalg_vecdot": (X, X + 1), "vdot": (X[0], X[1]), "nansum": (EDGES[1:-2],),
    "channel_shuffle": (torch.rand(1, 4, 2, 2), 2), "nanmean": (OTHER,),
    "_safe_softmax": (torch.tensor([[0.0, 1.0], [-math.inf, -math.inf]]), -1), "_is_all_true": (X > -9,),
    "_is_any_true": (X > 9,), "bilinear": (X, X, torch.rand(2, 4, 4), torch.rand(2)),
    "addbmm": (torch.rand(3, 2), torch.rand(5, 3, 4), torch.rand(5, 4, 2)), "hstack": ([X[0], X[1]],),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_results(kind):
    if kind == "round":
        check_kept(kind, *CASES[kind])  # the engine rounds as PyTorch does
    else:
        check(kind, *CASES[kind])


@pytest.mark.parametrize("kind", ["addcmul", "addcdiv"])
def test_factors(kind):
    check(kind, X, X, X + 7, value=0.5)


def test_forms_that_stay():
    check_kept("permute", X, [1, 0])
    check_kept("normal", X, 1.0)
