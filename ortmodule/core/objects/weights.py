"""Counts the weights of modules that an engine computes with: those of embeddings are only looked up."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_TABLES = (nn.Embedding, nn.EmbeddingBag)


def weights(modules: Iterable[nn.Module]) -> dict[int, int]:
    """Elements by the ids of the parameters of ``modules``, without those of what is inside of these."""
    layers = (module for module in modules if not isinstance(module, _TABLES))
    return {id(p): p.numel() for module in layers for p in module._parameters.values() if p is not None}
