"""The bridge to autograd: one node for a whole graph, and what a forward keeps until its backward.

What backward reads is saved through autograd, so editing it raises PyTorch's own error. The memory of a forward belongs
to its :class:`Call`: several may wait for their backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ortmodule.core.errors import Mismatch, Raised
from ortmodule.core.torch_private import keeps_graph
from ortmodule.engine.session import CPU, ENGINE_ERRORS, Run, Session
from ortmodule.runtime.grad_buckets import Segment
from ortmodule.runtime.recompute import results_again

if TYPE_CHECKING:
    from ortmodule.runtime.compiled_graph import Graph

Flags = tuple[bool, ...]


@dataclass
class Prepared:
    """A plan, and what Python needs to know of it for every run."""

    plan: Any
    output_grads: Flags | None
    sizes: tuple[int, ...]
    random: bool
    reads_input: list[int]
    reads_output: list[int]
    session: Session
    defers: bool  # there are hidden states in place of scores
    segments: list[Segment]  # in which gradients may be handed over; none: all at once


class Bridge(torch.autograd.Function):
    """The node in autograd's graph; its inputs are the tensors that need a gradient."""

    @staticmethod
    def forward(ctx: Any, call: Call, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        inputs, outputs = call.read(call.prepared.reads_input, call.prepared.reads_output)
        ctx.save_for_backward(*inputs, *outputs)
        return call.take_outputs()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # raises after a backward that did not retain the graph, and after an edit
        if torch.is_grad_enabled():
            return None, *ctx.call.eager_backward(grads)
        keep = keeps_graph()
        user = None
        try:
            return None, *ctx.call.backward(saved, grads, keep)
        except Raised as raised:
            user = raised.error
        except ENGINE_ERRORS as error:
            ctx.call.graph.failed(error)
            with torch.enable_grad():
                found = ctx.call.eager_backward(grads)
            return None, *[None if grad is None else grad.detach() for grad in found]
        raise user


class Call:
    """One forward that waits for its backward."""

    def __init__(
        self, graph: Graph, prepared: Prepared, run: Run, shapes: tuple, inputs: Sequence, held: list, tensors: list,
        eager: Callable[[Sequence[torch.Tensor]], Any], generator: Any = None,
    ) -> None:  # fmt: skip
        self.graph, self.prepared, self.run, self.shapes, self.eager = graph, prepared, run, shapes, eager
        self.inputs, self.tensors = inputs, tensors
        self.shown: dict[int, torch.Tensor] = {}  # outputs that the caller sees in another way
        self.replaced = False  # what `run` was planned for is not so
        self.device = run.gpu or CPU
        self.generator = generator  # torch's, as the nodes found them that PyTorch runs
        # Of what was written there are copies: it may be written again.
        kept = [h for h, t in zip(held, tensors, strict=True) if h is t or not h.is_contiguous()]
        self.versions = [(t, t._version) for t in kept]

    # --- forward ------------------------------------------------------------------------------------------------------

    def read(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What backward reads of the run's inputs and outputs. Of a parameter it is the memory that forward read, as in
        PyTorch's products: the parameter may have other `data` by then."""
        feeds, needs, tensors = self.graph.feeds, self.graph.needs, self.tensors
        given = [tensors[i].detach() if needs[i] and not isinstance(feeds[i], int) else tensors[i] for i in inputs]
        return given, [self.run.outputs[i] for i in outputs]

    def take_outputs(self) -> tuple[torch.Tensor, ...]:
        """The differentiable ones, for the caller."""
        run = self.run
        outputs = tuple(self.shown.get(i, run.outputs[i]) for i in self.graph.differentiable)
        self.shown = {}
        # An output knows its node; if the node knew the output nothing of both would ever be freed.
        run.inputs = run.outputs = None
        return outputs

    # --- backward -----------------------------------------------------------------------------------------------------

    def arrived(self, grads: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], Flags]:
        """Gradients of the differentiable outputs as those of all outputs; and which there are, the next forward's
        prediction."""
        graph = self.graph
        output_grads: list[torch.Tensor | None] = [None] * len(graph.session.outputs)
        for i, grad in zip(graph.differentiable, grads, strict=True):
            output_grads[i] = None if grad is None else grad.contiguous().resolve_neg()
        wanted = tuple(grad is not None for grad in output_grads)
        graph.prediction = wanted if not graph.writes else graph.prediction
        return output_grads, wanted

    def lacks(self, wanted: Flags) -> bool:
        """Was the run planned without one of these?"""
        return any(want and not have for want, have in zip(wanted, self.prepared.output_grads, strict=True))

    def spread(self, inputs: Sequence[int], outputs: Sequence[int], saved: Sequence) -> tuple[list, list]:
        """What was `read`, at the places of the run's inputs and outputs."""
        all_inputs: list[torch.Tensor | None] = [None] * len(self.graph.feeds)
        all_outputs: list[torch.Tensor | None] = [None] * len(self.graph.session.outputs)
        for i, tensor in zip(inputs, saved, strict=False):
            all_inputs[i] = tensor
        for i, tensor in zip(outputs, saved[len(inputs) :], strict=True):
            all_outputs[i] = tensor
        return all_inputs, all_outputs

    def without_gradient(self, wanted: Flags) -> list[bool] | None:
        """No gradient is not a gradient of zeros: inputs that only other outputs depend on; None: of all outputs."""
        prepared = self.prepared
        if wanted == prepared.output_grads:
            return None
        other = self.graph.prepare(self.shapes, wanted, prepared.sizes, None, prepared.defers)
        return [spec is None for spec in other.plan.input_grads]

    def backward(
        self, saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], keep: bool
    ) -> list[torch.Tensor | None]:
        """Gradients of the leaves."""
        graph, prepared = self.graph, self.prepared
        output_grads, wanted = self.arrived(grads)
        if self.run.calls is not None and (self.replaced or wanted != prepared.output_grads):
            found = self._foreign(wanted, self.again(wanted), output_grads, keep)
        elif self.lacks(wanted):
            found = self.again(wanted).backward(output_grads)
        else:
            inputs, outputs = self.spread(prepared.reads_input, prepared.reads_output, saved)
            if self.run.calls is None:
                found = self.run.backward(output_grads, inputs, outputs, keep)
            else:
                found = self._foreign(wanted, self.run, output_grads, keep, inputs, outputs)
            if (none := self.without_gradient(wanted)) is not None:
                found = [None if flag else grad for flag, grad in zip(none, found, strict=True)]
        for i in graph.empty:  # the engine leaves out what is empty; its gradient is empty, not none
            if found[i] is None:
                found[i] = torch.zeros_like(self.tensors[i])
        if not keep:
            self._forget()
        return [found[i] for i in graph.leaves]

    def taken(self) -> Call:
        """All of it for a backward that is the last; raises RuntimeError when there was one."""
        if self.run is None:
            raise RuntimeError("Trying to backward through the graph a second time: specify retain_graph=True.")
        taken = copy.copy(self)
        self._forget()
        return taken

    def _forget(self) -> None:
        self.run = self.inputs = self.tensors = self.versions = self.eager = None

    def _foreign(self, wanted: Flags, run: Run, output_grads: Sequence, keep: bool, *saved: Sequence) -> list:
        """Backward with nodes that PyTorch runs, once more where it finds out which gradients there are."""
        while True:
            try:
                return run.backward(output_grads, *saved, keep=keep)
            except Mismatch:
                self.graph.session.known.changed()
                run, saved, self.replaced = self.again(wanted), (), True

    def _check_versions(self) -> None:
        for tensor, version in self.versions:
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                    f"tensor of shape {list(tensor.shape)} is at version {tensor._version}; expected version {version}"
                )

    def again(self, wanted: Flags) -> Run:
        """The same forward, planned for gradients of other outputs."""
        self._check_versions()
        if self.run.calls is not None:
            return self.graph.run(self.shapes, wanted, self.tensors, self.run.seed, self.run.calls)[1]
        if self.prepared.defers:  # what is left out is another thing where the scores are seen
            prepared, _ = self.graph._planned(self.shapes, wanted, self.tensors, self.run.seed)
        else:
            prepared = self.graph.prepare(self.shapes, wanted, self.prepared.sizes)
        return Run(prepared.plan, self.tensors, self.run.seed, seed_there=self.run.seed_there)

    def eager_backward(self, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Gradients that can be differentiated again: through PyTorch, which runs forward once more."""
        graph = self.graph
        self._check_versions()
        if self.run.seed_there is not None or (self.run.calls is not None and self.generator is None):
            raise RuntimeError(
                "ORTModule: PyTorch cannot compute these gradients: the forward was captured into a CUDA graph, and "
                "only that knows which random numbers it drew"
            )
        results, stands = results_again(graph, self.eager, self.inputs, self.tensors, self.run.seed, self.generator)
        sources = [s for s in graph.capture.trace.sources if s.kind != "number"]
        outputs = {s.key: t for s, t in zip(sources, results, strict=True) if s.kind == "graph"}
        wanted = [(outputs[i], g) for i, g in zip(graph.differentiable, grads, strict=True) if g is not None]
        outputs, grads = zip(*wanted, strict=True)
        return torch.autograd.grad(outputs, stands, grads, create_graph=True, allow_unused=True)


def backward_nodes(tensors: Iterable[torch.Tensor]) -> set[Any]:
    """The autograd nodes that run the engine's backward for these outputs."""
    nodes = {t.grad_fn for t in tensors if t.grad_fn is not None}
    return {node for node in nodes if node.name() == "BridgeBackward"}
