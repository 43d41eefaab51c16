"""Operators of torch in terms of others: `table.py` says what a definition is, the other files hold them."""

from ortmodule.definitions import indices, layers, norms, order, pointwise, ranks, spatial, statistics
from ortmodule.definitions.table import DEFINITIONS, Keep, Leave

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
