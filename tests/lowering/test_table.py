"""Definitions are registered under all their names, and their helpers give what they say."""

import pytest
import torch

from ortmodule.core.errors import Keep
from ortmodule.lowering.decompositions import DEFINITIONS, table


def test_registered(monkeypatch):
    monkeypatch.setattr(table, "DEFINITIONS", {})

    @table.defines("aten::a", "aten::b", recursive=True)
    def define(x):
        return x

    assert {"aten::a": define, "aten::b": define} == table.DEFINITIONS
    assert define.recursive and not define.sizes


def test_every_name_is_an_operator_of_torchs():
    assert len(DEFINITIONS) > 100
    missing = [name for name in DEFINITIONS if not torch._C._jit_get_schemas_for_operator(name)]
    assert not missing


def test_from_start():
    assert table.from_start(torch.tensor([0, -1, 2, -3]), 3).tolist() == [0, 2, 2, 0]
    with pytest.raises(IndexError):
        table.from_start(torch.tensor([3]), 3)


def test_types():
    assert table.dtype_of(6) is torch.float32 and table.dtype_of(torch.int8) is torch.int8
    assert table.dtype_of(None) is None
    with pytest.raises(Keep):
        table.dtype_of(9)  # complex64


def test_values_of_sloped():
    x = torch.tensor([1.0, 2.0])
    assert torch.equal(table.sloped(x * 3, (x, torch.full_like(x, 3.0))), x * 3)
    assert torch.equal(table.shared(torch.tensor([1.0]), torch.ones(2)), torch.ones(2))
