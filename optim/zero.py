"""Makes the steps of DeepSpeed's optimizers cheaper: ZeRO stages 0 to 3.

They look at every gradient several times: for its largest and its smallest element, for its norm, and to unscale it.
Here all gradients are read once. The library's own methods still run, with their collectives, on stand-ins of one
element that have the same norm and are finite when the gradient is: so whatever they return, and whatever groups they
reduce over, is theirs.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from ortmodule.core.torch_private import global_step_hooks
from ortmodule.optim.fused_adam import FusedAdam
from ortmodule.optim.replace import StandIn, fits, has_method, replace, square_sums

_OPTIMIZERS = "deepspeed.runtime.zero.utils"

# --- the optimizers that ZeRO accepts ---------------------------------------------------------------------------------


def _accept(module: Any) -> None:
    known = getattr(module, "ZERO_SUPPORTED_OPTIMIZERS", None)
    if isinstance(known, list) and FusedAdam not in known:
        known.append(FusedAdam)


class _Finder:
    """Lets ZeRO accept FusedAdam when, and only when, DeepSpeed is imported."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _OPTIMIZERS:
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _accept(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # DeepSpeed's, when it is imported
        return spec


def register() -> None:
    """FusedAdam needs no ``zero_allow_untested_optimizer``; works before and after DeepSpeed's import."""
    if _OPTIMIZERS in sys.modules:
        _accept(sys.modules[_OPTIMIZERS])
    elif _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


# --- sums of squares --------------------------------------------------------------------------------------------------


class _Sums:
    """Sums of squares of gradients; during a step those that were asked for are known from then on."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._known: dict[int, tuple[torch.Tensor, tuple[int, int], torch.Tensor]] | None = None

    def of(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        known = self._known
        if known is None or self._changes_gradients():
            return square_sums(gradients)
        missing = [g for g in gradients if id(g) not in known or known[id(g)][1] != _state(g)]
        known |= {id(g): (g, _state(g), s) for g, s in zip(missing, square_sums(missing), strict=True)}
        return [known[id(g)][2] for g in gradients]

    def _changes_gradients(self) -> bool:
        """Muon writes into them, after the check for overflow."""
        return any(group.get("use_muon") for group in self._optimizer.param_groups)

    @property
    def in_step(self) -> bool:
        return self._known is not None

    def watch_step(self) -> None:
        original = self._optimizer.step

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._known = {}
            try:
                return original(*args, **kwargs)
            finally:
                self._known = None

        self._optimizer.step = step


def _state(gradient: torch.Tensor) -> tuple[int, int]:
    return gradient.data_ptr(), gradient._version


# --- what is replaced -------------------------------------------------------------------------------------------------


def knows(optimizer: Any) -> bool:
    if type(optimizer).__module__.partition(".")[0] != "deepspeed":
        return False
    return _has_norm(optimizer) or _has_list(optimizer) or _has_checker(optimizer)


def _has_norm(optimizer: Any) -> bool:
    return has_method(optimizer, "get_grad_norm_direct", "gradients", "params", "norm_type")


def _has_list(optimizer: Any) -> bool:
    return has_method(optimizer, "get_grads_for_norm", "for_clipping")


def _has_checker(optimizer: Any) -> bool:
    return has_method(getattr(optimizer, "overflow_checker", None), "has_overflow_serial", "params")


def modify(optimizer: Any, **_: Any) -> None:
    """The optimizer of stages 1 and 2, of stage 3, that of bfloat16 with float32 gradients, and those of stage 0."""
    sums = _Sums(optimizer)

    def put(target: Any, name: str, ours: Any) -> None:
        replace(target, name, functools.partial(ours, optimizer, sums))

    if _has_norm(optimizer):
        put(optimizer, "get_grad_norm_direct", _norm)
        if has_method(optimizer, "has_overflow_partitioned_grads_serial"):
            put(optimizer, "has_overflow_partitioned_grads_serial", _overflow)
        if hasattr(optimizer, "grad_partitions_flat_buffer") and has_method(
            optimizer, "has_overflow", "partition_gradients"
        ):
            put(optimizer, "has_overflow", _overflow_of_partitions)
    if _has_list(optimizer):
        optimizer.get_grads_for_norm = functools.partial(_gradients_for_norm, optimizer.get_grads_for_norm)
    if _has_checker(optimizer):
        put(optimizer.overflow_checker, "has_overflow_serial", _overflow_of_parameters)
    if has_method(optimizer, "unscale_and_clip_grads", "total_norm"):
        ours = functools.partial(_unscale, optimizer, sums, optimizer.unscale_and_clip_grads)
        optimizer.unscale_and_clip_grads = ours
    sums.watch_step()


def _norm(optimizer: Any, sums: _Sums, original: Any, gradients: Any, params: Any, norm_type: Any = 2) -> Any:
    gradients = list(gradients)
    if float(norm_type) != 2 or not fits(gradients):
        return original(gradients, params, norm_type)
    small = [total.sqrt() for total in sums.of(gradients)]
    for one, gradient in zip(small, gradients, strict=True):
        one.__dict__.update(gradient.__dict__)  # some are marked, as padding for instance
    return original(small, params, norm_type)


def _averaged(optimizer: Any) -> list[torch.Tensor]:
    groups = optimizer.averaged_gradients.values()
    return [g for group in groups if group is not None for g in group if g is not None]


def _overflow(optimizer: Any, sums: _Sums, original: Any) -> Any:
    gradients = _averaged(optimizer)
    if not fits(gradients):
        return original()
    small = iter(sums.of(gradients))
    groups = {
        i: None if group is None else [None if g is None else next(small) for g in group]
        for i, group in optimizer.averaged_gradients.items()
    }
    stand_in = StandIn(optimizer, averaged_gradients=groups)
    return type(optimizer).has_overflow_partitioned_grads_serial(stand_in)


def _overflow_of_partitions(
    optimizer: Any, sums: _Sums, original: Any, partition_gradients: bool = True
) -> Any:  # fmt: skip
    """Stage 3: the gradients are views of one buffer, which is checked as a whole."""
    buffer = optimizer.grad_partitions_flat_buffer
    if not partition_gradients or buffer is None or not fits([buffer]):
        return original(partition_gradients)
    gradients = _averaged(optimizer)
    small = sums.of(gradients if fits(gradients) and _tile(gradients, buffer) else [buffer])
    total = torch.stack(small).sum().reshape(1)
    return type(optimizer).has_overflow(StandIn(optimizer, grad_partitions_flat_buffer=total), partition_gradients)


def _tile(gradients: list[torch.Tensor], buffer: torch.Tensor) -> bool:
    """Whether every element of the buffer is in one of its views."""
    size, at = buffer.element_size(), buffer.data_ptr()
    for start, count in sorted((g.data_ptr(), g.numel()) for g in gradients if g.numel()):
        if start != at:
            return False
        at += count * size
    return at == buffer.data_ptr() + buffer.numel() * size


def _overflow_of_parameters(optimizer: Any, sums: _Sums, original: Any, params: Iterable[Any]) -> Any:
    params = list(params)
    gradients = [p.grad for p in params if p.grad is not None]
    if not fits(gradients):
        return original(params)
    small = iter(sums.of(gradients))
    stand_ins = [SimpleNamespace(grad=None if p.grad is None else next(small)) for p in params]
    return original(stand_ins)


def _gradients_for_norm(original: Any, for_clipping: bool = False) -> Any:
    """Scalars that have the gradients' norms, except where the gradients themselves are asked for."""
    found = original(for_clipping=for_clipping)
    if for_clipping or not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list)):
        return found
    gradients, experts = found
    if not fits(gradients):
        return found
    return [total.sqrt().float() for total in square_sums(gradients)], experts


