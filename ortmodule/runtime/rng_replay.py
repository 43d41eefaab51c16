"""Gives PyTorch the masks and numbers that the engine drew, when a module runs there once more.

The numbers of a random node are functions of the run's seed, of the node's place among the random nodes, and of an
element's index. So they can be computed once more: :class:`RngReplay` runs the graph's random nodes alone.
:class:`ReplayMode` gives them to PyTorch, one after the other, where it would draw its own. What host nodes draw comes
from torch's generator, in the order of forward, and so it does in the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ortmodule.capture.calls import checkpoints
from ortmodule.core import devices
from ortmodule.core.errors import Incomparable, NotKnown
from ortmodule.core.onnx_utils import OF_SIZES, drawing, without_dead
from ortmodule.core.torch_private import DispatchKey, TorchDispatchMode, decomposition_table
from ortmodule.engine.session import Session
from ortmodule.guards.module_tree import Tree
from ortmodule.host.host_node import DryCalls, Known, Node, drawing_overloads
from ortmodule.host.met_calls import recording
from ortmodule.host.passed_calls import Passed
from ortmodule.lowering import draws

# Random ATen calls -> the operators that stand for them.
_UNIFORM, _NORMAL = ("RandomUniform", "RandomUniformLike"), ("RandomNormal", "RandomNormalLike")
_OPERATORS = {
    "bernoulli_.float": ("Dropout", "Bernoulli"),
    "native_dropout": ("Dropout",),
    "bernoulli": ("Bernoulli",),
    "bernoulli.p": ("Bernoulli",),
    "bernoulli_.Tensor": ("Bernoulli",),
    "bernoulli.Tensor": ("Bernoulli",),
    **dict.fromkeys(("rand", "rand_like", "uniform_", "uniform", "exponential_", "exponential"), _UNIFORM),
    **dict.fromkeys(("randint", "randint.low", "randint_like", "randint_like.low_dtype"), _UNIFORM),
    **dict.fromkeys(("randn", "randn_like", "normal_", "normal_functional", "normal.float_float"), _NORMAL),
    **dict.fromkeys(("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor"), _NORMAL),
    **dict.fromkeys(("rrelu_with_noise", "rrelu_with_noise_"), _UNIFORM),
    "multinomial": ("Multinomial",),
}


#: Called by name they are compositions of others (`torch.ops.aten.cauchy(x)`), in the graph, too.
_COMPOSED = ("cauchy", "geometric", "log_normal")


def _scaled(found: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    return found * given["std"] + given["mean"]


def _between(found: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    return draws.between(found, given["from"], given["to"], given["self"].dtype)


def _exponential(found: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    return draws.exponential(found, given["lambd"])


def _integers(found: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    low = given.get("low") or 0
    return (found * (given["high"] - low)).floor().long() + low


# ... and how the call's numbers follow from the operator's, where they are not these: as the graph computes them
# (lowering/draws.py, lowering/decompositions).
_FROM: dict[str, Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]] = {
    **dict.fromkeys(("uniform_", "uniform"), _between),
    **dict.fromkeys(("exponential_", "exponential"), _exponential),
    **{name: _scaled for name in _OPERATORS if name.startswith("normal")},
    **{name: _integers for name in _OPERATORS if name.startswith("randint")},
}


@dataclass
class RandomValue:
    """What one random node of the graph drew in one run."""

    node: onnx.NodeProto
    ratio: float  # of a Dropout, else 0
    tensor: torch.Tensor  # the mask of a Dropout, else the numbers


class RngReplay:
    """The random nodes of a graph, and what they draw for a seed.

    ``known``: the nodes that PyTorch runs, if there are any. They do not run for this. Raises Incomparable when what is
    drawn depends on what they compute.
    """

    def __init__(self, model: onnx.ModelProto, known: Known | None = None) -> None:
        model = without_dead(model)
        self.nodes = list(drawing(model))
        for node, _ in self.nodes:
            if node.op_type == "Dropout" and len(node.output) < 2:
                node.output.append(f"{node.output[0]}/mask")
        self.session = None
        if self.nodes:
            if known is not None:
                _check_independent(model)
            del model.graph.output[:]
            model.graph.output.extend(onnx.ValueInfoProto(name=node.output[-1]) for node, _ in self.nodes)
            model = without_dead(model)
            self.known = known
            self.session = Session(model.SerializeToString(), nodes=known.nodes if known is not None else ())

    def of(self, feeds: dict[str, torch.Tensor], seed: int) -> list[RandomValue]:
        """What the run with this seed drew. ``feeds``: the graph's inputs by name, as they were before it."""
        if self.session is None:
            return []
        tensors = [feeds[name] for name in self.session.inputs]
        calls = None if self.known is None else DryCalls(self.known)
        try:
            found = self.session.run(tensors, [False] * len(tensors), seed=seed, calls=calls).outputs
        except NotKnown:
            raise Incomparable("how many numbers are drawn depends on what PyTorch computes") from None
        return [RandomValue(node, ratio, tensor) for (node, ratio), tensor in zip(self.nodes, found, strict=True)]


