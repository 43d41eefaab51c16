"""Runs nodes that are Python code inside a graph: custom autograd functions, opaque submodules, ATen operators.

The engine knows such a node by a number. It calls back with the operands' values (:class:`Calls`, one for a run), the
node's Python code runs as in eager mode and leaves an autograd graph, and backward asks that graph for gradients.

Sizes of results are those that were seen before for operands of these sizes, or follow from those seen for others, or
are found by running the node. The sizes that a plan assumes are compared when the node has run; what a node computed in
a run is kept, so that another plan goes on from there and nothing runs twice.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ortmodule.core import devices, pytree
from ortmodule.core.dtypes import DTYPES
from ortmodule.core.errors import Disagrees, Mismatch, NotKnown, NotTraceable, Raised, Unflattenable
from ortmodule.core.names import RETURNS_GIVEN
from ortmodule.core.objects.tensor_copies import with_attributes
from ortmodule.core.objects.tensor_memory import version_of
from ortmodule.core.structures import tokens as pytree_tokens

MOST_KNOWN = 4096  # sizes that are remembered
#: Operators of plans that PyTorch runs (csrc/ops/host_call.c).
HOST_OPERATORS = ("HostCall", "HostGrad", "HostProbe")

#: Type and shape; of an operand that is a number also its value, where that is known.
Result = tuple[str, tuple[int, ...]]
Spec = Result | tuple[str, tuple[int, ...], int]


_AS_THEY_ARE: AbstractContextManager[None] = nullcontext()


@dataclass
class Modes:
    """Grad mode and autocast at a place in forward."""

    grad: bool
    autocast: devices.Autocast

    @staticmethod
    def now() -> Modes:
        return Modes(torch.is_grad_enabled(), devices.autocast())

    def set(self) -> AbstractContextManager[None]:
        """Inside, they are as they were there."""
        if torch.is_grad_enabled() == self.grad and devices.autocast() == self.autocast:
            return _AS_THEY_ARE
        return self._changed()

    @contextmanager
    def _changed(self) -> Iterator[None]:
        with torch.set_grad_enabled(self.grad), devices.autocast_as(self.autocast):
            yield


def drawing_overloads(name: str) -> list[Any]:
    """The overloads of an ATen operator that draw random numbers."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet is not None else []
    return [each for each in overloads if torch.Tag.nondeterministic_seeded in each.tags]


@dataclass
class Spent:
    """Calls, and the seconds of their forward; how many of them returned tensors of sizes that were not known before,
    or of others."""

    calls: int = 0
    seconds: float = 0.0
    unforeseen: int = 0


