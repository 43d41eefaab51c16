"""Makes plans of one captured model and runs them: the thin layer between torch tensors and the C engine.

A :class:`Session` holds a model (ONNX bytes, read once) and its plans, one for every combination of input types and
shapes, inputs that need a gradient, and outputs that receive one. A :class:`Run` is one forward with the memory its
backward will need.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import distributed

from ortmodule import _core
from ortmodule.core.dtypes import DTYPES
from ortmodule.core.errors import Mismatch, StateError, TritonError
from ortmodule.core.logger import ENGINE, warn_once
from ortmodule.core.torch_private import raw_stream
from ortmodule.engine.autotune import Tuning
from ortmodule.engine.memory_goal import USUAL_COSTS, MemoryGoal, Spec
from ortmodule.engine.plan_cache import PlanCache
from ortmodule.host.host_node import Calls, Known, Node
from ortmodule.triton_kernels import maker
from ortmodule.triton_kernels.use import PASSES_OFF, TritonUse

#: What plans and kernels raise; the shape and type errors of bad input are ValueError and TypeError.
ENGINE_ERRORS = (_core.EngineError, ValueError, TypeError)
CPU = torch.device("cpu")
#: Bytes that divide the address of memory for a plan on a GPU (csrc/plan/plan.h).
GPU_ALIGNED = 256
#: Each is called with every plan that is made: what measures plans (debug/profile.py).
PLAN_MADE: list[Callable[[_core.Plan], None]] = []
#: For :class:`Run`: its first input says where it runs.
OF_INPUTS: Any = "of inputs"


def _empty(spec: Spec, device: torch.device | None = None) -> torch.Tensor:
    if device is not None:
        return torch.empty(spec[1], dtype=getattr(torch, spec[0]), device=device)
    return _core.empty(torch.Tensor, spec[0], spec[1])


def _all_empty(specs: Iterable[tuple | None], gpu: torch.device) -> list[Any]:
    return [None if spec is None else _empty(spec, gpu) for spec in specs]


def aligned_bytes(count: int, device: torch.device | None = None) -> torch.Tensor:
    """``count`` bytes; on a GPU aligned as libraries want their workspaces, which allocators that are plugged into
    torch need not do, nor does the CPU's."""
    if device is None:
        return _empty(("uint8", (count,)))
    room = _empty(("uint8", (count,)), device) if device.type == "cuda" else None
    if room is not None and room.data_ptr() % GPU_ALIGNED == 0:
        return room
    room = _empty(("uint8", (count + GPU_ALIGNED,)), device)
    start = -room.data_ptr() % GPU_ALIGNED
    return room[start : start + count]


def _zeros(spec: Spec, device: torch.device | None = None) -> torch.Tensor:
    tensor = _empty(spec, device)
    if device is not None:
        return tensor.zero_()
    _core.zero(tensor)
    return tensor


def gpu_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The GPU that a run over these tensors is for; None: the CPU. The first tensor decides; a plan refuses others.

    In a build for tests (``EMULATED=1``) the GPU is emulated, and its memory is the CPU's.
    """
    device = next((t.device for t in tensors), CPU)
    return device if device.type == "cuda" or _core.emulated else None


def stream_of(gpu: torch.device) -> int:
    """torch's current stream, for kernels to run in order with torch's own."""
    return raw_stream(gpu.index) if gpu.type == "cuda" else 0


def is_captured(gpu: torch.device) -> bool:
    """Does the caller capture torch's current stream there into a CUDA graph of their own?"""
    return _core.cuda_captured(stream_of(gpu))


def _refuse_in_capture(gpu: torch.device | None, what: str) -> None:
    """RuntimeError, which is no reason to let PyTorch run the module, where the stream is captured."""
    if gpu is not None and is_captured(gpu):
        raise StateError(f"ORTModule: while a CUDA graph is captured {what}")


def may_plan(gpu: torch.device | None) -> None:
    """Raises RuntimeError where a CUDA graph is captured: a plan is made with uploads and waits."""
    _refuse_in_capture(
        gpu,
        "no graph or plan can be made, and there is none for these inputs yet: run the same step before the capture",
    )


