"""Verifies steps against PyTorch, and traces a difference to one operator (``ORTMODULE_VERIFY``).

The engine runs as always. The same call then runs in PyTorch, on the inputs, buffers and random numbers that the engine
had: every random ATen call gets what the engine drew for the node that stands for it. Outputs and buffers are compared
at once, gradients when the user's backward has computed them. The module, its generators and hooks on parameters see
nothing of it. Where they differ by more than a tolerance, PyTorch runs again, several times at most, on operands that
are rounded once more: a difference as large as the one that this makes is rounding (as in a mean whose terms cancel, or
where a ReLU's operand is near 0). So is one that is not larger than PyTorch's own from a run in float64.

If something differs, the operator is looked for (:mod:`ortmodule.debug.bisect`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ortmodule.core import devices, pytree, rng_state
from ortmodule.core.dtypes import as_pairs
from ortmodule.core.errors import Incomparable
from ortmodule.core.logger import Log
from ortmodule.core.names import INPUT, STATE
from ortmodule.core.objects.tensor_copies import cloned, with_attributes
from ortmodule.core.objects.tensor_memory import version_of
from ortmodule.core.tolerance import WAYS, MovedElements, exact, is_little, is_rounding_of, movement
from ortmodule.core.torch_private import TorchDispatchMode, is_batched
from ortmodule.debug import bisect
from ortmodule.debug.bisect import difference
from ortmodule.guards.inventory import Slot
from ortmodule.guards.isolation import containers
from ortmodule.guards.module_tree import Tree
from ortmodule.host.fallback import only_pytorch
from ortmodule.host.host_node import Node
from ortmodule.runtime.autograd_bridge import backward_nodes
from ortmodule.runtime.broken_graph import BrokenGraph
from ortmodule.runtime.compiled_graph import CompiledGraph
from ortmodule.runtime.executable import draw_seed, seed_of
from ortmodule.runtime.piece_graph import PieceGraph
from ortmodule.runtime.rng_replay import RandomValue, RngReplay, replaying

_MISSING = object()
Change = Callable[[torch.Tensor], torch.Tensor]

# --- one call ---------------------------------------------------------------------------------------------------------


class Before:
    """What a call began with: copies of everything that forward may change, and the state of torch's generator."""

    def __init__(self, inputs: Sequence[torch.Tensor], tree: Tree, sets: Sequence[Slot] = ()) -> None:
        """``sets``: attributes that forward gives other values."""
        self.versions = [version_of(t) for t in inputs]
        self.inputs = [with_attributes(t.detach().clone().requires_grad_(t.requires_grad), t) for t in inputs]
        tensors = {slot.name: slot.find() for slot in (*tree.others, *tree.held, *tree.counters)}
        self.state = {name: t.detach().clone() for name, t in tensors.items() if isinstance(t, torch.Tensor)}
        values = [(slot, slot.find(_MISSING)) for slot in sets]
        self.sets = [(slot, v.detach().clone() if isinstance(v, torch.Tensor) else v) for slot, v in values]
        self.containers = containers(tree)
        self.generator, self.states = devices.generators(), rng_state.States()

    def feeds(self, names: Sequence[str], tree: Tree) -> dict[str, torch.Tensor]:
        """The graph's inputs by name."""
        return {name: as_pairs(self._feed(name, tree).detach()).contiguous() for name in names}

    def put_back(self, copies: dict[str, torch.Tensor]) -> None:
        """What the module held then, into these ``copies`` of tensors by name; inside of `Tree.isolated`."""
        self.states.put_back()
        for kept in self.containers:
            kept.put_back()
        for slot, then in self.sets:
            if then is _MISSING:
                if slot.key in slot.holder:
                    slot.holder.pop(slot.key)
            elif not isinstance(then, torch.Tensor):
                slot.set(then)
            elif slot.name not in copies or copies[slot.name].shape != then.shape:
                slot.set(then.clone())
        with torch.no_grad():
            for name, copy in copies.items():
                then = self.state.get(name)
                if then is not None and copy.shape == then.shape:
                    copy.copy_(then)

    def _feed(self, name: str, tree: Tree) -> torch.Tensor:
        if name.startswith(INPUT):
            return self.inputs[int(name.removeprefix(INPUT))]
        name = name.removeprefix(STATE)
        return self.state[name] if name in self.state else tree.slots[name].get()


@dataclass(eq=False)
class Eager:
    """The same call in PyTorch."""

    results: list[torch.Tensor]
    leaves: list[torch.Tensor | None]  # what stands for the graph's inputs that need a gradient, in their order
    state: dict[str, torch.Tensor]  # buffers and plain tensors afterwards
    inputs: list[torch.Tensor]