def _unscale(optimizer: Any, sums: _Sums, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Where FusedAdam steps next, it multiplies what it reads; the factor is what becomes of a gradient of 1."""
    inner = optimizer.optimizer
    trial = torch.tensor([1.0, 2.0])
    if not (sums.in_step and _reads_scaled(optimizer, inner)) or "apply_scale" in kwargs:
        return original(*args, **kwargs)
    function, only = type(optimizer).unscale_and_clip_grads, SimpleNamespace(grad=trial)
    if len(args) == 2 and isinstance(args[0], list):  # stages 1 and 2: gradients, norm
        result = function(optimizer, [trial], args[1])
    elif len(args) == 2 and hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3: number of a group, norm
        result = function(StandIn(optimizer, fp32_partitioned_groups_flat={args[0]: only}), *args)
    elif len(args) == 1 and hasattr(optimizer, "fp32_groups"):  # stage 0: norm
        result = function(StandIn(optimizer, fp32_groups=[[only]]), *args)
    else:
        return original(*args, **kwargs)
    factor, twice = trial.tolist()
    if not math.isfinite(factor) or twice != 2 * factor:
        return original(*args, **kwargs)
    inner.scale_gradients(factor)
    return result


def _reads_scaled(optimizer: Any, inner: Any) -> bool:
    """A hook before the step would see gradients that are not unscaled yet."""
    if global_step_hooks is None:
        return False
    hooks = [*getattr(inner, "_optimizer_step_pre_hooks", {}).values(), *global_step_hooks.values()]
    reads = any(getattr(hook, "reads_gradients", True) for hook in hooks)
    return type(inner) is FusedAdam and not reads and not getattr(optimizer, "torch_autocast_gradscaler", None)
