"""Decides when PyTorch runs the module instead of the engine, and warns about it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ortmodule.core.errors import BypassError, Cause, NotInEngine
from ortmodule.core.logger import Log
from ortmodule.core.names import NOTHING

MOST_REFUSED = 1024  # calls that are remembered as not for the engine


#: For ``silent`` below: nothing is warned about.
EVERY_REASON = ("",)
#: Policies that force PyTorch -> only where gradients are recorded?
_FORCED = {"FALLBACK_FORCE_TORCH_FORWARD": False, "FALLBACK_FORCE_TORCH_BACKWARD": True}


class _Thread(threading.local):
    only_pytorch = False  # see only_pytorch()
    in_assigned: Any = None  # see inside_assigned()


THREAD = _Thread()


@contextmanager
def only_pytorch() -> Iterator[None]:
    """Inside, in this thread, no module uses the engine."""
    before, THREAD.only_pytorch = THREAD.only_pytorch, True
    try:
        yield
    finally:
        THREAD.only_pytorch = before


@contextmanager
def inside_assigned(dispatcher: object) -> Iterator[None]:
    """Inside, in this thread, runs the forward that was assigned to a wrapped module; its own is a part of that."""
    before, THREAD.in_assigned = THREAD.in_assigned, dispatcher
    try:
        with only_pytorch():
            yield
    finally:
        THREAD.in_assigned = before


class Fallback:
    """Which calls PyTorch runs, by policy."""

    def __init__(
        self, policies: frozenset[str], retry: bool, log: Log, silent: Sequence[str] = (), strict: bool = False
    ) -> None:
        """``silent``: reasons that contain one of these are not warned about. ``strict``: PyTorch runs nothing, and
        what goes past the engine is an error."""
        self.silent, self.strict = silent, strict
        self.policies, self.retry, self.log = frozenset(("FALLBACK_DISABLE",)) if strict else policies, retry, log
        #: The policies that force PyTorch, if there are any.
        self.forcing = frozenset() if "FALLBACK_DISABLE" in self.policies else self.policies & _FORCED.keys()
        self.reason: str | None = None  # why the latest call was not run by the engine
        self.refused: dict[object, NotInEngine] = {}

    def refusal(self, epoch: int, *keys: object) -> NotInEngine | None:
        """What was found about such a call before; ``epoch`` as in :meth:`Guards.hold`."""
        for key in keys:
            error = self.refused.get(key)
            if error is not None and (error.guards is None or error.guards.hold(epoch)):
                return error
        return None

    def forced(self) -> bool:
        """Does the policy leave this call to PyTorch, whatever the engine can do? It has no forward without its own
        backward, so PyTorch's backward needs PyTorch's forward."""
        if not any(torch.is_grad_enabled() or not _FORCED[policy] for policy in self.forcing):
            return False
        self.reason = f"ORTMODULE_FALLBACK_POLICY asks for it ({' and '.join(sorted(self.forcing))})"
        self._warn(self.reason)
        return True

    def at_wrapping(self, reason: str) -> bool:
        """May a module that cannot be wrapped stay as it is?"""
        allowed = "FALLBACK_BAD_INITIALIZATION" in self.policies and "FALLBACK_DISABLE" not in self.policies
        if allowed:
            self._warn(reason)
        return allowed

    def allows(self, cause: Cause) -> bool:
        """May PyTorch run calls for this cause?"""
        return "FALLBACK_DISABLE" not in self.policies and cause.value in self.policies

    def allow(self, error: NotInEngine) -> None:
        """Raises when PyTorch must not run this call: the exception that began it."""
        if error.reason == NOTHING:
            return
        if self.strict:
            raise _bypass(error.reason) from error
        if not self.allows(error.cause):
            original = _original(error)
            if type(original).__module__ == BypassError.__module__:
                raise BypassError(str(original)) from error  # of the package's own, which users do not know
            raise original

    def bypassed(self, text: str) -> None:
        """What went, or goes, past the engine without a choice of the policy: a warning, once. Raises BypassError."""
        if self.strict:
            raise _bypass(text)
        self.log.warn_once(text)

    def done(self, error: NotInEngine) -> None:
        """PyTorch has run the call. One warning for each reason."""
        self.reason = error.reason
        _forget_frames(error)
        if error.key is not None and not self.retry:
            if len(self.refused) >= MOST_REFUSED:
                self.refused.clear()
            self.refused[error.key] = error
        if error.warning is not None:
            if error.warning:
                self.log.warn_once(error.warning)
        elif error.reason != NOTHING and not any(text in error.reason for text in self.silent):
            alone = error.cause is Cause.DATA and error.key is None  # others like it may run in the engine
            self._warn(error.reason, "such a call" if alone else "this module")

    def _warn(self, reason: str, what: str = "this module") -> None:
        self.log.warn_once(f"PyTorch runs {what}, not the engine: {reason}")


def _bypass(reason: str) -> BypassError:
    return BypassError(f"{reason} (ORTMODULE_STRICT=1)")


def _forget_frames(error: BaseException | None) -> None:
    """Or the caller's tensors would live as long as the exception."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _original(error: BaseException) -> BaseException:
    """The exception at the beginning of the chain, of those that others may know."""
    found = error
    while error.__cause__ is not None:
        error = error.__cause__
        found = found if type(error).__name__.startswith("_") else error
    return found
