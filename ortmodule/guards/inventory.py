"""Lists a module's submodules and every tensor they hold, found again on every call.

A captured graph takes the module's tensors as inputs. They are looked up anew for every run, in the dictionaries that
hold them, so that `.to()`, `load_state_dict(assign=True)` or a replaced buffer need no new capture.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from ortmodule.guards.reads.size_tables import SizeTable
from ortmodule.guards.reads.tensor_attributes import TensorAttributes
from ortmodule.guards.sharding.local_parameters import LocalParameters
from ortmodule.guards.sharding.sharded import communicating_in, has_refused

_numbers = itertools.count()

#: Classes of tensors that a graph can take in; others need PyTorch.
PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


class Holder(Protocol):
    """A dictionary or a list."""

    def __getitem__(self, key: Any, /) -> Any: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...
    def __contains__(self, key: Any, /) -> bool: ...
    def pop(self, key: Any, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class Slot:
    """A place that holds a tensor: an entry of a module's parameters, buffers or attributes."""

    name: str
    holder: Holder
    key: Any

    def get(self) -> torch.Tensor:
        return self.holder[self.key]

    def find(self, missing: Any = None) -> Any:
        """The tensor in this place, or ``missing``. The holder is a dictionary, or a scripted module's."""
        if self.key not in self.holder:
            return missing
        return self.holder[self.key]

    def set(self, tensor: torch.Tensor) -> None:
        self.holder[self.key] = tensor

    @property
    def leaf(self) -> Any:
        """What autograd puts a gradient on: the tensor, or the DTensor that it is a part of."""
        return self.holder.whole(str(self.key)) if isinstance(self.holder, LocalParameters) else self.get()

    @functools.cached_property
    def on_tensor(self) -> TensorAttributes:
        """What users have put on the tensor."""
        return TensorAttributes(self.name, self.get if isinstance(self.holder, list) else self.find)


class NumberAttributes:
    """The attributes of a module as a :class:`Holder` of tensors of rank 0: an `int` is int64, a `float` float64."""

    def __init__(self, attributes: dict[str, Any], device: torch.device) -> None:
        self.attributes, self.device = attributes, device
        self._held: dict[str, torch.Tensor] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self._held:
            return self._held[key]
        value = self.attributes[key]
        dtype = torch.float64 if type(value) is float else torch.int64
        return torch.tensor(value, dtype=dtype, device=self.device)

    def __setitem__(self, key: str, tensor: torch.Tensor) -> None:
        self.attributes[key] = tensor.item()

    def __contains__(self, key: str) -> bool:
        return type(self.attributes.get(key)) in (int, float)

    def pop(self, key: str) -> torch.Tensor:
        tensor = self[key]
        del self.attributes[key]
        return tensor

    @contextmanager
    def held(self, key: str, value: float | None, step: int = 0) -> Iterator[torch.Tensor]:
        """Inside, the attribute is always this tensor, which is for ``value``, or for one that is larger by ``step``
        than that of now."""
        now = self[key]
        self._held[key] = tensor = now + step if value is None else torch.full_like(now, value)
        try:
            yield tensor
        finally:
            del self._held[key]


