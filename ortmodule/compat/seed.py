"""Seeds all generators that a training draws from, under the original's name."""

import random

import numpy
import torch


def set_seed(seed: int) -> None:
    """Seeds Python, NumPy and torch; the engine draws from torch's generator."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
