"""Intercepts calls of custom autograd functions (`torch.autograd.Function`), where they call the user's forward.

`Function.apply` cannot be replaced: user code keeps it (`swish = Swish.apply`), and since torch 2.14 it is a builtin.
But each call asks the class for `setup_context` and then for `forward`, and the metaclass may answer for the class. By
then the call has begun: the tracer has recorded a node of its own, without results yet. The host node is recorded
behind it, and takes its place when the trace is done (:func:`settle`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import Function, FunctionMeta

from ortmodule.core.objects.interception import Replacement, as_found, replaced

#: The tracer's node for a call.
TRACED = "prim::PythonOp"


class _Asked:
    """An attribute of the metaclass: a class that is asked for ``name`` gives what ``answer`` makes of its own."""

    def __init__(self, name: str, answer: Callable[[type, Callable], Callable]) -> None:
        self.name, self.answer = name, answer

    def __get__(self, cls: type | None, meta: type) -> Any:
        return self if cls is None else self.answer(cls, _own(cls, self.name))

    def __set__(self, cls: type, value: Any) -> None:
        with as_found(FunctionMeta, self.name):
            setattr(cls, self.name, value)


def _own(cls: type, name: str) -> Any:
    """``cls.name``, whatever its metaclass says."""
    found = inspect.getattr_static(cls, name)
    return found.__get__(None, cls) if hasattr(found, "__get__") else found


def bound_apply(cls: type) -> Callable:
    """`apply` as torch has it, below one of the user's."""
    return _own(cls, "apply") if not issubclass(cls, Function) else vars(Function)["apply"].__get__(None, cls)


def has_context(cls: type) -> bool:
    """Is its forward given a context? Otherwise `setup_context` is, after forward."""
    return _own(cls, "setup_context") is _own(Function, "setup_context")


class _Thread(threading.local):
    met: Callable | None = None
    asked: type | None = None  # for `setup_context`: its forward will be next
    grad = True  # the caller's grad mode
    instead: tuple[type, Callable] | None = None  # of its own `setup_context`


_thread = _Thread()


@contextmanager
def meeting(met: Callable[[type, Callable, tuple, dict, bool], tuple[Any, Callable | None] | None]) -> Iterator[None]:
    """Inside, in this thread, a call of a function goes to ``met(cls, forward, args, kwargs, grad)`` when it has begun:
    the arguments are those of ``forward``, its context included, ``grad`` is the grad mode of the caller.

    What it returns is (what the call goes on with as forward's result, what sets up the context instead of forward and
    `setup_context`, or None), or None: the call goes on as it would.
    """
    before, _thread.met = _thread.met, met
    asked = [_Asked("forward", _forward), _Asked("setup_context", _setup_context)]
    try:
        with replaced([Replacement(FunctionMeta, each.name, each) for each in asked]):
            yield
    finally:
        _thread.met, _thread.asked, _thread.instead = before, None, None


class _Begun:
    """The forward of a call that has begun. torch looks at the code and the signature of what it calls."""

    def __init__(self, cls: type, own: Callable, met: Callable) -> None:
        self._cls, self._own, self._met = cls, own, met

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _thread.asked = None
        found = self._met(self._cls, self._own, args, kwargs, _thread.grad)
        if found is None:
            return self._own(*args, **kwargs)
        result, set_up = found
        if set_up is not None and has_context(self._cls):
            set_up(args[0])
        elif set_up is not None:
            _thread.instead = self._cls, lambda context, *_, **__: set_up(context)
        return result


def _forward(cls: type, own: Callable) -> Callable:
    if _thread.met is None or _thread.asked is not cls:  # user code may call it by itself
        return own
    return _Begun(cls, own, _thread.met)


def _setup_context(cls: type, own: Callable) -> Callable:
    """Before forward a call asks whether there is one of the user's, after it to call that."""
    instead, _thread.instead = _thread.instead, None
    if instead is not None and instead[0] is cls:
        return instead[1]
    if _own(cls, "forward") is not _own(Function, "forward"):  # torch compares with its own class's
        _thread.asked, _thread.grad = cls, torch.is_grad_enabled()
    return own


def settle(graph: Any, calls: dict[int, list[int | None]], kind: str) -> None:
    """Puts nodes of ``kind`` in the place of the tracer's. ``calls``: by a node's number (its second operand), which of
    its results, as they are unpacked, are those of the call; -1 - i: its operand i; None: what is no tensor."""
    traced = None
    for node in list(graph.nodes()):
        if node.kind() == TRACED:
            traced = node
        elif node.kind() == kind and (number := list(node.inputs())[1].toIValue()) in calls and traced is not None:
            listed, unpacked = next(node.inputs()).node(), next(iter(node.output().uses())).user
            results, operands = list(unpacked.outputs()), list(listed.inputs())
            found = [i if i is None else results[i] if i >= 0 else operands[-1 - i] for i in calls[number]]
            _replace(traced, found)
            traced = None


def _replace(traced: Any, values: Sequence[Any]) -> None:
    """The results of the tracer's node: one, or a tuple that is unpacked at once."""
    result = traced.output()
    unpacked = [use.user for use in result.uses() if use.user.kind() == "prim::TupleUnpack"]
    for old, new in zip(unpacked[0].outputs() if unpacked else [result], values, strict=True):
        if new is not None:
            old.replaceAllUsesWith(new)
    for node in unpacked[:1]:
        node.destroy()
    traced.destroy()
