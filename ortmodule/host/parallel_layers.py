"""Traces layers of tensor parallelism as what this rank computes of them; where they communicate there are nodes.

`parallelize_module` makes DTensors of a layer's parameters, and its hooks make DTensors of what a layer is given and
returns. In a trace such a DTensor is a shell: functions of torch that are given it run on this rank's part of it, and
:class:`MeshLayout` knows how it lies on the mesh. How its gradient lies there follows from what uses it
(:meth:`LocalTensors.settle`), by PyTorch's rules: of what is split, the gradient is split alike; of what has to be
added up it is whole; of what every rank has it is a part of a sum where ranks have computed other things with it. So
the same collectives run as in PyTorch, in the same order.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ortmodule.core.errors import NotTraceable
from ortmodule.core.interception import Replacement, original, replaced
from ortmodule.core.torch_private import get_tracing_state, tree_map_only
from ortmodule.guards.inventory import Slot
from ortmodule.guards.local_parameters import LocalParameters
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.sharded import refuse_parts
from ortmodule.host.collectives import WAIT, Node, number_of, wait_for
from ortmodule.host.opaque_regions import eagerly

#: Of each mesh dimension.
Placements = tuple[Any, ...]

_current = threading.local()


class MeshLayout:
    """How a tensor lies on a mesh, and its gradient."""

    def __init__(
        self, mesh: Any, placements: Sequence[Any], sources: Sequence[tuple[MeshLayout, Placements]] = ()
    ) -> None:
        """``sources``: what it is computed from, and how that lies where it is used."""
        self.mesh, self.placements, self.sources = mesh, tuple(placements), sources
        self.moved: MeshLayout | None = None  # what it was before a redistribution
        self.needs = True  # a gradient
        #: (a tensor, its dimension that was split, among how many) where parts may not be as large as others: PyTorch
        #: would know how large all are.
        self.unsure: list[tuple[torch.Tensor, int, int]] = []
        for source, _ in sources:
            self.unsure += source.unsure
        self.parameter: Slot | None = None
        self.arriving: set[Placements] = set()  # of its gradients
        self.gradient: Placements = self.default()

    def default(self) -> Placements:
        """How its gradient lies where nothing else says so."""
        return tuple([_types().Replicate() if p.is_partial() else p for p in self.placements])

    def settle(self) -> None:
        """Says how the gradient lies, and to its sources how theirs arrive. Raises NotTraceable."""
        if not self.needs:
            return
        if len(self.arriving) > 1:
            raise NotTraceable(f"gradients of a DTensor that lies as {self.placements} arrive as {self.arriving}")
        self.gradient = next(iter(self.arriving), self.default())
        for source, used in self.sources:
            source.arriving.add(tuple(map(_arriving, used, self.placements, self.gradient)))
        if self.moved is not None:
            pairs = zip(self.moved.placements, self.gradient, strict=True)
            whole = _types().Replicate()
            self.moved.arriving.add(tuple([whole if p.is_partial() and not g.is_partial() else p for p, g in pairs]))

    def sizes(self, part: Sequence[Any]) -> list[Any]:
        """Those of the whole tensor, where ranks have parts as large as this one's."""
        sizes = list(part)
        for i, placement in enumerate(self.placements):
            if placement.is_shard():
                sizes[placement.dim] = sizes[placement.dim] * self.mesh.size(i)
        return sizes

    def move(
        self, tensor: torch.Tensor, placements: Placements, target: Placements, sizes: Sequence[int] | None = None,
        later: bool = False,
    ) -> Any:  # fmt: skip
        """``tensor``, which lies on the mesh as ``placements``, as ``target`` has it. ``sizes``: of the whole tensor,
        where parts differ. ``later``: it may be one that is to be waited for."""
        if placements == target:
            return tensor
        known: dict[str, Any] = {}
        if sizes is not None:
            known = {"shape": torch.Size(sizes), "stride": torch.empty(sizes, device="meta").stride()}
        with torch.no_grad():
            whole = _types().DTensor.from_local(tensor.detach(), self.mesh, placements, run_check=False, **known)
            found = whole.redistribute(placements=target, async_op=later).to_local()
        return found if later else _waited(found)

    def begin(self, tensor: torch.Tensor) -> tuple[Callable[[], torch.Tensor], Sequence[int]]:
        """What waits for ``tensor``, which lies as :attr:`moved` does, to be here as this one, and its sizes then."""
        assert self.moved is not None, "it comes from somewhere"
        before, pairs = self.moved.placements, list(zip(self.moved.placements, self.placements, strict=True))
        other = [i for i, (p, q) in enumerate(pairs) if p != q]
        if len(other) != 1 or not pairs[other[0]][0].is_shard() or not pairs[other[0]][1].is_replicate():
            found = self.move(tensor, before, self.placements, later=True)
            return lambda: _waited(found), found.shape
        # Along another dimension than the first PyTorch would wait at once, to bring parts into their order.
        (i,) = other
        shard, dim = _types().Shard, before[i].dim
        rest = [shard(p.dim + 1) if p.is_shard() else p for p in before]
        split = (*rest[:i], shard(0), *rest[i + 1 :])
        gathered = self.move(tensor[None], split, (*rest[:i], self.placements[i], *rest[i + 1 :]), later=True)
        sizes = [size * (self.mesh.size(i) if d == dim else 1) for d, size in enumerate(tensor.shape)]
        return lambda: torch.cat(_waited(gathered).unbind(0), dim), sizes


