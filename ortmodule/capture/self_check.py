"""Checks that a captured graph computes what the module computes.

A trace can differ from the module without an error: code that asks whether it is traced, a change through a view, a
mistake of the exporter. So before a graph is used it runs once, on the small inputs that it was traced on, beside the
module in PyTorch, and the results are compared. Nothing is left to chance: dropout drops nothing on either side, any
other draw of the engine's is one number of its distribution on both, and what PyTorch draws inside the graph it draws
from the same state of its generator.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import onnx
import torch

from ortmodule.capture.dynamic_dims import Capture
from ortmodule.core import devices, pytree, rng_state
from ortmodule.core.dtypes import as_pairs
from ortmodule.core.errors import FromElsewhere, Raised
from ortmodule.core.names import INPUT, STATE
from ortmodule.core.objects.tensor_copies import with_attributes
from ortmodule.core.objects.tensor_memory import memory_of
from ortmodule.core.onnx_utils import OF_SIZES, RANDOM, attributes
from ortmodule.core.tolerance import TOLERANCE, is_rounding, rounded
from ortmodule.core.torch_private import TorchDispatchMode, unvalidated
from ortmodule.engine.autotune import Tuning
from ortmodule.engine.session import Session
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.sharding.collectives import alone
from ortmodule.host.escapes import changed_by_breaks
from ortmodule.host.fallback import only_pytorch
from ortmodule.lowering import draws

#: Operators whose results have sizes that values decide.
_SIZED_BY_DATA = frozenset(("NonZero", "Compress", "Unique"))
_NARROW = {onnx.TensorProto.FLOAT16: torch.float16, onnx.TensorProto.BFLOAT16: torch.bfloat16}


def difference(
    capture: Capture, forward: Callable, arguments: pytree.Structure, tree: Tree, tuning: Tuning | None = None
) -> str:
    """Where the graph's results differ from those of ``forward``, or an empty string. Raises what the engine raises.

    Parameters that are nothing but zeros, as biases are at first, and all of an adapter's or a gated layer's last
    matrix, would hide what is computed before them: they have other values here, the same on both sides. Not so where
    values decide what forward does. ``tuning``: measures products before the first of them runs, since what has run in
    a process is not measured any more.
    """
    with alone(), tree.counted(0, capture.counted):
        return _difference_alone(capture, forward, arguments, tree, tuning)


def _difference_alone(
    capture: Capture, forward: Callable, arguments: pytree.Structure, tree: Tree, tuning: Tuning | None
) -> str:
    if not capture.trace.nodes and not capture.trace.data_reads and (filled := _nonzero_parameters(tree)):
        with contextlib.suppress(FromElsewhere):
            return _difference(capture, forward, arguments, tree, filled, tuning)
    return _difference(capture, forward, arguments, tree, {}, tuning)


def _difference(
    capture: Capture, forward: Callable, arguments: pytree.Structure, tree: Tree, filled: _Filled, tuning: Tuning | None
) -> str:
    inputs, generators = capture.sample, rng_state.States(())
    around = changed_by_breaks(tree, capture.trace.nodes)
    drawn = {name.rpartition("::")[2].removesuffix("_") for node in capture.trace.nodes for name in node.aten}
    left: Set[str] = drawn if all(node.kind == "aten" for node in capture.trace.nodes) else frozenset()

    def in_pytorch(change: Callable | None = None) -> tuple[list[torch.Tensor], bool]:
        """What the module gives; whether it draws random numbers. ``change``: of inputs and parameters before."""

        def given(t: torch.Tensor) -> torch.Tensor:
            return t if change is None else change(t)

        with tree.isolated(), tree.unhooked(), around.around():
            if change is not None or filled:
                tree.replace_parameters(lambda p: given(filled.get(_key(p), p)))
            given_inputs = [given(t.detach()).clone().requires_grad_(t.requires_grad) for t in inputs]
            given_inputs = [with_attributes(copy, t) for copy, t in zip(given_inputs, capture.sample, strict=True)]
            generators.put_back()
            with only_pytorch(), _unvalidated(), _KeepAll(filled, left) as recorder:
                tree.put_counters()
                return [t.detach() for t in capture.trace.eager(forward, arguments, given_inputs)], recorder.random

    expected, random = in_pytorch()
    if not capture.trace.data_reads and not all(t.isfinite().all() for t in expected if t.is_floating_point()):
        inputs = [_without_overflow(t) for t in inputs]
        expected, random = in_pytorch()
    sources = [source for source in capture.trace.sources if source.kind != "number"]
    if len(sources) != len(expected):
        return f"there are {len(expected)} tensors in the module's result, {len(sources)} in the graph's"
    model, complete = _without_chance(capture.model)
    session = Session(model.SerializeToString(), nodes=capture.trace.nodes, tuning=tuning)
    feeds = _feeds(session.inputs, inputs, tree, filled)
    generators.put_back()
    if not capture.trace.nodes:
        found = session.run(feeds, [False] * len(feeds)).outputs
    else:
        with tree.isolated(), tree.unhooked(), around.around(), only_pytorch(), _KeepAll((), left):
            try:
                calls = session.calls()
                assert calls is not None, "there are nodes"
                calls.generators = pytree.generators(arguments.rebuild(inputs))
                found = session.run([t.clone() for t in feeds], [False] * len(feeds), calls=calls).outputs
            except Raised as raised:
                return f"{type(raised.error).__name__}: {raised.error}"
    if random or not complete:  # the numbers are others, but not their types, nor sizes that do not hang on them
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


def _feeds(names: Sequence[str], inputs: Sequence[torch.Tensor], tree: Tree, filled: _Filled) -> list[torch.Tensor]:
    """What a graph's inputs of these ``names`` are."""
    found = [
        inputs[int(name.removeprefix(INPUT))] if name.startswith(INPUT) else tree.slots[name.removeprefix(STATE)].get()
        for name in names
    ]
    return [as_pairs(filled.get(_key(t), t).detach()).contiguous() for t in found]


