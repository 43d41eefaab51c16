"""Puts a function between two layers, for tests of what it computes with sizes."""

from torch import nn


class Block(nn.Module):
    def __init__(self, use, width):
        super().__init__()
        self.first, self.last, self.use = nn.Linear(width, width), nn.Linear(width, width), use

    def forward(self, x):
        return self.last(self.use(self.first(x)))
