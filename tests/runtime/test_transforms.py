"""Autograd's other ways in: forward mode, batches of gradients, torch.func around the engine's backward."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.autograd import functional

from ortmodule import ORTModule, explain

MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
    "norm": lambda: nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)),
    "cnn": lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(),
                                 nn.Linear(12, 3)),
    "softmax": lambda: nn.Sequential(nn.Linear(3, 5), nn.Softmax(-1), nn.SiLU(), nn.Linear(5, 3)),
}  # fmt: skip


def pair(name):
    torch.manual_seed(0)
    eager = MODELS[name]()
    ours = ORTModule(eager)
    x = torch.randn(2, 3, requires_grad=True)
    ours(x).sum().backward()
    eager.zero_grad(), x.grad.zero_()
    assert explain(ours).captured
    return eager, ours, x


def tangent(module, x, t, over=None):
    with forward_ad.dual_level():
        if over is None:
            y = module(forward_ad.make_dual(x, t))
        else:  # a tangent of a parameter
            weight = next(module.parameters())
            y = torch.func.functional_call(module, {over: forward_ad.make_dual(weight, torch.ones_like(weight))}, (x,))
        return forward_ad.unpack_dual(y).tangent


def jacobian_by_rows(module, x):
    y = module(x)
    return torch.stack([torch.autograd.grad(y, x, v, retain_graph=True)[0] for v in units(y)])


def units(y):
    return torch.eye(y.numel()).reshape(-1, *y.shape)


def batched(module, x):
    y = module(x)
    return torch.autograd.grad(y, x, units(y), is_grads_batched=True)[0]


def of_parameters(module, x):
    y = module(x)
    return torch.cat(
        [g.flatten(1) for g in torch.autograd.grad(y, [*module.parameters()], units(y), is_grads_batched=True)], 1
    )


def twice(module, x):
    y = module(x)
    grads = [torch.autograd.grad(y, x, units(y), is_grads_batched=True, retain_graph=True)[0] for _ in range(2)]
    return torch.stack([*grads, torch.autograd.grad(y.sum(), x)[0].expand_as(grads[0])])


def differentiable(module, x):
    y = module(x)
    g = torch.autograd.grad(y, x, units(y), is_grads_batched=True, create_graph=True)[0]
    return torch.autograd.grad(g.square().sum(), x)[0]


def mapped(module, x):
    y = module(x)
    return torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(units(y))


WAYS = {
    "is_grads_batched": batched,
    "is_grads_batched, parameters": of_parameters,
    "is_grads_batched, retain_graph": twice,
    "is_grads_batched, create_graph": differentiable,
    "vmap over grad": mapped,
    "jacobian": lambda module, x: functional.jacobian(module, x),
    "jacobian, vectorized": lambda module, x: functional.jacobian(module, x, vectorize=True),
    "jacobian, forward mode": lambda module, x: functional.jacobian(module, x, strategy="forward-mode", vectorize=True),
    "hessian": lambda module, x: functional.hessian(lambda x: module(x).square().sum(), x),
    "hessian, vectorized": lambda module, x: functional.hessian(lambda x: module(x).square().sum(), x, vectorize=True),
    "vjp": lambda module, x: functional.vjp(module, x, torch.ones(2, 3))[1],
    "hvp": lambda module, x: functional.hvp(lambda x: module(x).square().sum(), x, torch.ones(2, 3))[1],
    "func.jacrev": lambda module, x: torch.func.jacrev(module)(x),
    "func.jacfwd": lambda module, x: torch.func.jacfwd(module)(x),
    "func.hessian": lambda module, x: torch.func.hessian(lambda x: module(x).square().sum())(x),
    "a tangent": lambda module, x: tangent(module, x, torch.ones(2, 3)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_as_in_pytorch(name, way):
    eager, ours, x = pair(name)
    torch.testing.assert_close(WAYS[way](ours, x), WAYS[way](eager, x))


@pytest.mark.parametrize("way", ["is_grads_batched", "vmap over grad"])
def test_with_the_masks_of_forward(way):
    """Dropout: all gradients of a batch are of the one forward."""
    torch.manual_seed(0)
    module = ORTModule(nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 3)))
    x = torch.randn(2, 3, requires_grad=True)
    y = module(x)
    one_by_one = torch.stack([torch.autograd.grad(y, x, v, retain_graph=True)[0] for v in units(y)])
    if way == "is_grads_batched":
        found = torch.autograd.grad(y, x, units(y), is_grads_batched=True)[0]
    else:
        found = torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(units(y))
    torch.testing.assert_close(found, one_by_one)
    assert explain(module).captured


def test_the_engine_runs_again_afterwards():
    eager, ours, x = pair("mlp")
    tangent(ours, x, torch.ones(2, 3))
    assert not explain(ours).captured or explain(ours).fallback is None
    torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).captured