def _check_independent(model: onnx.ModelProto) -> None:
    """Numbers whose distribution depends on what a node of PyTorch's computes cannot be had without it."""
    depends: set[str] = set()
    for node in model.graph.node:
        if node.op_type in OF_SIZES:
            continue
        if node.op_type == "PythonOp" or depends.intersection(node.input):
            if node.op_type in ("Bernoulli", "Multinomial"):
                raise Incomparable(f"what {node.name} draws depends on what PyTorch computes inside the graph")
            depends |= set(node.output)


@contextmanager
def replaying(
    tree: Tree, nodes: Sequence[Node], values: Sequence[RandomValue], runs: Callable[[str | None], None] | None = None,
    passed: Passed | None = None,
) -> Iterator[None]:  # fmt: skip
    """Inside, in this thread, forward draws what it drew: ``values``, and from torch's generator in ``nodes``.
    ``runs`` is called before each of these, with the path of a submodule. ``passed``: instead of that, what has calls
    of nodes; behind all values, too, it draws from torch's generator.

    Raises Incomparable on leaving, see :class:`ReplayMode`.
    """
    goes_on = passed is not None
    left = {name.rpartition("::")[2].removesuffix("_") for node in nodes if node.kind == "aten" for name in node.aten}
    if passed is None:
        passed = Passed(tree, nodes)
        passed.runs = runs or passed.runs
    # A fused kernel draws inside what the graph has a mask for; attention one operator at a time asks for the mask.
    one_by_one = sdpa_kernel(SDPBackend.MATH) if values else nullcontext()
    calls = recording(passed) if nodes else nullcontext()
    with one_by_one, calls, checkpoints.plain(), ReplayMode(values, passed, left, goes_on):
        yield


