"""Looks whether the graphs of a loop hold at a length that was not traced.

A graph of a long loop is written after traces of short ones, which do not show what comes later: `if t == 20:`, or
`h = h.detach()` in every 16th step. So the module runs at a long length in PyTorch, on a small batch, and is compared
with the graph: its results, and how many nodes of autograd are behind them, which has to grow by the same with every
step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.autograd.graph import saved_tensors_hooks

from ortmodule.capture import self_check
from ortmodule.capture.calls.scripted_calls import as_traced
from ortmodule.capture.dynamic_dims import Capture
from ortmodule.capture.loops.loop import LENGTHS, Loop, small
from ortmodule.core import devices, pytree, rng_state
from ortmodule.core.errors import MissingPrivate
from ortmodule.engine.session import ENGINE_ERRORS
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.sharding.collectives import alone
from ortmodule.host.fallback import only_pytorch

#: Loops are checked at once for lengths up to this, where that does not take longer than so many seconds.
FIRST, SECONDS = 256, 0.3


class LoopCheck:
    """Says up to which length graphs of a loop hold."""

    def __init__(self, capture: Capture, forward: Callable, arguments: pytree.Structure, tree: Tree) -> None:
        self._capture, self._forward, self._arguments, self._tree = capture, forward, arguments, tree
        self._differentiates = torch.is_grad_enabled() and any(capture.trace.requires_grad)
        self.checked = 0  # the longest length that was compared
        self.seconds = 0.0
        self._nodes: dict[int, Counter[str]] = {}
        self._a_step = 0.0  # seconds in PyTorch
        self._refused = 1 << 62  # the shortest length that was found wrong

    def holds(self, n: int, tensors: Sequence[torch.Tensor]) -> str:
        """What is wrong with a graph of length ``n``, or an empty string. ``tensors``: of a call of that length."""
        if n <= self.checked:
            return ""
        if n >= self._refused:
            return "the loop goes on in another way"
        start, grad = time.perf_counter(), torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad), rng_state.found():
            text = self._look(n, tensors)
        self.seconds += time.perf_counter() - start
        return text

    def _look(self, n: int, tensors: Sequence[torch.Tensor]) -> str:
        try:
            if not self._a_step:
                self._time_steps(tensors)
        except Exception as error:  # the module's own
            return f"{type(error).__name__}: {error}"
        longer = min(max(FIRST, 2 * n), int(SECONDS / self._a_step))
        text = ""
        for length in (longer, n) if longer > n else (n,):
            if not (text := self._wrong(length, tensors)):
                self.checked = length
                return ""
        self._refused = min(self._refused, n)
        return text

    def _time_steps(self, tensors: Sequence[torch.Tensor]) -> None:
        for n in LENGTHS:
            start = time.perf_counter()
            self._nodes[n] = self._run(n, tensors)
            self._a_step = max((time.perf_counter() - start) / n, 1e-6)

    def _run(self, n: int, tensors: Sequence[torch.Tensor]) -> Counter[str]:
        """The nodes of autograd that are behind the module's results in PyTorch, counted by kind."""
        generators = devices.generators()
        given = small(tensors, self._loop(), n)
        try:
            with (
                self._tree.isolated(), self._tree.unhooked(), only_pytorch(), alone(),
                saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing),
                self._tree.counted(0, self._capture.numbers_at(given)), as_traced(),
            ):  # fmt: skip
                self._tree.put_counters()
                return _nodes_behind(self._capture.trace.eager(self._forward, self._arguments, given))
        finally:
            devices.set_generators(generators)

    def _loop(self) -> Loop:
        assert self._capture.loop is not None
        return self._capture.loop

    def _wrong(self, n: int, tensors: Sequence[torch.Tensor]) -> str:
        loop = self._loop()
        if not loop.template.fits(n):
            return "it has too few steps"
        try:
            if self._differentiates and (text := self._other_nodes(n, tensors)):
                return text
            captured = replace(self._capture.at_length(n), sample=small(tensors, loop, n))
            return self_check.difference(captured, self._forward, self._arguments, self._tree)
        except (*ENGINE_ERRORS, MissingPrivate) as error:
            return str(error)
        except Exception as error:  # the module's own, of a length that it does not take
            return f"{type(error).__name__}: {error}"

    def _other_nodes(self, n: int, tensors: Sequence[torch.Tensor]) -> str:
        first, second, _ = LENGTHS
        one, two = self._nodes[first], self._nodes[second]
        for length in (LENGTHS[-1], n):
            found = self._nodes[length] if length in self._nodes else self._run(length, tensors)
            for kind in one.keys() | two.keys() | found.keys():
                expected = one[kind] + (length - first) * (two[kind] - one[kind])
                if found[kind] != expected:
                    return f"{length} steps have {found[kind]} {kind} behind their results, not {expected}"
        return ""


def _nodes_behind(results: Sequence[torch.Tensor]) -> Counter[str]:
    """Nodes of autograd by kind."""
    found: Counter[str] = Counter()
    waiting = [t.grad_fn for t in results if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        found[node.name()] += 1
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
    return found
