"""Attributes that users have put on a tensor go over to its copy, which says what it copies."""

import gc

import pytest
import torch

from ortmodule.core.objects.tensor_copies import OPERAND, as_operand, attributes_of, cloned, with_attributes


def marked():
    x = torch.ones(2)
    x.scale = 2.0
    return x


def test_attributes_go_over():
    x = marked()
    copy = with_attributes(torch.zeros(2), x)
    assert copy.scale == 2.0
    copy.scale = 3.0
    assert x.scale == 2.0  # each has its own


def test_a_tensor_is_no_copy_of_itself():
    x = marked()
    assert with_attributes(x, x) is x and x.scale == 2.0


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("grad_mode", [False, True])
def test_clone(needs_grad, grad_mode):
    x = torch.ones(2, requires_grad=needs_grad)
    x.scale = 2.0
    with torch.set_grad_enabled(grad_mode):
        copy = cloned(x)
    assert copy.scale == 2.0 and copy.requires_grad is needs_grad
    assert copy.is_leaf is not (needs_grad and grad_mode)
    assert copy.data_ptr() != x.data_ptr()


def test_an_operand_knows_its_tensor():
    x = torch.ones(2)
    assert not attributes_of(as_operand(torch.ones(2), x, given=False))
    assert attributes_of(as_operand(torch.ones(2), x, given=True))[OPERAND]() is x
    y = marked()
    held = attributes_of(as_operand(torch.ones(2), y, given=False))[OPERAND]
    assert held() is y
    del y
    gc.collect()
    assert held() is None  # only weakly