def run_eager(graph: CompiledGraph, tree: Tree, arguments: pytree.Structure, before: Before, forward: Callable,
              values: Sequence[RandomValue], change: Change = torch.Tensor.detach) -> Eager:  # fmt: skip
    """Runs ``forward`` as it would have run then, with what the engine drew. Raises Incomparable, what forward does.

    ``change``: what becomes of inputs and parameters; in float64 buffers are, too.
    """
    inputs = [with_attributes(change(t.detach()).clone().requires_grad_(t.requires_grad), t) for t in before.inputs]
    # Operations on a leaf in place are allowed on what is no leaf: the caller's tensor may have been none.
    given = [cloned(t) if t.requires_grad else t for t in inputs]
    hooks = [
        each for m in tree.modules.values() for d in (m._forward_hooks, m._forward_pre_hooks) for each in d.values()
    ]
    around = tree.around(tree.modules.values(), hooks)
    with tree.isolated() as copies, around.around():
        before.put_back(copies)
        aliases = tree.replace_parameters(change)
        for name, copy in copies.items() if change is exact else ():
            tree.slots[name].set(exact(copy))
        for slot in tree.counters:
            slot.set(before.state[slot.name])
        devices.set_generators(before.generator)
        with only_pytorch(), replaying(tree, graph.capture.trace.nodes, values, _Seeds(graph).draw):
            results = graph.capture.trace.eager(forward, arguments, given)
        state = {slot.name: slot.find() for slot in tree.others}
        feeds = [inputs[feed] if isinstance(feed, int) else aliases.get(id(feed.get())) for feed in graph.feeds]
    leaves = [feeds[i] for i in graph.leaves]
    return Eager(results, leaves, {n: t for n, t in state.items() if isinstance(t, torch.Tensor)}, given)


class _Seeds:
    """Draws a graph's seeds from torch's generator as its runs did: a piece's before what PyTorch runs in it, or
    behind it."""

    def __init__(self, graph: CompiledGraph) -> None:
        self._runs: list[Any] = list(graph.runs) if isinstance(graph, BrokenGraph) else [graph]
        self._nodes = graph.capture.trace.nodes
        self._inside: list[str | None] = []  # what PyTorch still runs in the piece that runs now
        if not isinstance(self._runs[0], Node):
            self._begin(self._runs.pop(0))

    def draw(self, path: str | None) -> None:
        """What PyTorch runs is about to run: the submodule ``path``, if it is one."""
        at = next((i for i, run in enumerate(self._runs) if path in self._calls(run)), None)
        if path not in self._inside and at is not None:
            for run in self._runs[: at + 1]:
                self._begin(run)
            del self._runs[: at + 1]
        if path in self._inside:
            self._inside.remove(path)

    def _begin(self, run: Any) -> None:
        if isinstance(run, CompiledGraph) and run.is_random:
            draw_seed()
        self._inside = self._calls(run)

    def _calls(self, run: Any) -> list[str | None]:
        """Submodules that PyTorch runs in it, and None for other calls."""
        numbers = [number for number, _ in run.piece.calls] if isinstance(run, PieceGraph) else ()
        nodes = [run] if isinstance(run, Node) else [self._nodes[number] for number in numbers]
        return [node.name if node.kind == "module" else None for node in nodes]


def tensors_of(graph: CompiledGraph, call: Any, result: Any) -> list[torch.Tensor]:
    """The tensors of a call's result, and of what forward sets on the module, in the order of the graph's sources."""
    held = pytree.containers(call.given) if graph.capture.trace.filled else []
    return graph.capture.trace.tensors_of(call.given, held, result)


