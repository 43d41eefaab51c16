"""Predicts how much memory a step takes before there is one: its peak, the largest batch, what budgets cost.

Everything comes from plans: the module is traced on small slices of the sample, the engine plans the step at its full
size, and no step runs. ``model`` is an ORTModule, whose settings count and which keeps the graph for its training, or a
plain module, for which it is made anew in every call.
"""

from __future__ import annotations

import contextlib
import copy
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ortmodule import _core
from ortmodule.core.errors import ArgumentError, DoesNotHold, NotInEngine, OutOfMemoryError
from ortmodule.core.objects.dispatchers import dispatcher_of
from ortmodule.core.pytree import as_arguments
from ortmodule.core.torch_private import tree_map_only
from ortmodule.debug.memory.peak import HeldTensor, Peak, peak_of
from ortmodule.engine.memory_goal import ALL_AGAIN, MOST_NAMED, MemoryGoal
from ortmodule.engine.rates import seconds_of
from ortmodule.module import ORTModule

__all__ = ["HeldTensor", "Peak", "Price", "largest_batch", "pareto", "predict"]

MOST_SIZE, MOST_BYTES = 1 << 31, 1 << 63  # that :func:`largest_batch` looks at
LEFT = 50  # of so many parts of what is free one is for what no plan counts: Python's objects, threads


def predict(model: nn.Module, *args: Any, optimizer: str | torch.optim.Optimizer = "none", **kwargs: Any) -> Peak:
    """The peak of a training step ``model(*args, **kwargs)``, with its backward unless grad mode is off.

    ``args``, ``kwargs``: a sample, in the shapes and types of the step. Tensors of the model and of the sample may be
    on the meta device: the step is planned for the CPU then, integers count as 1 where data decides sizes, and forward
    is traced with zeros. ``optimizer``: whose states count, by name (``"none"``, ``"sgd"``, ``"momentum"``,
    ``"adagrad"``, ``"rmsprop"``, ``"adam"``, ``"adamw"``, ``"lamb"``, ``"amsgrad"``; with tensors of the parameters'
    types), or an optimizer.

    Gradients count once: those that are added to the ones of an earlier step come in parts. Settings of the model and
    the environment (``MEMORY_OPT_LEVEL``, ``MEMORY_BUDGET``) hold.

    Raises ``ortmodule.UnsupportedError`` where PyTorch would run the module or a part of it, whose memory no plan
    counts; MemoryError for a budget that cannot be kept.
    """
    return PredictedStep(model, (args, kwargs), optimizer).peak()


def largest_batch(
    model: nn.Module,
    sample: Any,
    budget: int | None = None,
    dim: int = 0,
    *,
    optimizer: str | torch.optim.Optimizer = "none",
) -> int:
    """The largest batch of which a training step fits in ``budget`` bytes, found by planning alone.

    ``sample``: a tuple of arguments, a dictionary of those with names, or one argument. ``dim``: the dimension that is
    the batch; the first tensor that has it says how large the batch is, and all tensors with that size there go along.
    ``budget``: None: the model's ``Config.memory_budget``, or else what is free now: of the machine, of this process's
    control groups, of its addresses (RLIMIT_AS); a fiftieth is left for what no plan counts. ``optimizer``: as in
    :func:`predict`. Backward computes again what the model's settings say: with
    ``ORTModule(model, config=Config(memory_budget=...))`` whatever it takes.

    Raises MemoryError where not even a batch of 1 fits, ``ortmodule.UnsupportedError`` as :func:`predict` does, and
    where the graph holds for this batch alone.
    """
    step = PredictedStep(model, as_arguments(sample), optimizer)
    first = next((t for t in step.call.inputs if t.dim() > dim), None)
    if first is None:
        raise ArgumentError(f"no tensor of the sample has a dimension {dim}")
    room = step.room() if budget is None else budget
    batch = first.shape[dim]
    refused: list[MemoryError] = [OutOfMemoryError()]

    def fits(size: int) -> bool:
        try:
            peak = step.peak_at(dim, batch, size)
        except MemoryError as error:
            refused[0] = error
            return False
        if peak.total > room:
            refused[0] = OutOfMemoryError(f"a step takes {peak.total} bytes; the largest: {_largest(peak)}")
        return peak.total <= room

    if not fits(1):
        raise OutOfMemoryError(f"a batch of 1 does not fit in {room} bytes: {refused[0]}")
    return _last(fits, batch)


