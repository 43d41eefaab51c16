"""Defines operators of torch by others; `table.py` says what a definition is."""

from ortmodule.core.errors import Keep, Leave
from ortmodule.lowering.decompositions import indices, layers, norms, order, pointwise, ranks, spatial, statistics
from ortmodule.lowering.decompositions.table import DEFINITIONS

__all__ = [
    "DEFINITIONS",
    "Keep",
    "Leave",
    "indices",
    "layers",
    "norms",
    "order",
    "pointwise",
    "ranks",
    "spatial",
    "statistics",
]