@dataclass
class Node:
    """One node: ``function(*args, **kwargs)`` with the operands in the places that ``arguments`` has for them.

    The operands are the ``needs``-many given ones, then the parameters ``held`` that the function finds itself.
    The results are the tensors of what it returns, operands that it changed, then tensors it put in ``sets``.
    """

    kind: str  # "function", "module", "method", "draw" (from a torch.Generator) or "aten"
    name: str
    function: Callable
    arguments: pytree.Structure
    places: list[int]  # which operand stands in each place of the arguments
    needs: list[bool]
    numbers: frozenset[int]  # operands that are Python numbers to the function
    modes: Modes
    held: list[Any] = field(default_factory=list)  # slots
    own: dict[int, Any] = field(default_factory=dict)  # operands that the function gets as the module holds them: slots
    inputs: dict[int, int] = field(default_factory=dict)  # ... as the caller gave them: numbers of the module's inputs
    clones: bool = False  # the function changes operands in place
    result: pytree.Structure | None = None
    sources: list[tuple[str, int]] = field(default_factory=list)  # of the result's tensors: "new" or "operand"
    changed: list[int] = field(default_factory=list)  # operands
    sets: list[Any] = field(default_factory=list)  # slots
    writes: list[Any] = field(default_factory=list)  # slots of parameters that it changes in place
    flags: list[bool] = field(default_factory=list)  # which results carry a gradient
    makes: int = 0  # tensors of its own that carry a gradient and are not computed from any
    aten: list[str] = field(default_factory=list)  # names of operators
    breaks: str = ""  # why it is a break of the graph, as its tensors are seen by others; "": it is none
    copies: bool = False  # results that are operands are copies of them, as they are results of its own in other calls
    untouched: bool = True  # nothing is written into its operands and its results behind it
    fills: bool = False  # it changes containers among its arguments: the result is a pair of its result and these
    filled: dict[int, int] = field(default_factory=dict)  # by their numbers in the result: those of its arguments
    given: dict[int, int] = field(default_factory=dict)  # numbers of its containers, and of the caller's that they are
    #: Generators in its arguments: their numbers among those of the caller's arguments, or slots.
    generators: list[Any] = field(default_factory=list)
    kinds: list[tuple[str, int]] = field(default_factory=list)  # types and ranks of the results' tensors
    spent: Spent = field(default_factory=Spent)  # of a submodule, in runs

    @property
    def owner(self) -> str | None:
        """The path of the submodule that it is, or is a method of."""
        return {"module": self.name, "method": self.name.rpartition(".")[0]}.get(self.kind)

    @functools.cached_property
    def draws(self) -> bool:
        """Does one of its operators draw random numbers?"""
        return any(drawing_overloads(name.rpartition("::")[2]) for name in self.aten)

    def run(
        self, given: Sequence[torch.Tensor], inputs: Any = None, generators: Sequence[torch.Generator] = ()
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:  # fmt: skip
        """(what stands for the operands in autograd, the result's tensors as :meth:`arrange` takes them). ``inputs``:
        the module's, of the caller's call, by their numbers; ``generators``: those among its arguments."""
        given = [self.own[i].get() if i in self.own else t for i, t in enumerate(given)]
        for i, number in self.inputs.items() if inputs is not None else ():
            if inputs[number].is_leaf:  # of another one autograd would know more than this function
                given[i] = inputs[number]
        leaves = [t.requires_grad_() if need else t for t, need in zip(given, self.needs, strict=True)]
        if not self.clones:
            found = self._operators(leaves)
            return leaves, self.call(leaves, generators=generators) if found is None else found
        with self.modes.set():
            passed = [with_attributes(t.clone(), t) if t.requires_grad else t for t in leaves]
        return leaves, self.call(passed, generators=generators)

    def _operators(self, passed: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """As :meth:`call` of operators that change none of their operands, and have run before; None: it is not that.
        Their results are lists of tensors of their own."""
        if self.kind != "aten" or self.result is None:
            return None
        with self.modes.set():
            given = self.function(*passed)
        found: list[torch.Tensor] = [given] if isinstance(given, torch.Tensor) else list(given)
        if any(type(t) is not torch.Tensor for t in found):
            raise Disagrees(f"{self.name} returns another kind of result than before")
        return found

    def call(
        self, passed: Sequence[torch.Tensor], held: Sequence[Any] | None = None, returned: list[Any] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> list[torch.Tensor]:  # fmt: skip
        """The result's tensors of a call with these operands. ``held``: for a break, the containers of the module's
        call, which it gets with what is in them by now; None: a node gets others. ``returned`` gets the result."""
        with self.modes.set():
            counted = not torch.is_inference_mode_enabled()  # which knows no versions
            versions = [version_of(t) for t in passed] if counted else []
            values = [t.tolist() if i in self.numbers else t for i, t in enumerate(passed)]
            into = {} if held is None else {own: held[number] for own, number in self.given.items()}
            drawn = [generators[each] if isinstance(each, int) else each.get() for each in self.generators]
            arguments = self.arguments.rebuild([values[i] for i in self.places], into=into, generators=drawn)
            inside = pytree.flatten(arguments) if self.kind == "module" and not self.fills else None
            mine = pytree.containers(arguments) if self.kind == "module" else []
            result = self.function(*arguments[0], **arguments[1])
        if returned is not None:
            returned.append(result)
        if inside is not None and _was_changed(inside, arguments):
            if self.result is not None:
                raise Disagrees(f"{self.name} changes a container that it was given, which it did not do before")
            self.fills = True
        if self.fills:
            found, structure, self.filled = pytree.flatten_filled((arguments, result), mine)
            if empty := left_empty(arguments):
                raise NotTraceable(f"{self.name}, which PyTorch would run inside the graph, is given {empty}")
        else:
            found, structure = pytree.flatten(result, results=True)
        if pytree_tokens.SPLIT in structure.tokens:
            raise Unflattenable("a DTensor")
        sources, outputs = _new_ones(self._copied(found, passed), passed)
        changed = [i for i, t in enumerate(passed) if version_of(t) != versions[i]] if counted else self.changed
        if held is not None:  # others see it as it happens
            changed = self.changed
        if self.kind == "aten":  # a trace goes on with the result of what changes an operand
            changed = []
        if self.result is None:
            self.result, self.sources, self.changed = structure, sources, changed
        elif structure == self.result and changed == self.changed and _given(sources) != _given(self.sources):
            raise Disagrees(f"{self.name} {RETURNS_GIVEN}")
        elif structure != self.result or sources != self.sources or changed != self.changed:
            raise Disagrees(f"{self.name} returns another kind of result, or changes other arguments, than before")
        return outputs + [passed[i] for i in changed]

    def _copied(self, found: list[torch.Tensor], passed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The result's tensors, with copies of those operands for which the graph has results of its own."""
        if self.kind != "module" or self.fills or not self.untouched:
            return found
        own = {id(t) for t in passed}
        if self.result is not None and len(found) == len(self.sources):
            wanted = [kind == "new" for kind, _ in self.sources]
        else:
            wanted = [self.copies] * len(found)
        return [t.clone() if copy and id(t) in own else t for t, copy in zip(found, wanted, strict=True)]

    def rebuild(self, outputs: Sequence[torch.Tensor], operands: Sequence[Any], arguments: Any) -> Any:
        """What the function returned, around other tensors; containers of ``arguments`` get what it put into its."""
        assert self.result is not None, "it has run"
        held = pytree.containers(arguments) if self.filled else []
        into = {number: held[own] for number, own in self.filled.items()}
        found = [(outputs if kind == "new" else operands)[i] for kind, i in self.sources]
        result = self.result.rebuild(found, into=into)
        return result[1] if self.fills else result


def left_empty(arguments: Any) -> str:
    """What is wrong with an object among these, which were given to something that has run; "": nothing is."""
    try:
        _, structure = pytree.flatten(arguments)
    except Unflattenable:
        return ""  # something else was put into it
    name = structure.empty()
    return f"a value of type {name}, which may change while the module runs" if name else ""


def varying(nodes: Sequence[Node], text: str) -> list[str]:
    """The paths of the submodules of which ``text`` says that they return what they are given in some calls."""
    return [node.name for node in nodes if text.endswith(f"{node.name} {RETURNS_GIVEN}")]


def _given(sources: list[tuple[str, int]]) -> list[bool]:
    """Which tensors of a result are operands."""
    return [kind == "operand" for kind, _ in sources]


def _was_changed(then: tuple[list[torch.Tensor], pytree.Structure], arguments: Any) -> bool:
    """Is something else in the containers of ``arguments``, of which ``then`` was `pytree.flatten`?"""
    try:
        tensors, structure = pytree.flatten(arguments)
    except Unflattenable:
        return True
    return structure != then[1] or any(a is not b for a, b in zip(tensors, then[0], strict=True))


def _new_ones(found: Sequence[torch.Tensor], passed: Sequence[torch.Tensor]) -> tuple[list, list[torch.Tensor]]:
    known: dict[int, tuple[str, int]] = {id(t): ("operand", i) for i, t in enumerate(passed)}
    outputs: list[torch.Tensor] = []
    for tensor in found:
        if id(tensor) not in known:
            known[id(tensor)] = "new", len(outputs)
            outputs.append(tensor)
    return [known[id(t)] for t in found], outputs


def nodes_behind(tensors: Sequence[torch.Tensor], ends: Container[Any] = ()) -> set[Any]:
    """The nodes of autograd's graph that ``tensors`` come from, up to those of ``ends``."""
    seen: set[Any] = set()
    waiting = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen and node not in ends:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions if parent is not None]
    return seen


def leaves_of(tensors: Sequence[torch.Tensor], ends: Container[Any] = ()) -> dict[int, torch.Tensor]:
    """The tensors that gradients of ``tensors`` would be accumulated in, by their ids. ``ends``: nodes of autograd's
    behind which none are looked for."""
    variables = [getattr(node, "variable", None) for node in nodes_behind(tensors, ends)]
    return {id(variable): variable for variable in variables if variable is not None}


def specs_of(tensors: Sequence[torch.Tensor]) -> tuple[Result, ...]:
    return tuple([(DTYPES.get(t.dtype, str(t.dtype)), tuple(t.shape)) for t in tensors])


def operands_of(tensors: Sequence[torch.Tensor]) -> tuple[Spec, ...]:
    """As :func:`specs_of`, with the values of numbers: results may be as large as they say."""
    specs = zip(specs_of(tensors), tensors, strict=True)
    return tuple([(*spec, int(t.item())) if _is_number(spec) else spec for spec, t in specs])


def _is_number(spec: Spec) -> bool:
    return spec[:2] == ("int64", ())


def _without_values(operands: tuple[Spec, ...]) -> tuple[Spec, ...]:
    return tuple([spec[:2] for spec in operands])


# --- what is known of nodes -------------------------------------------------------------------------------------------


class _Rule:
    """Sizes of results as functions of the operands' sizes, where all pairs that were seen agree."""

    def __init__(self, operands: tuple[Spec, ...], results: tuple[Result, ...]) -> None:
        self.types = [(dtype, len(shape)) for dtype, shape in results]
        self.same = [[{("is", size), *_equal(operands, size)} for size in shape] for _, shape in results]
        self.seen = 1

    def see(self, operands: tuple[Spec, ...], results: tuple[Result, ...]) -> bool:
        """False when there is no such rule."""
        if self.types != [(dtype, len(shape)) for dtype, shape in results]:
            return False
        for dims, (_, shape) in zip(self.same, results, strict=True):
            for options, size in zip(dims, shape, strict=True):
                options &= {("is", size), *_equal(operands, size)}
        self.seen += 1
        return all(options for dims in self.same for options in dims)

    def results(self, operands: tuple[Spec, ...]) -> tuple[Any, ...] | None:
        shapes = [tuple(_size(options, operands) for options in dims) for dims in self.same]
        if any(None in shape for shape in shapes):
            return None
        return tuple((dtype, shape) for (dtype, _), shape in zip(self.types, shapes, strict=True))


def _equal(operands: tuple[Spec, ...], size: int) -> list[tuple]:
    found = [("of", i, d) for i, spec in enumerate(operands) for d, n in enumerate(spec[1]) if n == size]
    return found + [("value", i) for i, spec in enumerate(operands) if spec[2:] == (size,)]


def _size(options: set[tuple], operands: tuple[Spec, ...]) -> int | None:
    """None: a number says it whose value is not known."""
    kind, *where = min(options)  # "is" comes first
    if kind == "is":
        return where[0]
    if kind == "of":
        return operands[where[0]][1][where[1]]
    return next(iter(operands[where[0]][2:]), None)


class Known:
    """The nodes of one graph, and what their results were like."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)
        self.results: dict[tuple, tuple[Result, ...] | None] = {}  # by node and operands; None: these do not tell
        self.rules: dict[int, _Rule | None] = {}
        self.none: dict[int, frozenset[int]] = {}  # operands that get no gradient
        self.plans: list[dict] = []  # what was planned with it
        #: Operators that change none of their operands: they get the run's inputs, and not copies of these.
        self.shared = frozenset(i for i, node in enumerate(nodes) if node.kind == "aten" and not node.clones)
        self._lock = threading.Lock()

    def learn(self, number: int, operands: tuple[Spec, ...], results: tuple[Result, ...]) -> None:
        key = number, operands
        if self.results.get(key) == results:
            return
        with self._lock:
            if len(self.results) >= MOST_KNOWN:
                self.results.clear()
            for key in ((number, operands), (number, _without_values(operands))):
                self.results[key] = results if self.results.get(key, results) == results else None
            if number not in self.rules:
                self.rules[number] = _Rule(operands, results)
            elif (rule := self.rules[number]) is not None and not rule.see(operands, results):
                self.rules[number] = None

    def answer(self, number: int, operands: tuple[Spec, ...], guess: bool) -> tuple[tuple[Spec, ...] | None, bool]:
        """(the results, whether they are a guess)."""
        found = self.results.get((number, operands))
        # A number of an unknown value may say a size.
        certain = not any(_is_number(spec) and len(spec) == 2 for spec in operands)
        if found is not None and (certain or guess):
            return found, not certain
        rule = self.rules.get(number)
        if not guess or rule is None or rule.seen < 2:
            return None, False
        return rule.results(operands), True

    def changed(self) -> None:
        """Drops the plans, which assume something that a run found to be different."""
        for plans in self.plans:
            plans.clear()


# --- a run ------------------------------------------------------------------------------------------------------------


@dataclass
class _Done:
    """What one node did in this run. ``outputs`` know autograd."""

    leaves: list[torch.Tensor]
    outputs: list[torch.Tensor]
    operands: tuple[Spec, ...]
    results: tuple[Result, ...]


class Calls:
    """The nodes of one run: the object that the engine calls (csrc/py/host.c)."""

    def __init__(self, known: Known) -> None:
        self.known, self.shared = known, known.shared
        self.none = dict(known.none)  # as the plan of this run has it: another run may learn something else meanwhile
        self.done: dict[int, _Done] = {}
        self.grads: dict[int, dict[int, torch.Tensor | None]] = {}
        self.keep = False  # another backward may follow
        self.released = False
        self.guess, self.guessed = True, False
        self.device: torch.device | None = None  # where operands are, unless on the CPU
        self.inputs: Any = None  # the caller's, by their numbers
        self.generators: Sequence[torch.Generator] = ()  # among the caller's arguments

    def empty(self, spec: Spec) -> torch.Tensor:
        """A tensor for an operand on a GPU."""
        return torch.empty(spec[1], dtype=getattr(torch, spec[0]), device=self.device)

    def ask(self, number: int, operands: tuple[Spec, ...]) -> tuple | None:
        """Types and shapes of the results, and which operands get a gradient; None: not known yet."""
        done = self.done.get(number)
        results: tuple[Spec, ...] | None = done.results if done is not None else None
        if results is None:
            results, guessed = self.known.answer(number, operands, self.guess)
            self.guessed |= guessed
        if results is None:
            return None
        none = self.known.none.get(number, ())
        return results, tuple([i not in none for i in range(len(operands))])

    def without_guesses(self) -> bool:
        """Was a guess the reason that a plan could not be made? Then no more guesses are made."""
        guessed, self.guess, self.guessed = self.guessed, False, False
        return guessed

    def forward(
        self, number: int, given: list[torch.Tensor], expected: tuple[Result, ...] | None
    ) -> list[torch.Tensor]:
        done = self.done.get(number)
        if done is None:
            done = self.done[number] = self._run(self.known.nodes[number], given)
            self.known.nodes[number].spent.unforeseen += done.results != expected
            self.known.learn(number, done.operands, done.results)
        if expected is not None and done.results != expected:
            raise Mismatch
        return [t.detach().resolve_neg().contiguous() for t in done.outputs]

    def _run(self, node: Node, given: list[torch.Tensor]) -> _Done:
        held = [slot.get() for slot in node.held]
        operands = operands_of((*given, *held))
        try:
            leaves, outputs = node.run(given, self.inputs, self.generators)
        except Exception as error:
            raise Raised(error) from None
        outputs += [slot.get() for slot in node.sets]
        for tensor, flag in zip(outputs, node.flags, strict=True):
            if tensor.requires_grad and not flag:
                raise Raised(Disagrees(f"{node.name} returns a tensor that carries a gradient, where it had none"))
        if node.owner is not None:
            known = {id(t) for t in (*leaves, *held)}
            if sum(key not in known for key in leaves_of(outputs)) > node.makes:
                raise Raised(Disagrees(f"{node.name} uses a parameter that it did not use before, of another module"))
        results = specs_of(outputs)
        for kind, _ in results:
            if kind not in DTYPES.values():
                raise Raised(Disagrees(f"{node.name} returns a tensor of type {kind}"))
        return _Done(leaves + held, outputs, operands, results)

    def backward(self, number: int, given: list[torch.Tensor | None], wanted: tuple[int, ...]) -> list[torch.Tensor]:
        none = self.none.get(number, frozenset())
        found = self.grads.get(number)
        if found is None:
            found = self.grads[number] = self._differentiate(number, given, sorted({*wanted, *none}))
        there = {i: grad for i, grad in found.items() if grad is not None}
        missing = frozenset(found.keys() - there.keys())
        if missing != none:
            # No gradient is not a gradient of zeros.
            self.known.none[number] = missing
            self.none = dict(self.known.none)
            raise Mismatch
        return [there[i].detach().resolve_neg().contiguous() for i in wanted]

    def _differentiate(self, number: int, given: list, indices: list[int]) -> dict[int, torch.Tensor | None]:
        done = self.done[number]
        every, indices = indices, [i for i in indices if done.leaves[i].requires_grad]
        pairs = [(t, g) for t, g in zip(done.outputs, given, strict=False) if g is not None and t.requires_grad]
        if not pairs or not indices:
            return dict.fromkeys(every)
        outputs, grads = zip(*pairs, strict=True)
        leaves = [done.leaves[i] for i in indices]
        try:
            with _no_hooks(leaves):
                found = torch.autograd.grad(outputs, leaves, grads, retain_graph=self.keep, allow_unused=True)
        except Exception as error:
            raise Raised(error) from None
        if not self.keep:
            done.outputs = [t.detach() for t in done.outputs]
        return dict.fromkeys(every) | dict(zip(indices, found, strict=True))

    def release(self) -> None:
        self.done, self.grads, self.released = {}, {}, True


class DryCalls(Calls):
    """Functions and submodules do not run: of their results there are only the sizes, as far as they are known."""

    def forward(
        self, number: int, given: list[torch.Tensor], expected: tuple[Result, ...] | None
    ) -> list[torch.Tensor]:
        if self.known.nodes[number].kind == "aten":
            if self.known.nodes[number].draws:  # the run behind this one takes what was drawn
                given = [t.clone() for t in given]
            return super().forward(number, given, expected)
        if expected is None:
            raise NotKnown
        return [torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device) for dtype, shape in expected]


@contextmanager
def _no_hooks(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, hooks on these tensors are not called: the node's operand has the same ones, and calls them."""
    hooked = [(t._backward_hooks, dict(t._backward_hooks)) for t in leaves if t._backward_hooks]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, then in hooked:
            hooks.update(then)