def may_read(gpu: torch.device | None, prologue: _core.Plan) -> None:
    """Raises RuntimeError where a CUDA graph is captured: the host cannot read what ``prologue`` computes."""
    if gpu is None:
        return
    operator, name = prologue.code()[-1][:2]
    what = f"{operator} ({name or '-'}) cannot tell the host a size, which is decided by data"
    if prologue.bounded:
        what += ": ORTMODULE_DISABLED_PASSES=score_mask,mask_removal,padding_removal,label_sparsity computes all rows"
    _refuse_in_capture(gpu, what)


def math_mode() -> int:
    """What torch lets kernels do, added up. 1: TF32 in products, 2: TF32 in convolutions, 4: only the same bits in
    every run. Its kernels ask what ``fp32_precision`` says; the older settings set that, too, and refuse to be read
    once the new ones have been set."""
    products = torch.backends.cuda.matmul
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # torch puts it there when it is imported
    rounds = (products.fp32_precision == "tf32") + 2 * (convolutions.fp32_precision == "tf32")
    return rounds + 4 * torch.are_deterministic_algorithms_enabled()


def _how(stream: int, graphs: bool, seed_there: torch.Tensor | None) -> tuple[int, int, bool, int]:
    """How a GPU starts kernels, as plans take it: the stream, what torch lets kernels do, whether CUDA graphs may be
    used, and where the seed lies, if not on the host. Asked once in a forward, and once in a backward: what torch lets
    kernels do may change between them."""
    return stream, math_mode(), graphs, 0 if seed_there is None else seed_there.data_ptr()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor with memory of its own, without a gradient."""
    if tensor.device.type != "cpu":
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    made = _core.empty(torch.Tensor, DTYPES[tensor.dtype], tuple(tensor.shape))
    _core.copy(made, tensor)
    return made


def overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)`` for tensors of one type and shape; autograd sees a new version."""
    if target.device.type == "cpu" and target.is_contiguous() and source.is_contiguous():
        _core.copy(target, source)
        torch.autograd.graph.increment_version(target)
    else:
        target.detach().copy_(source)


