"""Traces through `torch.utils.checkpoint`, and marks what lies inside, which backward computes again.

The nodes of a checkpoint have a step of their own in their names (:data:`CHECKPOINT_STEP`, with its number), by which
the planner knows them (csrc/plan/recompute_checkpoints.c). Nested ones are one with the outermost.

PyTorch runs the function twice, the engine what it computes: so nothing else may happen in it. One that changes
something, draws what a second run would not draw alike, or comes with a context of its own is refused. With
`use_reentrant=True` results alone carry a gradient, and none where no argument does.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import checkpoint

from ortmodule.capture.randomness.chance import Chance
from ortmodule.capture.scalar_guards import active, user_line
from ortmodule.capture.trace_mode import TraceMode
from ortmodule.core import pytree
from ortmodule.core.errors import NotTraceable, Unflattenable
from ortmodule.core.names import CHECKPOINT, CHECKPOINT_STEP, REENTRANT
from ortmodule.core.objects.interception import Replacement, replaced
from ortmodule.core.objects.tensor_memory import memory_of, version_of
from ortmodule.core.torch_private import checkpoint_inputs, get_tracing_state, scope_name, untraced
from ortmodule.guards.inventory import path_of
from ortmodule.guards.isolation import containers, contents
from ortmodule.guards.module_tree import Tree
from ortmodule.host.opaque_regions import Regions

_ADVICE = " (with ORTMODULE_MEMORY_OPT_LEVEL=1 in its place the engine computes layers again)"


class _Then:
    """What the module and its arguments held when a checkpoint began."""

    def __init__(self, tree: Tree, regions: Regions) -> None:
        self.tree, self.regions = tree, regions
        self.contents, self.containers = contents(tree), containers(tree)
        held = ((slot.name, slot.find()) for slot in tree.others)
        given = ((f"argument {i}", tensor) for i, tensor in enumerate(regions.inputs))
        self.tensors = [(name, t, version_of(t)) for name, t in (*held, *given) if isinstance(t, torch.Tensor)]
        self.arguments = _flattened(regions.arguments)

    def changed(self) -> str | None:
        """The name of something that is not as it was."""
        now = contents(self.tree)
        for path, then in self.contents.items():
            for _, key in then.changed(now[path]):
                return path_of(path, key)
        if any(kept.changed() for kept in self.containers):
            return "a container in an attribute"
        arguments = _flattened(self.regions.arguments)
        if arguments[1:] != self.arguments[1:] or [*map(id, arguments[0])] != [*map(id, self.arguments[0])]:
            return "a container among the arguments"
        return next((name for name, tensor, version in self.tensors if version_of(tensor) != version), None)


def _unseen() -> AbstractContextManager[None]:
    """Inside, what is read is not read by forward."""
    recorder = active()
    return nullcontext() if recorder is None else recorder.paused()


def _flattened(arguments: Any) -> tuple[list[torch.Tensor], Any]:
    try:
        return pytree.flatten(arguments)
    except Unflattenable:
        return [], None


@dataclass
class _Open:
    """A checkpoint that has begun."""

    name: str  # of its kind
    nodes: int  # that PyTorch runs, so far
    draws: int
    then: _Then | None
    known: dict[int, Any] | None  # tensors of the trace, where results alone carry a gradient

    def changed(self) -> str | None:
        """As of :class:`_Then`, if it is looked at that."""
        with _unseen():
            return None if self.then is None else self.then.changed()


class Checkpoints:
    """Those of one trace."""

    def __init__(self, tree: Tree, regions: Regions, chance: Chance, mode: TraceMode, looks: bool) -> None:
        """``looks``: at what each of them changes."""
        self.tree, self.regions, self.chance, self.mode, self.looks = tree, regions, chance, mode, looks
        self.count = 0
        self._open: list[_Open] = []

    def begin(self, name: str) -> None:
        """``name``: CHECKPOINT, or REENTRANT."""
        if not self._open:
            self.count += 1
            get_tracing_state().push_scope(scope_name(CHECKPOINT, f"{CHECKPOINT_STEP}{self.count}"))
        with _unseen():
            then = _Then(self.tree, self.regions) if self.looks else None
        known = self.mode.known() if name == REENTRANT else None
        if self._open and self._open[-1].name == REENTRANT:
            name = REENTRANT  # PyTorch cannot run that inside of the graph, nor what is in it
        self._open.append(_Open(name, len(self.regions.nodes), len(self.chance.draws), then, known))

    def end(self) -> None:
        """In any case."""
        self._open.pop()
        state = get_tracing_state()
        if not self._open and state is not None:
            state.pop_scope()

    def check(self, results: Any = None) -> None:
        """Before the end: raises NotTraceable where a second run would not do the same, and nothing else."""
        opened, what = self._open[-1], ""
        if len(self.chance.draws) > opened.draws or any(n.kind == "draw" for n in self.regions.nodes[opened.nodes :]):
            what = "draws a number in it that would be another one there"
        elif name := opened.changed():
            what = f"changes {name} in it once more there"
        elif opened.known is not None and self._escapes(opened.known, results):
            what = "gives tensors away in another way than as results, which carry no gradient then"
        if what:
            raise NotTraceable(f"{user_line()} uses {opened.name}, which runs again in backward, and {what}{_ADVICE}")

    def _escapes(self, known: dict[int, Any], results: Any) -> bool:
        """Is something with a gradient that was made in it still there, beside its results?"""
        given = results if isinstance(results, tuple) else (results,)
        memories = {memory_of(t) for t in given if isinstance(t, torch.Tensor)}
        return any(t.requires_grad and memory_of(t) not in memories for t in self.mode.made_since(known))


class OfCheckpoints:
    """Which checkpoint has changed something: that is looked for once forward does, as it takes a look at the module
    around each."""

    looked_for = False

    def are_to_be_found(self, traced: Checkpoints, changes: Sequence[Any]) -> bool:
        """In another trace, after this one? ``changes``: what forward has changed."""
        nodes = traced.regions.nodes
        new = traced.count > 0 and (bool(changes) or any(node.sets or node.writes or node.fills for node in nodes))
        before, self.looked_for = self.looked_for, self.looked_for or new
        return new and not before


# --- where they are met -----------------------------------------------------------------------------------------------


class _Plain:
    """Stands for those of a forward in PyTorch that is to keep everything."""

    def begin(self, name: str) -> None:
        pass

    def end(self) -> None:
        pass

    def check(self, results: Any = None) -> None:
        pass


_current = threading.local()


def _met() -> Checkpoints | _Plain | None:
    """What checkpoints of this thread go to."""
    recorder = active()
    return getattr(_current, "plain", None) if recorder is None else recorder.checkpoints


def _is_checkpoints(hooks: saved_tensors_hooks) -> bool:
    return type(hooks).__module__ == checkpoint.__name__


def _leaves_alone(hooks: saved_tensors_hooks) -> bool:
    """Do these of forward's own change nothing in what is traced: they move what autograd saves, which is nothing in a
    trace? Raises NotTraceable where they may do anything."""
    if active() is None or get_tracing_state() is None or not torch.is_grad_enabled():
        return False
    if not isinstance(hooks, save_on_cpu):
        raise NotTraceable(f"{user_line()} puts hooks on what autograd saves, which a graph would not call")
    return True


def _entering(original: Callable) -> Callable:
    """A checkpoint without reentrant autograd puts hooks on what autograd saves: nothing is saved in a trace."""

    def enter(hooks: saved_tensors_hooks) -> Any:
        found = _met()
        if found is None or not _is_checkpoints(hooks):
            return hooks if _leaves_alone(hooks) else original(hooks)
        if isinstance(found, Checkpoints) and _context_of(sys._getframe(1)) is not checkpoint.noop_context_fn:
            raise NotTraceable(f"{user_line()} uses {CHECKPOINT} with a context of its own, or to debug{_ADVICE}")
        found.begin(CHECKPOINT)
        return hooks

    return enter


def _leaving(original: Callable) -> Callable:
    def leave(hooks: saved_tensors_hooks, *error: Any) -> Any:
        found = _met()
        if found is None or not _is_checkpoints(hooks):
            return None if _leaves_alone(hooks) else original(hooks, *error)
        try:
            if error[:1] == (None,):
                found.check()
        finally:
            found.end()

    return leave


def _context_of(frame: FrameType | None) -> Any:
    """The `context_fn` of the checkpoint that is entered in ``frame``."""
    while frame is not None and frame.f_code.co_filename in _AROUND:
        if "context_fn" in frame.f_locals:
            return frame.f_locals["context_fn"]
        frame = frame.f_back
    return None


_AROUND = {checkpoint.__file__, contextlib.__file__}


def _reentrant(original: Callable) -> Callable:
    def apply(function: Callable, preserve: bool, *args: Any) -> Any:
        found = _met()
        if found is None:
            return original(function, preserve, *args)
        if not torch.is_grad_enabled():
            return function(*args)
        if not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            with torch.no_grad():
                return function(*args)
        found.begin(REENTRANT)
        try:
            results = function(*args)
            found.check(results)
            return results
        finally:
            found.end()

    return apply


def _keeping(original: Callable) -> Callable:
    """Of torch 2.12 and older: whether gradients are recorded is read off what it returns."""

    def apply(like: torch.Tensor, *args: Any) -> Any:
        if _met() is None:
            return original(like, *args)
        with untraced():
            return like.view_as(like)

    return apply


_REPLACEMENTS = [
    Replacement.around(saved_tensors_hooks, "__enter__", _entering),
    Replacement.around(saved_tensors_hooks, "__exit__", _leaving),
    Replacement.around(checkpoint.CheckpointFunction, "apply", _reentrant),
    *([] if checkpoint_inputs is None else [Replacement.around(checkpoint_inputs, "apply", _keeping)]),
]


def met() -> AbstractContextManager[None]:
    """Inside, in this thread, checkpoints are traced through (`Recorder.checkpoints`)."""
    return replaced(_REPLACEMENTS)


@contextmanager
def plain() -> Iterator[None]:
    """Inside, in this thread, PyTorch keeps what checkpoints compute: backward does not run them again, when what they
    draw is no longer what it was in forward."""
    before, _current.plain = getattr(_current, "plain", None), _Plain()
    try:
        with replaced(_REPLACEMENTS):
            yield
    finally:
        _current.plain = before
