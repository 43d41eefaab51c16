"""Checks overflow and computes the gradient norm of mixed-precision optimizers in one pass (FP16_Optimizer)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ortmodule.core.errors import ArgumentTypeError
from ortmodule.optim import amp, megatron, zero
from ortmodule.optim.fused import FusedOptimizer

#: By duck type: (does this know the optimizer?, change it). The first one that does.
_KINDS: list[tuple[Callable[[Any], bool], Callable[..., None]]] = [
    (zero.knows, zero.modify),
    (amp.knows, amp.modify),
    (megatron.knows, megatron.modify),
]


def FP16_Optimizer(optimizer: Any, **kwargs: Any) -> Any:  # noqa: N802, the name that scripts use
    """Makes the overflow check and the gradient norm of a mixed-precision optimizer cheaper, and returns it.

    The optimizer itself is changed, so libraries that hold it already (DeepSpeed's engine, accelerate) profit, too.
    What its methods return and which collectives they run stays the same. Call it on every rank, or on none.

    Args:
        optimizer: of DeepSpeed (ZeRO 0 to 3, fp16 and bf16), accelerate's wrapper of one, of Apex AMP (O2), or
            Megatron's FP16 optimizer. Another one is returned as it is, with a warning.
        get_horizontal_model_parallel_rank: for Megatron, a function that gives this process's model parallel rank.
        get_horizontal_model_parallel_group: for Megatron, a function that gives its model parallel process group.

    Raises TypeError for an unknown argument.
    """
    unknown = set(kwargs) - set(megatron.ARGUMENTS)
    if unknown:
        raise ArgumentTypeError(f"FP16_Optimizer has no argument {sorted(unknown)[0]!r}")
    target = _innermost(optimizer)
    for knows, modify in _KINDS:
        if knows(target):
            if not getattr(target, "_ortmodule_modified", False):  # twice is once
                modify(target, **kwargs)
                target._ortmodule_modified = True
            return optimizer
    if not isinstance(target, FusedOptimizer):  # one that has nothing to save
        warnings.warn(
            f"FP16_Optimizer does not know {type(target).__module__}.{type(target).__qualname__}: it stays as it is",
            stacklevel=2,
        )
    return optimizer


def _innermost(optimizer: Any) -> Any:
    """What accelerate wraps."""
    while type(optimizer).__module__.partition(".")[0] == "accelerate" and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
