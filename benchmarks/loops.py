"""Measures loops over time, written in Python: a step at each length, and what a new length costs.

    python benchmarks/loops.py [--rows lstm gru scan euler] [--width N] [--batch N] [--repeats N]

A row is a model and a length. `eager` and `ours`: milliseconds of forward and backward, the best of some repeats, in
turns. `new`: milliseconds of the first call at that length, all of it. `exports` at the end: of all lengths.
"""

import argparse
import time

import torch
from torch import nn

from ortmodule import ORTModule, explain

LENGTHS = (5, 10, 20, 50, 100, 200)


class Lstm(nn.Module):
    """PyTorch's cell, step by step."""

    def __init__(self, width):
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], x.shape[2])
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return h.sum()


class Gru(nn.Module):
    """A cell of linear layers, its outputs in a list."""

    def __init__(self, width):
        super().__init__()
        self.gates, self.new = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        h, found = torch.zeros_like(x[:, 0]), []
        for part in x.unbind(1):
            r, z = torch.sigmoid(self.gates(torch.cat((part, h), 1))).chunk(2, 1)
            h = torch.lerp(torch.tanh(self.new(torch.cat((part, r * h), 1))), h, z)
            found.append(h)
        return torch.stack(found, 1).square().mean()


class Scan(nn.Module):
    """Mamba's selective scan, with 16 states for each channel."""

    STATES = 16

    def __init__(self, width):
        super().__init__()
        self.step, self.b, self.c = (nn.Linear(width, n) for n in (width, self.STATES, self.STATES))
        self.a = nn.Parameter(torch.arange(1.0, self.STATES + 1).log().repeat(width, 1))
        self.d = nn.Parameter(torch.ones(width))

    def forward(self, x):
        step, b, c = nn.functional.softplus(self.step(x)), self.b(x), self.c(x)
        kept = torch.exp(step[..., None] * -torch.exp(self.a))
        new = step[..., None] * b[:, :, None] * x[..., None]
        h, found = torch.zeros_like(new[:, 0]), []
        for t in range(x.shape[1]):
            h = kept[:, t] * h + new[:, t]
            found.append((h * c[:, t, None]).sum(-1))
        return (torch.stack(found, 1) + x * self.d).square().mean()


class Euler(nn.Module):
    """A differential equation's right side of two layers, in as many steps as there are times."""

    def __init__(self, width):
        super().__init__()
        self.right = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x):
        y, dt = x.mean(1), 1.0 / x.shape[1]
        for t in range(x.shape[1]):
            y = y + dt * self.right(y + x[:, t])
        return y.square().mean()


ROWS = {"lstm": Lstm, "gru": Gru, "scan": Scan, "euler": Euler}


def step(module, x):
    """Milliseconds of forward and backward."""
    start = time.perf_counter()
    module(x).backward()
    return 1e3 * (time.perf_counter() - start)


def measure(name, width, batch, repeats):
    """Prints the rows of one model."""
    torch.manual_seed(0)
    eager, ours = ROWS[name](width), ORTModule(ROWS[name](width))
    first = step(ours, torch.randn(batch, LENGTHS[-1] // 2 + 1, width))
    print(f"{name}: first call {first:.0f} ms")
    for length in LENGTHS:
        x = torch.randn(batch, length, width)
        new = step(ours, x)
        times = [[step(module, x) for module in (eager, ours)] for _ in range(repeats)]
        of_eager, of_ours = (min(column) for column in zip(*times, strict=True))
        print(f"  {length:4d}  eager {of_eager:8.2f}  ours {of_ours:8.2f}  {of_eager / of_ours:5.2f}x  new {new:8.2f}")
    report = explain(ours)
    print(f"  exports {report.exports}, in the engine {report.captured}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    for name in given.rows:
        measure(name, given.width, given.batch, given.repeats)


if __name__ == "__main__":
    main()
