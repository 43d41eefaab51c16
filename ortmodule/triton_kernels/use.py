"""Decides what a module's graphs have of Triton, by its settings, and saves kernels for a look at them.

``ORTMODULE_TRITON_DEBUG`` writes a folder ``triton_debug`` in the current one, with a folder for each kernel: the
nodes of the graph that it stands for (``original.txt``), its program (``processed.txt``), and its source
(``kernel.py``).
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

import onnx

from ortmodule import _core
from ortmodule.core.config import PREFIX, Config
from ortmodule.core.logger import warn_once
from ortmodule.core.settings.safe_files import write_whole
from ortmodule.triton_kernels.rules import Rules, read_rules
from ortmodule.triton_kernels.source import source_of

DEBUG_FOLDER = "triton_debug"
#: Passes that make of nodes, which a kernel could have, one that it cannot have.
PASSES_OFF = ("norm_residual", "embedding_norm", "softmax_dropout", "softmax_cast")
_read = functools.lru_cache(maxsize=16)(read_rules)


class TritonUse(NamedTuple):
    """``rules``: what becomes a kernel; ``saves``: kernels are written to :data:`DEBUG_FOLDER`."""

    rules: Rules
    saves: bool

    @staticmethod
    def of(config: Config) -> TritonUse | None:
        """None where the settings ask for nothing. ValueError for a file of rules that cannot be understood."""
        if config.use_triton:
            rules = _read(config.triton_config_file, config.onnx_opset_version)
            return TritonUse(rules._replace(flash=config.use_flash_attention), config.triton_debug)
        for name in ("triton_config_file", "triton_debug", "use_flash_attention"):
            if getattr(config, name):
                warn_once(f"{PREFIX}{name.upper()} has no effect without {PREFIX}USE_TRITON=1")
        return None

    def save(self, plan: _core.Plan) -> None:
        """Writes the kernels of a plan, each once; a warning where the folder cannot be written."""
        if not self.saves or not any(row[0].startswith("TritonChain") for row in plan.code()):
            return
        try:
            for node in onnx.load_model_from_string(plan.onnx()).graph.node:
                if node.op_type.startswith("TritonChain"):
                    _save({a.name: onnx.helper.get_attribute_value(a) for a in node.attribute})
        except OSError as error:
            warn_once(f"{PREFIX}TRITON_DEBUG: {DEBUG_FOLDER} cannot be written: {error}")


def _save(attributes: dict[str, bytes]) -> None:
    program, original = attributes["program"].decode(), attributes["original"].decode()
    folder = Path(DEBUG_FOLDER, "kernel_" + hashlib.sha256(program.encode()).hexdigest()[:16])
    if folder.exists():
        return
    folder.mkdir(parents=True)
    lines = program.splitlines()
    operands, results = sum(line.startswith("operand ") for line in lines), len(lines[-1].split()) - 1
    # As where every operand lies as the elements do.
    source = source_of(program, "D" * operands + "|" + "y" * results + "|")
    for name, text in (("original.txt", original), ("processed.txt", program), ("kernel.py", source.text)):
        write_whole(folder / name, text.encode())
