"""Compares the results of a definition with PyTorch's operator; gradients show in a trace alone (`sloped`)."""

import pytest
import torch

from ortmodule.lowering.decompositions import DEFINITIONS, Keep, Leave
from tests.tolerances import assert_near

#: Of a result's norm.
NEAR, NEAR_HALF = 1e-5, 1e-2


def check(kind, *args, **named):
    """``DEFINITIONS[kind]`` gives what the operator of this name gives, for these arguments.

    ``named``: those that follow in the schema of the operator, which takes them by name alone.
    """
    found = results(DEFINITIONS[f"aten::{kind}"](*args, *named.values()))
    expected = results(getattr(torch.ops.aten, kind)(*args, **named))
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        finite = b.isfinite()
        torch.testing.assert_close(a[~finite], b[~finite], equal_nan=True)
        assert_near([a[finite]], [b[finite]], NEAR if b.is_floating_point() and b.itemsize > 2 else NEAR_HALF)


def results(result):
    return result if isinstance(result, (tuple, list)) else (result,)


def check_kept(kind, *args):
    """The operator stays as it is."""
    with pytest.raises(Keep):
        DEFINITIONS[f"aten::{kind}"](*args)


def check_left(kind, *args):
    """PyTorch runs it."""
    with pytest.raises(Leave):
        DEFINITIONS[f"aten::{kind}"](*args)