class _Inside(TorchDispatchMode):
    """Inside, calls are `mode`'s, which is at work on one."""

    def __init__(self, mode: ReplayMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.mode.__torch_dispatch__(function, types, args, kwargs)


class ReplayMode(TorchDispatchMode):
    """Inside, random ATen calls return ``values``, in order; those in ``passed`` calls, and those of ATen operators
    that are ``left`` to PyTorch in the graph, draw from torch's generator.

    Another call, on whose result the graph does not depend, gets numbers of its own. Raises
    Incomparable on leaving if some of ``values`` were not asked for, or more dropout was.
    """

    def __init__(self, values: Sequence[RandomValue], passed: Passed, left: Set[str], goes_on: bool = False) -> None:
        """``goes_on``: behind all values calls draw from torch's generator."""
        super().__init__()
        self.goes_on = goes_on
        self.left, self.unexpected, self.passed, self.in_pytorch = list(values), "", passed, left
        self.composed = any(_is_composed(name) for name in left)  # they draw by other names than their own
        self.given: set[int] = set()  # how many numbers the calls wanted that got values

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would first import it, for a second

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is not None:
            return
        if self.unexpected:
            raise Incomparable(f"PyTorch draws with {self.unexpected} what the graph does not")
        if self.left:
            raise Incomparable(f"PyTorch does not draw what {self.left[0].node.name} of the graph draws")

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.goes_on and not self.left:
            return function(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in function.tags or self.passed.depth:
            return function(*args, **kwargs)
        bound = {a.name: a.default_value for a in function._schema.arguments} | kwargs
        bound |= {a.name: value for a, value in zip(function._schema.arguments, args, strict=False)}
        if any(not bound.get(switch, True) for switch in ("dropout_p", "dropout", "train", "training")):
            return function(*args, **kwargs)  # may drop elements, and does not
        name = draws.name_of(function)
        if name in _COMPOSED and name not in self.in_pytorch:
            with _Inside(self):
                return decomposition_table[function](*args, **kwargs)
        sizes = None if name == "multinomial" else _sizes(bound)
        found = self._next(name, sizes, bound.get("p"))
        if found is None:
            named = name.partition(".")[0].removesuffix("_") in self.in_pytorch
            if self.composed and not named and (sizes is None or sizes.numel() in self.given):
                raise Incomparable(f"both the engine and PyTorch draw with {name}, and as many numbers")
            if self.composed or named:
                return self.passed.call(function, args, kwargs)
            if name not in ("rand", "rand_like", "uniform_") and not self.unexpected:
                self.unexpected = name
            generator = devices.generators()
            try:
                return function(*args, **kwargs)
            finally:
                devices.set_generators(generator)
        self.given.add(found.numel())
        if name.startswith("rrelu_with_noise"):
            slopes = args[1].copy_(torch.where(args[0] <= 0, found.reshape(args[0].shape), 1))
            return args[0].mul_(slopes) if name.endswith("_") else args[0] * slopes
        if name in _FROM:
            found = _FROM[name](found, bound)
        if name == "native_dropout":
            mask = found.reshape(args[0].shape)
            return args[0] * mask * (1 / (1 - args[1])), mask
        if name.partition(".")[0].endswith("_"):
            return args[0].copy_(found.reshape(args[0].shape))
        if isinstance(out := kwargs.get("out"), torch.Tensor):
            return out.copy_(found.reshape(out.shape))
        generators = devices.generators()
        empty = torch.empty_like(function(*args, **kwargs))
        devices.set_generators(generators)
        return empty.copy_(found.reshape(empty.shape))

    def _next(self, name: str, sizes: torch.Size | None, rate: float | None) -> torch.Tensor | None:
        """What the next draw drew, if a call for a tensor of these sizes, with this rate, is what it stands for."""
        if not self.left or self.left[0].node.op_type not in _OPERATORS.get(name, ()):
            return None
        draw = self.left[0]
        kept = {"bernoulli_.float": 1 - draw.ratio, "native_dropout": draw.ratio}.get(name)
        if draw.node.op_type == "Bernoulli":
            kept = None
        if sizes is not None and sizes.numel() != draw.tensor.numel():
            return None
        if kept is not None and (rate is None or abs(kept - rate) > 1e-6):
            return None
        return self.left.pop(0).tensor


def _is_composed(name: str) -> bool:
    """Is an ATen operator that draws a composition of others, as dropout is?"""
    composed = DispatchKey.CompositeImplicitAutograd
    return any(each.has_kernel_for_dispatch_key(composed) for each in drawing_overloads(name))


def _sizes(given: dict[str, Any]) -> torch.Size:
    """Of what a random call fills or makes."""
    if "size" in given:
        return torch.Size(given["size"])
    tensors = [value.shape for name, value in given.items() if isinstance(value, torch.Tensor) and name != "out"]
    if "self" in given and isinstance(given["self"], torch.Tensor):
        return given["self"].shape
    return torch.broadcast_shapes(*tensors)
