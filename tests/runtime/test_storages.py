"""Storages that shrink under a tensor: an exception with PyTorch's sentence, never a read past their end."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, _core
from ortmodule.optim import FusedAdam

SENTENCE = r"setStorage: sizes \[.*\], strides \[.*\].* requiring a storage size of \d+ are out of bounds for storage"


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(40, 30)
        self.register_buffer("scale", torch.rand(30) + 0.5)

    def forward(self, x):
        return (self.linear(x) * self.scale).tanh()


def built():
    torch.manual_seed(0)
    model = Scaled()
    wrapped = ORTModule(model)
    x = torch.randn(5, 40, requires_grad=True)
    wrapped(x).sum().backward()
    model.zero_grad()
    x.grad = None
    return model, wrapped, x


def of(model, x, which):
    return {"weight": model.linear.weight, "bias": model.linear.bias, "buffer": model.scale, "input": x}[which]


@pytest.mark.parametrize("which", ["weight", "bias", "buffer", "input"])
@pytest.mark.parametrize("size", [16, 0])
def test_shrunk_before_forward(which, size):
    model, wrapped, x = built()
    of(model, x, which).untyped_storage().resize_(size)
    with pytest.raises(RuntimeError, match=SENTENCE):
        wrapped(x)


@pytest.mark.parametrize("which", ["weight", "buffer", "input"])
def test_shrunk_between(which):
    model, wrapped, x = built()
    y = wrapped(x)
    of(model, x, which).untyped_storage().resize_(16)
    with pytest.raises(RuntimeError, match=SENTENCE):
        y.sum().backward()


def test_gradient_handed_in():
    _, wrapped, x = built()
    y, grad = wrapped(x), torch.ones(5, 30)
    grad.untyped_storage().resize_(16)
    with pytest.raises(RuntimeError, match=SENTENCE):
        y.backward(grad)


def test_view_of_memory_that_is_gone():
    model, wrapped, _ = built()
    whole = torch.randn(10, 40)
    part = whole[5:]
    wrapped(part)
    whole.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage offset 200, .* requiring a storage size of 1600"):
        wrapped(part)


def test_grown_again():
    """What is large enough, wherever it is, is computed with."""
    model, wrapped, x = built()
    model.linear.weight.untyped_storage().resize_(16)
    with pytest.raises(RuntimeError, match=SENTENCE):
        wrapped(x)
    model.linear.weight.untyped_storage().resize_(40 * 30 * 4)
    with torch.no_grad():
        model.linear.weight.normal_()
    torch.testing.assert_close(wrapped(x), model(x))


@pytest.mark.parametrize("change", ["set_", "data", "view"])
def test_moved(change):
    """Other memory is read where it is, however it came there."""
    model, wrapped, x = built()
    weight, large = model.linear.weight, torch.randn(50, 40)
    with torch.no_grad():
        if change == "set_":
            weight.set_(large.untyped_storage(), 80, (30, 40), (40, 1))
        elif change == "data":
            weight.data = torch.randn(30, 40)
        else:
            weight.data = large[10:40]
    torch.testing.assert_close(wrapped(x), model(x))
    large.untyped_storage().resize_(16)
    if change != "data":
        with pytest.raises(RuntimeError, match=SENTENCE):
            wrapped(x)


@pytest.mark.parametrize("which", ["parameter", "gradient", "exp_avg", "exp_avg_sq"])
def test_optimizer(which):
    parameter = nn.Parameter(torch.randn(100))
    optimizer = FusedAdam([parameter])
    parameter.grad = torch.randn(100)
    optimizer.step()
    parameter.grad = torch.randn(100)
    tensors = {"parameter": parameter, "gradient": parameter.grad, **optimizer.state[parameter]}
    tensors[which].untyped_storage().resize_(16)
    with pytest.raises(RuntimeError, match=rf"{SENTENCE} of size 16"):
        optimizer.step()


def test_functions_of_the_core():
    tensor, other = torch.randn(100), torch.randn(100)
    tensor.untyped_storage().resize_(16)
    for attempt in (
        lambda: _core.zero(tensor),
        lambda: _core.copy(other, tensor),
        lambda: _core.copy(tensor, other),
        lambda: _core.digest(tensor),
        lambda: _core.sums_of_squares([tensor]),
    ):
        with pytest.raises(RuntimeError, match=SENTENCE):
            attempt()


def shrunk_in_place(tensor, share):
    """Leaves this share of its storage, where it lay if the allocator allows that; whether it does."""
    storage = tensor.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    for _ in range(50):
        storage.resize_(0)
        storage.resize_(int(size * share))
        if storage.data_ptr() == address:
            return True
    return False


def test_shrunk_to_the_same_address():
    """What is left of a storage may lie where all of it did: the address alone tells nothing."""
    seen = []
    for width in (64, 200, 512, 2000, 96, 333, 48, 1000):  # whether it stays there is the allocator's
        for share in (0.9, 0.5, 0.1):
            model = nn.Linear(width, width)
            wrapped, x = ORTModule(model), torch.randn(4, width, requires_grad=True)
            for _ in range(3):
                y = wrapped(x)
                y.sum().backward()
            y = wrapped(x)
            seen.append(shrunk_in_place(model.weight, share))
            with pytest.raises(RuntimeError, match=SENTENCE):
                wrapped(x)
            with pytest.raises(RuntimeError, match=SENTENCE):
                y.sum().backward()
    assert any(seen)
