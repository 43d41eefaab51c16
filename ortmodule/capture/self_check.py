"""Checks that a captured graph computes what the module computes.

A trace can differ from the module without an error: code that asks whether it is traced, a change through a view, a
mistake of the exporter. So before a graph is used it runs once, on the small inputs that it was traced on, beside the
module in PyTorch, without dropout on either side, and the results are compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import onnx
import torch

from ortmodule.capture.dynamic_dims import Capture
from ortmodule.capture.trace_mode import memory_of
from ortmodule.core import pytree
from ortmodule.core.dtypes import as_pairs
from ortmodule.core.errors import Raised
from ortmodule.core.names import INPUT, STATE
from ortmodule.core.tolerance import TOLERANCE, is_rounding, rounded
from ortmodule.core.torch_private import TorchDispatchMode
from ortmodule.engine.session import Session
from ortmodule.guards.module_tree import Tree
from ortmodule.host.fallback import only_pytorch

#: Operators whose results have sizes that values decide.
_SIZED_BY_DATA = frozenset(("NonZero", "Compress", "Unique"))
_NARROW = {onnx.TensorProto.FLOAT16: torch.float16, onnx.TensorProto.BFLOAT16: torch.bfloat16}


def difference(capture: Capture, forward: Callable, arguments: pytree.Structure, tree: Tree) -> str:
    """Where the graph's results differ from those of ``forward``, or an empty string. Raises what the engine raises.

    Parameters that are nothing but zeros, as biases are at first, and all of an adapter's or a gated layer's last
    matrix, would hide what is computed before them: they have other values here, the same on both sides. Not so where
    values decide what forward does.
    """
    if not capture.trace.nodes and not capture.trace.data_reads and (filled := _nonzero_parameters(tree)):
        with contextlib.suppress(_Elsewhere):
            return _difference(capture, forward, arguments, tree, filled)
    return _difference(capture, forward, arguments, tree, {})


def _difference(
    capture: Capture, forward: Callable, arguments: pytree.Structure, tree: Tree, filled: dict[_Key, torch.Tensor]
) -> str:
    inputs = capture.sample

    def in_pytorch(change: Callable | None = None) -> tuple[list[torch.Tensor], bool]:
        """What the module gives; whether it draws random numbers. ``change``: of inputs and parameters before."""

        def given(t: torch.Tensor) -> torch.Tensor:
            return t if change is None else change(t)

        with tree.isolated(), tree.unhooked():
            if change is not None or filled:
                tree.replace_parameters(lambda p: given(filled.get(_key(p), p)))
            alike = [given(t.detach()).clone().requires_grad_(t.requires_grad) for t in inputs]
            args, kwargs = arguments.rebuild(alike)
            with only_pytorch(), _KeepAll(filled) as recorder:
                result = forward(*args, **kwargs)
                sets = [slot.find() for slot in capture.trace.sets]
                return [t.detach() for t in pytree.flatten((result, sets), results=True)[0]], recorder.random

    expected, random = in_pytorch()
    sources = [source for source in capture.trace.sources if source.kind != "number"]
    if len(sources) != len(expected):
        return f"there are {len(expected)} tensors in the module's result, {len(sources)} in the graph's"
    session = Session(_without_dropout(capture.model).SerializeToString(), nodes=capture.trace.nodes)
    feeds = [
        inputs[int(name.removeprefix(INPUT))] if name.startswith(INPUT) else tree.slots[name.removeprefix(STATE)].get()
        for name in session.inputs
    ]
    feeds = [as_pairs(filled.get(_key(t), t).detach()).contiguous() for t in feeds]
    if not capture.trace.nodes:
        found = session.run(feeds, [False] * len(feeds)).outputs
    else:
        with tree.isolated(), tree.unhooked(), only_pytorch(), _KeepAll(()):
            try:
                found = session.run([t.clone() for t in feeds], [False] * len(feeds)).outputs
            except Raised as raised:
                return f"{type(raised.error).__name__}: {raised.error}"
    if random:  # the numbers are others, but not their types, nor sizes that do not hang on them
        sized = not any(node.op_type in _SIZED_BY_DATA for node in capture.model.graph.node)
        for i, (source, tensor) in enumerate(zip(sources, expected, strict=True)):
            if source.kind == "graph" and (kinds := _other_kind(found[source.key], tensor, sized)):
                return f"tensor {i} of the result {kinds}"
        return ""
    least = _narrowest(capture.model, dict(zip(session.inputs, feeds, strict=True)))
    for i, (source, tensor) in enumerate(zip(sources, expected, strict=True)):
        if source.kind == "graph" and (text := _tensor_difference(found[source.key], tensor, least)):
            moved = in_pytorch(rounded)[0]
            if len(moved) == len(expected) and is_rounding(found[source.key], tensor, moved[i]):
                continue
            return f"tensor {i} of the result {text}"
    return ""


# --- parameters that are zeros ----------------------------------------------------------------------------------------

_Key = tuple[int, int, torch.Size]  #: where a parameter lies, in which memory, and how large it is


class _Elsewhere(Exception):
    """Forward has a parameter from elsewhere than its module."""


def _key(tensor: torch.Tensor) -> _Key:
    return memory_of(tensor), tensor.storage_offset(), tensor.shape


def _nonzero_parameters(tree: Tree) -> dict[_Key, torch.Tensor]:
    """Other values for parameters of zeros: positive ones, which roots and logarithms have results for."""
    found: dict[_Key, torch.Tensor] = {}
    for slot in tree.parameters:
        p = slot.get().detach()
        if type(p) is not torch.Tensor or not p.is_floating_point() or not p.numel() or not _is_zero(p):
            continue
        generator = torch.Generator(p.device).manual_seed(p.numel())
        width = p[0].numel() if p.dim() > 1 else 16
        made = torch.rand(p.shape, generator=generator, device=p.device) / 2 + 0.5
        found[_key(p)] = (made / width**0.5).to(p.dtype)
    return found


def _is_zero(tensor: torch.Tensor) -> bool:
    return not tensor.reshape(-1)[:64].any() and not tensor.any()


def _tensors(arguments: Sequence) -> Iterator[torch.Tensor]:
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (tuple, list)):
            yield from _tensors(each)


def _narrowest(model: onnx.ModelProto, feeds: dict[str, torch.Tensor]) -> float:
    """The tolerance of the narrowest type of a float that the graph computes with, as under autocast.

    float32 counts where a float64 tensor becomes one, not where a size does.
    """
    types = {tensor.dtype for tensor in feeds.values()}
    wide = {name for name, tensor in feeds.items() if tensor.dtype is torch.float64}
    for node in model.graph.node:
        to = next((attribute.i for attribute in node.attribute if attribute.name == "to"), None)
        if node.op_type == "Cast" and (to in _NARROW or (to == onnx.TensorProto.FLOAT and node.input[0] in wide)):
            types.add(_NARROW.get(to, torch.float32))
        elif node.op_type not in ("Shape", "Size") and not wide.isdisjoint(node.input):
            wide.update(node.output)
    return max((TOLERANCE[dtype] for dtype in types & TOLERANCE.keys()), default=0.0)


def _other_kind(found: torch.Tensor, expected: torch.Tensor, sized: bool = True) -> str:
    """How devices, types or sizes differ (``sized``), or types or ranks."""
    if found.device != expected.device:
        return f"is on {found.device}, not on {expected.device}"
    shapes = [t.shape if sized else t.dim() for t in (found, expected)]
    if shapes[0] == shapes[1] and found.dtype == expected.dtype:
        return ""
    kinds = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (found, expected)]
    return "is {}, not {}".format(*kinds)


def _tensor_difference(found: torch.Tensor, expected: torch.Tensor, least: float) -> str:
    if kinds := _other_kind(found, expected):
        return kinds
    tolerance = TOLERANCE.get(expected.dtype)
    if tolerance is None:
        return "" if torch.equal(found, expected) else "is not the same"
    tolerance = max(tolerance, least)
    found, expected = (t if t.dtype is torch.float64 else t.float() for t in (found, expected))
    off, largest = (found - expected).abs(), expected.abs().nan_to_num(posinf=0.0)
    # Infinities that agree leave NaN behind, like NaN themselves: they have to be in the same places.
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return "is not finite in the same places"
    if not off.numel():
        return ""
    off, largest = off.nan_to_num().max().item(), largest.max().item()
    return "" if off <= tolerance * largest + 1e-30 else f"is off by {off:.3g} of {largest:.3g}"


# --- without dropout --------------------------------------------------------------------------------------------------


class _KeepAll(TorchDispatchMode):
    """Dropout changes nothing: its mask is constant, and scaled back to ones. ``random``: other numbers are drawn."""

    def __init__(self, filled: Iterable[_Key]) -> None:
        """Raises :class:`_Elsewhere` where one of those tensors is used that ``filled`` stands for."""
        super().__init__()
        self.random = False
        self._replaced = {memory for memory, *_ in filled}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would first import it, for a second

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self._replaced and any(memory_of(t) in self._replaced for t in _tensors(args)):
            raise _Elsewhere
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **(kwargs or {}))
        if function is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        if function is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        names = [argument.name for argument in function._schema.arguments]
        if "dropout_p" in names:  # attention, which only draws numbers for its dropout
            place = names.index("dropout_p")
            if place < len(args):
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs = {k: v for k, v in (kwargs or {}).items() if k != "dropout_p"}
        else:
            self.random = True
        return function(*args, **(kwargs or {}))


def _without_dropout(model: onnx.ModelProto) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for node in changed.graph.node:
        if node.op_type == "Dropout":
            node.op_type = "Identity"
            del node.input[1:], node.output[1:], node.attribute[:]
    return changed
