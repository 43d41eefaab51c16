"""Says once that a hook on a result, or its retain_grad(), does not see what comes through another result.

The results of a graph come from one node in autograd's graph. Of a loss that forward computes from logits which it
returns, too, PyTorch knows that it comes from them; autograd's node does not. So the gradient that the logits get is
what the script itself computes from them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import onnx
import torch

from ortmodule.core.logger import warn_once
from ortmodule.guards.code_reader import is_torchs

#: Of an output: those that are computed from it. Both are places among the outputs.
Dependents = dict[int, list[int]]


def dependents_of(model: onnx.ModelProto, outputs: Iterable[int]) -> Dependents:
    """Of these outputs of the graph."""
    names = {i: model.graph.output[i].name for i in outputs}
    if len(names) < 2:
        return {}
    same: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type == "Identity":
            same[node.output[0]] = same.get(node.input[0], node.input[0])
    places: dict[str, int] = {}  # of a value that is an output, as a bit
    for i, name in names.items():
        places[same.get(name, name)] = places.get(same.get(name, name), 0) | 1 << i
    behind: dict[str, int] = {}  # the outputs that a value is computed from
    for node in model.graph.node:
        mask = 0
        for name in node.input:
            mask |= behind.get(name, 0) | places.get(same.get(name, name), 0)
        if mask:
            behind.update(dict.fromkeys(node.output, mask))
    found: Dependents = {}
    for i, name in names.items():
        mask = behind.get(same.get(name, name), 0)
        for other in names:
            if mask >> other & 1:
                found.setdefault(other, []).append(i)
    return found


class WatchedResults:
    """The results of a forward that others are computed from. It does not keep them alive."""

    def __init__(self, results: Sequence[torch.Tensor], differentiable: Sequence[int], dependents: Dependents) -> None:
        """``results``: the ``differentiable`` outputs."""
        self._places, self._dependents = differentiable, dependents
        self._results: list[Any] = []
        for i, result in zip(differentiable, results, strict=True):
            self._results.append(weakref.ref(result) if i in dependents else None)

    def check(self, grads: Sequence[torch.Tensor | None]) -> None:
        """``grads``: of the differentiable outputs, which backward begins with."""
        there = {i for i, grad in zip(self._places, grads, strict=True) if grad is not None}
        for i, reference in zip(self._places, self._results, strict=True):
            result = None if reference is None else reference()
            if type(result) is not torch.Tensor or there.isdisjoint(self._dependents[i]):
                continue
            hooks = (result._backward_hooks or {}).values()  # FSDP2 waits for backward with its own
            if result.retains_grad or not all(map(is_torchs, hooks)):
                warn_once(
                    f"ORTModule: a hook or retain_grad() of a result of shape {list(result.shape)} does not see the "
                    "gradient that comes through another result, which forward computes from it: PyTorch adds that. "
                    "Compute the other result (a loss) outside of the wrapped module to see it"
                )