class Run:
    """One forward. ``outputs``: tensors of their own; ``writes``: {input index: its new contents}."""

    __slots__ = (
        "plan", "inputs", "outputs", "writes", "seed", "seed_there", "calls", "gpu", "graphs", "room", "joint",
        "_arena",
    )  # fmt: skip

    def __init__(
        self,
        plan: _core.Plan,
        inputs: Sequence[torch.Tensor],
        seed: int,
        gpu: torch.device | None = OF_INPUTS,
        calls: Calls | None = None,
        graphs: bool = False,
        seed_there: torch.Tensor | None = None,
        joint: bool = False,
    ) -> None:
        """``gpu``: as :func:`gpu_of` says. ``calls``: the nodes that PyTorch runs, if there are any. ``graphs``: a GPU
        may use CUDA graphs.
        ``seed_there``: the seed of a run that is repeated, as a tensor of its GPU. Where the caller captures a CUDA
        graph it is made here: torch's generator gives another number in each replay. ``joint``: its gradients may be in
        its arena, if the plan has a place for them."""
        self.plan, self.inputs, self.seed, self.calls, self.graphs = plan, inputs, seed, calls, graphs
        self.gpu = gpu = gpu_of(inputs) if gpu is OF_INPUTS else gpu
        if plan.offload_bytes:
            _refuse_in_capture(gpu, "no activations can be offloaded, and ORTMODULE_MEMORY_OFFLOAD is set")
        #: Where activations wait for backward that are offloaded.
        self.room = plan.take_room() if plan.offload_bytes else None
        if calls is not None:
            calls.device = gpu
            if plan.writes:  # what forward changes is another tensor's memory for autograd
                calls.shared = frozenset()
        self.writes: dict[int, torch.Tensor] = {}
        self._arena: torch.Tensor | None
        how: tuple[Any, ...] = ()
        room = plan.arena_bytes
        if gpu is None:
            self._arena = plan.joint_arena(torch.Tensor) if joint else None
            self.joint = self._arena is not None
            self.outputs = plan.empty_outputs(torch.Tensor, self.joint)
            if room and not self.joint:
                try:
                    self._arena = _core.empty(torch.Tensor, "uint8", (room,))
                except MemoryError:
                    plan.no_memory()
        else:
            stream = stream_of(gpu)
            if seed_there is None and plan.random and _core.cuda_captured(stream):
                seed_there = torch.empty(1, dtype=torch.int64, device=gpu).random_()
            how = _how(stream, graphs, seed_there)
            self.outputs, self.joint = _all_empty(plan.outputs, gpu), False
            self._arena = aligned_bytes(room, gpu) if room else None
        self.seed_there = seed_there
        for index, spec in plan.writes:
            self.writes[index] = _empty(spec, gpu)
        try:
            plan.forward(
                self._arena, inputs, self.outputs, list(self.writes.values()), seed, calls, *how, room=self.room,
                joint=self.joint,
            )  # fmt: skip
        except BaseException:
            self._arena = self.room = None
            raise
        if not plan.differentiates:
            self._arena = None

    def begin(
        self, output_grads: Sequence[torch.Tensor | None], keep: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """For one backward: the arena, and zeros for gradients that the plan is for and that are not there."""
        plan, arena = self.plan, self._arena
        if (arena is None and plan.arena_bytes) or (self.calls is not None and self.calls.released):
            raise RuntimeError("Trying to backward through the graph a second time: specify retain_graph=True.")
        if keep and arena is not None:
            another = plan.joint_arena(torch.Tensor, True) if self.joint else aligned_bytes(arena.numel(), self.gpu)
            assert another is not None, "a run with a joint arena has a plan for it"
            arena = another.copy_(arena)
        given = []
        for spec, grad in zip(plan.output_grads, output_grads, strict=True):
            given.append(None if spec is None else _zeros(spec, self.gpu) if grad is None else grad)
        return arena, given

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
        plan = self.plan
        if not plan.differentiates:
            return [None] * len(plan.input_grads)
        arena, output_grads = self.begin(output_grads, keep)
        gpu = self.gpu
        if gpu is None:
            grads = plan.empty_input_grads(torch.Tensor, arena if self.joint else None)
        else:
            grads = _all_empty(plan.input_grads, gpu)
        if self.calls is not None:
            self.calls.keep = keep
        try:
            plan.backward(
                arena,
                self.inputs if inputs is None else inputs,
                self.outputs if outputs is None else outputs,
                output_grads,
                grads,
                self.seed,
                self.calls,
                *(() if gpu is None else self.how()),
                room=self.room,
                joint=self.joint,
            )
        except Mismatch:
            self._arena = self.room = None
            raise
        except BaseException:
            if not keep:
                self.release()
            elif self.calls is not None:
                self.calls.grads = {}
            raise
        if not keep:
            self.release()
        elif self.calls is not None:
            self.calls.grads = {}
        return grads

    def how(self) -> tuple[Any, ...]:
        """As :func:`_how`, for a backward; nothing on the CPU."""
        return () if self.gpu is None else _how(stream_of(self.gpu), self.graphs, self.seed_there)

    def release(self) -> None:
        """Lets the arena go, and what was offloaded: the engine keeps both for the next run. No backward can follow."""
        self._arena = None
        if self.room is not None:
            self.plan.give_room(self.room)
            self.room = None
        if self.calls is not None:
            self.calls.release()


class Backward:
    """A backward of ``run``, segment by segment. ``grads``: of the inputs, as far as it has come."""

    def __init__(self, run: Run, output_grads: Sequence[torch.Tensor | None], keep: bool) -> None:
        """As in :meth:`Run.backward`. The run has no host nodes; the caller runs the segments in order."""
        self._run = run
        self._arena, self._output_grads = run.begin(output_grads, keep)
        self.grads: list[torch.Tensor | None] = [None] * len(run.plan.reads_input)
        self._how, self._room, self._keeps = run.how(), run.room, keep
        if not keep:
            run.room = None  # it is given back behind the last segment
            run.release()

    def run(
        self, first: int, last: int, new: Iterable[tuple[int, tuple]],
        inputs: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor | None],
    ) -> None:  # fmt: skip
        """Instructions [first, last), after those before. ``new``: the gradients that they begin, and their specs."""
        run = self._run
        for i, spec in new:
            self.grads[i] = _empty(spec, run.gpu)
        run.plan.backward_part(
            first, last, self._arena, inputs, outputs, self._output_grads, self.grads, run.seed, None, *self._how,
            room=self._room, joint=run.joint,
        )  # fmt: skip
        if self._room is not None and not self._keeps and last == sum(run.plan.nodes):
            run.plan.give_room(self._room)
            self._room = None