def _types() -> Any:
    return sys.modules["torch.distributed.tensor"]  # which has made DTensors


def _waited(tensor: Any) -> torch.Tensor:
    return tensor.wait() if hasattr(tensor, "trigger_wait") else tensor


def _arriving(used: Any, made: Any, gradient: Any) -> Any:
    """How a gradient arrives along one dimension of a mesh, at what was ``used`` like this, of a result that was
    ``made`` and has a gradient like these."""
    if used.is_shard():
        return used
    if used.is_partial():
        return _types().Replicate()
    if made.is_replicate():
        return gradient
    return _types().Partial()


# --- the nodes --------------------------------------------------------------------------------------------------------


class _Entered(torch.autograd.Function):
    """A tensor becomes a part of a DTensor: nothing happens but to its gradient."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, layout: MeshLayout) -> torch.Tensor:
        context.layout = layout
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        layout = context.layout
        return layout.move(grad, layout.gradient, layout.default()), None


class _Sent(torch.autograd.Function):
    """What stands for a tensor that is on its way to another layout: zeros. Backward communicates, too."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, sizes: Sequence[int], layout: MeshLayout) -> torch.Tensor:
        assert layout.moved is not None, "it comes from somewhere"
        context.layout, context.sizes = layout, layout.moved.sizes(tensor.shape)
        return tensor.new_zeros(sizes)

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        layout, before = context.layout, context.layout.moved
        pairs = zip(before.placements, layout.gradient, strict=True)
        whole = _types().Replicate()
        target = tuple([whole if p.is_partial() and not g.is_partial() else p for p, g in pairs])
        return layout.move(grad, layout.gradient, target, sizes=context.sizes), None, None


def _enter(layout: MeshLayout, tensor: torch.Tensor) -> torch.Tensor:
    return _Entered.apply(tensor, layout)


def _send(layout: MeshLayout, tensor: torch.Tensor) -> list[torch.Tensor]:
    wait, sizes = layout.begin(tensor)
    return [number_of(lambda: [wait()]), _Sent.apply(tensor, sizes, layout)]


# --- what functions do with parts -------------------------------------------------------------------------------------


class Refused(Exception):
    """There is no rule for what is done with a DTensor; the sentence says why."""


class Given:
    """A DTensor among arguments: this rank's part, and how it lies."""

    def __init__(self, part: torch.Tensor, layout: MeshLayout) -> None:
        self.part, self.layout = part, layout


