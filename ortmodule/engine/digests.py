"""Tells whether the contents of tensors have changed, by digests of their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ortmodule import _core
from ortmodule.engine.session import gpu_of, stream_of


class Digests:
    """Of contiguous tensors, all on the CPU or on one GPU, where making it waits for nothing."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._found = _digests(tensors)

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Have these the same bytes? Waits for a GPU."""
        return torch.equal(self._found, _digests(tensors))


def _digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    gpu = gpu_of(tensors)
    if gpu is None:
        return torch.tensor([_core.digest(tensor) - (1 << 63) for tensor in tensors], dtype=torch.int64)
    found = torch.empty((len(tensors), _core.cuda_digest_parts), dtype=torch.int64, device=gpu)
    _core.cuda_digests(list(tensors), found, gpu.index or 0, stream_of(gpu))
    return found
