"""Leaves calls of a trace to PyTorch: each becomes a host node (:mod:`ortmodule.host.host_node`).

While a module is traced, calls of custom autograd functions and of submodules that are to be opaque are not traced:
they run as in eager mode, on copies, and one operator stands for them in the graph, `ortmodule::call`.
"""

from __future__ import annotations

import functools
import inspect
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from ortmodule.core import devices, pytree, rng_state
from ortmodule.core.dtypes import DTYPES
from ortmodule.core.errors import NotTraceable, Unflattenable
from ortmodule.core.names import REENTRANT, RETURNS_GIVEN
from ortmodule.core.objects.tensor_copies import as_operand
from ortmodule.core.size_expr import is_number
from ortmodule.core.snapshot import Items
from ortmodule.core.structures.tokens import ARRAY
from ortmodule.core.torch_private import (
    EXPORTER_GLOBALS,
    ListType,
    TracedValue,
    get_tracing_state,
    get_value_trace,
    set_value_trace,
    untraced,
)
from ortmodule.guards import hook_arguments
from ortmodule.guards.inventory import Slot
from ortmodule.guards.module_hooks import without
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.sharding.collectives import alone
from ortmodule.guards.writes.surroundings import GlobalState, state_of_function
from ortmodule.host import autograd_functions, escapes
from ortmodule.host.fallback import only_pytorch
from ortmodule.host.host_node import Modes, Node, Spent, leaves_of, nodes_behind, operands_of, specs_of

CALL = "ortmodule::call"
# The schema by which the passes of TorchScript know that the operator changes nothing.
_library = torch.library.Library("ortmodule", "FRAGMENT")
_library.define("call(Tensor[] operands, int number, int given) -> Tensor[]")


class Place(str):
    """The path of a submodule; ``methods``: those of its own that were running there, the innermost first."""

    methods: tuple[str, ...] = ()


