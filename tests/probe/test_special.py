"""At the edges of their types, operators are PyTorch's: pointwise ones and those over a dimension."""

import pytest
import torch

from tests.probe import special
from tests.selection import each

EACH = [(name, dtype) for dtype in ("float32", "float64", "bfloat16", "float16") for name in special.NAMES]


@each(("name", "dtype"), EACH, lambda pair: pair[1] == "float32")
def test_special(name, dtype):
    result = special.differing(name, getattr(torch, dtype))
    if result is None:
        pytest.skip("PyTorch does not have it")
    wrong, fallback = result
    assert not wrong
    assert not fallback


def test_what_is_not_compared_is_named():
    assert set(special.EXCEPT) | set(special.TIMES) <= set(special.NAMES)
