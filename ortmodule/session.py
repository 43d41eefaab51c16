"""Plans and runs of one captured model: the thin layer between torch tensors and the C engine.

A :class:`Session` holds a model (ONNX bytes, read once) and its plans, one for every combination of input types and
shapes, inputs that need a gradient, and outputs that receive one. A :class:`Run` is one forward with the memory its
backward will need.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch

from ortmodule import _core
from ortmodule.logger import ENGINE

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
#: What plans and kernels raise; the shape and type errors of bad input are ValueError and TypeError.
ENGINE_ERRORS = (_core.Error, ValueError, TypeError)
#: Plans kept for shapes seen before; the least recently used goes first.
MOST_PLANS = 128


def _empty(spec: tuple[str, tuple[int, ...]]) -> torch.Tensor:
    return _core.empty(torch.Tensor, spec[0], spec[1])


def _zeros(spec: tuple[str, tuple[int, ...]]) -> torch.Tensor:
    tensor = _empty(spec)
    _core.zero(tensor)
    return tensor


def overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)`` for tensors of one type and shape; autograd sees a new version."""
    if target.is_contiguous() and source.is_contiguous():
        _core.copy(target, source)
        torch.autograd.graph.increment_version(target)
    else:
        target.detach().copy_(source)


class Run:
    """One forward. ``outputs``: tensors of their own; ``writes``: {input index: its new contents}."""

    __slots__ = ("plan", "inputs", "outputs", "writes", "seed", "_arena")

    def __init__(self, plan: _core.Plan, inputs: Sequence[torch.Tensor], seed: int) -> None:
        self.plan, self.inputs, self.seed = plan, inputs, seed
        self.outputs = plan.empty_outputs(torch.Tensor)
        self.writes = {index: _empty(spec) for index, spec in plan.writes}
        self._arena = _empty(("uint8", (plan.arena_bytes,))) if plan.arena_bytes else None
        try:
            plan.forward(self._arena, inputs, self.outputs, list(self.writes.values()), seed)
        except BaseException:
            self.release()
            raise
        if not plan.differentiates:
            self.release()

    def backward(
        self,
        output_grads: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor | None] | None = None,
        outputs: Sequence[torch.Tensor | None] | None = None,
        keep: bool = False,
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs, None where there is none.

        ``output_grads``: contiguous, of the outputs' types and shapes; None for an output that receives no gradient.
        ``inputs``, ``outputs``: those of the forward when the caller kept them elsewhere. ``keep``: leave what
        forward saved intact for another backward.

        Raises RuntimeError when the memory of this run is gone already.
        """
        plan, arena = self.plan, self._arena
        if not plan.differentiates:
            return [None] * len(plan.input_grads)
        if arena is None and plan.arena_bytes:
            raise RuntimeError("Trying to backward through the graph a second time: specify retain_graph=True.")
        if keep and arena is not None:
            arena = arena.clone()
        output_grads = [
            None if spec is None else _zeros(spec) if grad is None else grad
            for spec, grad in zip(plan.output_grads, output_grads, strict=True)
        ]
        grads = plan.empty_input_grads(torch.Tensor)
        try:
            plan.backward(
                arena,
                self.inputs if inputs is None else inputs,
                self.outputs if outputs is None else outputs,
                output_grads,
                grads,
                self.seed,
            )
        finally:
            if not keep:
                self.release()
        return grads

    def release(self) -> None:
        """Lets the arena go: the engine keeps its memory for the next run. No backward can follow."""
        self._arena = None


class Session:
    """A model and its plans.

    Raises ``ortmodule.InvalidModelError`` for bytes that are not an ONNX model, ``ortmodule.UnsupportedError`` for a
    model with operators the engine does not have.
    """

    def __init__(self, model: bytes, without: Iterable[str] = ()) -> None:
        """``without``: names of passes that are not to run. KeyError for one that there is not."""
        self.model = _core.Model(model)
        self.disabled = sum({_core.passes()[name] for name in without})
        self.inputs: list[str] = self.model.inputs
        self.outputs: list[str] = self.model.outputs
        self.plans: OrderedDict[tuple, _core.Plan] = OrderedDict()
        self.plans_made = 0
        self.plan_seconds = 0.0

    def plan(
        self,
        specs: Sequence[tuple[str, tuple[int, ...]]],
        needs_grad: Sequence[bool],
        output_grads: Sequence[bool] | None = None,
        sizes: tuple[int, ...] = (),
    ) -> _core.Plan:
        """The plan for inputs of these ``(dtype name, shape)``; made when it is not known yet.

        ``needs_grad``: one flag for each input. ``output_grads``: which outputs receive a gradient; None: inference.
        ``sizes``: sizes that data decides (elements a mask selects), as far as they are known. A plan that is a
        ``prologue`` only computes the next of them (:meth:`next_size`).
        """
        key = (tuple(specs), tuple(needs_grad), None if output_grads is None else tuple(output_grads), sizes)
        plan = self.plans.get(key)
        if plan is not None:
            self.plans.move_to_end(key)
            return plan
        start = time.perf_counter()
        plan = self.model.plan(key[0], key[1], key[2], self.disabled, sizes)
        self.plan_seconds += time.perf_counter() - start
        self.plans_made += 1
        if ENGINE.isEnabledFor(logging.INFO):
            passes = ", ".join(f"{name} {times}x" for name, times in plan.fired.items()) or "none"
            shapes = ", ".join(f"{kind}{list(shape)}" for kind, shape in key[0])
            forward, backward = plan.nodes
            text = "plan %d: %d + %d instructions, arena of %d bytes, passes: %s; for %s"
            ENGINE.info(text, self.plans_made, forward, backward, plan.arena_bytes, passes, shapes)
        self.plans[key] = plan
        while len(self.plans) > MOST_PLANS:
            self.plans.popitem(last=False)
        return plan

    def next_size(self, prologue: _core.Plan, tensors: Sequence[torch.Tensor], seed: int) -> int:
        """Runs a plan that is a ``prologue``: the next size that data decides."""
        return Run(prologue, tensors, seed).outputs[0].tolist()

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        needs_grad: Sequence[bool],
        output_grads: Sequence[bool] | None = None,
        seed: int = 0,
    ) -> Run:
        """Forward over contiguous CPU ``tensors``, one for each input. ``seed``: 64 bits that random operators use."""
        specs = tuple((DTYPES.get(t.dtype, str(t.dtype)), tuple(t.shape)) for t in tensors)
        sizes: tuple[int, ...] = ()
        while (plan := self.plan(specs, needs_grad, output_grads, sizes)).prologue:
            sizes += (self.next_size(plan, tensors, seed),)
        return Run(plan, tensors, seed)
