"""Traces layers of tensor parallelism as what this rank computes of them; where they communicate there are nodes.

`parallelize_module` makes DTensors of a layer's parameters, and its hooks make DTensors of what a layer is given and
returns. In a trace such a DTensor is a shell: functions of torch that are given it run on this rank's part of it
(`parallel_rules.py`), and :class:`~ortmodule.host.mesh_layouts.MeshLayout` knows how it lies on the mesh.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ortmodule.core.errors import NoRule, NotTraceable
from ortmodule.core.objects.interception import Replacement, original, replaced
from ortmodule.core.structures.dtensor_results import PART_OF
from ortmodule.core.torch_private import get_tracing_state, tree_map_only
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.process_state import of_setting
from ortmodule.guards.sharding.local_parameters import LocalParameters
from ortmodule.guards.sharding.sharded import refuse_parts
from ortmodule.host.collectives import WAIT, Node, wait_for
from ortmodule.host.mesh_layouts import MeshLayout, Placements, enter, mesh_types, send
from ortmodule.host.opaque_regions import eagerly
from ortmodule.host.parallel_rules import RULES, Given

_current = threading.local()
#: Attributes that are those of the part; sizes are not.
_ALIKE = {"dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_leaf"}


class LocalTensors:
    """The DTensors of one trace."""

    def __init__(self, tree: Tree, node: Node, function: Callable[[Any, Any, tuple, dict], Any]) -> None:
        """``function``: calls a function of torch as a part of the trace."""
        self._tree, self._node, self._function = tree, node, function
        self._shells: dict[int, tuple[Any, Given]] = {}
        self._layouts: list[MeshLayout] = []
        #: Those that the trace rests on, and where they are asked for.
        self.settings: dict[tuple[int, str], tuple[Any, str]] = {}
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
        rule = RULES.get(name)
        try:
            if rule is None:
                raise NoRule("for which there is no rule")
            args, kwargs = tree_map_only(torch.Tensor, self._given, (args, kwargs))
            on_parts, placements, used = rule(self, *args, **kwargs)
        except (NoRule, TypeError) as error:
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
            raise NoRule("which is no parameter, and not of a layer of parallelize_module")
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
            shell = mesh_types().DTensor.from_local(blank, layout.mesh, layout.placements, run_check=False)
        self._known(shell, Given(part, layout))
        setattr(shell, PART_OF, functools.partial(self.result, shell))
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
        except NoRule as error:
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
            placements = [mesh_types().Replicate()] * device_mesh.ndim
        layout = MeshLayout(device_mesh, self._positive(placements, tensor.dim()))
        if tensor.requires_grad and torch.is_grad_enabled() and any(p.is_replicate() for p in layout.placements):
            tensor = self._node("collective", "from_local", functools.partial(enter, layout), (tensor,), {})
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
            self._check_even(before)
        else:
            target.unsure = list(before.unsure)
        for i, (p, q) in enumerate(zip(before.placements, target.placements, strict=True)):
            if q.is_shard() and p != q:
                target.unsure.append((part, q.dim, before.mesh.size(i)))
        target.moved, target.needs = before, part.requires_grad
        return self._shell(self._moved(part, target), target)

    def _moved(self, part: torch.Tensor, target: MeshLayout) -> Any:
        number, place = self._node("collective", "redistribute", functools.partial(send, target), (part,), {})
        return self._node("collective", WAIT, wait_for, (number, place), {})[0]

    def reduced(self, part: torch.Tensor, mesh: Any, how: str) -> Any:
        target = MeshLayout(mesh, (mesh_types().Replicate(),))
        target.moved = MeshLayout(mesh, (mesh_types().Partial(how),))
        return self._moved(part, target)

    def asks(self, setting: Callable[[], bool]) -> bool:
        known = of_setting(setting)
        self.settings[id(known), "value"] = known, "a function of a DTensor"
        return bool(known.value)

    def _check_even(self, layout: MeshLayout) -> None:
        if any(self._is_uneven(*each) for each in layout.unsure):
            raise self._refuse("a DTensor has parts that are not as large as others")

    def _is_uneven(self, tensor: torch.Tensor, dim: int, ranks: int) -> bool:
        """A decision that a graph rests on."""
        left = self.run(torch.Tensor.remainder, self.run(torch.Tensor.size, tensor, dim), ranks)
        return bool(self.run(torch.Tensor.ne, left, 0))

    def to_local(self, tensor: Any, *, grad_placements: Any = None) -> torch.Tensor:
        given = self._asked_of(tensor, "to_local")
        if given.part.requires_grad and torch.is_grad_enabled():
            given.layout.arriving.add(tuple(grad_placements or given.layout.default()))
        return given.part

    def result(self, tensor: Any) -> torch.Tensor:
        """This rank's part of a DTensor that forward returns. Raises NotTraceable where others may not be as large."""
        self._check_even(self._asked_of(tensor, "its part").layout)
        return self.to_local(tensor)

    def full_tensor(self, tensor: Any, *, grad_placements: Any = None) -> torch.Tensor:
        whole = [mesh_types().Replicate()] * self._asked_of(tensor, "full_tensor").layout.mesh.ndim
        return self.to_local(self.redistribute(tensor, placements=whole), grad_placements=grad_placements)

    def _positive(self, placements: Any, rank: int) -> Placements:
        """With dimensions that count from the front. Raises NotTraceable where these are of another kind."""
        types, found = mesh_types(), []
        for p in placements:
            known = type(p) in (types.Shard, types.Replicate) or (type(p) is types.Partial and p.reduce_op == "sum")
            if not known:
                raise self._refuse(f"a DTensor of forward lies on the mesh as {p}")
            found.append(types.Shard(p.dim % rank) if p.is_shard() else p)
        return tuple(found)


# --- where they are met -----------------------------------------------------------------------------------------------


def _method(name: str) -> Any:
    """Takes the place of a method of DTensor."""
    function = original(mesh_types().DTensor, name)

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
        with replaced(Replacement(mesh_types().DTensor, name, _method(name)) for name in names):
            yield
    finally:
        _current.parts = before
