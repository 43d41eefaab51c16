"""Makes the step of Megatron-LM's FP16 optimizer cheaper."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from ortmodule.core.torch_private import foreach_mul_
from ortmodule.optim.replace import fits, has_method, square_sums

ARGUMENTS = ("get_horizontal_model_parallel_rank", "get_horizontal_model_parallel_group")


def knows(optimizer: Any) -> bool:
    groups = hasattr(optimizer, "fp16_groups") and hasattr(optimizer, "fp32_from_fp32_groups")
    methods = has_method(optimizer, "_check_overflow") and has_method(optimizer, "clip_master_grads", "max_norm")
    return groups and methods and hasattr(optimizer, "loss_scaler") and hasattr(optimizer, "optimizer")


def modify(
    optimizer: Any,
    get_horizontal_model_parallel_rank: Callable[[], int] | None = None,
    get_horizontal_model_parallel_group: Callable[[], Any] | None = None,
) -> None:
    """``get_...``: the model parallel rank and group; without them every process has the whole model."""
    rank = 0 if get_horizontal_model_parallel_rank is None else get_horizontal_model_parallel_rank()
    group = None if get_horizontal_model_parallel_group is None else get_horizontal_model_parallel_group()
    original = optimizer.clip_master_grads
    optimizer._check_overflow = functools.partial(_check_overflow, optimizer, optimizer._check_overflow, group)
    optimizer.clip_master_grads = functools.partial(_clip, optimizer, original, rank, group)


def _reduce(value: torch.Tensor, operation: Any, group: Any) -> torch.Tensor:
    if group is not None:
        distributed.all_reduce(value, op=operation, group=group)
    return value


def _check_overflow(optimizer: Any, original: Callable[[], Any], group: Any) -> None:
    """Sets ``optimizer.overflow``, a bool, as the method replaced."""
    parameters = [p for part in (optimizer.fp16_groups, optimizer.fp32_from_fp32_groups) for g in part for p in g]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients or not fits(gradients):
        original()
        return
    bad = (~torch.isfinite(torch.stack(square_sums(gradients)).sum())).to(torch.uint8).reshape(1)
    optimizer.overflow = bool(_reduce(bad, distributed.ReduceOp.MAX, group).item())


def _clip(
    optimizer: Any, original: Callable[..., Any], rank: int, group: Any, max_norm: float, norm_type: float = 2
) -> Any:
    """Clips the float32 gradients; returns their norm, or -1 after an overflow."""
    if optimizer.overflow:
        return -1
    parameters = [p for each in optimizer.optimizer.param_groups for p in each["params"] if p.grad is not None]
    if float(norm_type) != 2 or not parameters or not fits([p.grad for p in parameters]):
        return original(max_norm, norm_type)
    # A parameter that is not split is on every rank, and counts once.
    counted = [p.grad for p in parameters if rank == 0 or getattr(p, "model_parallel", False)]
    sums = square_sums(counted)
    total = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    norm = math.sqrt(_reduce(total, distributed.ReduceOp.SUM, group).item())
    factor = max_norm / (norm + 1e-6)
    if factor < 1:
        foreach_mul_([p.grad for p in parameters], factor)
    return norm
