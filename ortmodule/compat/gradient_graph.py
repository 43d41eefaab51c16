"""Exports the graph of a module's loss with all gradients, under the original's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ortmodule.core.config import Config
from ortmodule.core.errors import CompatError
from ortmodule.core.names import DEFAULT_OPSET, OPSETS
from ortmodule.core.safe_files import write_whole
from ortmodule.module import ORTModule


class _Loss(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: tuple, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(*inputs), labels)


def export_gradient_graph(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], example_input: torch.Tensor | tuple[torch.Tensor, ...],
    example_labels: torch.Tensor, gradient_graph_path: Path | str, opset_version: int = DEFAULT_OPSET,
    dynamic_axes: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Writes the graph that the engine runs for ``loss_fn(model(example_input), example_labels)``, forward and
    backward, to an ONNX file: the loss and the gradients of all parameters.

    It is planned for the shapes of the examples (``dynamic_axes`` is accepted for old scripts), and operators of the
    engine (domain ``ortmodule``) are in it where passes have fused some. An older ``opset_version`` than the engine
    knows is the oldest that it does. Raises BypassError where PyTorch would have to run a part of the model.
    """
    inputs = example_input if isinstance(example_input, tuple) else (example_input,)
    opset = min(max(opset_version, OPSETS.start), OPSETS.stop - 1)
    wrapped = ORTModule(_Loss(model, loss_fn), config=Config(onnx_opset_version=opset, strict=True, defer_logits="0"))
    before = [p.grad for p in model.parameters()]
    try:
        wrapped(inputs, example_labels).backward()
    finally:
        for parameter, grad in zip(model.parameters(), before, strict=True):
            parameter.grad = grad
    graph = wrapped._ortmodule.latest
    parts = [] if graph is None else graph.parts()
    if len(parts) != 1:
        raise CompatError(f"{type(model).__name__} runs in {len(parts)} graphs, so there is none for the file")
    executable = next(reversed(parts[0].plans.values()))
    write_whole(Path(gradient_graph_path), executable.plan.onnx())
