"""One trace of a module, as ONNX bytes. The only file that knows an exporter.

The exporter is the TorchScript path of `torch.onnx.export`: it takes tenths of a second and captures nearly everything
that trains. The module is traced on small inputs, in its own modes, with every tensor it holds as a graph input (so no
weight enters the bytes), and with everything that forward changes as an extra output. Whether the graph holds for
other sizes and values is decided elsewhere (`capture.py`), by comparing two traces.
"""

from __future__ import annotations

import io as bytes_io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ortmodule import io, reads, symbolics
from ortmodule.reads import NotTraceable
from ortmodule.state import Tree

OPSETS = range(17, 21)
DEFAULT_OPSET = 18

#: Names in the graph: `input/0`, ..., and `state/` with the path of a parameter, buffer or plain tensor.
INPUT, STATE = "input/", "state/"

#: The exporter keeps what it does in globals: one export at a time in a process.
EXPORTING = threading.Lock()


class ExportError(Exception):
    """The exporter refused the module, or forward raised; the sentence is for the user."""


@dataclass
class Source:
    """Where a tensor of the result comes from: ("graph", output), ("input", number) or ("state", name)."""

    kind: str
    key: Any


@dataclass
class Write:
    """A tensor that forward changes: ``target`` as in Source, ``output`` of the graph, a new object or new contents."""

    target: Source
    output: int | None  # None: the graph's own operators write it (BatchNormalization)
    replaces: bool


@dataclass
class Trace:
    """A captured graph and how it meets Python."""

    model: onnx.ModelProto
    result: io.Structure
    sources: list[Source]  # of the result's tensors
    requires_grad: list[bool]  # of the first graph outputs: those of the result
    writes: list[Write]
    size_reads: list[reads.Read]
    data_reads: list[reads.Read]
    examples: list[torch.Tensor] = field(repr=False)  # what the first graph outputs were in this trace

    @property
    def n_outputs(self) -> int:
        """Graph outputs that belong to the result; writes, size reads and data reads follow in this order."""
        return len(self.requires_grad)


def trace(
    forward: Callable, module: nn.Module, tree: Tree, arguments: io.Structure, tensors: Sequence[torch.Tensor], opset: int
) -> Trace:
    """Traces ``forward(*args, **kwargs)`` of ``module`` on ``tensors`` in the places that ``arguments`` has for them.

    The module, its buffers and all random generators are left as they were. Raises NotTraceable or ExportError.
    """
    stops = _GradientStops() if torch.is_grad_enabled() else nullcontext()
    with tree.isolated() as copies, reads.recording() as recorder, stops:
        flat = _Flat(forward, module, tree, arguments, copies, recorder)
        model = _export(flat, tuple(tensors), opset)
    return flat.finish(model)


# --- the module that the exporter sees ------------------------------------------------------------------------------------


class _Flat(nn.Module):
    """Flat tensors in, flat tensors out; its state is every tensor of the user's module, by our names."""

    def __init__(
        self,
        forward: Callable,
        module: nn.Module,
        tree: Tree,
        arguments: io.Structure,
        copies: dict[str, torch.Tensor],
        recorder: reads.Recorder,
    ) -> None:
        super().__init__()
        self.model = module  # named as a child only for the scopes in node names
        self.training = module.training
        self.call, self.tree, self.arguments, self.copies, self.recorder = forward, tree, arguments, copies, recorder
        self.error: Exception | None = None

    def state_dict(self, *args: Any, destination: dict | None = None, prefix: str = "", keep_vars: bool = False) -> dict:
        destination = {} if destination is None else destination
        for slot in self.tree.slots.values():
            tensor = slot.get()
            destination[STATE + slot.name] = tensor if keep_vars else tensor.detach()
        return destination

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        try:
            return self._forward(tensors)
        except Exception as error:
            self.error = error
            raise

    def _forward(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        parameters = [slot.get() for slot in self.tree.parameters]
        versions = [t._version for t in (*tensors, *parameters, *self.copies.values())]
        attributes = self.tree.attributes()
        args, kwargs = self.arguments.rebuild(tensors)
        result = self.call(*args, **kwargs)
        with self.recorder.paused():
            inside, left = io.flatten((args, kwargs))
            if left != self.arguments or any(a is not b for a, b in zip(inside, tensors, strict=True)):
                raise NotTraceable("forward puts something else into a container that it was given")
            versions = iter(versions)
            changed = [t._version != next(versions) for t in tensors]
            for slot, tensor in zip(self.tree.parameters, parameters, strict=True):
                if slot.get() is not tensor or tensor._version != next(versions):
                    raise NotTraceable(f"forward changes the parameter {slot.name}")
            for name in self.tree.changed(attributes):
                raise NotTraceable(f"forward sets the attribute {name}")
            outputs = self._results(result, tensors, parameters)
            outputs += self._writes(tensors, changed, versions)
            for read in (self.recorder.of(reads.SIZE), self.recorder.of(reads.DATA)):
                outputs += [torch.stack([r.tensor.detach().to(torch.float64) for r in read])] if read else []
        if not outputs:
            raise NotTraceable("forward computes nothing")
        return tuple(outputs)

    def _results(self, result: Any, tensors: Sequence, parameters: Sequence) -> list[torch.Tensor]:
        leaves, self.result = io.flatten(result, results=True)
        known = {id(t): Source("input", i) for i, t in enumerate(tensors)}
        known |= {id(t): Source("state", slot.name) for slot, t in zip(self.tree.parameters, parameters, strict=True)}
        known |= {id(t): Source("state", name) for name, t in self.copies.items()}
        self.sources, outputs = [], []
        for tensor in leaves:
            if id(tensor) not in known:
                known[id(tensor)] = Source("graph", len(outputs))
                outputs.append(tensor)
            self.sources.append(known[id(tensor)])
        self.requires_grad = [t.requires_grad for t in outputs]
        self.examples = [t.detach() for t in outputs]
        return outputs

    def _writes(self, tensors: Sequence, changed: Sequence[bool], versions: Iterator[int]) -> list[torch.Tensor]:
        """New contents of the inputs, buffers and plain tensors that forward changed."""
        self.writes, outputs = [], []

        def add(target, tensor, replaces):
            if tensor.requires_grad:
                raise NotTraceable(f"forward gives {target.kind} {target.key} a new value that carries a gradient")
            if not replaces and torch._C._get_value_trace(tensor).node().kind() == "prim::Param":
                self.writes.append(Write(target, None, False))
                return
            self.writes.append(Write(target, len(self.requires_grad) + len(outputs), replaces))
            outputs.append(tensor)

        for i, tensor in enumerate(tensors):
            if changed[i]:
                add(Source("input", i), tensor, False)
        for slot in self.tree.others:
            copy, now, version = self.copies[slot.name], slot.holder.get(slot.key), next(versions)
            if now is not copy and not isinstance(now, torch.Tensor):
                raise NotTraceable(f"forward removes {slot.name}")
            if now is not copy or copy._version != version:
                add(Source("state", slot.name), now, now is not copy)
        return outputs

    def finish(self, model: onnx.ModelProto) -> Trace:
        self._check_own_writes(model)
        kept = [self.recorder.of(kind) for kind in (reads.SIZE, reads.DATA)]
        for read in self.recorder.reads:
            read.tensor = None
        examples = [t.detach() for t in self.examples]
        return Trace(model, self.result, self.sources, self.requires_grad, self.writes, *kept, examples)

    def _check_own_writes(self, model: onnx.ModelProto) -> None:
        """A buffer that changed without a trace must be one that BatchNormalization updates."""
        covered = set()
        for node in model.graph.node:
            if node.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in node.attribute):
                covered |= set(node.input[3:5])
        for write in self.writes:
            if write.output is None and (write.target.kind != "state" or STATE + write.target.key not in covered):
                raise NotTraceable(f"forward changes {write.target.kind} {write.target.key} in a way that is not traced")


