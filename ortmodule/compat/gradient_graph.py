"""Exports the graph of a module's loss with all gradients, under the original's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

from ortmodule.core.config import Config
from ortmodule.core.errors import CompatError
from ortmodule.core.names import DEFAULT_OPSET, INPUT, OPSETS, STATE
from ortmodule.core.objects.dispatchers import dispatcher_of
from ortmodule.core.onnx_utils import without_dead
from ortmodule.core.settings.safe_files import write_whole
from ortmodule.debug.graph_dump import ALL_PASSES
from ortmodule.debug.standard_form import in_standard_form
from ortmodule.module import ORTModule

#: What names of the module's state begin with in the graph, and the metadata of a plan that says where gradients are.
_STATE, _GRADIENT = f"{STATE}model.", "gradient of "


class _Loss(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: tuple, labels: torch.Tensor) -> tuple[Any, torch.Tensor]:
        result = self.model(*inputs)
        return result, self.loss(result, labels)


def export_gradient_graph(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], example_input: torch.Tensor | tuple[torch.Tensor, ...],
    example_labels: torch.Tensor, gradient_graph_path: Path | str, opset_version: int = DEFAULT_OPSET,
    dynamic_axes: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Writes the graph of ``loss_fn(model(example_input), example_labels)``, forward and backward, to an ONNX file.

    Its inputs are ``input`` (``input_0`` and so on where there are several), ``labels``, and the parameters and buffers
    by their names; its outputs ``output`` (what the module returns), ``loss`` and ``<parameter>_grad``. It is as it is
    before passes, in ONNX's operators as far as these can say it: of linear layers and activations it opens in ONNX
    Runtime, not with dropout or a cross entropy. It is made for the shapes of the examples (``dynamic_axes`` is
    accepted for old scripts). An older ``opset_version`` than the engine knows is the oldest that it does. Raises
    BypassError where PyTorch would have to run a part of the model.
    """
    inputs = example_input if isinstance(example_input, tuple) else (example_input,)
    opset = min(max(opset_version, OPSETS.start), OPSETS.stop - 1)
    wrapped = ORTModule(_Loss(model, loss_fn), config=Config(onnx_opset_version=opset, strict=True, defer_logits="0"))
    before = [p.grad for p in model.parameters()]
    try:
        wrapped(tuple(each.detach() for each in inputs), example_labels)[1].backward()
    finally:
        for parameter, grad in zip(model.parameters(), before, strict=True):
            parameter.grad = grad
    graph = dispatcher_of(wrapped).latest
    parts = [] if graph is None else graph.parts()
    if len(parts) != 1:
        raise CompatError(f"{type(model).__name__} runs in {len(parts)} graphs, so there is none for the file")
    key, executable = next(reversed(parts[0].plans.items()))
    grads = [spec is not None for spec in executable.plan.output_grads]
    specs = parts[0].executables.specs_for(key[0])
    session = executable.session
    plan = session.model.plan(specs, parts[0].needs, grads, ALL_PASSES, executable.sizes, session.calls())
    sources = parts[0].capture.trace.sources
    if any(source.kind != "graph" for source in sources):
        raise CompatError(f"{type(model).__name__} gives back what it is given: the graph has no such output")
    results = [source.key for source in sources]
    made = _named(onnx.load_model_from_string(plan.onnx()), len(inputs), results)
    write_whole(Path(gradient_graph_path), in_standard_form(made).SerializeToString())


def _named(model: onnx.ModelProto, inputs: int, results: list[int]) -> onnx.ModelProto:
    """``model``, of a plan, with the original's names of inputs and outputs. ``inputs``: how many the module has;
    ``results``: which outputs are its results, and the loss. The others but the gradients go: sizes that Python read,
    what forward writes."""
    graph = model.graph
    gradients = {p.value: p.key.removeprefix(_GRADIENT) for p in model.metadata_props if p.key.startswith(_GRADIENT)}
    names: dict[str, str] = {}
    for value in list(graph.input):
        if value.name.startswith(INPUT):
            number = int(value.name.removeprefix(INPUT))
            names[value.name] = "labels" if number == inputs else "input" if inputs == 1 else f"input_{number}"
        elif value.name.startswith(_STATE):
            names[value.name] = value.name.removeprefix(_STATE)
        else:  # the gradient of the loss
            graph.initializer.append(numpy_helper.from_array(np.ones((), _type(value)), value.name))
            graph.input.remove(value)
    *outputs, loss = [graph.output[i] for i in results]
    for number, value in enumerate(outputs):
        names[value.name] = "output" if len(outputs) == 1 else f"output_{number}"
    names[loss.name] = "loss"
    kept = [*outputs, loss, *(value for value in graph.output if value.name in gradients)]
    del graph.output[:]
    graph.output.extend(kept)
    for value in kept:
        source = gradients.get(value.name, _STATE)
        if source.startswith(_STATE) and value.name in gradients:
            names[value.name] = f"{source.removeprefix(_STATE)}_grad"
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(name, name) for name in values]
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    del model.metadata_props[:]
    return without_dead(model)


def _type(value: onnx.ValueInfoProto) -> np.dtype:
    return onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