# --- parameters that are zeros ----------------------------------------------------------------------------------------

_Key = tuple[int, int | torch.SymInt, torch.Size]  #: where a parameter lies, in which memory, and how large it is
_Filled = dict[_Key, torch.Tensor]  #: parameters with other values


def _without_overflow(tensor: torch.Tensor) -> torch.Tensor:
    """Other values in place of those whose products are not finite, as in memory that a pipeline's first call has not
    written yet: results that are not finite say nothing of a graph."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    most = torch.finfo(tensor.dtype).max
    if tensor.detach().abs().max().item() <= (most if tensor.dtype is torch.float16 else most**0.5):
        return tensor
    made = _parts(tensor.numel()).reshape(tensor.shape).to(tensor) * 2 - 1
    return made.requires_grad_(tensor.requires_grad)


def _key(tensor: torch.Tensor) -> _Key:
    return memory_of(tensor), tensor.storage_offset(), tensor.shape


def _nonzero_parameters(tree: Tree) -> _Filled:
    """Other values for parameters of zeros: positive ones, which roots and logarithms have results for."""
    found: _Filled = {}
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
        elif node.op_type not in OF_SIZES and not wide.isdisjoint(node.input):
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
    most, of = off.nan_to_num().max().item(), largest.max().item()
    return "" if most <= tolerance * of + 1e-30 else f"is off by {most:.3g} of {of:.3g}"


# --- without chance ---------------------------------------------------------------------------------------------------

#: What stands for draws are the parts behind the point of its multiples: no two alike, as where draws are sorted.
_STEP = (5**0.5 - 1) / 2


def _parts(count: int) -> torch.Tensor:
    """Numbers between 0 and 1, float64."""
    return torch.arange(1, count + 1, dtype=torch.float64).mul(_STEP).fmod(1)


def _normal(u: torch.Tensor, mean: Any = 0.0, std: Any = 1.0, *rest: Any) -> torch.Tensor:
    return (u + 0.5) * std + mean


def _integers(u: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return (u * (high - low)).floor().long() + low


#: Draws that are the engine's in a graph -> what they give here: of numbers between 0 and 1, as many as the result has,
#: and the operands of the call; fills without the first.
_DRAWS: dict[str, Callable[..., Any]] = {
    "bernoulli_.float": lambda u, p=0.5: p,
    "bernoulli_.Tensor": lambda u, p: p,
    "bernoulli": lambda u, p: p,
    "bernoulli.p": lambda u, x, p: p,
    "bernoulli.Tensor": lambda u, x, p: p,
    "uniform_": lambda u, low=0.0, high=1.0: u * (high - low) + low,
    "uniform": lambda u, x, low=0.0, high=1.0: u * (high - low) + low,
    "exponential_": draws.exponential,
    "exponential": lambda u, x, *rate: draws.exponential(u, *rate),
    "rand": lambda u, *_: u,
    "rand_like": lambda u, *_: u,
    "normal_": _normal,
    "normal_functional": lambda u, x, *rest: _normal(u, *rest),
    "normal.float_float": _normal,
    "normal.Tensor_float": _normal,
    "normal.float_Tensor": _normal,
    "normal.Tensor_Tensor": _normal,
    "randn": lambda u, *_: _normal(u),
    "randn_like": lambda u, *_: _normal(u),
    "randint": lambda u, high, *_: _integers(u, 0, high),
    "randint.low": lambda u, low, high, *_: _integers(u, low, high),
    "randint_like": lambda u, x, high: _integers(u, 0, high),
    "randint_like.low_dtype": lambda u, x, low, high: _integers(u, low, high),
}


class _KeepAll(TorchDispatchMode):
    """Draws are what :data:`_DRAWS` says; dropout drops nothing. ``random``: other numbers were drawn, by operators
    that are not ``alike`` in a graph."""

    def __init__(self, filled: Iterable[_Key], alike: Set[str]) -> None:
        """Raises :class:`FromElsewhere` where one of those tensors is used that ``filled`` stands for."""
        super().__init__()
        self.random = False
        self._replaced = {memory for memory, *_ in filled}
        self._alike = alike

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would first import it, for a second

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self._replaced and any(memory_of(t) in self._replaced for t in _tensors(args)):
            raise FromElsewhere
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **kwargs)
        if function is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        name = draws.name_of(function)
        if kwargs.get("generator") is not None:
            return function(*args, **kwargs)  # it is in the same state on both sides
        if name in _DRAWS:
            fills = name.partition(".")[0].endswith("_")
            result = args[0] if fills else _without_drawing(function, args, kwargs)
            numbers = [kwargs[k] for k in ("p", "from", "mean", "to", "std", "lambd") if k in kwargs]
            parts = _parts(result.numel()).reshape(result.shape).to(result.device)
            parts = draws.between(parts, 0, 1, result.dtype) if name.startswith("uniform") else parts
            value = _DRAWS[name](parts, *args[fills:], *numbers)
            return result.copy_(value) if isinstance(value, torch.Tensor) else result.fill_(value)
        names = [argument.name for argument in function._schema.arguments]
        if "dropout_p" in names:  # attention, which only draws numbers for its dropout
            place = names.index("dropout_p")
            if place < len(args):
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs = {k: v for k, v in kwargs.items() if k != "dropout_p"}
        elif name.partition(".")[0].removesuffix("_") not in self._alike:
            self.random = True
        return function(*args, **kwargs)


def _unvalidated() -> AbstractContextManager[None]:
    """Inside, in this thread, distributions take what stands for their samples."""
    here = threading.get_ident()

    def met(validate: Callable) -> Callable:
        return lambda self, value: None if threading.get_ident() == here else validate(self, value)

    return unvalidated(met)


def _without_drawing(function: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    """A result of the same sizes and type."""
    generators = devices.generators()
    try:
        return function(*args, **kwargs)
    finally:
        devices.set_generators(generators)


def _without_chance(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
    """The same of a graph's draws; whether that is all of them."""
    changed, complete = onnx.ModelProto(), True
    changed.CopyFrom(model)
    nodes = []
    for node in changed.graph.node:
        given = attributes(node)
        if node.op_type == "Dropout":
            node.op_type = "Identity"
            del node.input[1:], node.output[1:], node.attribute[:]
        elif node.op_type == "Bernoulli" and "dtype" in given:
            node.op_type = "Cast"
            del node.attribute[:]
            node.attribute.append(onnx.helper.make_attribute("to", given["dtype"]))
        elif node.op_type in RANDOM and "dtype" in given and node.op_type != "Multinomial":
            nodes += _parts_of(node, given)
            continue
        elif node.op_type in RANDOM:
            complete = False
        nodes.append(node)
    del changed.graph.node[:]
    changed.graph.node.extend(nodes)
    return changed, complete