class Opaque:
    """Says what PyTorch runs: submodules by path, with the reasons; kinds of ATen operators.

    A path with the name of a method (`model:positions`) is that method alone.
    """

    def __init__(
        self, modules: dict[str, str], kinds: frozenset[str], functions: bool, hooked: frozenset[str] = frozenset(),
        wrapped: dict[str, Callable] | None = None, cuts: bool = True,
        parted: Mapping[str, tuple[str, Callable[[], AbstractContextManager]]] | None = None,
        varying: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """``functions``: may custom autograd functions become nodes? ``hooked``: submodules with hooks that may keep
        tensors. ``wrapped``: what is called in place of submodules that communicate, by path. ``cuts``: may the graph
        be cut at values that forward puts into the caller's containers? ``parted``: those that are breaks, by path: a
        sentence on why, and what a call of them runs in. ``varying``: those that return what they are given in some
        calls alone."""
        self.parted, self.varying = parted or {}, varying
        self.returned: dict[tuple[int, str], list[tuple[str, int]]] = {}  # `Node.sources`, in the traces so far
        self.hooked, self.wrapped, self.cuts = hooked, wrapped or {}, cuts
        self.modules = {path: why for path, why in modules.items() if ":" not in path}
        self.methods = [tuple(path.split(":")) for path in modules if ":" in path]
        self.kinds, self.functions = kinds, functions


def _nothing(*args: Any) -> None:
    return None


class Regions:
    """The calls that become nodes in one trace."""

    def __init__(self, tree: Tree, opaque: Opaque) -> None:
        self.tree, self.opaque = tree, opaque
        self.paths = {id(tree.modules[path]): path for path in opaque.modules}
        self.methods = {(id(tree.modules[path]), name): f"{path}.{name}" for path, name in opaque.methods}
        self.names = {id(module): path for path, module in tree.modules.items()}
        self.nodes: list[Node] = []
        self.calls: dict[int, list[int | None]] = {}  # of functions: the values that are their results
        self.tokens: list[torch.Tensor] = []
        self.ends: set[Any] = set()  # of the trace's autograd graph: what each node's own graph gives
        self.seen: list[tuple] = []  # (number, operands, results)
        self.stack: list[str] = []
        self.blamed: tuple[BaseException, Place] | None = None
        self.entered: Callable[[str], Any] = _nothing  # before and after a submodule runs by itself
        self.left: Callable[[Any, Node, list[torch.Tensor]], None] = _nothing
        self.made: Callable[[Any], None] = _nothing
        self.begins: Callable[[], None] = _nothing  # a submodule is about to be traced
        self.traced: Callable[[], None] = _nothing  # it has been traced
        self.runs: Callable[[], None] = _nothing  # PyTorch is about to run a node
        self.ran: Callable[[], None] = _nothing  # it has run it
        self.arguments: Any = None  # those of the module
        self.inputs: list[torch.Tensor] = []  # the tensors in them
        self.generators: list[torch.Generator] = []  # the same of torch's generators
        self.filled: Any = None  # they, flattened, as they were in the beginning, or as breaks have left them
        self.altered: list[Any] = []  # what breaks change of what is around them
        self.written: dict[int, torch.Tensor] = {}  # the tensors there that they write into, by their ids
        self.escaped: list[weakref.ref[torch.Tensor]] = []  # what something keeps of breaks
        self.kept: list[weakref.ref[torch.Tensor]] = []  # what breaks have made, and was there behind them
        self.containers: dict[int, int] = {}  # numbers of those in the beginning, by their ids
        self.functions: dict[type, GlobalState] = {}  # what is around autograd functions, as before the first call
        self.versions: list[tuple[Node, torch.Tensor, int]] = []  # of operands and results of submodules, behind these

    def __contains__(self, node: Any) -> bool:
        """Is it a node of autograd's graph of one of the calls? Which gradients these have is found in a run."""
        return node in self.ends or isinstance(node, BackwardCFunction)

    def active(self) -> bool:
        return get_tracing_state() is not None

    def innermost(self) -> str | None:
        """The path of the submodule whose forward runs."""
        return self.stack[-1] if self.stack else None

    def function(
        self, cls: type, forward: Callable, args: tuple, kwargs: dict, grad: bool
    ) -> tuple[Any, Callable]:  # fmt: skip
        """A call that has begun (`autograd_functions.py`): another one runs in its place, and its results are those of
        this one, too."""
        if not self.opaque.functions:
            raise NotTraceable(f"forward uses the autograd function {cls.__name__}, and custom autograd is off")
        given, number = args[autograd_functions.has_context(cls) :], len(self.nodes)
        if cls not in self.functions:
            with eagerly():
                self.functions[cls] = state_of_function(cls)
        modes, apply = Modes(grad, Modes.now().autocast), autograd_functions.bound_apply(cls)
        result = self._call("function", cls.__qualname__, apply, given, kwargs, [], modes)
        results = result if isinstance(result, tuple) else (result,)
        operands = {id(t): i for i, t in enumerate(_unique([t for t in given if isinstance(t, torch.Tensor)])[0])}
        changed = self.nodes[number].changed
        self.calls[number] = [
            None if not isinstance(t, torch.Tensor)
            else -1 - operands[id(t)] if id(t) in operands and operands[id(t)] not in changed
            else _value(t).offset()
            for t in results
        ]  # fmt: skip
        made = [t for t in results if isinstance(t, torch.Tensor)]

        def set_up(context: Any) -> None:
            context.mark_dirty(*[t for t in made if id(t) in operands])
            context.mark_non_differentiable(*[t for t in made if not t.requires_grad])

        return result, set_up

    def module(self, module: nn.Module, path: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        if path in self.opaque.wrapped:  # its parameters are autograd's alone
            return self._call("module", path, self.opaque.wrapped[path], args, kwargs, [])
        held, known = [], set()
        if torch.is_grad_enabled():
            for part in module.modules():
                for key, parameter in part._parameters.items():
                    if parameter is not None and parameter.requires_grad and id(parameter) not in known:
                        known.add(id(parameter))
                        held.append(Slot(f"{self.names.get(id(part), path)}.{key}", part._parameters, key))

        # Hooks that are a part of forward are one of the graph around it.
        if self.tree.hooks.busy(module, path):
            raise NotTraceable(f"hooks inside of {path}, which PyTorch would run by itself, give something to forward")
        hooks = self.tree.hooks  # (they may be registered anew behind the trace)
        (_, around), spent = self.opaque.parted.get(path, ("", nullcontext)), Spent()

        def function(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            with without(module._forward_hooks, hooks.followed.get(path, ())), around():
                result = original(module, *args, **kwargs)
            spent.calls, spent.seconds = spent.calls + 1, spent.seconds + time.perf_counter() - start
            return result

        number = len(self.nodes)
        result = self._call("module", path, function, args, kwargs, held)
        self.nodes[number].spent = spent
        spent.calls, spent.seconds = 0, 0.0  # that was the trace
        for hook in hooks.followed.get(path, {}).values():
            other = hook(module, args, result)
            result = result if other is None else other
        return result

    def method(self, module: nn.Module, name: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        """One that computes tensors: positions, masks, hidden states of which it masks some. None of them leaves it by
        another way than its result, and it changes nothing but its operands."""
        result = self._call("method", name, functools.partial(original, module), args, kwargs, [])
        if not _holds_tensors_alone(result):
            raise NotTraceable(f"{name}, which PyTorch would run inside the graph, returns more than tensors")
        return result

    def draw(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """A call of torch's that draws from a generator. It may fill a tensor: then it returns another one, filled."""
        name = getattr(function, "__name__", "draw")
        if "out" in kwargs:
            raise NotTraceable(f"{name}(out=...) draws from a torch.Generator")
        if name.endswith("_"):
            fills, rest = function, args[1:]
            if not args[0].is_contiguous():
                raise NotTraceable(f"{name} draws from a torch.Generator into a tensor that is not contiguous")

            def function(filled: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
                return fills(torch.empty_like(filled), *rest, **kwargs)

            args = torch.zeros_like(args[0].detach()), *rest
        result = self._call("draw", name, function, args, kwargs, [])
        if any(self.nodes[-1].flags):
            raise NotTraceable(f"{name} draws from a torch.Generator with a gradient")
        return result

    def node(self, kind: str, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        """A node of its own: what ``function`` makes of what Python or NumPy draw ("draw"), or a collective."""
        return self._call(kind, name, function, args, kwargs, [])

    def _source(self, name: str, generator: torch.Generator) -> int | Slot:
        """Where a generator is found in each run: among the arguments, or in an attribute of a module."""
        rng_state.meet(generator)  # here, and not in what PyTorch runs: its state would seem to escape from there
        for number, each in enumerate(self.generators):
            if each is generator:
                return number
        for path, module in self.tree.modules.items():
            for key, value in module.__dict__.items():
                if value is generator:
                    return Slot(f"{path}.{key}" if path else key, module.__dict__, key)
        raise NotTraceable(f"{name} draws from a torch.Generator that is no argument and no attribute of a module")

    # --- one call -----------------------------------------------------------------------------------------------------

    def _call(
        self, kind: str, name: str, function: Callable, args: tuple, kwargs: dict, held: list[Slot],
        modes: Modes | None = None,
    ) -> Any:  # fmt: skip
        tensors, arguments = _given(name, args, kwargs)
        drawn = [self._source(name, generator) for generator in pytree.generators((args, kwargs))]
        operands, places, numbers = _unique(tensors)
        needs = [bool(t.requires_grad) for t in operands]
        node = Node(kind, name, function, arguments, places, needs, numbers, modes or Modes.now(), held)
        node.generators = drawn
        if kind == "module":
            self._find_breaks(node, args, kwargs)
        known = bool(node.given) and not self.changed()
        number = len(self.nodes)
        self.nodes.append(node)
        for tensor in operands:
            _check_type(name, tensor)
        self.runs()
        own, inputs = self._own(operands, numbers) if kind == "function" else ({}, {})
        with eagerly(), alone():
            owner = None if node.owner is None else self.tree.modules[node.owner]
            around = None if owner is None else self.tree.around([owner])
            by_itself = kind in ("function", "draw", "numpy", "collective")
            before = None if by_itself else self.entered(name if kind == "module" else "")
            outputs, mine, made = self._run_and_look(node, operands, around)
            if not by_itself:
                if name in self.opaque.wrapped:
                    node.makes = len(leaves_of(outputs))
                elif around is not None:
                    self._find_parameters(node, mine, outputs, [*made, *around.used])
                count = len(outputs)
                self.left(before, node, outputs)
                if around is not None:
                    self._find_escapes(node, mine, outputs, count, made, around)
                if kind == "method" and node.breaks:
                    raise NotTraceable(f"{name}, which PyTorch would run inside the graph: {node.breaks}")
                mine = (*mine, *outputs[count:])
            if node.result is not None and node.result.objects:
                raise NotTraceable(f"{name}, which PyTorch would run inside the graph, returns an object")
            for tensor in outputs:
                _check_type(name, tensor)
            node.own = {i: slot for i, slot in own.items() if i not in node.changed}
            node.inputs = {i: number for i, number in inputs.items() if i not in node.changed}
            node.flags = [t.requires_grad for t in outputs]
            node.kinds = [(DTYPES[t.dtype], t.dim()) for t in outputs]
            kept = [slot.get() for slot in node.held]
            self.seen.append((number, operands_of((*operands, *kept)), specs_of(outputs)))
            self.ran()
        self._add_outputs(number, [*operands, *kept], len(operands), outputs)
        returned = {i for kind, i in node.sources if kind == "operand"}  # Python reads no other number
        found = [t.tolist() if i in numbers & returned else t for i, t in enumerate(operands)]
        result = node.rebuild(outputs, found, (args, kwargs))
        if node.fills and known:
            self.filled = pytree.flatten(self.arguments)
        if node.fills:
            self._check_hooks(node, args, kwargs, result)
        return result

    def _check_returned(self, number: int, node: Node) -> None:
        """Raises NotTraceable where it returns an operand in one trace, and a tensor of its own in another."""
        before = self.opaque.returned.setdefault((number, node.name), node.sources)
        if node.kind == "module" and len(before) == len(node.sources) and before != node.sources:
            error = NotTraceable(f"{node.name} {RETURNS_GIVEN}")
            error.submodule = node.name
            raise error

    def check_apart(self) -> None:
        """At the end of a trace: into what of submodules forward has written behind them. Raises NotTraceable."""
        for node, alias, version in self.versions:
            node.untouched = node.untouched and alias._version == version
        for node in self.nodes:
            if node.copies and not node.untouched:
                raise NotTraceable(f"{node.name} {RETURNS_GIVEN}, and forward writes into it")

    def _add_outputs(self, number: int, operands: list, count: int, outputs: list) -> None:
        """``outputs`` are those of a node in the graph; operands that it has changed are these from now on."""
        self._check_returned(number, self.nodes[number])
        node, values = self.nodes[number], self._insert(number, operands, count, outputs)
        new = sum(kind == "new" for kind, _ in set(node.sources))
        for i, position in enumerate(node.changed):
            self._change(node, operands[position], outputs[new + i], values[new + i])
        self.made(outputs)
        if node.kind == "module":
            with eagerly(), torch.no_grad():
                aliases = [t.detach() for t in (*operands[:count], *outputs)]  # they share the counter of versions
                self.versions += [(node, alias, alias._version) for alias in aliases]

    def changed(self) -> bool:
        """Is something else in the arguments of the module than in the beginning, what breaks put there aside?"""
        then = self.filled
        try:
            inside, now = pytree.flatten(self.arguments)
        except Unflattenable:
            return True
        return now != then[1] or any(a is not b for a, b in zip(inside, then[0], strict=True))

    def _find_breaks(self, node: Node, args: tuple, kwargs: dict) -> None:
        """Says whether a submodule is a break, as far as that is known before it runs, and which of the caller's
        containers it is given. Raises NotTraceable."""
        node.breaks, node.copies = self._hooked(node.name), node.name in self.opaque.varying
        if not node.breaks and node.name in self.opaque.parted:
            node.breaks, _ = self.opaque.parted[node.name]
        within = pytree.containers((args, kwargs))
        self._check_hooks(node, args, kwargs)
        node.given = {n: self.containers[id(c)] for n, c in enumerate(within) if id(c) in self.containers}

    def _check_hooks(self, node: Node, args: tuple, kwargs: dict, result: Any = ()) -> None:
        """Raises NotTraceable where hooks may change or keep containers that the submodule is given. ``result``: what
        it returns."""
        held, path = hook_arguments.changeable(args, kwargs), node.name
        text = self._hooked(path) if held and path not in self.opaque.wrapped else ""
        inside = any(hooked.startswith(f"{path}.") for hooked in self.opaque.hooked)  # what they are given is not known
        if text and (inside or hook_arguments.takes(self.tree.hooks.seeing(path), held, args, kwargs, result)):
            raise NotTraceable(f"{text}, and a container that it is given, which they may change, or keep")

    def _hooked(self, path: str) -> str:
        """A sentence on hooks that may keep tensors of the submodule at ``path``; "": there are none."""
        if path in self.opaque.wrapped:
            return f"{path} communicates with other processes"
        for hooked in self.opaque.hooked:
            if hooked == path or hooked.startswith(f"{path}."):
                return f"there are hooks on {hooked}, which see its tensors"
        return ""

    def _find_escapes(
        self, node: Node, leaves: Sequence, outputs: list, count: int, new: list, around: GlobalState
    ) -> None:
        """Makes a break of a submodule that has run, where something that it computes is seen by others.

        ``leaves``: what stood for its operands; ``count``: of its own results among ``outputs``. ``new``: the
        tensors that it has made. ``around``: what its methods may change around it, which is put back."""
        reasons = [f"{node.name} changes a container that it was given"] if node.fills else []
        if any(getattr(n, "_saved_sparse", False) for n in nodes_behind(outputs)):
            reasons.append(f"{node.name} gives a parameter a sparse gradient")
        for name, each in around.all_changed():
            reasons.append(f"{node.name} changes {name}, which is around the module")
            self.altered.append(each.container if isinstance(each, Items) else each)
        for key, tensor in around.written.items():
            reasons.append(f"{node.name} changes a tensor of shape {list(tensor.shape)}, which is around the module")
            self.written[key] = tensor
        if any(t.requires_grad for t in outputs):
            for text, tensor in escapes.kept(node.name, leaves, outputs[:count], outputs[count:], new, (outputs,)):
                reasons.append(text)
                self.escaped.append(weakref.ref(tensor))
        node.breaks = next(filter(None, (node.breaks, *reasons)), "")
        self.tree.caches.holders.put_back(around)

    def _run_and_look(
        self, node: Node, operands: Sequence[torch.Tensor], around: GlobalState | None
    ) -> tuple[list[torch.Tensor], tuple, list[torch.Tensor]]:
        """What :meth:`_run` returns, and of a submodule the tensors that it has made; ``around`` it none is written."""
        if around is None:
            return *self._run(node, operands), []
        with around.writes():  # first: its copies are none of these
            young = escapes.Young()
            try:
                run, made = self._run(node, operands), young.tensors()
            finally:
                young.close()
        self.kept += map(weakref.ref, made)
        return *run, made

    def _run(self, node: Node, operands: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], tuple]:
        for clones in (False, True):
            node.clones = clones
            inputs = {id(t) for t in self.inputs}
            copies = [as_operand(t.detach().clone(), t, id(t) in inputs) for t in operands]
            try:
                leaves, outputs = node.run(copies, generators=self.generators)
                return outputs, tuple(leaves)
            except RuntimeError as error:
                if clones or "in-place" not in str(error) or not any(node.needs):
                    raise
                node.result = None
        raise AssertionError

    def _own(self, operands: Sequence[torch.Tensor], numbers: frozenset[int]) -> tuple[dict[int, Slot], dict[int, int]]:
        """Parameters and buffers among the operands that forward has not changed, and inputs of the module's: what a
        function writes into them, or into attributes of theirs (`weight.main_grad`), in its backward is meant for the
        module, or the caller."""
        slots = {id(slot.get()): slot for slot in self.tree.slots.values()}
        found = {i: slots[id(t)] for i, t in enumerate(operands) if id(t) in slots and i not in numbers}
        own = {i: slot for i, slot in found.items() if _value(operands[i]).node().kind() == "prim::Param"}
        given = {id(t): number for number, t in enumerate(self.inputs)}
        inputs = {i: given[id(t)] for i, t in enumerate(operands) if id(t) in given and i not in numbers}
        return own, {i: n for i, n in inputs.items() if _value(operands[i]).node().kind() == "prim::Param"}

    def _find_parameters(self, node: Node, leaves: Sequence, outputs: Sequence[torch.Tensor], new: list) -> None:
        """Parameters of other modules that it uses, and how many leaves it makes itself, which only it knows.

        ``new``: the tensors that it has made."""
        if any(type(n).__name__ == "CheckpointFunctionBackward" for n in nodes_behind(outputs)):
            raise NotTraceable(f"{node.name} uses {REENTRANT}")
        known, made = {id(slot.get()) for slot in node.held} | {id(t) for t in leaves}, {id(t) for t in new}
        found = {key: tensor for key, tensor in leaves_of(outputs).items() if key not in known}
        for slot in self.tree.parameters:  # in an order that two traces have alike
            if found.pop(id(slot.get()), None) is not None:
                node.held.append(slot)
        node.makes += len(found.keys() & made)
        if found.keys() - made:
            raise NotTraceable(f"{node.name} computes with a tensor that needs a gradient and is no parameter")

    def _insert(self, number: int, operands: list, given: int, outputs: list) -> list[TracedValue]:
        graph = get_tracing_state().graph
        graph = graph() if callable(graph) else graph
        listed = graph.insertNode(graph.create("prim::ListConstruct", [_value(t) for t in operands], 1))
        listed.output().setType(ListType.ofTensors())
        numbers = [graph.insertConstant(number), graph.insertConstant(given)]
        call = graph.insertNode(graph.create(CALL, [listed.output(), *numbers], 1))
        call.output().setType(ListType.ofTensors())
        unpacked = graph.insertNode(graph.create("prim::ListUnpack", [call.output()], 1 + len(outputs)))
        with eagerly():
            token = torch.zeros((), dtype=torch.int64)
            detached = [t.detach() for t in outputs]
            self.ends |= {t.grad_fn for t in outputs}
        self.tokens.append(token)
        values = list(unpacked.outputs())
        for value, tensor in zip(values, [token, *detached], strict=True):
            value.inferTypeFrom(tensor)
        for value, tensor in zip(values, [token, *outputs], strict=True):
            set_value_trace(tensor, value)
        return values[1:]

    def _change(self, node: Node, operand: torch.Tensor, output: torch.Tensor, value: TracedValue) -> None:
        """``operand`` holds what is in ``output`` from now on."""
        if operand.requires_grad != output.requires_grad:
            raise NotTraceable(f"{node.name} changes a tensor in place, which carries a gradient from then on")
        with eagerly(), torch.no_grad():
            operand.copy_(output)
        set_value_trace(operand, value)

    def forget(self) -> None:
        """Drops references that would keep frames and traced tensors alive, and puts back what functions changed."""
        for state in self.functions.values():
            state.put_back()
        self.blamed, self.tokens, self.arguments, self.filled, self.containers = None, [], None, None, {}
        self.inputs, self.generators, self.versions = [], [], []
        self.ends, self.functions = set(), {}
        self.entered = self.left = self.made = self.begins = self.traced = self.runs = self.ran = _nothing

    def blame(self, error: BaseException, module: nn.Module) -> None:
        """Notes the innermost submodule that an error comes through, as its origin."""
        if self.stack and (self.blamed is None or self.blamed[0] is not error):
            place = Place(self.stack[-1])
            place.methods = _methods_behind(error, module)
            self.blamed = error, place

    def mark(self, failure: BaseException) -> None:
        """Writes on ``failure`` the path of the submodule that it comes from, if it is known."""
        known = getattr(failure, "submodule", None)
        if not known and self.blamed is not None and self.blamed[0] is failure:
            blamed: Any = failure
            with suppress(AttributeError):
                blamed.submodule = self.blamed[1]


def _value(tensor: torch.Tensor) -> TracedValue:
    return get_value_trace(tensor)


def _check_type(name: str, tensor: torch.Tensor) -> None:
    if hasattr(tensor, "to_local"):
        raise NotTraceable(f"{name} returns or is given a DTensor; use_local_output=True gives this rank's part")
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.device.type not in devices.TYPES:
        raise NotTraceable(f"{name}: a tensor of type {tensor.dtype}, {tensor.layout} between PyTorch and the engine")


def _methods_behind(error: BaseException, module: nn.Module) -> tuple[str, ...]:
    """The methods of ``module``, but forward, that ``error`` comes through, the innermost first."""
    found: list[str] = []
    step = error.__traceback__
    while step is not None:
        frame, step = step.tb_frame, step.tb_next
        code, name = frame.f_code, frame.f_code.co_name
        if name == "forward" or name in vars(nn.Module) or not code.co_argcount:
            continue
        method = inspect.getattr_static(type(module), name, None)
        if not isinstance(method, types.FunctionType) or getattr(inspect.unwrap(method), "__code__", None) is not code:
            continue
        # A frame keeps what it was asked for, an error that it handles too: no other object's is asked.
        if frame.f_locals.get(code.co_varnames[0]) is module:
            found.insert(0, name)
    return tuple(found)


def _holds_tensors_alone(result: Any) -> bool:
    if isinstance(result, (tuple, list)):
        return all(map(_holds_tensors_alone, result))
    return result is None or isinstance(result, torch.Tensor)


def _given(name: str, args: tuple, kwargs: dict) -> tuple[list[torch.Tensor], pytree.Structure]:
    """The tensors among the arguments of a node, and what is around them. Raises NotTraceable."""
    try:
        tensors, arguments = pytree.flatten((args, kwargs), by_forward=True)
    except Unflattenable as error:
        raise NotTraceable(f"{name}, which PyTorch would run inside the graph, is given {error}") from None
    if ARRAY in arguments.tokens:  # which it may change
        raise NotTraceable(f"{name}, which PyTorch would run inside the graph, is given an array of NumPy's")
    return tensors, arguments


def _unique(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int], frozenset[int]]:
    """(each tensor once, where those are that were given, which of them are Python numbers)."""
    known: dict[int, int] = {}
    operands: list[torch.Tensor] = []
    for tensor in tensors:
        if id(tensor) not in known:
            known[id(tensor)] = len(operands)
            operands.append(tensor)
    numbers = frozenset(i for i, t in enumerate(operands) if is_number(t))
    return operands, [known[id(t)] for t in tensors], numbers


@contextmanager
def eagerly() -> Iterator[None]:
    """Inside, nothing is traced, and code that asks whether it is traced gets no; PyTorch runs all modules."""
    exporting = EXPORTER_GLOBALS.in_onnx_export
    EXPORTER_GLOBALS.in_onnx_export = False
    try:
        with untraced(), only_pytorch():
            yield
    finally:
        EXPORTER_GLOBALS.in_onnx_export = exporting
