"""When PyTorch runs the module instead of the engine, and how that is said."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch

from ortmodule.logger import Log

MOST_REFUSED = 1024  # calls that are remembered as not for the engine


class Cause(Enum):
    """Why a call cannot be run by the engine; the value is the policy that allows PyTorch to take over."""

    DEVICE = "FALLBACK_UNSUPPORTED_DEVICE"
    DATA = "FALLBACK_UNSUPPORTED_DATA"
    TORCH_MODEL = "FALLBACK_UNSUPPORTED_TORCH_MODEL"
    ONNX_MODEL = "FALLBACK_UNSUPPORTED_ONNX_MODEL"


class _Thread(threading.local):
    only_pytorch = False


_thread = _Thread()


@contextmanager
def only_pytorch() -> Iterator[None]:
    """Inside, in this thread, no module uses the engine."""
    before, _thread.only_pytorch = _thread.only_pytorch, True
    try:
        yield
    finally:
        _thread.only_pytorch = before


def engine_allowed() -> bool:
    """Nobody asked for PyTorch, and nobody looks at the operations that a module consists of."""
    return not (
        _thread.only_pytorch
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


class NotInEngine(Exception):
    """A call that the engine cannot run; the sentence says why. ``key``: the calls that it is true for."""

    def __init__(self, cause: Cause, reason: str, key: object = None) -> None:
        super().__init__(reason)
        self.cause, self.reason, self.key = cause, reason, key


class Fallback:
    """Which calls PyTorch runs, by policy."""

    def __init__(self, policies: frozenset[str], log: Log) -> None:
        self.policies, self.log = policies, log
        self.reason: str | None = None  # why the latest call was not run by the engine
        self.refused: dict[object, NotInEngine] = {}

    def check(self, *keys: object) -> None:
        """Raises what was found about such a call before."""
        for key in keys if self.refused else ():
            if key in self.refused:
                raise self.refused[key]

    def allow(self, error: NotInEngine) -> None:
        """Raises when PyTorch must not run this call."""
        if "FALLBACK_DISABLE" in self.policies or error.cause.value not in self.policies:
            raise error.__cause__ or error

    def done(self, error: NotInEngine) -> None:
        """PyTorch has run the call. One warning for each reason."""
        self.reason = error.reason
        if error.key is not None:
            if len(self.refused) >= MOST_REFUSED:
                self.refused.clear()
            self.refused[error.key] = error
        self.log.warn_once(f"PyTorch runs this module, not the engine: {error.reason}")
