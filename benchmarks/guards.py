"""Measures what a call costs before and around the engine: guards, and the way through autograd.

    python benchmarks/guards.py [--compile]

A model of 200 parameters in 230 modules, tiny in width. Measured, as the best of many repeats:

    guards      from the call of the module to the graph that serves it, the engine left out
    compile     the same of torch.compile: its guards and a backend that computes nothing
    step        forward and backward with plans that compute nothing: guards, autograd, fresh outputs and gradients
    mlp         the same of a model of two layers
    node        forward and backward of a module that is one `torch.autograd.Function` of as many parameters, which
                computes nothing: what of `mlp` is PyTorch's

The two kinds of guards are measured in turns, so that other work on the machine hits both.
"""

import argparse
import time

import torch
from torch import nn

from ortmodule import ORTModule

WIDTH = 8


class Block(nn.Module):
    """A transformer block: 12 modules without those inside, 16 parameters."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act, self.dropouts = nn.GELU(), nn.ModuleList([nn.Dropout(0.0) for _ in range(7)])
        self.scale = WIDTH**-0.5

    def forward(self, x):
        h = self.ln_1(x)
        weights = self.dropouts[0](torch.softmax(self.q(h) @ self.k(h).mT * self.scale, -1))
        x = x + self.dropouts[1](self.o(weights @ self.v(h)))
        return x + self.dropouts[2](self.down(self.act(self.up(self.ln_2(x)))))


class Stack(nn.Module):
    """12 blocks, with a norm and head: 230 modules, 200 parameters."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(12)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.extra = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(4)])
        self.rest = nn.ModuleList([nn.Identity() for _ in range(8)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        for parameter, identity in zip(self.extra, self.rest, strict=False):
            x = identity(x + parameter)
        return self.head(self.norm(x)).sum()


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *parameters):
        ctx.shapes = [p.shape for p in parameters]
        return torch.zeros(())

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.zeros(shape) for shape in ctx.shapes)


class Node(MLP):
    def forward(self, x, y):
        return Nothing.apply(*self.parameters())


class Idle:
    """A plan that computes nothing."""

    def __init__(self, plan):
        self.plan = plan

    def __getattr__(self, name):
        return getattr(self.plan, name)

    def forward(self, arena, inputs, outputs, *rest, **options):
        for output in outputs:
            output.zero_()  # numbers that nothing wrote may be slow to add

    def backward(self, arena, inputs, outputs, output_grads, grads, *rest, **options):
        for grad in grads:
            if grad is not None:
                grad.zero_()


def idle(model):
    """From now on the plans that it has compute nothing."""
    for executable in model._ortmodule.latest.plans.values():
        executable.plan = Idle(executable.plan)


def best(function, repeats=9, calls=50):
    """Microseconds of one call."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        found.append((time.perf_counter() - start) / calls)
    return min(found) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="measure torch.compile, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, x = Stack(), torch.randn(2, 4, WIDTH)
    print(f"{len(list(model.modules()))} modules, {len(list(model.parameters()))} parameters")
    ours = ORTModule(model)
    for _ in range(2):
        ours(x).backward()
    runner = ours._ortmodule
    run, runner._run = runner._run, lambda graph, call: None
    calls = {"guards": lambda: runner((x,), {})}
    if options.compile:
        constant = torch.zeros(())
        compiled = torch.compile(model, backend=lambda graph, inputs: lambda *args: (constant,))
        for _ in range(3):
            compiled(x)
        calls["compile"] = lambda: compiled(x)
    figures = {name: best(call) for name, call in calls.items()}
    for name, call in calls.items():
        figures[name] = min(figures[name], best(call))
    runner._run = run
    idle(ours)
    small, y = ORTModule(MLP()), torch.randn(2, 4, WIDTH)
    for _ in range(2):
        small(x, y).backward()
    idle(small)
    node = Node()
    steps = {
        "step": lambda: ours(x).backward(),
        "mlp": lambda: small(x, y).backward(),
        "node": lambda: node(x, y).backward(),
    }
    for _ in range(3):
        for name, call in steps.items():
            figures[name] = min(figures.get(name, float("inf")), best(call, calls=20))
    for name, figure in figures.items():
        print(f"{name:8} {figure:8.1f} µs")


if __name__ == "__main__":
    main()