def run_planned(
    plan: Callable[[tuple[int, ...]], _core.Plan],
    tensors: Sequence[torch.Tensor],
    seed: int,
    calls: Calls | None,
    graphs: bool = False,
    joint: bool = False,
) -> tuple[tuple[int, ...], Run]:
    """Forward by what ``plan(sizes)`` returns, after as many prologues as it takes: (the sizes, the run)."""
    sizes: tuple[int, ...] = ()
    while True:
        try:
            found = plan(sizes)
        except ENGINE_ERRORS:
            if calls is None or not calls.without_guesses():
                raise
            continue
        if found.prologue:
            may_read(gpu_of(tensors), found)
        try:
            run = Run(found, tensors, seed, calls=calls, graphs=graphs, joint=joint)
        except Mismatch:
            if calls is None:
                raise
            calls.known.changed()
            continue
        if not found.prologue:
            return sizes, run
        if found.probe and calls is not None:
            calls.known.changed()
        else:
            sizes = (*sizes, *_keyed(found, run.outputs[0].reshape(-1).tolist()))


def _keyed(prologue: _core.Plan, numbers: Sequence[int]) -> tuple[int, ...]:
    """What a prologue has found, as ``sizes`` of :meth:`Session.plan`: a key, a number, ..."""
    return tuple(x for pair in zip(prologue.pending_keys, numbers, strict=True) for x in pair)


def _tune(tuning: Tuning, plan: _core.Plan, gpu: torch.device | None) -> None:
    if gpu is None:
        tuning.plan_made(plan)
    else:
        tuning.plan_made_for(gpu.index or 0, plan, math_mode(), stream_of(gpu), lambda n: aligned_bytes(n, gpu))


