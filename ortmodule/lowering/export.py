"""Exports a TorchScript trace as ONNX bytes. The only file that knows an exporter.

The exporter is the TorchScript path of `torch.onnx.export`: it takes tenths of a second and captures nearly everything
that trains. It is entered with a trace that was made before (`trace.py`), so that two traces can be compared first and
the sizes that differ between them hidden: what the exporter does not see it cannot write into the graph.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import onnx
import torch
from torch import nn

from ortmodule.core.dtypes import as_pairs
from ortmodule.core.errors import ExportError
from ortmodule.core.names import INPUT
from ortmodule.core.objects.interception import Replacement, replaced
from ortmodule.core.torch_private import (
    EXPORTER_GLOBALS,
    TracedGraph,
    exporting_trace,
    quiet_exporter,
    register_symbolics,
    reset_trace_module_map,
    scope_name,
    setup_trace_module_map,
    symbolic_registry,
    tracer,
)
from ortmodule.lowering import (  # noqa: F401 (some: for their translations)
    draws,
    onnx_types,
    packed_sequence,
    shape_symbolics,
    symbolics,
)

#: The tracer and the exporter keep what they do in globals: one capture at a time in a process.
CAPTURING = threading.RLock()


@contextmanager
def tracing(module: nn.Module) -> Iterator[None]:
    """Around a trace: nodes get scopes, `torch.onnx.is_in_onnx_export()` is true, nothing is printed."""
    setup_trace_module_map(module, False)
    tracer._trace_module_map.update(_names_in_containers(module))
    before, EXPORTER_GLOBALS.in_onnx_export = EXPORTER_GLOBALS.in_onnx_export, True
    # Else the tracer copies what an autograd function does into its node, and fails where a tensor comes in a list.
    inlining, EXPORTER_GLOBALS.autograd_inlining = EXPORTER_GLOBALS.autograd_inlining, False
    try:
        with _quiet():
            # A cached cast of a weight would become a constant.
            torch.set_autocast_cache_enabled(False)
            yield
    finally:
        EXPORTER_GLOBALS.in_onnx_export, EXPORTER_GLOBALS.autograd_inlining = before, inlining
        reset_trace_module_map()


def _has_no_forward(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is nn.Module.forward  # the class of a scripted module may not say


def _names_in_containers(module: nn.Module) -> dict[nn.Module, str]:
    """The scopes of submodules of containers that never run, as a ModuleDict: they have the container's name, too.

    The exporter begins a name at its last part that is no number; the scope of a parent that runs has what is before.
    """
    modules, found = dict(module.named_modules()), {}
    for path, submodule in modules.items():
        parts = path.split(".")
        first = max((i for i, part in enumerate(parts) if not part.isnumeric()), default=0)
        begin = first
        while begin and _has_no_forward(modules[".".join(parts[:begin])]):
            begin -= 1
        if begin < first:
            found[submodule] = scope_name(torch.typename(type(submodule)), ".".join(parts[begin:]))
    return found


def export(
    graph: TracedGraph, results: Sequence[torch.Tensor], module: nn.Module, tensors: Sequence[torch.Tensor],
    varied: Set[tuple[int, int]], opset: int,
) -> onnx.ModelProto:  # fmt: skip
    """``graph``, traced from ``module(*tensors)`` with these results, as ONNX without weights. Consumes ``graph``.

    ``varied``: (tensor, dimension) pairs whose sizes differ from call to call.
    """
    names = [f"{INPUT}{i}" for i in range(len(tensors))]
    tensors = [as_pairs(tensor) for tensor in tensors]
    file = io.BytesIO()
    try:
        with exporting_trace(lambda *args: (graph, tuple(results))), _quiet(), symbolics.installed():
            torch.onnx.export(
                module,
                tuple(tensors),
                file,  # type: ignore[arg-type]  # torch takes a file, too, which its stub does not say
                dynamo=False,
                training=torch.onnx.TrainingMode.PRESERVE,
                do_constant_folding=False,
                export_params=False,
                keep_initializers_as_inputs=True,
                autograd_inlining=False,
                opset_version=opset,
                input_names=names,
                dynamic_axes={
                    name: {d: f"{name}/{d}" for d in range(t.dim()) if (i, d) in varied}
                    for i, (name, t) in enumerate(zip(names, tensors, strict=True))
                },
            )
    except Exception as error:
        raise ExportError(f"torch.onnx: {_first_line(error)}", symbolics.record.failed) from error
    return onnx.load_model_from_string(file.getvalue())


def knows(kind: str, opset: int) -> bool:
    """Can the exporter translate this operator (`aten::...`)?"""
    register_symbolics()
    name = kind.removesuffix("_")
    return symbolics.knows(name) or symbolic_registry.is_registered_op(name, opset)


def kinds_behind(operators: Iterable[str]) -> frozenset[str]:
    """The operators of the latest trace that became these of ONNX."""
    record = symbolics.record
    found = [record.made.get(operator) or record.inner.get(operator, set()) for operator in operators]
    return frozenset(kind for kinds in found for kind in kinds if kind.startswith("aten::"))


def _first_line(error: Exception) -> str:
    """Without the invitations and addresses that follow."""
    line = str(error).strip().partition("\n")[0]
    for rest in (" Please ", " [Caused by", " If you are trying"):
        line = line.partition(rest)[0]
    return line.strip() or type(error).__name__


class _Remarks(threading.local):
    shown = False


_remarks = _Remarks()


@contextmanager
def exporter_logs(on: bool) -> Iterator[None]:
    """Inside, in this thread, remarks of tracer and exporter are shown, or not."""
    before, _remarks.shown = _remarks.shown, on
    try:
        yield
    finally:
        _remarks.shown = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences tracer and exporter unless they are to be shown, and leaves torch's settings as they were.

    Shape inference over the whole graph is left out (it takes three quarters of an export, and the engine has its own),
    and so are torch's checks of its own passes.
    """
    cache = torch.is_autocast_cache_enabled()
    checked = replaced([Replacement(nn.RNNBase, "check_forward_args", _check_input)])
    try:
        with checked, quiet_exporter(onnx_types.settle, _verify_batch_size), warnings.catch_warnings():
            if not _remarks.shown:
                warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_autocast_cache_enabled(cache)


def _check_input(layer: nn.RNNBase, x: torch.Tensor, state: Any, batch_sizes: torch.Tensor | None) -> None:
    """torch's check of what a recurrent layer is given, without looks at a packed sequence: its operator checks it by
    itself, and the state."""
    if batch_sizes is None:
        layer.check_input(x, batch_sizes)


def _verify_batch_size(size: torch.Size) -> None:
    """torch's check of a normalisation's input, without the in-place product that the exporter remarks on."""
    values = size[0]
    for length in size[2:]:
        values = values * length
    if values == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