class Inventory:
    """The submodules, parameters and buffers of ``module`` at the time of making.

    Plain tensors held by attributes come and go: :meth:`refresh` finds those of now.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = dict(module.named_modules())
        #: Scripted submodules: their dictionaries are no dictionaries, and nothing shows when they change.
        self.scripted = [path for path, m in self.modules.items() if isinstance(m, torch.jit.ScriptModule)]
        #: Submodules that FSDP2 shards, which gathers their tensors when it calls them: those are none of here. And
        #: those of tensor parallelism, of which graphs have this rank's parts.
        self.sharded, self.parallel = communicating_in(self.modules)
        self.within_sharded = {id(m) for unit in self.sharded.values() for m in unit.modules()}
        #: Submodules with frozen parameters of a class of their own (4-bit weights), which their code alone can read.
        self.coded = {path: why for path, m in self.modules.items() if path and (why := _coded_in(m))}
        self.classes = [(m, type(m)) for m in self.modules.values()]
        self._children = [(m, tuple(m._modules.items())) for m in self.modules.values()]
        self.parameters: list[Slot] = []
        self.buffers: list[Slot] = []
        self.plain: list[Slot] = []
        self.written: list[Slot] = []  # parameters without a gradient that forward changes: buffers to a graph
        self._counters: list[Slot] = []  # attributes that graphs take as numbers
        self.held: list[Slot] = []  # tensors inside of attributes that hold others again and again
        self.held_again: list[Slot] = []  # places there of tensors that are in another place, too
        #: Places of tensors without a gradient that are replaced by others of other sizes: grown tables and masks.
        self.resized: list[tuple[dict[str, Any], str]] = []
        self.tables: list[SizeTable] = []  # what dictionaries hold under sizes
        self._ties: list[tuple[Slot, Slot]] = []  # one tensor in two places
        self._holders = [
            (m, name, m.__dict__[name], _entries_with_tensor(m.__dict__[name]))
            for m in self.modules.values()
            for name in ("_parameters", "_buffers")
        ]
        found: dict[int, Slot] = {}
        for path, part in self._own_modules():
            for holder, slots in ((part._parameters, self.parameters), (part._buffers, self.buffers)):
                for slot in _slots_in(path, holder, path in self.parallel):
                    if path in self.coded and is_coded(slot.get()):
                        continue
                    if id(slot.get()) in found:
                        self._ties.append((found[id(slot.get())], slot))
                    else:
                        found[id(slot.get())] = slot
                        slots.append(slot)
        self.outside: list[Slot] = []  # tensors that forward takes from elsewhere: a list, an object, a global
        self._candidates: list[Slot] = []  # those that were met once
        self._fresh = 0  # how many are others in every trace
        self._kinds = [*self.parameters, *self.buffers]
        self.slots: dict[str, Slot] = {}
        self.refresh()

    def refresh(self) -> None:
        """Finds the plain tensors that attributes hold now."""
        known = {id(slot.get()) for slot in self._kinds}
        before = {(id(slot.holder), slot.key): slot for slot in self.plain}
        self.plain = []
        for path, part in self._own_modules():
            for slot in _slots_in(path, part.__dict__):
                if id(slot.get()) not in known:
                    known.add(id(slot.get()))
                    self.plain.append(before.get((id(slot.holder), slot.key), slot))  # keys of calls know them
        self.held, self.held_again = [], []
        for slot in self._held_places():
            (self.held_again if id(slot.get()) in known else self.held).append(slot)
            known.add(id(slot.get()))
        self._name_slots()

    def _held_places(self) -> Iterable[Slot]:
        """Where tensors are inside of attributes that hold others again and again."""
        return ()

    def _own_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """By path, those whose tensors are here."""
        return ((path, m) for path, m in self.modules.items() if id(m) not in self.within_sharded)

    def _name_slots(self) -> None:
        every = (*self._kinds, *self.plain, *self.held, *self.outside, *self.counters)
        self.slots = {slot.name: slot for slot in every}

    def adopt(self, tensors: Iterable[torch.Tensor], second: bool) -> bool:
        """Makes slots of tensors that a trace met and that are none yet. Is there one that may be met again?

        ``second``: the trace was the second one; what it did not meet is made anew by every forward, and no slot.
        """
        met = {id(tensor): tensor for tensor in tensors}
        known = {id(slot.get()) for slot in self.outside}
        if second:
            lost = [slot for slot in self._candidates if id(slot.get()) not in met]
            self.outside = [slot for slot in self.outside if slot not in lost]
            self._fresh = max(self._fresh, len(lost))
            self._candidates = []
        elif len(met.keys() - known) > self._fresh:
            self._candidates = [Slot(f"outside/{next(_numbers)}", [t], 0) for key, t in met.items() if key not in known]
            self.outside = self.outside + self._candidates
        self._name_slots()
        return bool(self._candidates)

    @property
    def others(self) -> list[Slot]:
        """Buffers and plain tensors, and what is like them."""
        return self.buffers + self.written + self.plain

    @property
    def ranks(self) -> int:
        """How many share the largest of the DTensors."""
        local = [slot for slot in self.parameters if isinstance(slot.holder, LocalParameters)]
        return max((slot.leaf.device_mesh.size() for slot in local), default=1)

    @property
    def counters(self) -> list[Slot]:
        """Attributes that change again and again, and are Python numbers now."""
        return [slot for slot in self._counters if slot.key in slot.holder]

    def resize(self, holder: Any, key: Any) -> None:
        """Lists a place among :attr:`resized`."""
        if not any(holder is other and key == name for other, name in self.resized):
            self.resized.append((holder, key))

    def resized_tensors(self) -> tuple[list[tuple[Any, Any]], list[torch.Tensor], list[Any]]:
        """The places among :attr:`resized`, and in :attr:`tables` for the latest call of this thread, that hold such a
        tensor now, the tensors, and what the others hold."""
        places: list[tuple[Any, Any]] = []
        tensors: list[torch.Tensor] = []
        others: list[Any] = []
        every: list[tuple[Any, Any]] = [(table, i) for table in self.tables for i in table.numbers()]
        for place in (*self.resized, *every):
            tensor: Any = place[0].get(place[1])
            if type(tensor) in PLAIN_TENSORS and not tensor.requires_grad and 0 not in tensor.shape:
                places.append(place)
                tensors.append(tensor)
            else:
                others.append((place[1], tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else None))
        return places, tensors, others

    def count(self, path: str, key: str) -> bool:
        """Lists an attribute of the submodule at ``path`` among :attr:`counters`. False: it is one already."""
        attributes, name = self.modules[path].__dict__, path_of(path, key)
        if any(slot.name == name for slot in self._counters) or name in self.slots:
            return False
        device = next((slot.get().device for slot in self._kinds), torch.device("cpu"))
        self._counters.append(Slot(name, NumberAttributes(attributes, device), key))
        self._name_slots()
        return True

    def counts(self, further: int) -> dict[str, float]:
        """What :meth:`counted` has for :attr:`counters`."""
        return {slot.name: slot.get().item() + further for slot in self.counters}

    @contextmanager
    def counted(
        self, further: int, values: Mapping[str, float] = MappingProxyType({})
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Inside, :attr:`counters` are always these tensors: of ``values`` by their names, or of numbers that are
        larger by ``further`` than those of now."""
        held: dict[str, torch.Tensor] = {}
        with ExitStack() as stack:
            for slot in self.counters:
                assert isinstance(slot.holder, NumberAttributes) and isinstance(slot.key, str)
                number = slot.holder.held(slot.key, values.get(slot.name), further)
                held[slot.name] = stack.enter_context(number)
            yield held

    def put_counters(self) -> None:
        """Gives the attributes the values that :meth:`counted` has for them."""
        for slot in self.counters:
            slot.set(slot.get())

    def treat_as_buffer(self, parameter: torch.Tensor) -> bool:
        """Lists one without a gradient, which forward changes, among :attr:`others`. False: it is no parameter."""
        slot = next((slot for slot in self.parameters if slot.get() is parameter), None)
        if slot is not None:
            self.parameters.remove(slot)
            self.written.append(slot)
        return slot is not None

    def names(self) -> dict[int, str]:
        """What modules, parameters and buffers are called, by their ids."""
        found = {id(module): path for path, module in self.modules.items()}
        return found | {id(slot.get()): slot.name for slot in self._kinds}

    def is_current(self) -> bool:
        """Are the submodules the same, and the tensors in the same places?"""
        if has_refused(self.parallel.values()):
            return False
        for module, cls in self.classes:
            if type(module) is not cls:
                return False
        for module, then in self._children:
            if tuple(module._modules.items()) != then:
                return False
        for module, name, holder, filled in self._holders:
            if module.__dict__[name] is not holder or ((holder or filled) and _entries_with_tensor(holder) != filled):
                return False
        return all(a.get() is b.get() for a, b in self._ties)

    def kinds_of_tensors(self) -> tuple:
        """Type, shape and need for a gradient of every parameter and buffer; of those that are :attr:`resized` no
        shape."""
        resized = {(id(holder), key) for holder, key in self.resized}
        pairs = [(slot.holder[slot.key], (id(slot.holder), slot.key) in resized) for slot in self._kinds]
        kinds = [_kind(t)[:-1] if alone else _kind(t) for t, alone in pairs]
        if self.parallel:
            local = [slot for slot in self.parameters if isinstance(slot.holder, LocalParameters)]
            kinds += [slot.holder.layout(str(slot.key)) for slot in local]  # type: ignore[attr-defined]  # as it says
        return tuple(kinds)

    def unsupported_tensor(self) -> str | None:
        """The name of a tensor that the engine cannot use, with the reason, or None."""
        self.refresh()
        for slot in self.slots.values():
            tensor = slot.get()
            if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
                sharded = hasattr(tensor, "to_local")
                advice = "; wrap a module around the one that is sharded or parallel" if sharded else ""
                return f"{slot.name} is a {type(tensor).__name__} with layout {tensor.layout}{advice}"
        return None


