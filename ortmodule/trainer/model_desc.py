"""Checks a description of a module's inputs and outputs, and what a module gets and gives against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ortmodule.core.errors import ArgumentError, ArgumentTypeError

Axis = int | str


@dataclass(frozen=True)
class Described:
    """A tensor: its name, and a number or a symbol for each axis."""

    name: str
    axes: tuple[Axis, ...]
    is_loss: bool = False


class ModelDescription:
    """``{"inputs": [("x", ["batch", 784])], "outputs": [("loss", [], True), ("logits", ["batch", 10])]}``.

    Axes are numbers, or symbols: one symbol is one size in a step, in all tensors. One output is the loss, a scalar.
    Raises TypeError or ValueError, which names the entry, for a description that is none.
    """

    def __init__(self, given: Any) -> None:
        if not isinstance(given, Mapping):
            raise ArgumentTypeError(f"a model description is a dictionary with 'inputs' and 'outputs', not {given!r}")
        for key in given:
            if key not in ("inputs", "outputs"):
                raise ArgumentError(f"the model description has the key {key!r}: it has 'inputs' and 'outputs'")
        self.inputs = [_entry("input", i, entry) for i, entry in enumerate(_entries(given, "inputs"))]
        self.outputs = [_entry("output", i, entry) for i, entry in enumerate(_entries(given, "outputs"))]
        seen: set[str] = set()
        for entry in (*self.inputs, *self.outputs):
            if entry.name in seen:
                raise ArgumentError(f"the model description has two tensors of the name {entry.name}")
            seen.add(entry.name)
        losses = [entry for entry in self.outputs if entry.is_loss]
        if len(losses) != 1:
            found = ", ".join(entry.name for entry in losses) or "none"
            raise ArgumentError(f"one output of the model description is the loss, as ('loss', [], True): {found} is")
        if losses[0].axes not in ((), (1,)):
            raise ArgumentError(f"the loss {losses[0].name} is a scalar: its axes are [], not {list(losses[0].axes)}")
        self.loss = self.outputs.index(losses[0])
        self._known: set[tuple] = set()

    def check(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Raises ValueError, which names the tensor, for one that is not as described; TypeError for no tensor.

        ``inputs``, ``outputs``: as many as are described, or the first ones.
        """
        shapes = tuple([tuple(getattr(t, "shape", ())) for t in (*inputs, *outputs)])
        if (len(inputs), shapes) in self._known:
            return
        symbols: dict[str, tuple[int, str]] = {}
        for kind, described, tensors in (("input", self.inputs, inputs), ("output", self.outputs, outputs)):
            for entry, tensor in zip(described, tensors, strict=False):
                if not isinstance(tensor, torch.Tensor):
                    raise ArgumentTypeError(f"the {kind} {entry.name} is {type(tensor).__name__}, no tensor")
                _check(kind, entry, list(tensor.shape), symbols)
        self._known.add((len(inputs), shapes))


def _entries(given: Mapping[str, Any], key: str) -> Sequence[Any]:
    entries = given.get(key)
    if isinstance(entries, (str, bytes)) or not isinstance(entries, Sequence) or not entries:
        raise ArgumentTypeError(f"the model description has a list of {key}, not {entries!r}")
    return entries


def _entry(kind: str, place: int, given: Any) -> Described:
    most = 3 if kind == "output" else 2
    form = "(name, axes, is_loss)" if kind == "output" else "(name, axes)"
    if not isinstance(given, (tuple, list)) or not 2 <= len(given) <= most:
        raise ArgumentTypeError(f"{kind} {place} of the model description is {form}, not {given!r}")
    name, axes = given[:2]
    if not isinstance(name, str) or not name:
        raise ArgumentTypeError(f"{kind} {place} of the model description has the name {name!r}, no text")
    if not isinstance(axes, (tuple, list)):
        raise ArgumentTypeError(f"the {kind} {name} has the axes {axes!r}: a list of numbers and symbols")
    for axis in axes:
        if (
            isinstance(axis, bool)
            or not isinstance(axis, (int, str))
            or axis == ""
            or isinstance(axis, int)
            and axis < 0
        ):
            raise ArgumentTypeError(f"the {kind} {name} has the axis {axis!r}: a number or a symbol")
    if len(given) == 3 and not isinstance(given[2], bool):
        raise ArgumentTypeError(f"the output {name} is the loss, True, or not, False; not {given[2]!r}")
    return Described(name, tuple(axes), len(given) == 3 and given[2])


def _check(kind: str, entry: Described, shape: list[int], symbols: dict[str, tuple[int, str]]) -> None:
    described = f"{kind} {entry.name} is described as {list(entry.axes)}"
    if entry.is_loss and shape in ([], [1]):
        return
    if len(shape) != len(entry.axes):
        raise ArgumentError(f"the {described}, and has the shape {shape}")
    for axis, size in zip(entry.axes, shape, strict=True):
        if isinstance(axis, int):
            if axis != size:
                raise ArgumentError(f"the {described}, and has the shape {shape}")
            continue
        known, where = symbols.setdefault(axis, (size, entry.name))
        if known != size:
            raise ArgumentError(f"the {described}, and has the shape {shape}: {axis} is {known} in {where}")