class Price(NamedTuple):
    """What a step takes and costs under some budget."""

    peak: int  #: bytes, as ``Peak.total``
    extra_work: float  #: by which share what backward computes again, or moves, adds to the work of a step, estimated
    offloaded: int = 0  #: bytes that wait for backward elsewhere, which ``peak`` does not count
    seconds: float = 0.0  #: of forward and backward, predicted from their work and what this machine does in a second


def pareto(
    model: nn.Module, sample: Any, points: int = 9, *, optimizer: str | torch.optim.Optimizer = "none"
) -> list[Price]:
    """What budgets cost, from that of a step that keeps everything down to the least that can be reached.

    ``sample``, ``optimizer``: as in :func:`largest_batch`. ``points``: budgets that are planned, at equal distances.
    Peaks descend and work ascends: a budget whose plan takes more of both than another's is left out. How fast this
    machine is in products and in moving bytes is measured with the first call of a process.
    """
    step = PredictedStep(model, as_arguments(sample), optimizer)
    offload = step.graph.session.memory.offload
    stored, least = (
        step.priced(goal) for goal in (MemoryGoal(0, MOST_BYTES), MemoryGoal(ALL_AGAIN, 0, offload=offload))
    )
    found = [stored, least]
    for i in range(1, points - 1):
        budget = stored[0].total + (least[0].total - stored[0].total) * i // (points - 1)
        with contextlib.suppress(MemoryError):  # less than the least, where that is not the least
            found.append(step.priced(MemoryGoal(0, budget - stored[0].optimizer, offload=offload)))
    prices: list[Price] = []
    for price in sorted((price for _, price in found), key=lambda p: (p.extra_work, p.peak)):
        if not prices or price.peak < prices[-1].peak:
            prices.append(price)
    return prices