class _Beside:
    """The same call in PyTorch on what is rounded once more, or in float64 (WAYS); made as it is asked for."""

    def __init__(self, run: Callable[[Change], Eager]) -> None:
        self._run = run
        self._made: list[Eager | None] = []  # None: other numbers are none that forward takes

    @functools.cached_property
    def scales(self) -> dict[str, float]:
        return running_mean_scales(self._run)

    def difference(self, ours: torch.Tensor, theirs: torch.Tensor, of: Callable[..., Any], least: float) -> str:
        """How far ``ours`` is from ``theirs``, if it is more than roundings move that. ``of``: the tensor in a run."""
        if not (text := difference(ours, theirs, least=least)):
            return ""
        moved = MovedElements(theirs)
        for each in self._found(of, None):
            moved.add(each)
            if not difference(ours, theirs, least=least, moved=moved):
                return ""
        return text

    def of_gradient(self, ours: torch.Tensor, k: int, expected: Sequence[torch.Tensor | None], of: Callable[..., Any],
                    least: float, modes: Any) -> str:  # fmt: skip
        """The same of number ``k`` of the gradients ``expected``, which ``of`` gives of a run. ``modes``: those that
        forward ran in."""
        theirs, scale = expected[k], bisect.share(expected)
        assert theirs is not None, "there is something to compare with"
        if not (text := difference(ours, theirs, scale, least)):
            return ""
        moved = MovedElements(theirs)
        for gradients in self._found(of, modes):
            if gradients[k] is None:
                continue
            moved.add(gradients[k])
            little = is_little(ours, theirs, movement(expected, gradients))
            if little or not difference(ours, theirs, scale, least, moved):
                return ""
        return text

    def _found(self, of: Callable[..., Any], modes: Any) -> Iterator[Any]:
        """What ``of`` gives of one run after the other. ``modes``: if they are not the present ones."""
        for place, change in enumerate(WAYS):
            if place == len(self._made):
                self._made.append(None)
                with contextlib.suppress(Exception), modes.set() if modes is not None else contextlib.nullcontext():
                    self._made[place] = self._run(change)
            run = self._made[place]
            with contextlib.suppress(Exception):
                if run is not None:
                    found = of(run)
                    yield found


