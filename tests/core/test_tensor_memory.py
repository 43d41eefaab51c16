"""The address of a tensor's memory is its storage's, and names of functions tell whether they write."""

import pytest
import torch

from ortmodule.core.objects.tensor_memory import is_in_place, is_of_data, memory_of


def test_views_have_one_memory():
    x = torch.zeros(4)
    assert memory_of(x[2:]) == memory_of(x) == x.data_ptr() != memory_of(x.clone())


@pytest.mark.parametrize("tensor", [torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.empty(0)], ids=str)
def test_without_memory(tensor):
    assert memory_of(tensor) == 0


@pytest.mark.parametrize(
    "name, writes", [("add_", True), ("__iadd__", True), ("add", False), ("__add__", False), ("__len__", False)]
)
def test_in_place(name, writes):
    assert is_in_place(name) is writes


@pytest.mark.parametrize("name", [name for name in dir(torch.Tensor) if name.startswith("__i")])
def test_operators_in_place(name):
    """Of a tensor: those that Python has one of without the letter."""
    assert is_in_place(name) is hasattr(torch.Tensor, name.replace("__i", "__", 1))


def test_data():
    data = torch.Tensor.data
    assert is_of_data(data.__get__, "__get__") and is_of_data(data.__set__, "__set__")
    assert not is_of_data(data.__get__, "__set__") and not is_of_data(torch.Tensor.grad.__get__, "__get__")
    assert not is_of_data(torch.add, "__get__")
