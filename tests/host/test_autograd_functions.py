"""Autograd functions that take tensors in a list or tuple: nodes of the graph, as those that take tensors alone."""

import torch

from tests.selection import each
from tests.twins import both, made, rows, step


class Scale(torch.autograd.Function):
    """Takes tensors in a list."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, factors):
        return x * factors[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1][0]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


#: What it is given: sizes, a tensor of the graph, a constant.
LISTED = {
    "size": lambda x: Scale.apply(x, [torch.arange(x.shape[0])[:, None]]),
    "own": lambda x: Scale.apply(x, (x.detach() * 2, "unused")),
    "filled": lambda x: Scale.apply(x, [torch.full_like(x, 3.0), x.detach()]),
    "two": lambda x: Scale.apply(Scale.apply(x, [x.detach()]), [x.detach() + 1]),
}


@each("name", LISTED, ("size",))
def test_listed_tensors(name):
    module = made(lambda self, x: self.linear(LISTED[name](self.linear(x))))
    both(module, lambda m: [step(m, rows(n, 4)) for n in (3, 5, 3)])


def test_mapped_function():
    """As `torch.vmap` maps the masks of flex attention: indices in a list, and no gradient."""

    def forward(self, x):
        mapped = torch.vmap(lambda a, i: Scale.apply(a, [i]))(x.detach(), torch.arange(x.shape[0]))
        return self.linear(x) + mapped

    both(made(forward), lambda m: step(m, rows(3, 4)))
