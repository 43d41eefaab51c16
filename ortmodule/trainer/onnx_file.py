"""Writes a model as an ONNX file for inference, with the axes of a description."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import torch

from ortmodule.core.errors import MissingFileError, StateError
from ortmodule.core.settings.safe_files import write_whole
from ortmodule.trainer.model_desc import Described

OPSET = 17


class _Inference(torch.nn.Module):
    """Outputs in their order, of ``function``."""

    def __init__(self, model: torch.nn.Module, function: Any) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def save(
    path: str | os.PathLike[str], model: torch.nn.Module, function: Any, samples: Sequence[torch.Tensor],
    inputs: Sequence[Described], outputs: Sequence[Described],
) -> None:  # fmt: skip
    """``function(*samples)`` of ``model``, in eval mode, as a file that is written at once.

    Raises OSError for a place that cannot be written, RuntimeError for what the exporter of PyTorch does not take.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise MissingFileError(f"the model {path} cannot be written: {path.parent} is no folder")
    symbols = {
        entry.name: {i: axis for i, axis in enumerate(entry.axes) if isinstance(axis, str)}
        for entry in (*inputs, *outputs)
    }
    made, modes = io.BytesIO(), [(module, module.training) for module in model.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # an operator that ONNX does not have
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _Inference(model, function).eval(), tuple(samples), made,  # type: ignore[arg-type]  # the TorchScript exporter takes it
                dynamo=False, opset_version=OPSET,
                input_names=[entry.name for entry in inputs], output_names=[entry.name for entry in outputs],
                dynamic_axes={name: axes for name, axes in symbols.items() if axes},
            )  # fmt: skip
    except Exception as error:
        raise StateError(f"the model cannot be saved as ONNX: {error}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, training in modes:
            module.training = training
    onnx.checker.check_model(made.getvalue())
    write_whole(path, made.getvalue())
