"""A deferred tensor says its shape at once, has its values when they are read, and passes gradients on."""

import pytest
import torch

from ortmodule.core.errors import StateError
from ortmodule.core.lazy_tensor import Deferred


class Source:
    def __init__(self, values):
        self.of, self.asked = values, 0

    def values(self):
        self.asked += 1
        return self.of


def deferred(dtype=torch.float32):
    source = Source(torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype))
    return Deferred(source, dtype, (2, 2), torch.device("cpu")), source


def test_what_says_nothing_of_values_computes_none():
    x, source = deferred()
    assert x.shape == (2, 2) and x.dtype is torch.float32 and x.dim() == 2 and x.numel() == 4 and len(x) == 2
    assert x.device.type == "cpu" and x.is_floating_point() and not torch.is_complex(x)
    assert hash(x) == hash(x)
    y = x.detach().float()
    assert y.shape == (2, 2) and source.asked == 0


def test_values_are_computed_once():
    x, source = deferred()
    assert (x + 1).tolist() == [[2.0, 3.0], [4.0, 5.0]] and x.tolist() == source.of.tolist() and source.asked == 1
    assert x.materialised() is x.materialised()


def test_a_change_in_place_is_seen():
    x, _ = deferred()
    x.mul_(2)
    assert x.sum().item() == 20.0


def test_float_is_put_off():
    x, source = deferred(torch.bfloat16)
    y = x.float()
    assert y.dtype is torch.float32 and source.asked == 0
    assert torch.equal(y + 0, source.of.float())
    z, _ = deferred()
    assert z.float() is z


@pytest.mark.parametrize("widened", [False, True])
def test_gradients_pass(widened):
    x, _ = deferred(torch.bfloat16 if widened else torch.float32)
    x.requires_grad_()
    (x.float() if widened else x).mul(3).sum().backward()
    assert x.grad.dtype is x.dtype and torch.equal(x.grad.float(), torch.full((2, 2), 3.0))


def test_c_functions_cannot_write_what_is_not_there():
    x, _ = deferred()
    with pytest.raises(StateError, match="clone them first"), torch._C.DisableTorchFunctionSubclass():
        torch.ops.aten.mul_.Tensor(x, torch.ones(2, 2))
