"""Lets code run that writes into tensors around a module, and leaves these as they were.

`STATISTICS["loss"] += loss` changes the tensor that is there, and autograd's graph behind it. ATen's operators say what
they write, whichever of torch's functions calls them; so nothing here changes which one is called, as a mode that sees
functions does (fast paths are not taken then, `l1_loss` loses its weight).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, MutableMapping
from types import TracebackType
from typing import Any

import torch

from ortmodule.core.objects.tensor_copies import cloned, with_attributes
from ortmodule.core.objects.tensor_memory import memory_of, version_of
from ortmodule.core.torch_private import TorchDispatchMode, set_versions, swap_tensors

#: What is not larger is copied at once, in bytes: so any write is found, also one by its address.
SMALL = 2**20
#: Operators that write what they do not say, and that stand before a way to write without an operator (`x.numpy()`).
_HIDE = {f"aten::{name}" for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "detach", "set_")}


class OutsideWrites(TorchDispatchMode):
    """Inside, code may write into ``tensors``; afterwards they are as before: elements, memory, autograd's graph and
    version. ``written`` takes those concerned, by their ids. So does ``known``: copies take their places from then on,
    since what code has computed from the elements then stays what it was. ``used`` takes what was written into."""

    supports_higher_order_operators = True

    def __init__(
        self, tensors: Iterable[torch.Tensor], written: dict[int, torch.Tensor],
        known: MutableMapping[int, torch.Tensor], used: list[torch.Tensor],
    ) -> None:  # fmt: skip
        super().__init__()
        self._used = used
        self._tensors = [*tensors]
        self._written, self._known = written, known
        self._swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._states: list[_State] = []
        self._groups: dict[int, list[torch.Tensor]] = {}  # those in one memory, by its address
        self._kept: dict[int, StorageContents] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would first import it, for a second

    def __enter__(self) -> OutsideWrites:
        # What autograd knows of the result of an operator could not be put back.
        moved = [t for t in self._tensors if self._known.get(id(t)) is t or t.grad_fn is not None]
        places = {memory_of(t) or id(t) for t in moved}
        for tensor, copy in _copies(t for t in self._tensors if (memory_of(t) or id(t)) in places):
            try:
                swap_tensors(tensor, copy)
            except RuntimeError:  # torch's tracer has a weak reference to it
                continue
            self._swapped.append((tensor, copy))
        self._states = [_State(t) for t in self._tensors]
        for tensor in self._tensors:
            self._groups.setdefault(memory_of(tensor) or id(tensor), []).append(tensor)
        for group in self._groups.values():
            if memory_of(group[0]) and group[0].untyped_storage().nbytes() <= SMALL:
                self._keep(group[0])
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, traceback)
        moved = {id(tensor) for tensor, _ in self._swapped}
        for key, kept in self._kept.items():
            if kept.changed():
                self._note(self._groups[key])
                if id(self._groups[key][0]) not in moved:
                    kept.put_back()
        for state in sorted(self._states, key=lambda state: state.tensor._is_view()):  # what views are of comes first
            if state.changed():
                self._note([state.tensor])
            if id(state.tensor) not in moved:
                state.put_back()
        for tensor, copy in reversed(self._swapped):
            swap_tensors(tensor, copy)
        self._used += [*self._written.values(), *(copy for _, copy in self._swapped)]
        self._swapped, self._states, self._groups, self._kept = [], [], {}, {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        places, hides = _writes(function)
        for place, name in places:
            self._before_write(args[place] if place < len(args) else kwargs.get(name))
        if hides:
            for each in (*args, *kwargs.values()):
                self._keep(each)
        return function(*args, **kwargs)

    def _before_write(self, target: Any) -> None:
        if isinstance(target, (tuple, list)):
            for each in target:
                self._before_write(each)
        elif isinstance(target, torch.Tensor):
            self._note(self._keep(target))

    def _keep(self, operand: Any) -> list[torch.Tensor]:
        """Sees to it that those in this memory, which are returned, get their elements back."""
        if isinstance(operand, (tuple, list)):
            return [tensor for each in operand for tensor in self._keep(each)]
        if isinstance(operand, torch.UntypedStorage):
            key = operand.data_ptr()
        elif isinstance(operand, torch.Tensor):
            key = memory_of(operand) or id(operand)
        else:
            return []
        group = self._groups.get(key, [])
        if group and key not in self._kept:
            self._kept[key] = StorageContents(group[0])
        return group

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._written[id(tensor)] = self._known[id(tensor)] = tensor


@functools.cache
def _writes(function: Any) -> tuple[tuple[tuple[int, str], ...], bool]:
    """The operands that an operator writes: their places and names. Whether it may write others, which it does not
    say: one of another library that says nothing, one that calls functions, and some of ATen's."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return (), True
    arguments = enumerate(schema.arguments)
    places = tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    says = bool(places) or function.namespace in ("aten", "prim", "prims")
    return places, not says or schema.name in _HIDE