#: Of a function's arguments, with :class:`Given` in place of DTensors: what runs on parts (None: the function itself),
#: the placements of its result, and how the DTensors lie where they are used, in their order among the arguments.
Rule = Callable[..., tuple[Any, Placements, list[Placements]]]


def _sizes_now(tensor: torch.Tensor) -> tuple[int, ...]:
    """In the trace, as numbers."""
    with eagerly():
        return tuple(tensor.shape)


def _is_whole(given: Any) -> bool:
    return given is None or (isinstance(given, Given) and all(p.is_replicate() for p in given.layout.placements))


def _check(condition: bool) -> None:
    if not condition:
        raise Refused("its operands lie on the mesh in a way that PyTorch would change first")


def _linear(run: Callable, x: Any, weight: Any, bias: Any = None) -> tuple:
    _check(isinstance(x, Given) and isinstance(weight, Given) and (bias is None or isinstance(bias, Given)))
    types, mesh, last = _types(), x.layout.mesh, x.part.dim() - 1
    made, of_bias, ranks = [], [], 1
    for i, (p, w) in enumerate(zip(x.layout.placements, weight.layout.placements, strict=True)):
        b = bias.layout.placements[i] if bias is not None else None
        if w.is_replicate():
            _check((p.is_replicate() or p.is_shard() and p.dim < last) and (b is None or b.is_replicate()))
            made.append(p)
        elif w.dim == 0:
            _check(p.is_replicate() and (b is None or b == types.Shard(0)))
            made.append(types.Shard(last))
        else:
            _check(p == types.Shard(last) and (b is None or b.is_replicate()))
            made.append(types.Partial())
            b = types.Partial()  # each rank adds a part of it
            ranks *= mesh.size(i)
        of_bias.append(b)
    used = [x.layout.placements, weight.layout.placements, *([tuple(of_bias)] if bias is not None else [])]

    def on_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if bias is not None and ranks > 1:  # its gradient is whole
            stopped = run(torch.Tensor.detach, bias)
            same = run(torch.Tensor.sub, bias, stopped)
            bias = run(torch.Tensor.add, run(torch.Tensor.div, stopped, ranks), same)
        return run(torch.nn.functional.linear, x, weight, bias)

    return on_parts, tuple(made), used


