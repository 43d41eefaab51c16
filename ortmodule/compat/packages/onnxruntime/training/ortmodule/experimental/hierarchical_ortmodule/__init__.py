"""Accepts `HierarchicalORTModule`: ORTModule itself leaves what cannot be captured to PyTorch, inside of the rest."""

from ortmodule import ORTModule as HierarchicalORTModule

__all__ = ["HierarchicalORTModule"]