class Session:
    """A model and its plans.

    Raises ``ortmodule.InvalidModelError`` for bytes that are not an ONNX model, ``ortmodule.UnsupportedError`` for a
    model with operators the engine does not have.
    """

    def __init__(
        self,
        model: bytes,
        without: Iterable[str] = (),
        nodes: Sequence[Node] = (),
        padding_unseen: bool = False,
        graphs: bool = False,
        tuning: Tuning | None = None,
        memory: MemoryGoal | None = None,
        triton: TritonUse | None = None,
    ) -> None:
        """``without``: names of passes that are not to run. KeyError for one that there is not. ``nodes``: those that
        PyTorch runs, by their numbers in the model. ``padding_unseen``: results for tokens that are padding may be
        zeros. ``graphs``: steps on a GPU may become CUDA graphs. ``tuning``: measures the products of plans.
        ``memory``: what a step with its backward may take. ``triton``: what becomes Triton kernels."""
        self.model = _core.Model(model)
        self.known = Known(nodes) if nodes else None
        self.graphs, self.tuning, self.memory = graphs, tuning, memory or MemoryGoal(0, 0)
        self.triton = triton
        self.disabled, self.padding_unseen = sum({_core.passes()[name] for name in without}), padding_unseen
        self.inputs: list[str] = self.model.inputs
        self.outputs: list[str] = self.model.outputs
        self.plans: PlanCache[_core.Plan] = PlanCache(lambda plan: plan.host_bytes)
        if self.known is not None:
            self.known.plans.append(self.plans)
        #: Of all plans that were kept, the one whose runs take the most, and the specs of its inputs.
        self.largest: tuple[_core.Plan, tuple[Spec, ...]] | None = None
        self.plans_made = 0
        self.plan_seconds = 0.0

    def like(self, model: bytes, without: Iterable[str]) -> Session:
        """Another model's, with what this one has of tuning, memory and Triton."""
        return Session(model, without, tuning=self.tuning, memory=self.memory, triton=self.triton)

    def plan(
        self,
        specs: Sequence[Spec],
        needs_grad: Sequence[bool],
        output_grads: Sequence[bool] | None = None,
        sizes: tuple[int, ...] = (),
        calls: Calls | None = None,
        gpu: torch.device | None = None,
        adds: bool = False,
    ) -> _core.Plan:
        """The plan for inputs of these ``(dtype name, shape)``; made when it is not known yet.

        ``needs_grad``: one flag for each input. ``output_grads``: which outputs receive a gradient; None: inference.
        ``sizes``: sizes that data decides (elements a mask selects), as far as they are known, each behind its key. A
        plan that is a ``prologue`` only computes the next of them; with `probe`, what ``calls`` learns by running a
        node.
        ``gpu``: where the tensors are, unless on the CPU. ``adds``: for a step that adds to gradients of earlier ones,
        where that makes another plan.
        """
        grads = None if output_grads is None else tuple(output_grads)
        adds = adds and grads is not None and self.memory.chooses
        key = (tuple(specs), tuple(needs_grad), grads, sizes, gpu, adds)
        plan = self.plans.get(key)
        if plan is not None:
            with contextlib.suppress(KeyError):  # another thread has dropped it
                self.plans.move_to_end(key)
            return plan
        may_plan(gpu)
        if self.tuning is not None and gpu is not None:
            self.tuning.prepare(gpu.index or 0)
        start = time.perf_counter()
        plan = self._make(key[:3], sizes, calls, gpu, self.memory, adds=adds)
        self.plan_seconds += time.perf_counter() - start
        self.plans_made += 1
        for listener in PLAN_MADE:
            listener(plan)
        if self.tuning is not None:
            _tune(self.tuning, plan, gpu)
        if ENGINE.isEnabledFor(logging.INFO):
            passes = ", ".join(f"{name} {times}x" for name, times in plan.fired.items()) or "none"
            shapes = ", ".join(f"{kind}{list(shape)}" for kind, shape in key[0])
            forward, backward = plan.nodes
            arena = f"{plan.arena_bytes} bytes" + (f" ({plan.joint_bytes} with gradients)" if plan.joint_bytes else "")
            text = "plan %d: %d + %d instructions, arena of %s, passes: %s; for %s"
            ENGINE.info(text, self.plans_made, forward, backward, arena, passes, shapes)
        if self.largest is None or plan.arena_bytes > self.largest[0].arena_bytes:
            self.largest = plan, key[0]
        self.plans.add(key, plan)
        return plan

    def let_go(self, plan: _core.Plan) -> None:
        """It is kept no longer."""
        self.plans.discard(plan)

    def sketch(
        self,
        specs: Sequence[Spec],
        needs_grad: Sequence[bool],
        output_grads: Sequence[bool] | None = None,
        sizes: tuple[int, ...] = (),
        calls: Calls | None = None,
        gpu: torch.device | None = None,
        memory: MemoryGoal | None = None,
        adds: bool = False,
    ) -> _core.Plan:
        """As :meth:`plan`, to be looked at: it is not kept, and this machine need not have the memory that its runs
        take. ``memory``: another goal."""
        of = tuple(specs), tuple(needs_grad), None if output_grads is None else tuple(output_grads)
        goal = memory or self.memory
        adds = adds and of[2] is not None and goal.chooses
        return self._make(of, sizes, calls, gpu, goal, any_size=True, adds=adds)

    def output_specs(self, specs: Sequence[Spec]) -> list[Spec] | None:
        """Types and shapes of the outputs for inputs of these, by a plan that costs little. None: data decides."""
        none, everything = (False,) * len(specs), sum(_core.passes().values())
        plan = self.model.plan(tuple(specs), none, None, everything, (), None, False, -1, 0, 0, True, None)
        return None if plan.prologue else plan.outputs

    def _make(
        self, of: tuple[Sequence[Spec], Sequence[bool], Sequence[bool] | None], sizes: tuple[int, ...],
        calls: Calls | None, gpu: torch.device | None, memory: MemoryGoal, any_size: bool = False, adds: bool = False,
    ) -> _core.Plan:  # fmt: skip
        device = -1 if gpu is None else gpu.index or 0
        goal = (0, 0) if of[2] is None else memory.of(self.inputs, *of[:2], adds)
        offload = None if of[2] is None else memory.offload
        given = *of, self.disabled, sizes, calls, self.padding_unseen, device, *goal, any_size, memory.clusters
        # A process group's hooks want gradients in segments, in memory of their own.
        segments = adds or (distributed.is_available() and distributed.is_initialized())
        joint_from = 0 if segments else memory.joint_from
        costs = memory.measured_costs(*goal) if gpu is None else USUAL_COSTS
        plan = self._plan_with_triton((*given, None, offload, joint_from, memory.layers, costs), gpu)
        if gpu is None:
            return plan
        if plan.constant_bytes:
            plan.keep(aligned_bytes(plan.constant_bytes, gpu), stream_of(gpu))
        return plan

    def _plan_with_triton(self, given: tuple[Any, ...], gpu: torch.device | None) -> _core.Plan:
        """The plan by these arguments of ``Model.plan``, with Triton kernels where they are asked for and can be
        made."""
        if self.triton is not None and (reason := maker.refusal(gpu)):
            warn_once(f"ORTMODULE_USE_TRITON has no effect: {reason}; the engine's own kernels run instead")
            self.triton = None
        if self.triton is not None:
            maker.install()
            asked = [*given]
            asked[-5] = self.triton.rules
            asked[3] = self.disabled | sum(_core.passes()[name] & ~self.disabled for name in PASSES_OFF)
            try:
                plan = self.model.plan(*asked)
            except TritonError as error:
                warn_once(f"ORTMODULE_USE_TRITON: {error}; the engine's own kernels run instead")
                self.triton = None
            else:
                self.triton.save(plan)
                return plan
        return self.model.plan(*given)

    def next_sizes(
        self, prologue: _core.Plan, tensors: Sequence[torch.Tensor], seed: int
    ) -> Callable[[], tuple[int, ...]]:
        """Runs a plan that is a ``prologue``. The result says the next sizes that data decides; on a GPU it waits for
        the numbers when it is called, and not for what was started since."""
        may_read(gpu_of(tensors), prologue)
        run = Run(prologue, tensors, seed)
        found = run.outputs[0].reshape(-1)
        if run.gpu is None:
            return lambda: _keyed(prologue, found.tolist())
        numbers = [_core.read(one, run.gpu.index or 0, stream_of(run.gpu)) for one in found]
        return lambda: _keyed(prologue, [number.value() for number in numbers])

    def calls(self) -> Calls | None:
        """For one run: its nodes that PyTorch runs."""
        return None if self.known is None else Calls(self.known)

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        needs_grad: Sequence[bool],
        output_grads: Sequence[bool] | None = None,
        seed: int = 0,
        calls: Calls | None = None,
    ) -> Run:
        """Forward over contiguous ``tensors``, one for each input, all on one device.

        ``seed``: 64 bits that random operators use.
        """
        specs = tuple((DTYPES.get(t.dtype, str(t.dtype)), tuple(t.shape)) for t in tensors)
        calls, gpu = calls or self.calls(), gpu_of(tensors)
        return run_planned(
            lambda sizes: self.plan(specs, needs_grad, output_grads, sizes, calls, gpu),
            tensors,
            seed,
            calls,
            self.graphs,
        )[1]
