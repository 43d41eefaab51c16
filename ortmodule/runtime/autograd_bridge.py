"""Connects a graph to autograd: one node for it, and what a forward keeps until its backward.

What backward reads is saved through autograd, so editing it raises PyTorch's own error. The memory of a forward belongs
to its :class:`Pending`: several may wait for their backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Protocol

import torch

from ortmodule import _core
from ortmodule.core.errors import Mismatch, Raised, StateError
from ortmodule.core.objects.tensor_memory import version_of
from ortmodule.core.torch_private import forward_level, is_batched, keeps_graph, outside_transforms, peek_transform
from ortmodule.engine.session import CPU, ENGINE_ERRORS, Run
from ortmodule.runtime.calls import capture_budget
from ortmodule.runtime.calls.state_before import StateBefore
from ortmodule.runtime.double_backward import RecomputableGraph
from ortmodule.runtime.executable import Executable, Executables, Flags
from ortmodule.runtime.tensors.result_hooks import WatchedResults


class ForwardCall(Protocol):
    """The call of a forward, as its backward sees it (:class:`~ortmodule.runtime.compiled_graph.Call`)."""

    shapes: tuple
    inputs: list[torch.Tensor]


class ForwardGraph(RecomputableGraph, Protocol):
    """The graph of a forward, as its backward sees it (:class:`~ortmodule.runtime.compiled_graph.CompiledGraph`)."""

    executables: Executables
    variant: capture_budget.Variant
    needs: Flags  # which inputs need a gradient
    differentiable: list[int]  # outputs
    prediction: Flags  # which outputs will receive a gradient
    failed: Callable[[Exception], None]
    keeps_memory: bool  # that a step is done with

    def recomputed(
        self, call: Any, tensors: Sequence[torch.Tensor], seed: int, before: Any
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...
    def reached(self, grads: Flags) -> Container[int]: ...  # the inputs with a gradient in PyTorch


class Bridge(torch.autograd.Function):
    """The node in autograd's graph; its inputs are the tensors that need a gradient."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        executable = pending.executable
        ctx.save_for_backward(*pending.read(executable.reads_input, executable.reads_output))
        return pending.take_outputs()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # raises after a backward that did not retain the graph, and after an edit
        if ctx.pending.watched is not None:
            ctx.pending.watched.check(grads)
        # Are gradients more than numbers: to be differentiated, a batch of them, or with tangents?
        more = torch.is_grad_enabled() or peek_transform() is not None or forward_level() >= 0
        for grad in grads:
            more = more or (grad is not None and is_batched(grad))
        if more:
            return None, *ctx.pending.eager_backward(grads)
        keep = keeps_graph()
        user, variant, start = None, ctx.pending.graph.variant, capture_budget.clock()
        try:
            found = ctx.pending.backward(saved, grads, keep)
            if not ctx.pending.graph.keeps_memory:
                _core.memory_trim()
            variant.seconds += capture_budget.clock() - start
            return None, *found
        except Raised as raised:
            user = raised.error
        except ENGINE_ERRORS as error:
            ctx.pending.graph.failed(error)
            with torch.enable_grad():
                eager = ctx.pending.eager_backward(grads)
            return None, *[None if grad is None else grad.detach() for grad in eager]
        raise user


#: `attach(pending, *leaves)`: the differentiable outputs, as results of one node. `Bridge.apply` without its look for
#: transforms of torch.func, under which the engine runs nothing.
attach = super(torch.autograd.Function, Bridge).apply


