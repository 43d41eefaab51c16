"""Stands for `torch_ort`, which is ortmodule."""

import random

import numpy
import torch

from ortmodule import DebugOptions, LogLevel, ORTModule

__all__ = ["DebugOptions", "LogLevel", "ORTModule", "set_seed"]


def set_seed(seed: int) -> None:
    """Seeds every generator that a training draws from; the engine draws from torch's."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
