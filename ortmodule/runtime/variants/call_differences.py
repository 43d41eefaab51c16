"""Says what tells calls from each other: their kind; the line and the value that split those without a graph.

The answers name variants of calls for the budget (`capture_budget.py`): its keys tell them apart, its texts are for
the user.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

from ortmodule.core import pytree
from ortmodule.core.errors import DoesNotHold, Unflattenable
from ortmodule.core.structures.tokens import NUMBER, TENSOR
from ortmodule.guards.guards import Guards
from ortmodule.guards.module_tree import Tree
from ortmodule.runtime.compiled_graph import Call, CompiledGraph

MOST_CHARACTERS = 80  # of a value that is shown
#: The parts of :attr:`Call.key` behind the arguments, up to the module's state.
_MODES = (
    "the types, ranks or gradients of its tensors", "the grad mode", "the inference mode", "autocast on the CPU",
    "autocast on a GPU", "the default type", "the setting for deterministic algorithms", "the forward that runs",
)  # fmt: skip
_STATE = len(_MODES) + 1
_HOOKS = "hooks on submodules are others", "hooks"


def split(call: Call, graphs: Sequence[CompiledGraph], misses: Sequence[DoesNotHold]) -> Hashable:
    """The same for calls that one graph would be for. ``graphs``: those of the call's key, none of which holds;
    ``misses``: of those that have run."""
    if (miss := _deepest(graphs, misses, call.shapes)) is not None:
        return (call.key, *(miss.found or (miss.place, miss.value)))
    for graph in graphs:
        if pinned := _pinned(graph, call):
            return call.key, *pinned
        if (broken := graph.guards.broken_by()) is not None:
            return call.key, broken
    return call.key


def describe(
    call: Call, graphs: Sequence[CompiledGraph], misses: Sequence[DoesNotHold], others: Collection[tuple]
) -> tuple[str, str]:
    """What tells the call from others, and the part of that which is the same for all values. ``others``: keys of
    calls that there are graphs for."""
    if (miss := _deepest(graphs, misses, call.shapes)) is not None:
        return str(miss), miss.place
    for graph in graphs:
        if pinned := _pinned(graph, call):
            (i, d), size = pinned[0]
            place = f"dimension {d} of input {i}"
            return f"{place} is {size}, and {graph.capture.pinned[i, d]} in the graph that there is", place
        if (name := graph.guards.broken_name()) is not None:
            return f"the attribute {name} {_broken(graph.guards)}", name
    if graphs:
        return "it takes another way through its Python code", ""
    if not others:
        return "its first call", ""
    return _of_key(call, max(others, key=lambda other: sum(a == b for a, b in zip(other, call.key, strict=True))))


def _deepest(graphs: Sequence[CompiledGraph], misses: Sequence[DoesNotHold], shapes: tuple) -> DoesNotHold | None:
    """The miss that says the most."""
    if misses:
        return max(misses, key=lambda miss: len(miss.found))
    return next((miss for graph in graphs if (miss := graph.misfit(shapes)) is not None), None)


def _pinned(graph: CompiledGraph, call: Call) -> list[tuple[tuple[int, int], int]]:
    """Sizes of the call at what the graph has pinned, where one is another."""
    sizes = {(i, d): call.shapes[i][d] for i, d in graph.capture.pinned}
    if sizes == graph.capture.pinned:
        return []
    return sorted(sizes.items(), key=lambda item: graph.capture.pinned[item[0]] == item[1])


def _broken(guards: Guards) -> str:
    place, one = guards.broken_place(), guards.broken_by() == guards.broken_value()
    text = f"is {_short(guards.broken_text())} now" if one else "is another one at each call"
    return text + (f", which {place} reads" if place else "")


def _of_key(call: Call, other: tuple) -> tuple[str, str]:
    key: tuple = call.key
    if NUMBER in call.arguments.tokens and key[0] is not other[0]:
        return "numbers among its arguments change from call to call", "numbers"
    if key[0] is not other[0]:
        return f"its arguments are {_shown(call.arguments.tokens)}", "its arguments"
    for i, name in enumerate(_MODES, 1):
        if key[i] != other[i]:
            if isinstance(key[i], tuple):
                return _of_kinds(key[i], other[i]), name
            return f"{name} is {_short(key[i])}, and {_short(other[i])} in the graph that there is", name
    if key[_STATE] != other[_STATE]:
        return _of_state(call.tree, key[_STATE], other[_STATE])
    return _HOOKS


def _of_state(tree: Tree, number: int, other: int) -> tuple[str, str]:
    found, before = tree.key_of(number), tree.key_of(other)
    if found is None or before is None:
        return "the module's tensors or training flags are others", "state"
    for path, now, then in zip(tree.modules, found[0], before[0], strict=False):
        if now != then:
            name = f"{path}.training" if path else "training"
            return f"{name} is {now}", name
    if found[2] != before[2]:
        return _HOOKS
    return "the types or requires_grad of parameters or buffers are others", "parameters"


def _of_kinds(kinds: Sequence[tuple], others: Sequence[tuple]) -> str:
    """The first input whose type, rank, need for a gradient or device differs."""
    differing = (i for i, (kind, other) in enumerate(zip(kinds, others, strict=False)) if kind != other)
    if (i := next(differing, None)) is None:
        return f"it has {len(kinds)} inputs, and {len(others)} in the graph that there is"
    return f"input {i} is {_kind(kinds[i])}, and {_kind(others[i])} in the graph that there is"


def _kind(kind: tuple) -> str:
    if len(kind) == 2:
        return f"no table in {kind[0]}"
    dtype, rank, needs_grad, device = kind
    text = f"{str(dtype).removeprefix('torch.')} with {rank} dimensions" + (" and a gradient" if needs_grad else "")
    return text if device.type == "cpu" else f"{text} on {device}"


def _shown(tokens: Sequence[Any]) -> str:
    """Constants among the arguments, and how many tensors there are."""
    tensors = sum(token is TENSOR or token is NUMBER for token in tokens)
    values = [
        float.fromhex(value) if kind is float else value
        for before, kind, value in zip((None, *tokens), tokens, tokens[1:], strict=False)
        if kind in (bool, int, float, str) and before is not NUMBER
    ]
    return _short(f"{tensors} tensors" + (f" and {', '.join(map(repr, values))}" if values else ""))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def kind(args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """What the ways that a forward takes depend on: its arguments but for tensors and numbers; None: not known."""
    try:
        return pytree.flatten((args, kwargs))[1].without_numbers()
    except Unflattenable:
        return None