def _parts_of(node: onnx.NodeProto, given: dict[str, Any]) -> list[onnx.NodeProto]:
    """:func:`_parts` as a graph's nodes, in the place of uniform or normal numbers."""
    made: list[onnx.NodeProto] = []
    name = node.output[0]

    def emit(kind: str, *inputs: str, **options: Any) -> str:
        made.append(onnx.helper.make_node(kind, inputs, [f"{name}/part{len(made)}"], f"{node.name}/part", **options))
        return made[-1].output[0]

    def constant(value: Any, dtype: torch.dtype = torch.float64) -> str:
        array = torch.tensor(value, dtype=dtype).numpy()
        return emit("Constant", value=onnx.numpy_helper.from_array(array))

    sizes = emit("Shape", node.input[0]) if node.input else constant(list(given.get("shape", ())), torch.int64)
    one = constant(1, torch.int64)
    end = emit("Add", emit("ReduceProd", sizes, keepdims=0), one)
    steps = emit("Cast", emit("Range", one, end, one), to=onnx.TensorProto.DOUBLE)
    parts = emit("Mod", emit("Mul", steps, constant(_STEP)), constant(1.0), fmod=1)
    if "Normal" in node.op_type:
        parts, least = emit("Add", parts, constant(0.5)), given.get("mean", 0.0)
        width = given.get("scale", 1.0)
    else:
        least = given.get("low", 0.0)
        width = given.get("high", 1.0) - least
    drawn = emit("Add", emit("Mul", parts, constant(width)), constant(least))
    last = onnx.helper.make_node("Reshape", [emit("Cast", drawn, to=given["dtype"]), sizes], [name], node.name)
    return [*made, last]
