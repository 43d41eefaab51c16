"""Lists the modules of benchmarks/regret.py: Python in their forward reads data, or changes by itself."""

import ast
import random
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

WIDTH, WORDS, BATCH, LONGEST = 128, 2000, 8, 64
WORD = re.compile(r"\w+|[^\w\s]")


@cache
def lengths():
    """Real lengths: words and signs of the docstrings of Python's standard library, in the order of its files."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
                found.append(min(len(WORD.findall(text)), LONGEST))
    return found


def some(step, least=2):
    """The lengths of a batch: docstrings drawn at random, the same for all columns."""
    chosen = random.Random(step).choices(lengths(), k=BATCH)
    return [max(n, least) for n in chosen]


def sequences(step, pad_to=None):
    """(batch, length, WIDTH) padded, as a collate function makes it; the lengths."""
    n, generator = some(step), torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, pad_to or max(n), WIDTH, generator=generator)
    return x, torch.tensor(n)


def encoder(layers=2):
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


# --- those that only read lengths -------------------------------------------------------------------------------------


class Longest(nn.Module):
    """Batches come padded to one size, and are cut at their longest member."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder()

    def forward(self, x, n):
        return self.encoder(x[:, : int(n.max())]).square().mean()


class OverTime(nn.Module):
    """An LSTM cell, step by step."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, n):
        h = c = x.new_zeros(x.shape[0], WIDTH)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return self.head(h).square().mean()


class Sequences(nn.Module):
    """A list of tensors, padded in forward."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder()

    def forward(self, sequences):
        x = pad_sequence(sequences, batch_first=True)
        return self.encoder(x).square().mean()


class Graphs(nn.Module):
    """Messages between the nodes of several graphs, and a sum for each graph."""

    def __init__(self):
        super().__init__()
        self.message, self.update, self.head = mlp(), mlp(), nn.Linear(WIDTH, 1)

    def forward(self, x, edges, batch):
        for _ in range(2):
            sent = self.message(x[edges[0]])
            x = x + self.update(x + torch.zeros_like(x).index_add(0, edges[1], sent))
        graphs = int(batch.max()) + 1
        pooled = x.new_zeros(graphs, x.shape[1]).index_add(0, batch, x)
        return self.head(pooled).square().mean()


class Split(nn.Module):
    """Packed sequences, split at their lengths."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, packed, n):
        parts = self.tokens(packed).split(n.tolist())
        return torch.stack([self.head(part.mean(0)) for part in parts]).square().mean()


class Means(nn.Module):
    """The mean of each member of a batch, in a loop."""

    def __init__(self):
        super().__init__()
        self.tokens = mlp()

    def forward(self, x, n):
        y = self.tokens(x)
        return torch.stack([y[i, : int(n[i])].mean(0) for i in range(y.shape[0])]).square().mean()


# --- others -----------------------------------------------------------------------------------------------------------


class EarlyExit(nn.Module):
    """Stops at the layer whose scores are sure enough."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([mlp() for _ in range(6)]), nn.Linear(WIDTH, 8)

    def forward(self, x, n):
        x = x[:, 0]
        for layer in self.layers:
            x = x + layer(x)
            scores = self.head(x)
            if scores.softmax(-1).amax(-1).mean() > 0.26:
                break
        return scores.logsumexp(-1).mean()


class Experts(nn.Module):
    """A loop over the experts that were hit."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 8), nn.ModuleList([mlp() for _ in range(8)])

    def forward(self, x, n):
        x = x.flatten(0, 1)
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if rows.numel():
                y = y.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return y.square().mean()


class Queue(nn.Module):
    """Contrast against a ring of earlier keys (MoCo), whose pointer is a buffer."""

    def __init__(self):
        super().__init__()
        self.tokens = mlp()
        self.register_buffer("queue", F.normalize(torch.randn(256, WIDTH), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    def forward(self, x, n):
        keys = F.normalize(self.tokens(x).mean(1), dim=1)
        loss = (keys @ self.queue.clone().mT / 0.2).logsumexp(1).mean()
        at = int(self.pointer)
        self.queue[at : at + keys.shape[0]] = keys.detach()
        self.pointer[...] = (at + keys.shape[0]) % self.queue.shape[0]
        return loss


class Annealed(nn.Module):
    """An autoencoder whose factor beta is another one at each step."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 64), nn.Linear(32, WIDTH)

    def forward(self, x, beta):
        mean, log_variance = self.encode(x).chunk(2, -1)
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).mean()
        return (self.decode(mean) - x).square().mean() + beta * divergence


class Scheduled(nn.Module):
    """A decoder that goes on with its own output now and then (scheduled sampling)."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, n):
        h, y, loss = x.new_zeros(x.shape[0], WIDTH), x[:, 0], 0.0
        for t in range(1, 12):
            h = self.cell(y, h)
            made = self.head(h)
            loss = loss + (made - x[:, t]).square().mean()
            y = made if random.random() < 0.25 else x[:, t]
        return loss


class Curriculum(nn.Module):
    """Grows by a layer now and then, and leaves out layers at random once it is whole."""

    def __init__(self):
        super().__init__()
        self.layers, self.depth = nn.ModuleList([mlp() for _ in range(6)]), 2

    def forward(self, x, n):
        for layer in self.layers[: self.depth]:
            x = x + layer(x)
        return x.square().mean()


# --- the twelve -------------------------------------------------------------------------------------------------------


def _padded(step):
    return sequences(step, LONGEST)


def _list(step):
    generator = torch.Generator().manual_seed(step)
    return ([torch.randn(n, WIDTH, generator=generator) for n in some(step)],)


def _packed(step):
    n = some(step)
    return torch.randn(sum(n), WIDTH, generator=torch.Generator().manual_seed(step)), torch.tensor(n)


def _graphs(step):
    """Molecules of so many atoms as a text has words, bound in a ring."""
    n = some(step, least=3)
    starts = [sum(n[:i]) for i in range(len(n))]
    edges = [(s + i, s + (i + 1) % k) for s, k in zip(starts, n, strict=True) for i in range(k)]
    edges = torch.tensor(edges + [(b, a) for a, b in edges]).mT.contiguous()
    batch = torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n))
    return torch.randn(sum(n), WIDTH, generator=torch.Generator().manual_seed(step)), edges, batch


def _annealed(step):
    return sequences(step, LONGEST)[0], step / 1000


def _drawn(module, step):
    random.seed(step)  # both columns draw the same


def _grown(module, step):
    module.depth = random.Random(step).choice([4, 5, 6]) if step > 150 else 2 + step // 50


@dataclass(frozen=True)
class Row:
    """A module, its batches by the number of the step, and what a script does before each step."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    lengths: bool  # its Python reads nothing but lengths
    before: Callable[[nn.Module, int], None] = lambda module, step: None


ROWS = {
    "longest": Row(Longest, _padded, True),
    "over-time": Row(OverTime, sequences, True),
    "pad-sequence": Row(Sequences, _list, True),
    "graphs": Row(Graphs, _graphs, True),
    "split": Row(Split, _packed, True),
    "means": Row(Means, _padded, True),
    "early-exit": Row(EarlyExit, _padded, False),
    "experts": Row(Experts, sequences, False),
    "queue": Row(Queue, _padded, False),
    "annealed": Row(Annealed, _annealed, False),
    "scheduled": Row(Scheduled, _padded, False, _drawn),
    "curriculum": Row(Curriculum, _padded, False, _grown),
}
