"""Counts the calls of a wrapped module by who ran them, and sees steps of optimizers without a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ortmodule.core.objects.dispatchers import dispatcher_of
from ortmodule.core.torch_private import in_backward
from ortmodule.runtime.calls import closures

UNREACHED = (
    "an optimizer takes a step with gradients of this module, but its forward was not called through ORTModule, so "
    "PyTorch ran it: wrap the module that the script calls, and call what ORTModule returns"
)


class Usage:
    """Who ran the calls of one wrapped module, over its life."""

    def __init__(self, module: nn.Module, bypassed: Callable[[str], None]) -> None:
        """``bypassed``: is given a sentence when a step comes that no call has come before."""
        global _wrapped
        self.engine = 0  # calls
        self.pytorch = 0  # calls
        self.unreached = 0  # steps of an optimizer
        self.inner = False  # a dispatcher has wrapped it, which counts the calls
        self.module, self.bypassed = module, bypassed
        _wrapped += 1
        _usages.add(self)

    @property
    def calls(self) -> int:
        return self.engine + self.pytorch

    def has_gradient(self, reached: Container[int]) -> bool:
        """Of a parameter that is not among ``reached``, ids of those of modules that were called."""
        return any(id(p) not in reached and _is_gradient(p.grad) for p in self.module.parameters())


def _is_gradient(grad: torch.Tensor | None) -> bool:
    """Is it one, and not the zeros that `zero_grad(set_to_none=False)` leaves?"""
    return grad is not None and (grad.layout is not torch.strided or bool((grad != 0).any()))


class _Steps:
    """The wrapped modules whose parameters one optimizer has, with their calls up to its latest step."""

    def __init__(self, optimizer: Any) -> None:
        self.made = _wrapped
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        usages = [usage for usage in _usages if not usage.inner]
        # A graph of the module around it runs a wrapped module, too.
        inner = {id(wrapped) for usage in usages for wrapped in _wrapped_inside(usage.module)}
        found = [u for u in usages if id(u.module) not in inner and any(id(p) in held for p in u.module.parameters())]
        self.calls = weakref.WeakKeyDictionary(dict.fromkeys(found, 0))

    def look(self) -> None:
        found = list(self.calls.items())
        called = [usage for usage, before in found if usage.calls != before]
        modules = {id(usage.module) for usage in called}  # `copy.copy` has its module
        others = [usage for usage, _ in found if id(usage.module) not in modules]
        self.calls.update((usage, usage.calls) for usage in called)
        if others:  # two wrapped modules may have the same parameters
            reached = {id(p) for usage in called for p in usage.module.parameters()}
        for usage in others:
            if usage.has_gradient(reached):
                usage.unreached += 1
                usage.bypassed(UNREACHED)


def _wrapped_inside(module: nn.Module) -> list[nn.Module]:
    dispatchers = [dispatcher_of(m) for m in module.modules() if m is not module]
    return [dispatcher.module for dispatcher in dispatchers if dispatcher is not None]


_usages: weakref.WeakSet[Usage] = weakref.WeakSet()
_wrapped = 0  # modules, ever
_steps: weakref.WeakKeyDictionary[Any, _Steps] = weakref.WeakKeyDictionary()


def _before_step(optimizer: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Looks for what was not called: now, or once a closure has run, which calls the module inside of the step."""
    if in_backward():  # a hook's step, with gradients of a call whose backward goes on
        return None
    waiting = [optimizer]  # one step counts once, however often it calls its closure

    def look() -> None:
        if waiting:
            _look(waiting.pop())

    changed = closures.followed(optimizer, args, kwargs, look)
    if changed is None:
        look()
    return changed


def _look(optimizer: Any) -> None:
    steps = _steps.get(optimizer)
    if steps is None or steps.made != _wrapped:
        known = {} if steps is None else dict(steps.calls)
        steps = _steps[optimizer] = _Steps(optimizer)
        steps.calls.update({usage: calls for usage, calls in known.items() if usage in steps.calls})
    steps.look()


vars(_before_step)["reads_gradients"] = False  # not their values (optim/zero.py)
register_optimizer_step_pre_hook(_before_step)