class _RunningMeans(TorchDispatchMode):
    """Inside, ``scales`` gets how large the numbers are that running means move to the mean of, by their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: dict[int, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence = (), kwargs: dict | None = None) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        if (mean := given.get("running_mean")) is not None and given["input"].numel():
            share = given.get("momentum", given.get("exponential_average_factor", 1.0))  # which cuDNN calls it
            self.scales[mean.data_ptr()] = share * given["input"].abs().max().item()
        return func(*args, **(kwargs or {}))


def running_mean_scales(run: Callable[[Change], Eager]) -> dict[str, float]:
    """How large the numbers are that running means move to the mean of, which may be nothing but rounding of these, by
    the names of the buffers. ``run`` makes the call in PyTorch; empty where it does not bear to be looked at."""
    try:
        with _RunningMeans() as means:
            eager = run(torch.Tensor.detach)
    except Exception:
        return {}
    sized = {name: means.scales.get(tensor.data_ptr()) for name, tensor in eager.state.items()}
    return {name: scale for name, scale in sized.items() if scale is not None}


class _PieceRun:
    """One run of a piece, between submodules that PyTorch runs; begun with copies of what it is given."""

    def __init__(self, tree: Tree, piece: PieceGraph, inputs: list[torch.Tensor]) -> None:
        self.piece, self.inputs, before = piece, inputs, Before(inputs, tree)
        self.seed = seed_of(before.generator)
        held = [
            before.inputs[feed] if isinstance(feed, int) else before.state.get(feed.name, feed.get())
            for feed in piece.feeds
        ]
        given = [as_pairs(t.detach()).contiguous().clone() for t in held]
        self.feeds = dict(zip(piece.session.inputs, given, strict=True))
        self.outputs: list[torch.Tensor] = []

    @staticmethod
    def begin(
        runs: list[_PieceRun], tree: Tree, piece: PieceGraph, inputs: list[torch.Tensor]
    ) -> Callable[[Any], None]:
        """A piece is about to run: one more of ``runs``. Returns what takes its outputs."""
        run = _PieceRun(tree, piece, inputs)
        runs.append(run)
        return lambda made: run.outputs.extend(made)

    def eager(self, change: Change = torch.clone) -> Eager:
        """The same in PyTorch, one operator after the other. Raises Incomparable."""
        tensors = [
            change(t).requires_grad_(need) if need or change is exact else t
            for t, need in zip(self.feeds.values(), self.piece.needs, strict=True)
        ]
        try:
            results, leaves = self.piece.recomputed(None, tensors, self.seed, None)
        except RuntimeError as error:
            raise Incomparable(str(error)) from None
        return Eager(results, list(leaves), {}, [])

    def case(self, values: Sequence[RandomValue]) -> bisect.Case:
        needs = dict(zip(self.piece.session.inputs, self.piece.needs, strict=True))
        return bisect.Case(self.piece.capture.model, self.feeds, needs, self.seed, values)


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """Something that differs. ``operator``: type and name of the first node that computes something else, or why it
    is not known."""

    what: str
    operator: str

    def __str__(self) -> str:
        return f"{self.what}; {self.operator}"


class Verifier:
    """Compares every ``every``-th call of one module."""

    def __init__(self, every: int, log: Log, parts_draw: Callable[[], bool] = lambda: False) -> None:
        """``parts_draw``: do graphs of submodules draw numbers that run in a call of a submodule that PyTorch runs?"""
        self.every, self.log, self.parts_draw = every, log, parts_draw
        self.calls = self.compared = self.gradients = 0
        self.findings: list[Finding] = []
        self._replays: weakref.WeakKeyDictionary[CompiledGraph, RngReplay] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def before_forward(self, graph: CompiledGraph, call: Any) -> Callable | None:
        """What to do with the result, if it is this call's turn."""
        with self._lock:
            self.calls += 1
            if self.calls % self.every:
                return None
        before = Before(call.inputs, call.tree, graph.capture.trace.sets)
        pieces: list[_PieceRun] = []
        if isinstance(graph, BrokenGraph):
            graph.watch = functools.partial(_PieceRun.begin, pieces, call.tree)

        def after_forward(result: Any) -> None:
            generator = devices.generators()
            try:
                if isinstance(graph, BrokenGraph):
                    graph.watch = None
                    self._compare_pieces(graph, call, before, result, pieces)
                else:
                    self._compare(graph, call, before, result)
            except Incomparable as error:
                self.log.warn_once(f"ORTMODULE_VERIFY cannot compare a call: {error}")
            finally:
                devices.set_generators(generator)

        return after_forward

    def _values(self, graph: CompiledGraph, feeds: dict[str, torch.Tensor], seed: int) -> list[RandomValue]:
        """What a run of the graph with this seed drew."""
        if graph not in self._replays:
            self._replays[graph] = RngReplay(graph.capture.model, graph.session.known)
        return self._replays[graph].of(feeds, seed)

    def _eager(
        self, graph: CompiledGraph, call: Any, before: Before, values: Sequence[RandomValue]
    ) -> Eager | None:  # fmt: skip
        """What the module computes; None: it raises an error, which is reported. Raises Incomparable."""
        if any(node.generators for node in graph.capture.trace.nodes):
            raise Incomparable("it draws from a torch.Generator, which goes on by that")
        if self.parts_draw():
            raise Incomparable("submodules that are graphs of their own draw numbers; they are compared by themselves")
        try:
            eager = run_eager(graph, call.tree, call.arguments, before, call.forward, values)
        except Incomparable:
            raise
        except Exception as error:
            self._report(f"PyTorch raises {type(error).__name__} ({error})", "the engine does not")
            return None
        self.compared += 1
        return eager

    def _compare_pieces(
        self, graph: BrokenGraph, call: Any, before: Before, result: Any, pieces: list[_PieceRun]
    ) -> None:
        """The results of the whole beside the module, those of each piece and its gradients beside its operators: what
        submodules have let escape has gradients that the module's results do not tell."""
        values = [value for run in pieces for value in self._values(run.piece, run.feeds, run.seed)]
        if (eager := self._eager(graph, call, before, values)) is None:
            return
        beside = _Beside(functools.partial(run_eager, graph, call.tree, call.arguments, before, call.forward, values))
        least = max((run.case(()).tolerance for run in pieces), default=0.0)
        found, count = tensors_of(graph, call, result), len(self.findings)
        whole = self._outputs(call, found, eager, before, least, beside)
        try:
            for run in pieces:
                self._compare_piece(run)
        finally:
            if whole and len(self.findings) == count:
                self._report(whole, "in a submodule that PyTorch runs, or between the pieces")

    def _compare_piece(self, run: _PieceRun) -> None:
        case = run.case(self._values(run.piece, run.feeds, run.seed))
        eager, beside = run.eager(), _Beside(run.eager)
        for i, (ours, theirs) in enumerate(zip(run.outputs, eager.results, strict=True)):
            text = beside.difference(ours, theirs, lambda made, i=i: made.results[i], case.tolerance)
            if text:
                self._report(f"{run.piece.session.outputs[i]} {text}", bisect.forward(case))
                return
        self._watch_backward(run.outputs, run.inputs, functools.partial(self._backward, run.piece, eager, beside, case))

    def _compare(self, graph: CompiledGraph, call: Any, before: Before, result: Any) -> None:
        tree, model, seed = call.tree, graph.capture.model, seed_of(before.generator)
        feeds = before.feeds(graph.session.inputs, tree)
        values = self._values(graph, feeds, seed)
        if (eager := self._eager(graph, call, before, values)) is None:
            return
        found = tensors_of(graph, call, result)
        case = bisect.Case(model, feeds, dict(zip(graph.session.inputs, graph.needs, strict=True)), seed, values)
        beside = _Beside(functools.partial(run_eager, graph, tree, call.arguments, before, call.forward, values))
        differs = self._outputs(call, found, eager, before, case.tolerance, beside)
        if differs:
            self._report(differs, bisect.forward(case))
            return
        self._watch_backward(found, call.inputs, functools.partial(self._backward, graph, eager, beside, case))

    def _watch_backward(self, made: list[torch.Tensor], inputs: list[torch.Tensor], compare: Callable) -> None:
        """Calls ``compare`` after a backward of the forward that had ``inputs``. Among what it returns may be a tensor
        that it was given, which is another forward's."""
        for node in backward_nodes(made):
            if node.pending.call.inputs is inputs:
                node.register_hook(compare)

    def _outputs(
        self, call: Any, found: list[torch.Tensor], eager: Eager, before: Before, least: float, beside: _Beside
    ) -> str:  # fmt: skip
        """What differs after a forward, or an empty string. ``least``: the tolerance for any tensor."""
        if len(found) != len(eager.results):
            return f"there are {len(eager.results)} tensors in PyTorch's result, {len(found)} in the engine's"

        def differs(ours: torch.Tensor, theirs: torch.Tensor, of: Callable[..., Any]) -> str:
            return beside.difference(ours, theirs, of, least)

        for i, (ours, theirs) in enumerate(zip(found, eager.results, strict=True)):
            if text := differs(ours, theirs, lambda run, i=i: run.results[i]):
                return f"tensor {i} of the result {text}"
            if ours.requires_grad != theirs.requires_grad:
                return f"tensor {i} of the result needs {'a' if ours.requires_grad else 'no'} gradient"
        for name, theirs in eager.state.items():
            ours = call.tree.slots[name].get()
            text = differs(ours, theirs, lambda run, name=name: run.state[name])
            if text and not is_rounding_of(beside.scales.get(name, 0.0), ours, theirs):
                return f"the buffer {name} {text}"
        for i, (tensor, version) in enumerate(zip(call.inputs, before.versions, strict=True)):
            if version_of(tensor) == version:
                continue
            if text := differs(tensor, eager.inputs[i], lambda run, i=i: run.inputs[i]):
                return f"input {i}, which forward changes, {text}"
        return ""

    def _backward(
        self, graph: CompiledGraph, eager: Eager, beside: _Beside, case: bisect.Case, got: Sequence, given: Sequence
    ) -> None:
        """After a backward of the engine: ``got``, gradients of the leaves, for ``given``, gradients of the outputs."""
        if any(g is not None and is_batched(g) for g in given):
            return  # PyTorch's autograd has computed them
        sources = [source for source in graph.capture.trace.sources if source.kind != "number"]
        places = {source.key: i for i, source in enumerate(sources) if source.kind == "graph"}
        used = [(places[i], g.detach(), i) for i, g in zip(graph.differentiable, given, strict=True) if g is not None]
        if not used or all(leaf is None for leaf in eager.leaves):
            return

        @functools.cache
        def gradients(run: Eager) -> list[torch.Tensor | None]:
            leaves = [leaf for leaf in run.leaves if leaf is not None]
            outputs = [run.results[place] for place, _, _ in used]
            grads = [g.to(result.dtype) for result, (_, g, _) in zip(outputs, used, strict=True)]
            known = iter(torch.autograd.grad(outputs, leaves, grads, retain_graph=True, allow_unused=True))
            found = [None if leaf is None else next(known) for leaf in run.leaves]
            return [None if grad is None else as_pairs(grad) for grad in found]

        try:
            expected = gradients(eager)
        except RuntimeError as error:
            self.log.warn_once(f"ORTMODULE_VERIFY cannot compare the gradients of a call: {error}")
            return
        self.gradients += 1
        for i, ours, theirs, k in zip(graph.leaves, got, expected, range(len(expected)), strict=True):
            if eager.leaves[k] is None:
                continue
            name = graph.session.inputs[i]
            if ours is None or theirs is None:
                # A gradient that was not asked for is not computed; one of zeros is none.
                other = ours if theirs is None else theirs
                text = "" if other is None or not other.any() or ours is None else "is there, but not in PyTorch"
            else:
                text = beside.of_gradient(ours, k, expected, gradients, case.tolerance, graph.modes)
            if text:
                self._report(
                    f"the gradient of {name.partition('/')[2]} {text}",
                    bisect.backward(case, {i: g for _, g, i in used}),
                )
                return

    def _report(self, what: str, operator: str) -> None:
        finding = Finding(what, operator)
        self.findings.append(finding)
        self.log.warn_once(f"the engine computes something else than PyTorch: {finding}", logging.ERROR)
