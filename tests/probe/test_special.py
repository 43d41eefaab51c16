"""At the edges of their types, operators are PyTorch's: pointwise ones and those over a dimension."""

import pytest
import torch

from tests.probe import special

#: In float32 all of them; in the other types with --full.
EACH = [
    pytest.param(name, dtype, id=f"{name}-{dtype}", marks=() if dtype == "float32" else pytest.mark.full)
    for dtype in ("float32", "float64", "bfloat16", "float16")
    for name in special.NAMES
]


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_special(name, dtype):
    result = special.differing(name, getattr(torch, dtype))
    if result is None:
        pytest.skip("PyTorch does not have it")
    wrong, fallback = result
    assert not wrong
    assert not fallback


def test_what_is_not_compared_is_named():
    assert set(special.EXCEPT) | set(special.TIMES) <= set(special.NAMES)