def is_coded(tensor: torch.Tensor) -> bool:
    """Is it a frozen parameter that no graph can take in, as its elements are not those of a matrix?"""
    if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided:
        return False
    return isinstance(tensor, nn.Parameter) and not (
        tensor.requires_grad or nn.parameter.is_lazy(tensor) or hasattr(tensor, "to_local")
    )


def _coded_in(module: nn.Module) -> str:
    """Why PyTorch runs ``module``, if that is for such a parameter of its own; "": it has none."""
    held = module._parameters.items()
    return next((f"its {name} is a {type(t).__name__}" for name, t in held if t is not None and is_coded(t)), "")


def path_of(path: str, key: object) -> str:
    """The name of an entry of the submodule at ``path``, which is empty for the module itself."""
    return f"{path}.{key}" if path else str(key)


def _slots_in(path: str, holder: Any, parts: bool = False) -> list[Slot]:
    """``parts``: of DTensors this rank's parts."""
    local = LocalParameters(holder) if parts else holder
    return [
        Slot(path_of(path, key), local if parts and hasattr(value, "to_local") else holder, key)
        for key, value in list(holder.items())
        if isinstance(value, torch.Tensor)
    ]


def _kind(t: torch.Tensor) -> tuple:
    # Parameters that are not initialised have no shape.
    return type(t), t.dtype, t.requires_grad, t.device, t.layout, t.shape if type(t) in PLAIN_TENSORS else None


def _entries_with_tensor(holder: Any) -> tuple[tuple[str, bool], ...]:
    """Which entries hold a tensor."""
    return tuple([(key, isinstance(value, torch.Tensor)) for key, value in holder.items()])
