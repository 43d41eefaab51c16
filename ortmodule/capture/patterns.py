"""Registers a user's own fusions: a captured graph that computes one function computes another in its place.

For example::

    from ortmodule import patterns

    patterns.register("softsign", lambda x: x / (1 + x.abs()), torch.nn.functional.softsign, [torch.randn(2, 3)])

Both functions are exported as a module would be, once for each type that a graph has, and the nodes of the first are
looked for in every graph that is captured from then on. What is replaced gets the gradient of its replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ortmodule.capture.dynamic_dims import capture
from ortmodule.capture.pattern_rewriter import LOCK, PATTERNS, Function
from ortmodule.core import devices, pytree
from ortmodule.core.errors import ArgumentError, CaptureError, Unflattenable, UnknownNameError
from ortmodule.core.names import DEFAULT_OPSET, INPUT
from ortmodule.core.onnx_utils import constants
from ortmodule.guards.module_tree import Tree
from ortmodule.host.opaque_regions import Opaque

Tensors = Sequence[torch.Tensor]

#: How far the two functions may be apart on the examples, in float64 and relative to the largest element.
_TOLERANCE = 1e-6


def register(
    name: str, pattern: Callable, replacement: Callable, examples: Sequence[torch.Tensor], check: bool = True
) -> None:
    """Replaces what ``pattern`` computes by what ``replacement`` computes, in all graphs captured from now on.

    Both take the same tensors and return one tensor. ``examples``: operands of the kinds that they are meant for, with
    no size 1 unless every operand there has it; numbers inside the functions (a scale, an epsilon, a rate of dropout)
    must be the graph's very numbers. A match may neither be looked into by anything outside of it nor be an output
    before its end. Patterns are tried in the order of their registration; what one has put in is not looked at again.

    ``check``: compares both on the examples in float64, results and gradients. Leave it off for functions that draw
    random numbers; a captured graph is compared with its module in any case.

    Raises ValueError for a name that is taken, for functions that cannot be exported, and for functions that differ.
    """
    with LOCK:
        if name in PATTERNS:
            raise ArgumentError(f"there is a pattern {name!r} already: unregister it first")
        found = _Pattern(name, pattern, replacement, [t.detach() for t in examples])
        if check:
            _compare(found)
        found.variant(_dtypes(found.examples)[:1], DEFAULT_OPSET)
        PATTERNS[name] = found


def unregister(name: str) -> None:
    """Graphs that are captured from now on keep what the pattern describes. Raises KeyError for an unknown name."""
    with LOCK:
        if name not in PATTERNS:
            raise UnknownNameError(f"there is no pattern {name!r}")
        del PATTERNS[name]


def registered() -> list[str]:
    """The names of all patterns, in the order in which they are tried."""
    return list(PATTERNS)


# --- what is registered -----------------------------------------------------------------------------------------------


@dataclass
class _Pattern:
    name: str
    pattern: Callable
    replacement: Callable
    examples: list[torch.Tensor]
    variants: dict[Any, tuple[Function, Function]] = field(default_factory=dict)

    def variant(self, types: Sequence[torch.dtype], opset: int) -> tuple[Function, Function]:
        """Both functions for floats of a type. Raises ValueError."""
        key = (tuple(types), opset, devices.autocast())
        if key not in self.variants:
            tensors = [t.to(types[0]) if types and t.is_floating_point() else t.clone() for t in self.examples]
            first, second = (
                self._export(function, what, tensors, opset)
                for function, what in ((self.pattern, "the pattern"), (self.replacement, "the replacement"))
            )
            self._check_operands(first)
            self.variants[key] = first, second
        return self.variants[key]

    def _export(self, function: Callable, what: str, tensors: Tensors, opset: int) -> Function:
        module = _Module(function)
        leaves = [t.requires_grad_(t.is_floating_point()) for t in tensors]
        inputs, arguments = pytree.flatten((tuple(leaves), {}))
        if len(inputs) != len(leaves):
            raise ArgumentError("a tensor stands twice among the examples")
        try:
            with torch.enable_grad():
                opaque = Opaque({}, frozenset(), functions=False)
                found = capture(module.forward, module, Tree(module), arguments, inputs, opset, opaque, rewritten=False)
        except (CaptureError, Unflattenable) as error:
            raise ArgumentError(f"{what} of {self.name!r} cannot be exported: {error}") from error
        if found.trace.nodes:
            raise ArgumentError(
                f"{what} of {self.name!r} has an operator that PyTorch would run: {found.trace.nodes[0].name}"
            )
        graph = found.model.graph
        strange = [v.name for v in graph.input if not v.name.startswith(INPUT)]
        if strange:
            raise ArgumentError(f"{what} of {self.name!r} uses a tensor that is not among its operands")
        if len(graph.output) != 1 or len(found.trace.sources) != 1:
            raise ArgumentError(f"{what} of {self.name!r} does not return one computed tensor")
        return Function(graph, constants(found.model))

    def _check_operands(self, half: Function) -> None:
        used = {name for node in half.graph.node for name in node.input}
        for i in range(len(self.examples)):
            if f"{INPUT}{i}" not in used:
                raise ArgumentError(f"the pattern of {self.name!r} does not use its operand {i}")


class _Module(nn.Module):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, *operands: torch.Tensor) -> torch.Tensor:
        result = self.function(*operands)
        # An operand as it is would be no part of the graph.
        return result.clone() if any(result is operand for operand in operands) else result


def _dtypes(tensors: Tensors) -> list[torch.dtype]:
    return list(dict.fromkeys(t.dtype for t in tensors if t.is_floating_point()))


def _compare(pattern: _Pattern) -> None:
    """Raises ValueError where the functions differ on the examples."""
    both = []
    for function in (pattern.pattern, pattern.replacement):
        leaves = [t.double().requires_grad_() if t.is_floating_point() else t for t in pattern.examples]
        wrt = [t for t in leaves if t.requires_grad]
        result = function(*leaves)
        if not isinstance(result, torch.Tensor):
            raise ArgumentError(f"the functions of {pattern.name!r} must return one tensor")
        grads: Sequence[Any] = ()
        if result.requires_grad:
            dy = torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype).view(result.shape)
            grads = torch.autograd.grad(result, wrt, dy, allow_unused=True, materialize_grads=True)
        both.append((result.detach(), *grads))
    (first, *first_grads), (second, *second_grads) = both
    if first.shape != second.shape or first.dtype != second.dtype or len(first_grads) != len(second_grads):
        raise ArgumentError(f"the functions of {pattern.name!r} return tensors of another type or shape")
    for i, (a, b) in enumerate(zip([first, *first_grads], [second, *second_grads], strict=True)):
        scale = max(1e-30, float(a.double().abs().max())) if a.numel() else 1.0
        if not torch.allclose(a.double(), b.double(), rtol=0, atol=_TOLERANCE * scale, equal_nan=True):
            what = f"gradients of operand {i - 1}" if i else "results"
            raise ArgumentError(f"the {what} of the two functions of {pattern.name!r} differ")