def _embedding(
    run: Callable, ids: Any, weight: Any, padding_idx: int | None = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> tuple:  # fmt: skip
    _check(isinstance(ids, Given) and isinstance(weight, Given))
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise Refused("it is an embedding that counts rows, limits them or has a sparse gradient")
    made = []
    for p, w in zip(ids.layout.placements, weight.layout.placements, strict=True):
        # A table that is split by words PyTorch runs (guards/sharded.py).
        _check(p.is_replicate() or (p.is_shard() and w.is_replicate()))
        made.append(_types().Shard(ids.part.dim()) if w.is_shard() else p)
    return None, tuple(made), [ids.layout.placements, weight.layout.placements]


def _norm(
    run: Callable, x: Any, sizes: Sequence[int], weight: Any = None, bias: Any = None, *rest: Any, **named: Any
) -> tuple:
    bias = bias if isinstance(bias, Given) else None
    _check(isinstance(x, Given) and _is_whole(weight) and _is_whole(bias))
    first = x.part.dim() - len(sizes)
    _check(all(p.is_replicate() or (p.is_shard() and p.dim < first) for p in x.layout.placements))
    used = [given.layout.placements for given in (x, weight, bias) if given is not None]
    return None, x.layout.placements, used


def _dropout(run: Callable, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple:
    _check(isinstance(x, Given) and not inplace)
    if training and p and not all(p.is_shard() for p in x.layout.placements):
        raise Refused("it is a dropout of what all ranks have, whose masks would not be the same")
    return None, x.layout.placements, [x.layout.placements]


def _pointwise(run: Callable, *args: Any, **named: Any) -> tuple:
    """Operands of the same rank, or smaller ones that all ranks have; what is added up later has no rule."""
    given = [a for a in (*args, *named.values()) if isinstance(a, Given)]
    rank = max(g.part.dim() for g in given)
    _check(not any(isinstance(a, torch.Tensor) and a.dim() for a in (*args, *named.values())))
    made = []
    for each in zip(*[g.layout.placements for g in given], strict=True):
        split = {p.dim - g.part.dim() for p, g in zip(each, given, strict=True) if p.is_shard()}
        _check(len(split) <= 1 and not any(p.is_partial() for p in each))
        dim = next(iter(split), None)
        for p, g in zip(each, given, strict=True):
            # What is not split has one row there, or none.
            _check(dim is None or p.is_shard() or g.part.dim() < -dim or _sizes_now(g.part)[dim] == 1)
        made.append(_types().Replicate() if dim is None else _types().Shard(dim + rank))
    return None, tuple(made), [g.layout.placements for g in given]


def _mean(run: Callable, x: Any, dim: Any = None, keepdim: bool = False, **named: Any) -> tuple:
    _check(isinstance(x, Given) and keepdim and dim is not None)
    dims = {d % x.part.dim() for d in (dim if isinstance(dim, (tuple, list)) else (dim,))}
    _check(all(p.is_replicate() or (p.is_shard() and p.dim not in dims) for p in x.layout.placements))
    return None, x.layout.placements, [x.layout.placements]


_RULES: dict[str, Rule] = {
    "linear": _linear, "embedding": _embedding, "layer_norm": _norm, "rms_norm": _norm, "dropout": _dropout,
    "mean": _mean,
    **dict.fromkeys(
        (
            "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "mul", "__mul__", "__rmul__", "div",
            "__truediv__", "__rtruediv__", "neg", "__neg__", "pow", "__pow__", "sqrt", "rsqrt", "exp", "tanh",
            "sigmoid", "relu", "gelu", "silu", "float", "bfloat16", "half", "to", "type_as", "contiguous", "square",
        ),
        _pointwise,
    ),
}  # fmt: skip
#: Attributes that are those of the part; sizes are not.
_ALIKE = {"dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_leaf"}


class LocalTensors:
    """The DTensors of one trace."""

    def __init__(self, tree: Tree, node: Node, function: Callable[[Any, Any, tuple, dict], Any]) -> None:
        """``function``: calls a function of torch as a part of the trace."""
        self._tree, self._node, self._function = tree, node, function
        self._shells: dict[int, tuple[Any, Given]] = {}
        self._layouts: list[MeshLayout] = []
        local = [slot for slot in tree.parameters if isinstance(slot.holder, LocalParameters)]
        self._parameters = {id(slot.leaf): slot for slot in local}

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self._function(function, (), args, kwargs)

    def concern(self, args: tuple, kwargs: dict[str, Any] | None) -> bool:
        """Is a DTensor among these?"""
        for each in (*args, *(kwargs or {}).values()):
            if hasattr(type(each), "to_local") or (isinstance(each, (tuple, list)) and self.concern(tuple(each), None)):
                return True
        return False

    def settle(self) -> None:
        """The trace is over: it is known how gradients lie. Raises NotTraceable."""
        layouts, self._layouts, self._shells = self._layouts, [], {}
        for layout in layouts:
            layout.unsure = []  # nothing keeps tensors of a trace
        for layout in reversed(layouts):
            try:
                layout.settle()
            except NotTraceable as error:
                raise self._refuse(str(error)) from None
            if (slot := layout.parameter) is not None and torch.is_grad_enabled():
                assert isinstance(slot.holder, LocalParameters)
                if not slot.holder.settle(str(slot.key), layout.gradient):
                    raise self._refuse(f"gradients of {slot.name} lie on the mesh in two ways")

    def call(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What a function of torch returns that is given DTensors."""
        name = getattr(function, "__name__", "")
        if name == "__get__":
            return self._attribute(function, args[0])
        if name in ("dim", "size", "is_floating_point"):
            return self._asked(name, *args, **kwargs)
        rule = _RULES.get(name)
        try:
            if rule is None:
                raise Refused("for which there is no rule")
            args, kwargs = tree_map_only(torch.Tensor, self._given, (args, kwargs))
            on_parts, placements, used = rule(self.run, *args, **kwargs)
        except (Refused, TypeError) as error:
            raise self._refuse(f"forward calls {name} of a DTensor: {error}") from None
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Given)]
        args, kwargs = tree_map_only(Given, lambda each: each.part, (args, kwargs))
        result = self.run(function, *args, **kwargs) if on_parts is None else on_parts(*args, **kwargs)
        sources = [(g.layout, u) for g, u in zip(given, used, strict=True) if g.part.requires_grad]
        return self._shell(result, MeshLayout(given[0].layout.mesh, placements, sources))

    def _refuse(self, reason: str) -> NotTraceable:
        refuse_parts(self._tree.parallel.values())
        return NotTraceable(reason)

    def _given(self, tensor: Any) -> Any:
        if not hasattr(type(tensor), "to_local"):
            return tensor
        if id(tensor) in self._shells:
            return self._shells[id(tensor)][1]
        slot = self._parameters.get(id(tensor))
        if slot is None:
            raise Refused("which is no parameter, and not of a layer of parallelize_module")
        layout = MeshLayout(tensor.device_mesh, tensor.placements)
        layout.parameter = slot
        self._layouts.append(layout)
        return self._known(tensor, Given(slot.get(), layout))

    def _known(self, shell: Any, given: Given) -> Given:
        self._shells[id(shell)] = shell, given
        return given

    def _shell(self, part: torch.Tensor, layout: MeshLayout) -> Any:
        """A DTensor that stands for one of which ``part`` is this rank's."""
        self._layouts.append(layout)
        with eagerly(), torch.no_grad():
            blank = torch.empty(part.shape, dtype=part.dtype, device=part.device)
            shell = _types().DTensor.from_local(blank, layout.mesh, layout.placements, run_check=False)
        self._known(shell, Given(part, layout))
        return shell

    # --- what is asked of a DTensor -----------------------------------------------------------------------------------

    def _attribute(self, function: Any, tensor: Any) -> Any:
        name = getattr(function.__self__, "__name__", "")
        given = self._asked_of(tensor, name)
        if name == "shape":
            return self._sizes(given)
        if name not in _ALIKE:
            raise self._refuse(f"forward asks for {name} of a DTensor")
        return self.run(function, given.part)

    def _asked(self, name: str, tensor: Any, *rest: Any) -> Any:
        given = self._asked_of(tensor, name)
        if name == "size":
            sizes = self._sizes(given)
            return sizes[rest[0]] if rest else sizes
        return self.run(getattr(torch.Tensor, name), given.part)

    def _asked_of(self, tensor: Any, name: str) -> Given:
        try:
            given: Given = self._given(tensor)
        except Refused as error:
            raise self._refuse(f"forward asks for {name} of a DTensor, {error}") from None
        return given

    def _sizes(self, given: Given) -> torch.Size:
        """Of the whole tensor, as they are in a trace."""
        sizes = list(self.run(torch.Tensor.size, given.part))
        for i, placement in enumerate(given.layout.placements):
            if placement.is_shard():
                sizes[placement.dim] = self.run(torch.Tensor.mul, sizes[placement.dim], given.layout.mesh.size(i))
        return torch.Size(sizes)

    # --- its methods --------------------------------------------------------------------------------------------------

    def from_local(
        self, tensor: torch.Tensor, device_mesh: Any = None, placements: Any = None, *, run_check: bool = False,
        **others: Any,
    ) -> Any:  # fmt: skip
        if device_mesh is None or run_check or any(value is not None for value in others.values()):
            raise self._refuse("forward makes a DTensor that is checked, or of sizes or gradients that it says")
        if placements is None:
            placements = [_types().Replicate()] * device_mesh.ndim
        layout = MeshLayout(device_mesh, self._positive(placements, tensor.dim()))
        if tensor.requires_grad and torch.is_grad_enabled() and any(p.is_replicate() for p in layout.placements):
            tensor = self._node("collective", "from_local", functools.partial(_enter, layout), (tensor,), {})
        return self._shell(tensor, layout)

    def redistribute(
        self, tensor: Any, device_mesh: Any = None, placements: Any = None, *, async_op: bool = False, **others: Any
    ) -> Any:
        given = self._asked_of(tensor, "redistribute")
        before, part = given.layout, given.part
        if placements is None or (device_mesh or before.mesh) != before.mesh or any(others.values()):
            raise self._refuse("forward redistributes a DTensor to another mesh, or as another type")
        target = MeshLayout(before.mesh, self._positive(placements, part.dim()))
        if target.placements == before.placements:
            return tensor
        if any(p.is_shard() and p != q for p, q in zip(before.placements, target.placements, strict=True)):
            if any(self._is_uneven(*each) for each in before.unsure):
                raise self._refuse("a DTensor has parts that are not as large as others")
        else:
            target.unsure = list(before.unsure)
        for i, (p, q) in enumerate(zip(before.placements, target.placements, strict=True)):
            if q.is_shard() and p != q:
                target.unsure.append((part, q.dim, before.mesh.size(i)))
        target.moved, target.needs = before, part.requires_grad
        number, place = self._node("collective", "redistribute", functools.partial(_send, target), (part,), {})
        part = self._node("collective", WAIT, wait_for, (number, place), {})[0]
        return self._shell(part, target)

    def _is_uneven(self, tensor: torch.Tensor, dim: int, ranks: int) -> bool:
        """A decision that a graph rests on."""
        left = self.run(torch.Tensor.remainder, self.run(torch.Tensor.size, tensor, dim), ranks)
        return bool(self.run(torch.Tensor.ne, left, 0))

    def to_local(self, tensor: Any, *, grad_placements: Any = None) -> torch.Tensor:
        given = self._asked_of(tensor, "to_local")
        if given.part.requires_grad and torch.is_grad_enabled():
            given.layout.arriving.add(tuple(grad_placements or given.layout.default()))
        return given.part

    def full_tensor(self, tensor: Any, *, grad_placements: Any = None) -> torch.Tensor:
        whole = [_types().Replicate()] * self._asked_of(tensor, "full_tensor").layout.mesh.ndim
        return self.to_local(self.redistribute(tensor, placements=whole), grad_placements=grad_placements)

    def _positive(self, placements: Any, rank: int) -> Placements:
        """With dimensions that count from the front. Raises NotTraceable where these are of another kind."""
        types, found = _types(), []
        for p in placements:
            known = type(p) in (types.Shard, types.Replicate) or (type(p) is types.Partial and p.reduce_op == "sum")
            if not known:
                raise self._refuse(f"a DTensor of forward lies on the mesh as {p}")
            found.append(types.Shard(p.dim % rank) if p.is_shard() else p)
        return tuple(found)


# --- where they are met -----------------------------------------------------------------------------------------------


def _method(name: str) -> Any:
    """Takes the place of a method of DTensor."""
    function = original(_types().DTensor, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        parts = getattr(_current, "parts", None)
        if parts is None or get_tracing_state() is None:
            return function(*args, **kwargs)
        return getattr(parts, name)(*args, **kwargs)

    return staticmethod(call) if name == "from_local" else call


@contextmanager
def recording(parts: LocalTensors | None) -> Iterator[None]:
    """Inside, in this thread, methods of DTensors that are traced are those of ``parts``."""
    if parts is None:
        yield
        return
    before, _current.parts = getattr(_current, "parts", None), parts
    names = ("from_local", "redistribute", "to_local", "full_tensor")
    try:
        with replaced(Replacement(_types().DTensor, name, _method(name)) for name in names):
            yield
    finally:
        _current.parts = before
