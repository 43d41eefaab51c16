"""Prints memory and padding of every step (``ORTMODULE_PRINT_MEMORY_STATS``, ``ORTMODULE_PRINT_INPUT_DENSITY``)."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import nn

from ortmodule import _core
from ortmodule.core import pytree
from ortmodule.core.logger import Log
from ortmodule.core.names import INPUT
from ortmodule.core.onnx_utils import attributes, without_dead
from ortmodule.runtime.autograd_bridge import backward_nodes
from ortmodule.runtime.compiled_graph import CompiledGraph
from ortmodule.runtime.lm_head import LOSSES

#: Steps between two tables of densities.
EVERY = 10
MEGABYTE = 2**20


# --- memory -----------------------------------------------------------------------------------------------------------


class Memory:
    """Says before and after each forward and backward how much memory the engine's large blocks take, in MiB."""

    def __init__(self, log: Log) -> None:
        self.log, self.steps = log, itertools.count()
        self._inactive = 0

    def before_forward(self, graph: CompiledGraph, call: Any) -> Callable[[Any], None]:
        step = next(self.steps)
        self._say(step, "before forward")

        def after_forward(result: Any) -> None:
            self._say(step, "after forward")
            for node in backward_nodes(pytree.flatten(result, results=True)[0]):
                node.register_prehook(lambda given: self._say(step, "before backward"))
                node.register_hook(lambda got, given: self._say(step, "after backward"))

        return after_forward

    def _say(self, step: int, when: str) -> None:
        now = _core.memory()
        self._inactive = max(self._inactive, now["kept"])
        cached = now["used"] + now["kept"]
        figures = {
            "allocated": now["used"],
            "max allocated": now["peak"],
            "cached": cached,
            "max cached": max(cached, now["peak"]),
            "inactive": now["kept"],
            "max inactive": self._inactive,
        }
        text = " | ".join(f"{name}: {size / MEGABYTE:.1f}" for name, size in figures.items())
        self.log.always(f"step {step} memory (MiB) | {when} | {text}")


# --- density ----------------------------------------------------------------------------------------------------------

# Operators whose result holds elements of their first operand, with their values.
_SAME_VALUES = {"Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Transpose", "Slice", "Contiguous"}


@dataclass(frozen=True)
class Padded:
    """An input of the graph in which one value means nothing."""

    kind: str  # EMBED or LABEL
    index: int  # of the input
    padding: int


def padded_inputs(model: onnx.ModelProto) -> Iterator[Padded]:
    """Tokens that an embedding with a padding index looks up, and labels of a loss that ignores a value."""
    makers = {name: node for node in model.graph.node for name in node.output}
    found = set()
    for node in without_dead(model).graph.node:
        values = attributes(node)
        if (node.domain, node.op_type) == ("ortmodule", "Embedding") and values.get("padding_idx", -1) >= 0:
            kind, padding = "EMBED", values["padding_idx"]
        elif node.op_type in LOSSES:
            kind, padding = "LABEL", values.get("ignore_index", -100)
        else:
            continue
        name = node.input[1]
        while name in makers and makers[name].op_type in _SAME_VALUES:
            name = makers[name].input[0]
        if name.startswith(INPUT) and (kind, name) not in found:
            found.add((kind, name))
            yield Padded(kind, int(name.removeprefix(INPUT)), padding)


def valid_elements(padded: Padded, tensor: torch.Tensor) -> torch.Tensor:
    """Which of them mean something."""
    return tensor != padded.padding


class Density:
    """A table, at every EVERY-th step, of how much of the token and label inputs is not padding."""

    _COLUMNS = ("STEP", "INPUT TYPE", "INPUT NAME", "PAD IDX", "DENSITY", "VALID TOKENS", "TOTAL TOKENS",
                "VALID TOKENS/BATCH")  # fmt: skip

    def __init__(self, module: nn.Module, log: Log) -> None:
        self.module, self.log, self.steps = module, log, 0
        self._inputs: weakref.WeakKeyDictionary[CompiledGraph, list[Padded]] = weakref.WeakKeyDictionary()
        self._rows: list[tuple[str, ...]] = []

    def before_forward(self, graph: CompiledGraph, call: Any) -> None:
        if graph not in self._inputs:
            self._inputs[graph] = list(padded_inputs(graph.capture.model))
        names = input_names(self.module, call.arguments, len(call.inputs))
        self._rows += [self._row(padded, call.inputs[padded.index], names) for padded in self._inputs[graph]]
        self.steps += 1
        if self.steps % EVERY == 0 and self._rows:
            self.log.always("input density\n" + table([self._COLUMNS, *self._rows]))
            self._rows.clear()

    def _row(self, padded: Padded, tensor: torch.Tensor, names: list[str]) -> tuple[str, ...]:
        valid = valid_elements(padded, tensor)
        count, total = int(valid.sum()), valid.numel()
        each = valid.reshape(len(valid), -1).sum(1).tolist() if valid.dim() else [count]
        return (
            str(self.steps),
            padded.kind,
            names[padded.index],
            str(padded.padding),
            f"{100 * count / total:.2f} %",
            str(count),
            str(total),
            str(each),
        )


def table(rows: list[tuple[str, ...]]) -> str:
    """The rows as text, the first as a head."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


class _Place:
    """Stands for a tensor among the arguments."""


def input_names(module: nn.Module, arguments: pytree.Structure, count: int) -> list[str]:
    """What forward calls the tensors of a call: `input_ids`, `batch.mask`, `states.0`."""
    places = [_Place() for _ in range(count)]
    args, kwargs = arguments.outline(places)
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = dict(enumerate(args)) | kwargs
    names: dict[int, str] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, _Place):
            names.setdefault(id(value), path)
        elif isinstance(value, dict):
            for key, part in value.items():
                walk(part, f"{path}.{key}" if path else str(key))
        elif isinstance(value, (list, tuple)):
            for i, part in enumerate(value):
                walk(part, f"{path}.{i}")
        elif hasattr(value, "__dict__"):
            walk(vars(value), path)

    walk(dict(bound), "")
    return [names.get(id(place), str(i)) for i, place in enumerate(places)]
