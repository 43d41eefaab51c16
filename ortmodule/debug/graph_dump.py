"""Saves a module's graphs as ONNX files, for training and for inference (``DebugOptions(save_onnx=True)``).

``torch_exported``: what the exporter made; ``post_processed``: specialised to the shapes of the first call (both in
ONNX's operators as far as these can say it: see `ortmodule.debug.standard_form`);
``optimized_pre_grad``: after the passes that come before the gradient; ``optimized``: with the gradient, after all
passes; ``execution_model``: what runs, with the copies that kernels need. Without a gradient ``optimized_pre_grad`` and
``optimized`` are one graph.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from ortmodule import _core
from ortmodule.core.errors import SettingError
from ortmodule.core.logger import LOGGER
from ortmodule.core.onnx_utils import without_dead
from ortmodule.core.settings.safe_files import write_whole
from ortmodule.core.settings.setting_types import check_folder
from ortmodule.debug.standard_form import in_standard_form, name_apart
from ortmodule.runtime.dispatcher import Dispatcher

ALL_PASSES = sum(_core.passes().values())


class Saver:
    """Writes the first graph of each kind, and says what was captured to those who want to know."""

    def __init__(self, module: nn.Module, prefix: str, folder: str) -> None:
        self.module, self.prefix, self.folder = module, prefix, folder
        self._saved: set[str] = set()

    @staticmethod
    def of(owner: Dispatcher) -> Saver | None:
        """The saver that the module's options ask for, or None. Raises OSError for a folder that cannot be written,
        ValueError without a prefix."""
        config = owner.config
        if config.save_onnx and not config.onnx_prefix:
            raise SettingError("ORTMODULE_SAVE_ONNX=1 needs ORTMODULE_ONNX_PREFIX, with which the names of files begin")
        prefix = config.onnx_prefix if config.save_onnx else ""
        folder = config.save_onnx_path or "."
        if prefix:
            check_folder(folder, "the folder for ONNX files")
        elif not LOGGER.isEnabledFor(logging.INFO):
            return None
        return Saver(owner.module, prefix, folder)

    def save(self, graph: Any, call: Any) -> None:
        """``graph`` has run for ``call``, in the caller's mode. Its kind follows from the module's mode, as in ONNX
        Runtime's ORTModule, and not from whether anything in it has a gradient."""
        kind = "training" if self.module.training and torch.is_grad_enabled() else "inference"
        if kind in self._saved:
            return
        self._saved.add(kind)
        text = onnx.printer.to_text(graph.capture.model)
        LOGGER.info("%s: captured for %s:\n%s", type(self.module).__name__, kind, text)
        if not self.prefix:
            return
        parts = graph.parts()
        for number, part in enumerate(parts):
            piece = f"_piece{number}" if len(parts) > 1 else ""
            for stage, model in _stages(part).items():
                path = Path(self.folder, f"{self.prefix}_{stage}_{kind}{piece}.onnx")
                write_whole(path, model.SerializeToString())


def _stages(graph: Any) -> dict[str, onnx.ModelProto]:
    """The graph's stages by name, for the shapes that it ran last: models of their own."""
    key, executable = next(reversed(graph.plans.items()))
    model, session = executable.session.model, executable.session
    specs, needs, sizes = graph.executables.specs_for(key[0]), graph.needs, executable.sizes
    plain = model.plan(specs, needs, None, ALL_PASSES, sizes, session.calls())
    before = model.plan(specs, needs, None, session.disabled, sizes, session.calls(), session.padding_unseen)
    ran = executable.plan.onnx()
    exported = onnx.ModelProto()
    exported.CopyFrom(graph.capture.model)
    return {
        "torch_exported": in_standard_form(exported),
        "post_processed": in_standard_form(_without_copies(plain.onnx())),
        "optimized_pre_grad": name_apart(_without_copies(before.onnx())),
        "execution_model": name_apart(onnx.load_model_from_string(ran)),
        "optimized": name_apart(_without_copies(ran)),
    }


def _without_copies(data: bytes) -> onnx.ModelProto:
    """Without the copies that only kernels need."""
    model = onnx.load_model_from_string(data)
    kept = {value.name for value in model.graph.output}
    source: dict[str, str] = {}
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = source.get(name, name)
        if node.op_type == "Contiguous" and node.output[0] not in kept:
            source[node.output[0]] = node.input[0]
    return without_dead(model)
