"""Gradients of ELU, SELU and CELU at NaN are NaN: alone, in chains, on the CPU and a GPU.

PyTorch's own differ by where an element lies: what a vector of the CPU computes is NaN, what is left of a row behind
the last whole vector gets the gradient as it comes (docs/ops_torch.md).
"""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule
from tests.ops.harness import DEVICE

pytestmark = [pytest.mark.emulated, pytest.mark.sanitized]

ACTIVATIONS = [nn.ELU(), nn.ELU(0.5), nn.SELU(), nn.CELU(), nn.CELU(2.0)]
FORMS = {
    "alone": lambda f: nn.Sequential(f),
    "in a chain": lambda f: nn.Sequential(nn.Softsign(), f, nn.Tanh()),
    "summed in a chain": lambda f: nn.Sequential(f, nn.Tanh(), nn.Flatten(0), nn.LayerNorm(37)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_gradients_at_nan(activation, form, dtype):
    x = torch.linspace(-3, 3, 37).to(dtype)
    places = [0, 5, 16, 31, 36]  # in whole vectors, and behind them
    x[places] = torch.nan
    x = x.to(DEVICE).requires_grad_()
    model = ORTModule(FORMS[form](activation).to(DEVICE, dtype))
    y = model(x)
    y.sum().backward()
    assert x.grad[places].isnan().all() and y[places].isnan().all()
    if form != "summed in a chain":  # a norm of a row with NaN is NaN
        rest = [i for i in range(37) if i not in places]
        assert x.grad[rest].isfinite().all() and y[rest].isfinite().all()