class PredictedStep:
    """A step that is planned, at the sizes of its sample or others."""

    def __init__(
        self, model: nn.Module, sample: tuple[tuple, dict[str, Any]], optimizer: str | torch.optim.Optimizer
    ) -> None:
        """Raises UnsupportedError where there is no graph for it."""
        on_meta = any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        wrapped, args, kwargs = _off_meta(model, *sample)
        self.optimizer, self._there = optimizer, not on_meta
        with _refusing():
            self.graph, self.call = dispatcher_of(wrapped).prepare(args, kwargs)

    def plan(
        self, memory: MemoryGoal | None = None, shapes: tuple | None = None,
        inputs: Callable[[], Sequence[torch.Tensor]] | None = None,
    ) -> _core.Plan:  # fmt: skip
        """Made anew. ``memory``: a goal other than the model's. ``shapes``, ``inputs``: other than the sample's."""
        if memory is not None:
            known = self.graph.session.memory
            memory = memory._replace(beside=known.beside, joint_from=known.joint_from, costs=known.costs)
        with _refusing():
            return self.graph.sketch(shapes or self.call.shapes, inputs or (lambda: self.call.inputs), memory)

    def peak(
        self, memory: MemoryGoal | None = None, shapes: tuple | None = None,
        inputs: Callable[[], Sequence[torch.Tensor]] | None = None,
    ) -> Peak:  # fmt: skip
        """As :meth:`plan`."""
        return self._peak_of(self.plan(memory, shapes, inputs), shapes)

    def _peak_of(self, plan: _core.Plan, shapes: tuple | None = None) -> Peak:
        specs = self.graph.executables.specs_for(shapes or self.call.shapes)
        return peak_of(self.graph, specs, plan, self.optimizer)

    def priced(self, memory: MemoryGoal) -> tuple[Peak, Price]:
        """The peak of a step with this goal, and what it costs."""
        plan = self.plan(memory)
        peak = self._peak_of(plan)
        seconds = seconds_of(plan, self.graph.executables.gpu)
        return peak, Price(peak.total, peak.extra_work, peak.offloaded, seconds)

    def peak_at(self, dim: int, batch: int, size: int) -> Peak:
        """With ``size`` in place of ``batch`` in that dimension of all tensors; their rows are those of the sample."""
        given = self.call.inputs
        along = [t.dim() > dim and t.shape[dim] == batch for t in given]
        shapes = tuple(
            [torch.Size((*t.shape[:dim], size, *t.shape[dim + 1 :])) if a else t.shape
             for t, a in zip(given, along, strict=True)]
        )  # fmt: skip
        if not self.graph.fits(given, shapes, self.call.state.epoch):
            raise _core.UnsupportedError(f"the graph is for {batch} in dimension {dim} alone, not for {size}")

        def inputs() -> list[torch.Tensor]:
            rows = torch.arange(size) % batch
            return [t.index_select(dim, rows.to(t.device)) if a else t for t, a in zip(given, along, strict=True)]

        return self.peak(None, shapes, inputs)

    def room(self) -> int:
        """Bytes that a step may have: of the model's budget, or what is free, and what the model has already."""
        if self.graph.session.memory.budget:
            return MOST_BYTES  # the budget is kept by the plan, or refused
        gpu = self.graph.executables.gpu
        if gpu is not None and gpu.type == "cuda":
            free = torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
        else:
            free = _core.memory_limits()["room"]
        free -= free // LEFT
        held = {id(slot.get()): slot.get() for slot in self.graph.tree.slots.values()}
        return free + (sum(t.nbytes for t in held.values()) if self._there else 0)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What leaves a call to PyTorch is an UnsupportedError."""
    try:
        yield
    except (DoesNotHold, NotInEngine) as error:
        raise _core.UnsupportedError(f"PyTorch would run it: {error}") from error


def _largest(peak: Peak) -> str:
    return ", ".join(
        f"{t.kind} {'.'.join(filter(None, (t.module, t.name)))} with {t.bytes} bytes" for t in peak.tensors[:MOST_NAMED]
    )


def _last(fits: Callable[[int], bool], guess: int) -> int:
    """The largest size that fits, where 1 does."""
    low, high = 1, max(2, guess)
    while high < MOST_SIZE and fits(high):
        low, high = high, 2 * high
    high = min(high, MOST_SIZE)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# --- the meta device --------------------------------------------------------------------------------------------------

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def _untouched_zeros(like: torch.Tensor) -> torch.Tensor:
    """Zeros on the CPU, in addresses that have no memory until they are written."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    room = mmap.mmap(-1, like.numel() * like.element_size(), flags=flags)
    return torch.frombuffer(room, dtype=like.dtype).reshape(like.shape)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """For a tensor of a sample: zeros, or ones where a number may be an index, a label, or part of a mask."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    return _untouched_zeros(tensor).requires_grad_(tensor.requires_grad)


def _off_meta(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
    """An ORTModule and its arguments with nothing on the meta device: other tensors stand for those that are."""
    memo: dict[int, Any] = {}
    held = [*model.parameters(), *model.buffers()]
    held += [value for m in model.modules() for value in vars(m).values() if isinstance(value, torch.Tensor)]
    for tensor in held:
        if tensor.is_meta:
            zeros = _untouched_zeros(tensor)
            parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(zeros, tensor.requires_grad) if parameter else zeros
        else:
            memo[id(tensor)] = tensor
    on_meta = any(tensor.is_meta for tensor in held)
    owner = dispatcher_of(model)
    given, config = (model, None) if owner is None else (owner.module, owner.given)
    if on_meta:
        given = copy.deepcopy(given, memo)
    wrapped: Any = model if owner is not None and not on_meta else ORTModule(given, config=config)
    if not isinstance(wrapped, ORTModule):
        raise _core.UnsupportedError(f"{type(model).__name__} cannot be wrapped: PyTorch would run it")
    if on_meta:
        dispatcher_of(wrapped).compiler.checks = False  # a graph beside the module, with what parameters hold
    return wrapped, *_moved((args, kwargs))


def _moved(value: Any) -> Any:
    """``value`` with a stand-in for each tensor on the meta device."""
    return tree_map_only(torch.Tensor, lambda leaf: _stand_in(leaf) if leaf.is_meta else leaf, value)