class Pending:
    """One forward that waits for its backward."""

    def __init__(
        self, graph: ForwardGraph, executable: Executable, run: Run, call: ForwardCall, held: list, tensors: list,
        before: StateBefore | None = None,
    ) -> None:  # fmt: skip
        """``held``: the tensors that the graph was called with; ``tensors``: those that it was fed, copies of what
        forward has changed since. ``before``: what else it began with."""
        self.graph, self.executable, self.run, self.call = graph, executable, run, call
        self.tensors, self.before = tensors, before
        self.shown: dict[int, torch.Tensor] = {}  # outputs that the caller sees in another way
        self.watched: WatchedResults | None = None
        self.replaced = False  # what `run` was planned for is not so
        self.device = run.gpu or CPU
        # Tensors that forward wrote are copied in `tensors`, and may be written again.
        versions = []
        for had, fed in zip(held, tensors, strict=True):
            if had is fed or not had.is_contiguous():
                try:
                    versions.append((had, had._version))
                except RuntimeError:  # one of inference mode; to ask for that first would take as long as the version
                    versions.append((had, version_of(had)))
        self.versions = versions

    # --- forward ------------------------------------------------------------------------------------------------------

    def read(self, inputs: Sequence[int], outputs: Sequence[int]) -> list[torch.Tensor]:
        """What backward reads of the run's inputs, then of its outputs. Of a parameter it is the memory that forward
        read, as in PyTorch's products: the parameter may have other `data` by then."""
        feeds, needs, tensors, found = self.graph.feeds, self.graph.needs, self.tensors, []
        for i in inputs:
            found.append(tensors[i].detach() if needs[i] and type(feeds[i]) is not int else tensors[i])
        made = self.run.outputs
        for i in outputs:
            found.append(made[i])
        return found

    def take_outputs(self) -> tuple[torch.Tensor, ...]:
        """The differentiable ones, for the caller."""
        run, shown = self.run, self.shown
        outputs = []
        for i in self.graph.differentiable:
            outputs.append(shown[i] if i in shown else run.outputs[i])
        self.shown = {}
        # An output knows its node; if the node knew the output nothing of both would ever be freed.
        run.inputs, run.outputs = (), []
        return tuple(outputs)

    # --- backward -----------------------------------------------------------------------------------------------------

    def arrived(self, grads: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], Flags]:
        """Gradients of the differentiable outputs as those of all outputs; and which there are, the next forward's
        prediction."""
        graph = self.graph
        count = len(graph.session.outputs)
        output_grads: list[torch.Tensor | None] = [None] * count
        flags = [False] * count
        for i, grad in zip(graph.differentiable, grads, strict=True):
            if grad is not None:
                output_grads[i], flags[i] = grad.contiguous().resolve_neg(), True
        wanted = tuple(flags)
        if not graph.writes:
            graph.prediction = wanted
        return output_grads, wanted

    def lacks(self, wanted: Flags) -> bool:
        """Was the run planned without one of these?"""
        planned = self.executable.output_grads or ()
        return any(want and not have for want, have in zip(wanted, planned, strict=True))

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
        """Which inputs get None, not zeros: only outputs without a gradient depend on them. None: as planned."""
        executable = self.executable
        if wanted == executable.output_grads:
            return None
        other = self.graph.executables.prepare(self.call.shapes, wanted, executable.sizes, None, executable.defers)
        return [spec is None for spec in other.plan.input_grads]

    def backward(
        self, saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], keep: bool
    ) -> list[torch.Tensor | None]:
        """Gradients of the leaves."""
        graph, executable, tensors = self.graph, self.executable, self.tensors
        output_grads, wanted = self.arrived(grads)
        if self.run.calls is not None and (self.replaced or wanted != executable.output_grads):
            found = self._backward_with_host_nodes(wanted, self.rerun_forward(wanted), output_grads, keep)
        elif wanted != executable.output_grads and self.lacks(wanted):
            found = self.rerun_forward(wanted).backward(output_grads)
        else:
            inputs, outputs = self.spread(executable.reads_input, executable.reads_output, saved)
            if self.run.calls is None:
                found = self.run.backward(output_grads, inputs, outputs, keep)
            else:
                found = self._backward_with_host_nodes(wanted, self.run, output_grads, keep, inputs, outputs)
            if wanted != executable.output_grads and (none := self.without_gradient(wanted)) is not None:
                found = [None if flag else grad for flag, grad in zip(none, found, strict=True)]
        if not keep:
            self.forget()
        gradients: list[torch.Tensor | None] = []
        for i in graph.leaves:
            grad = found[i]
            # The engine leaves out what is empty; its gradient is empty, not none.
            if grad is None and (i in graph.reached(wanted) or not tensors[i].numel()):
                grad = torch.zeros_like(tensors[i])
            gradients.append(grad)
        return gradients

    def taken(self) -> Pending:
        """All of it for a backward that is the last; raises RuntimeError when there was one."""
        if self.run is None:
            raise RuntimeError("Trying to backward through the graph a second time: specify retain_graph=True.")
        taken = copy.copy(self)
        self.forget()
        return taken

    def forget(self) -> None:
        """There is no backward any more: the run's memory is free."""
        self.run = self.call = self.tensors = self.versions = None  # type: ignore[assignment]  # the last backward asked

    def _backward_with_host_nodes(
        self, wanted: Flags, run: Run, output_grads: Sequence, keep: bool,
        inputs: Sequence[torch.Tensor | None] | None = None, outputs: Sequence[torch.Tensor | None] | None = None,
    ) -> list:  # fmt: skip
        """Backward with nodes that PyTorch runs, once more where it finds out which gradients there are."""
        while True:
            try:
                return run.backward(output_grads, inputs, outputs, keep)
            except Mismatch:
                if (known := self.graph.session.known) is None:
                    raise
                known.changed()
                run, self.replaced = self.rerun_forward(wanted), True
                inputs = outputs = None

    def _check_versions(self) -> None:
        for tensor, version in self.versions:
            if (now := version_of(tensor)) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                    f"tensor of shape {list(tensor.shape)} is at version {now}; expected version {version}"
                )

    def rerun_forward(self, wanted: Flags) -> Run:
        """The same forward, planned for gradients of other outputs."""
        self._check_versions()
        if self.run.calls is not None:
            return self.graph.executables.run_with(
                self.call.shapes, wanted, self.tensors, self.run.seed, self.run.calls
            )[1]
        if self.executable.defers:  # passes leave out less where the logits are read
            executable, _ = self.graph.executables.planned(self.call.shapes, wanted, self.tensors, self.run.seed)
        else:
            executable = self.graph.executables.prepare(self.call.shapes, wanted, self.executable.sizes)
        return Run(executable.plan, self.tensors, self.run.seed, self.run.gpu, seed_there=self.run.seed_there)

    def eager_backward(self, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Gradients that can be differentiated again: through PyTorch, which runs forward once more."""
        graph, generators = self.graph, self.before and self.before.generators
        self._check_versions()
        if self.run.seed_there is not None or (self.run.calls is not None and generators is None):
            raise StateError(
                "ORTModule: PyTorch cannot compute these gradients: the forward was captured into a CUDA graph, and "
                "only that knows which random numbers it drew"
            )
        with outside_transforms():
            made, stands = graph.recomputed(self.call, self.tensors, self.run.seed, self.before)
        there = [i for i, grad in zip(graph.differentiable, grads, strict=True) if grad is not None]
        given = [grad for grad in grads if grad is not None]
        outputs = [made[i] for i in there]
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            return torch.autograd.grad(outputs, stands, given, create_graph=create_graph, allow_unused=True)


def backward_nodes(tensors: Iterable[torch.Tensor]) -> set[Any]:
    """The autograd nodes that run the engine's backward for these outputs."""
    nodes = {t.grad_fn for t in tensors if t.grad_fn is not None}
    return {node for node in nodes if node.name() == "BridgeBackward"}