class StorageContents:
    """The elements in a tensor's memory, all of it; of a tensor that has none of its own, as a DTensor, its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._storage = tensor.untyped_storage() if memory_of(tensor) else None
        self._then = self._tensor.clone() if self._storage is None else _bytes(self._storage).clone()

    def _now(self) -> torch.Tensor:
        return self._tensor if self._storage is None else _bytes(self._storage)

    def changed(self) -> bool:
        return not torch.equal(self._now(), self._then)

    def put_back(self) -> None:
        if not self.changed():
            return
        if self._storage is not None and self._storage.nbytes() != self._then.numel():
            self._storage.resize_(self._then.numel())
        with torch.no_grad():
            self._now().copy_(self._then)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _State:
    """What a tensor is besides its elements."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self._alias = tensor, tensor.detach()
        self._needs, self._grad_fn = tensor.requires_grad, tensor.grad_fn
        self._version = version_of(tensor)
        self._history: torch.Tensor | None = None  # the same, from what it was computed
        if self._grad_fn is not None:
            with torch.enable_grad():
                self._history = tensor.clone()

    def _moved(self) -> bool:
        a, b = self.tensor, self._alias
        if (a.shape, a.dtype) != (b.shape, b.dtype) or memory_of(a) != memory_of(b):
            return True
        return bool(memory_of(a)) and (a.stride(), a.storage_offset()) != (b.stride(), b.storage_offset())

    def changed(self) -> bool:
        tensor = self.tensor
        return tensor.grad_fn is not self._grad_fn or tensor.requires_grad != self._needs or self._moved()

    def put_back(self) -> None:
        tensor, alias = self.tensor, self._alias
        if self._moved():
            tensor.data = alias
        if tensor.grad_fn is not self._grad_fn:
            self._put_back_history()
        elif self._grad_fn is None and tensor.requires_grad != self._needs:
            tensor.requires_grad_(self._needs)
        if version_of(tensor) != self._version:
            set_versions((tensor,), (self._version,))

    def _put_back_history(self) -> None:
        tensor, alias = self.tensor, self._alias
        if not tensor._is_view():
            tensor.detach_().requires_grad_(self._needs and self._history is None)
            if self._history is not None:
                with torch.enable_grad():
                    tensor.copy_(self._history)
        elif self._history is None:
            base = tensor._base
            if base is not None and not base.requires_grad:
                alias = base.as_strided(alias.shape, alias.stride(), alias.storage_offset())
            swap_tensors(tensor, alias.requires_grad_(self._needs))


def _copies(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor with a copy, which is what it is to autograd. Where tensors share memory copies do."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in sorted(tensors, key=lambda tensor: tensor._is_view()):
        base = made.get(id(tensor._base))
        if base is not None:
            copy = base[1].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        elif tensor.grad_fn is not None:
            copy = cloned(tensor)
        elif not memory_of(tensor) or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            copy = with_attributes(tensor.detach().clone(), tensor).requires_grad_(tensor.requires_grad)
        else:
            storage = storages.get(memory_of(tensor)) or tensor.untyped_storage().clone()
            storages[memory_of(tensor)] = storage
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copy = whole.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
            copy.requires_grad_(tensor.requires_grad)
        made[id(tensor)] = tensor, copy
    return list(made.values())
