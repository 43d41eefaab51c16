"""Tensors are tiled by numbers and by sizes, in one graph for all sizes, with PyTorch's results and gradients."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

FORMS = {
    "fewer times than dimensions": lambda w, z, x: x + w.tile((x.shape[2] // 2, x.shape[3] // 2)),
    "numbers": lambda w, z, x: (x * z).tile((2, 2)),
    "one number": lambda w, z, x: (x * z).tile((x.shape[0],)),
    "no number": lambda w, z, x: (x * z).tile(()),
    "more times than dimensions": lambda w, z, x: (x * z).tile((2, x.shape[0], 1, 1, 1, 2)),
    "no copy": lambda w, z, x: (x * z).tile((0, 1, 1, 1)).sum() + x.sum(),
    "a scalar": lambda w, z, x: z.tile((x.shape[0], 2)) * x.sum(),
    "a scalar, no number": lambda w, z, x: z.tile(()) * x,
    "whole numbers": lambda w, z, x: x + torch.arange(x.shape[3]).tile(x.shape[2], 1),
    "sizes of what is interpolated": lambda w, z, x: _by_interpolated(w, x[..., ::2, ::2] * z),
}


def _by_interpolated(w, x):
    h, width = x.shape[2:]
    places = nn.functional.interpolate(w, size=(h, width), mode="bicubic")
    return x + places + w.tile((places.shape[-2] // w.shape[-2], places.shape[-1] // w.shape[-1]))


class Net(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.w, self.z, self.form = nn.Parameter(torch.randn(1, 3, 2, 2)), nn.Parameter(torch.randn(())), form

    def forward(self, x):
        return self.form(self.w, self.z, x)


@pytest.mark.parametrize("form", FORMS)
def test_tile(form):
    torch.manual_seed(0)
    module = Net(FORMS[form]).double()
    model = ORTModule(module)
    for size in (8, 12):
        x = torch.randn(2, 3, size, size, dtype=torch.float64)
        results = []
        for run in (module, model):
            given = x.clone().requires_grad_()
            result = run(given)
            operands = [given, module.w, module.z]
            results.append([result, *torch.autograd.grad(result.sin().sum(), operands, allow_unused=True)])
        torch.testing.assert_close(results[1], results[0])
    assert explain(model).captured and explain(model).exports == 1
