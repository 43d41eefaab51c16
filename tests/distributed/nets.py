"""Trains two copies of a small model of layers side by side, on each of several processes."""

import warnings

import torch
from torch import nn

from ortmodule import ORTModule, explain

WIDTH, WORDS = 8, 13


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = self.query(y), self.key(y), self.value(y)
        x = x + self.out((q @ k.transpose(1, 2) / 3).softmax(-1) @ v)
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids, labels):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def net(cls=Net, *args):
    torch.manual_seed(0)
    return cls(*args)


def batch(step, rank, rows=2):
    """Other lengths in other steps."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(0, WORDS, (rows, 5 + step % 2), generator=generator) for _ in range(2)]


def whole(tensors):
    """Of shards the whole tensors."""
    return [t.full_tensor() if hasattr(t, "full_tensor") else t.detach().clone() for t in tensors if t is not None]


def both(make, train, said="", **tolerance):
    """Trains ``make()`` as it is, then as an ORTModule: what ``train(model)`` returns is to be the same. Returns what
    `explain` says. ``said``: what warnings may say of it."""
    found = []
    for wrap in (False, True):
        print("as an ORTModule" if wrap else "by PyTorch alone", flush=True)  # seen where a signal ends this process
        model = ORTModule(make()) if wrap else make()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found.append(train(model))
        others = [str(w.message) for w in told if "ORTModule" in str(w.message)]
        others = [text for text in others if not said or said not in text]
        assert not others, others
    torch.testing.assert_close(found[1], found[0], **tolerance)
    return explain(model)