class _GradientStops(TorchFunctionMode):
    """Makes visible to the trace where autograd stops: inside `torch.no_grad()`, and at `tensor.data`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.data.__get__:
            return args[0].detach()
        result = function(*args, **(kwargs or {}))
        if torch.is_grad_enabled() or not any(_follows(x) for x in (*args, *(kwargs or {}).values())):
            return result
        if isinstance(result, torch.Tensor):
            return _stopped(result)
        return type(result)(map(_stopped, result)) if type(result) in (tuple, list) else result


def _follows(argument: Any) -> bool:
    if isinstance(argument, (tuple, list)):
        return any(map(_follows, argument))
    return isinstance(argument, torch.Tensor) and argument.requires_grad


def _stopped(result: Any) -> Any:
    stops = isinstance(result, torch.Tensor) and result.is_floating_point() and not result.requires_grad
    return result.detach() if stops else result


# --- the exporter ---------------------------------------------------------------------------------------------------------


def _export(flat: _Flat, tensors: tuple[torch.Tensor, ...], opset: int) -> onnx.ModelProto:
    """Without the pass that takes most of the exporter's time; with it when that is what makes the export fail."""
    for shape_inference in (False, True):
        file = bytes_io.BytesIO()
        names = [f"{INPUT}{i}" for i in range(len(tensors))]
        flat.error = None
        flat.recorder.reset()
        try:
            with _quiet(shape_inference), symbolics.installed():
                torch.onnx.export(
                    flat,
                    tensors,
                    file,
                    dynamo=False,
                    training=torch.onnx.TrainingMode.PRESERVE,
                    do_constant_folding=False,
                    export_params=False,
                    keep_initializers_as_inputs=True,
                    autograd_inlining=False,
                    opset_version=opset,
                    input_names=names,
                    dynamic_axes={n: {d: f"{n}/{d}" for d in range(t.dim())} for n, t in zip(names, tensors, strict=True)},
                )
            return onnx.load_model_from_string(file.getvalue())
        except Exception as error:
            if isinstance(flat.error, (NotTraceable, io.Unflattenable)):
                raise NotTraceable(str(flat.error)) from None
            if flat.error is not None:
                raise ExportError(f"{type(flat.error).__name__}: {flat.error}") from flat.error
            if shape_inference:
                raise ExportError(f"torch.onnx: {_first_lines(error)}") from error
    raise AssertionError


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def _quiet(shape_inference: bool) -> Iterator[None]:
    """Silences the exporter, and leaves torch's settings as they were.

    The inference of shapes over the whole graph takes three quarters of an export, and the engine does its own.
    """
    logger = logging.getLogger("torch.onnx")
    level, cache = logger.level, torch.is_autocast_cache_enabled()
    nothing = ["_jit_onnx_log"] + [] if shape_inference else ["_jit_onnx_log", "_jit_pass_onnx_graph_shape_type_inference"]
    replaced = [(torch._C, name, lambda *args: None) for name in nothing]
    replaced.append((nn.functional, "_verify_batch_size", _verify_batch_size))
    originals = [getattr(owner, name) for owner, name, _ in replaced]
    try:
        for owner, name, function in replaced:
            setattr(owner, name, function)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logger.setLevel(logging.ERROR)
            yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)
        logger.setLevel(level)
        torch.set_autocast_cache_enabled(cache)


def _verify_batch_size(size: torch.Size) -> None:
    """torch's check of a normalisation's input, without the in-place product that the exporter remarks on."""
    values = size[0]
    for length in size[2:]:
        values = values * length
    if values == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
