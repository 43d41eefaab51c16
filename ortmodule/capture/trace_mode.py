"""Watches a trace: writes, tensors from elsewhere, and what autograd saves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from ortmodule.capture import scalar_guards
from ortmodule.capture.call_patches import has_sparse_gradient, recordable
from ortmodule.capture.calls import batched_sizes, named_operators, out_arguments
from ortmodule.capture.effects.filled_caches import may_set_up
from ortmodule.capture.numbers import numpy_sizes, symbolic_numbers, tensor_facts
from ortmodule.capture.randomness import chance, drawn_values
from ortmodule.core import rng_state
from ortmodule.core.errors import DrawsOperand, NotTraceable, WritesParameter
from ortmodule.core.names import CHANGES_PARAMETER, RECORDS
from ortmodule.core.objects.tensor_copies import cloned
from ortmodule.core.objects.tensor_memory import GIVES_MEMORY, is_in_place, is_of_data, memory_of, version_of
from ortmodule.core.size_expr import is_number
from ortmodule.core.snapshot import Elements, Snapshot
from ortmodule.core.torch_private import (
    DisableTorchFunction,
    get_tracing_state,
    get_value_trace,
    set_tracing_state,
    set_value_trace,
    untraced,
)
from ortmodule.guards.module_tree import Tree
from ortmodule.host import collectives
from ortmodule.host.parallel_layers import LocalTensors


class Saved:
    """What autograd saves in a trace: nothing, so that memory is used again, unless forward differentiates."""

    def __init__(self) -> None:
        self.keeps = self.asked = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor.detach() if self.keeps else None

    def unpack(self, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            self.asked = True
            raise NotTraceable("forward differentiates")
        return tensor

    def keeps_from_now_on(self) -> bool:
        """Whether it has to be traced again, with what is saved."""
        changes, self.keeps = self.asked and not self.keeps, self.keeps or self.asked
        return changes


class TraceMode(TorchFunctionMode):
    """Makes visible to the trace what it would not record.

    That is where autograd stops (inside `torch.no_grad()`, and at `tensor.data`), that an assignment to a part of a
    tensor repeats the value as often as the part is large, and which tensors forward takes from elsewhere: from a
    list, an object, a global.
    """

    def __init__(
        self, draw: Callable[[Any, tuple, dict[str, Any]], Any], node: collectives.Node, tree: Tree
    ) -> None:  # fmt: skip
        """``draw``: makes a node of a call that draws from a torch.Generator. ``node``: one of any function."""
        super().__init__()
        self.draw, self.node, self.tree = draw, node, tree
        self.dtensors = LocalTensors(tree, node, self.__torch_function__) if tree.parallel else None
        self.differentiates = torch.is_grad_enabled()
        self.outside: dict[int, torch.Tensor] = {}
        self.around: Container[int] = ()  # the memory of tensors around the module, which autograd may know
        self._before: dict[int, Elements] = {}  # of those
        self._snapshot = Snapshot()  # what they held, and parameters that are written
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}  # memory of those that are gone is used again
        self._parameters: dict[int, torch.Tensor] = {}  # by their memory
        self._written: set[int] = set()  # of those
        self._given: set[int] = set()  # those of the module and the caller
        self._constants: set[int] = set()  # those that do not follow from values of others, nor from sizes
        self._looks = False
        self.left: set[int] = set()  # ids of tensors that earlier calls have left in containers
        self.touched: set[int] = set()  # those of them that functions are given
        self.moved: dict[int, torch.Tensor] = {}  # tensors that forward has given other memory
        self._shared: list[tuple[torch.Tensor, int, str]] = []  # whose memory that is without a trace, and where
        self.failed = ""  # of an operator, the latest

    @contextmanager
    def looking(self, *known: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside, tensors from elsewhere than ``known`` are noted."""
        self._known, self._looks = {id(t): weakref.ref(t) for group in known for t in group}, True
        self._given = set(self._known)
        try:
            yield
        finally:
            self._looks = False

    def keep(self, parameters: Iterable[torch.Tensor]) -> None:
        """What forward changes of these is put back."""
        self._parameters = {memory: p for p in parameters if (memory := memory_of(p))}

    def uses_left(self, results: Iterable[torch.Tensor]) -> bool:
        """Has forward given one of these tensors to a function, or is one among its results?"""
        return bool(self.touched) or any(id(t) in self.left for t in results)

    def _before_write(self, argument: Any) -> None:
        if isinstance(argument, (tuple, list)):
            for each in argument:
                self._before_write(each)
        elif isinstance(argument, torch.Tensor):
            memory = memory_of(argument)
            if (id(argument) in self.outside or memory in self.around) and not is_number(argument):
                self._refuse_write(argument)
            if memory in self._parameters and memory not in self._written:
                parameter = self._parameters[memory]
                detached = parameter.detach()
                with untraced():
                    contents = detached.clone()
                self._written.add(memory)
                self._snapshot.add(Elements(parameter, contents, always=True))

    def _refuse_write(self, tensor: torch.Tensor) -> NoReturn:
        """Before it happens: nothing could put back what autograd knows of the tensor."""
        text = f"forward changes a tensor of shape {list(tensor.shape)} that no attribute of a module holds"
        self.failed = f"{text} ({scalar_guards.user_line()})"
        raise NotTraceable(self.failed)

    def _look(self, arguments: Iterable[Any]) -> None:
        for argument in arguments:
            if symbolic_numbers.is_one(argument):
                continue
            if isinstance(argument, torch.Tensor):
                if id(argument) in self.left:
                    self.touched.add(id(argument))
                made = self._knows(argument) or symbolic_numbers.stands_for_one(argument)
                if not made and argument.grad_fn is None:
                    self._known[id(argument)] = weakref.ref(argument)
                    self._given.add(id(argument))
                    self.outside[id(argument)] = argument
                    self._before[id(argument)] = before = Elements(argument, argument.detach().clone())
                    self._snapshot.add(before)
            elif isinstance(argument, (tuple, list)):
                self._look(argument)
            elif isinstance(argument, dict):
                self._look(argument.values())

    def _knows(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor

    def check(self, written: Container[int]) -> None:
        """Raises NotTraceable when forward changed a tensor that it has from elsewhere or under two names, or an
        operator failed, or it is not clear how gradients of DTensors lie. ``written``: ids of tensors from elsewhere
        that breaks change."""
        if self.failed:
            raise NotTraceable(self.failed)
        if self.dtensors is not None:
            self.dtensors.settle()
        for tensor, version, where in self._shared:
            if version_of(tensor) != version:
                raise NotTraceable(f"{where}, and changes them later under another name")
        for key, tensor in self.outside.items():
            if self._before[key].changed() or key in written:
                raise NotTraceable(
                    f"forward changes a tensor of shape {list(tensor.shape)} that no attribute of a module holds"
                )

    def settings(self) -> dict[tuple[int, str], tuple[Any, str]]:
        """Of the process, that layers of tensor parallelism depend on."""
        return {} if self.dtensors is None else self.dtensors.settings

    def cause(self, error: Exception) -> Exception:
        """What to say of a trace that ended with this: after an operator failed, a trace is not what it should be."""
        return error if str(error) in self.failed or not self.failed else NotTraceable(self.failed)

    def put_back(self) -> None:
        """Undoes changes of parameters, and of tensors that forward has from elsewhere."""
        self._snapshot.put_back()

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if kwargs and isinstance(generator := kwargs.get("generator"), torch.Generator):
            rng_state.meet(generator)
            if get_tracing_state() is not None:
                return self._draw(function, args, kwargs)
        if get_tracing_state() is None:
            tensor_facts.asked_in_node(function, args)
            if is_of_data(function, "__get__"):  # or no version would tell that a parameter is changed through it
                return args[0].detach()
            return function(*args, **(kwargs or {}))
        if self.dtensors is not None and self.dtensors.concern(args, kwargs):
            return self.dtensors.call(function, args, kwargs or {})
        if chance.is_among(args) or (kwargs and chance.is_among(kwargs.values())):
            raise DrawsOperand(f"{scalar_guards.user_line()} computes with a random number")
        if drawn_values.is_among(args):
            function, args, kwargs = drawn_values.given_to_torch(function, args, kwargs or {})
        if (sizes := batched_sizes.read(function, args, kwargs or {}, self._call)) is not NotImplemented:
            return sizes
        if not self._looks:
            return self._call(function, args, kwargs)
        self._look(args)
        self._look((kwargs or {}).values())
        result = self._call(function, args, kwargs)
        self._made(result, self._is_constant((args, (kwargs or {}).values())))
        return result

    def _draw(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """From a torch.Generator: PyTorch does it in each run, from the one that is in its place then."""
        try:
            drawn = self.draw(function, args, kwargs)
        except NotTraceable as error:
            raise NotTraceable(f"{scalar_guards.user_line()}: {error}") from None
        filled = args[0] if function.__name__.endswith("_") else None
        return drawn if filled is None else self._call(torch.Tensor.copy_, (filled, drawn), {})

    def write(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Puts what a node returns into a tensor of forward's."""
        self._call(torch.Tensor.copy_, (target, value), {})

    def _move(self, tensor: torch.Tensor, value: Any) -> None:
        """`tensor.data = value`: the same object has other memory from then on."""
        where = f"{scalar_guards.user_line()} puts other data into a tensor (x.data = ...)"
        if not isinstance(value, torch.Tensor) or (tensor.dtype, tensor.shape) != (value.dtype, value.shape):
            raise NotTraceable(f"{where}, of another type or shape")
        if _is_same(tensor, value):  # as `layer.to(dtype)` does where the layer is of that type
            return
        if memory_of(tensor) in self._parameters:
            text = f"{where}, which {CHANGES_PARAMETER} that holds it"
            if not tensor.requires_grad:
                raise WritesParameter(text, tensor)
            may_set_up(self.tree, text)
            raise NotTraceable(text)
        if tensor.requires_grad or not self._knows(tensor) or tensor._is_view():
            raise NotTraceable(f"{where}, which carries a gradient, is a part of another one or no attribute holds")
        shared = [*self._parameters.values(), *(t for ref in self._known.values() if (t := ref()) is not value)]
        if any(memory_of(t) == memory_of(value) for t in shared if isinstance(t, torch.Tensor)):
            raise NotTraceable(f"{where}, which is that of another tensor")
        with torch.no_grad():
            copy = value.detach().clone()
            with untraced(), DisableTorchFunction():
                tensor.data = copy.detach()
        set_value_trace(tensor, get_value_trace(copy))
        self.moved[id(tensor)] = tensor
        self._shared.append((value, version_of(value), where))

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Is it a result of the graph's operators?"""
        return id(tensor) not in self._given and self._knows(tensor)

    def known(self) -> dict[int, weakref.ref[torch.Tensor]]:
        """The tensors that it has seen, by their ids: for :meth:`made_since`."""
        return dict(self._known)

    def made_since(self, known: dict[int, weakref.ref[torch.Tensor]]) -> Iterator[torch.Tensor]:
        """Those made by the graph's operators since then that are still there."""
        new = [(key, ref()) for key, ref in self._known.items() if known.get(key) is not ref]
        return (tensor for key, tensor in new if tensor is not None and key not in self._given)

    def let_go(self) -> None:
        """Of all but weak references: the trace is over."""
        self.moved, self.outside, self._before = {}, {}, {}
        self._shared, self._snapshot = [], Snapshot()

    def alive(self) -> list[torch.Tensor]:
        """The tensors made inside :meth:`looking` that are still there."""
        found = [(key, each()) for key, each in self._known.items() if key not in self._given]
        return [tensor for _, tensor in found if tensor is not None]

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Is it one of :meth:`alive` that follows from constants alone?"""
        return id(tensor) in self._constants

    def _is_constant(self, arguments: Any) -> bool:
        if isinstance(arguments, torch.Tensor):
            return id(arguments) in self._constants
        if isinstance(arguments, (tuple, list, type({}.values()))):
            return all(map(self._is_constant, arguments))
        return True

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes tensors as results of the graph."""
        self._known |= {id(tensor): weakref.ref(tensor) for tensor in tensors}

    def _made(self, result: Any, constant: bool) -> None:
        if isinstance(result, torch.Tensor):
            if id(result) not in self._known or not self._knows(result):
                self._known[id(result)] = weakref.ref(result)
                self._given.discard(id(result))
            (self._constants.add if constant else self._constants.discard)(id(result))
        elif isinstance(result, (tuple, list)):
            for each in result:
                self._made(each, constant)

    def _call(self, function: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        if symbolic_numbers.is_among(args) or (kwargs and symbolic_numbers.is_among((*kwargs.values(),))):
            return symbolic_numbers.call(function, args, kwargs or {}, self._call)
        if (number := numpy_sizes.computed(function, args, kwargs)) is not NotImplemented:
            return number
        kwargs = kwargs or {}
        function, args, kwargs = named_operators.as_function(function, args, kwargs)
        if collective := collectives.functional(function):
            return collectives.call_functional(self.node, collective, function, args, kwargs)
        if function in symbolic_numbers.NARROWING:
            bounds = symbolic_numbers.narrowing(args, kwargs)
            if bounds is not None and scalar_guards.decided_by_data(bounds[2:]):
                return symbolic_numbers.narrowed(bounds, self._call)
        if is_of_data(function, "__get__"):
            return args[0].detach()
        if is_of_data(function, "__set__"):
            return self._move(*args)
        if function is torch.Tensor.__setitem__ or is_in_place(function.__name__):
            self._before_write(args[:1])
        self._before_write(kwargs.get("out"))
        if function.__name__ in GIVES_MEMORY and id(args[0]) in self.outside:
            self._refuse_write(args[0])
        if "out" in kwargs:
            result = out_arguments.into(function, args, kwargs, self._call, self.is_made)
            if result is not NotImplemented:
                return result
        if function is torch.Tensor.__setitem__ and isinstance(args[2], torch.Tensor) and _is_plain_index(args[1]):
            tensor, index, value = args
            with scalar_guards.slicing(function, args):
                args = tensor, index, value.expand_as(tensor[index]) if value.dim() else value
        if self.differentiates and has_sparse_gradient(function, args, kwargs or {}):
            self.failed = f"{scalar_guards.user_line()} asks for a sparse gradient of an embedding"
            raise NotTraceable(self.failed)
        tensor_facts.asked(function, args)
        function = _without_changing_numbers(function, args)
        function, args, kwargs = recordable(function, args, kwargs or {})
        if (compared := scalar_guards.observed(function, args, kwargs)) is not NotImplemented:
            return compared
        if not self.differentiates and torch.is_grad_enabled():
            self._check_unrecorded((*args, *kwargs.values()))
        unseen = not torch.is_grad_enabled() and self.differentiates
        if unseen and (function is torch.Tensor.__setitem__ or is_in_place(function.__name__) or "out" in kwargs):
            args, kwargs = _operands_stopped(args, kwargs)
        versions = [(t, version_of(t)) for t in (*args, *kwargs.values()) if unseen and _carries(t)]
        state = get_tracing_state()
        try:
            with scalar_guards.slicing(function, args):
                result = function(*args, **kwargs)
        except Exception as error:
            if get_tracing_state() is None:  # torch's tracer loses its place, and would end the process
                set_tracing_state(state)
            self.failed = f"forward goes on after an error: {error}"
            if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
                _let_go_of_indices()
            raise
        if any(version_of(tensor) != version for tensor, version in versions):
            raise NotTraceable("forward changes a tensor that carries a gradient, and autograd does not see it")
        if not unseen or result is kwargs.get("out") or not any(map(_follows, (*args, *kwargs.values()))):
            return result
        return _all_stopped(result)

    def _check_unrecorded(self, operands: Iterable[Any]) -> None:
        """Raises NotTraceable where autograd records an operator, in a call without gradients."""
        if any(map(_follows, operands)):
            self.failed = f"{scalar_guards.user_line()} {RECORDS}"
            raise NotTraceable(self.failed)


def _without_changing_numbers(function: Any, args: tuple) -> Any:
    """`n += 1`, which a tensor has as `add_`, leaves a number as it was where it is used elsewhere."""
    name = getattr(function, "__name__", "")
    if not is_in_place(name) or not args or not isinstance(args[0], torch.Tensor) or not is_number(args[0]):
        return function
    return getattr(torch.Tensor, name.removesuffix("_"), function)


def _let_go_of_indices() -> None:
    """Torch's tracer keeps tensors that are indices until it writes down the operator. Those of one that fails before
    would get into the next graph, when theirs has been freed."""
    zero = torch.zeros(1)
    zero[0], zero[0:1]


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Are these, of one type and shape, the same elements in memory?"""
    with untraced():
        places = [(t.storage_offset(), t.stride()) for t in (tensor, other)]
    return memory_of(tensor) == memory_of(other) != 0 and places[0] == places[1]


def _is_plain_index(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts)


def _follows(argument: Any) -> bool:
    if isinstance(argument, (tuple, list)):
        return any(map(_follows, argument))
    return isinstance(argument, torch.Tensor) and argument.requires_grad


def _carries(argument: Any) -> bool:
    """Is it, or a part of, a result that carries a gradient? (What becomes of leaves is found elsewhere.)"""
    if not isinstance(argument, torch.Tensor):
        return False
    base = argument._base if argument._is_view() and argument._base is not None else argument
    return base.grad_fn is not None


def _operands_stopped(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Of an operator that writes: what it writes is no result that could be stopped, so its operands are."""
    kept = 0 if "out" in kwargs else 1
    args = (*args[:kept], *map(_operand_stopped, args[kept:]))
    return args, {name: a if name == "out" else _operand_stopped(a) for name, a in kwargs.items()}


def _operand_stopped(operand: Any) -> Any:
    if isinstance(operand, (tuple, list)) and _follows(operand):
        return type(operand)(map(_operand_stopped, operand))
    return operand.detach() if isinstance(operand, torch.Tensor) and operand.requires_grad else operand


def _stopped(result: Any) -> Any:
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return result
    if not result.requires_grad:
        return result.detach()
    # Of views that there are several of (`x.unbind()`) PyTorch says that they need a gradient, and gives x none.
    return result.detach().requires_grad_() if result._is_view() and result.grad_fn is None else result


def _all_stopped(result: Any) -> Any:
    """With the tensors of tuples, named ones (`torch.max(x, 1)`) among them, and of lists."""
    if isinstance(result, torch.Tensor):
        return _stopped(result)
    if not isinstance(result, (tuple, list)):
        return result
    stopped = list(map(_all_stopped, result))
    return type(result)(*stopped) if hasattr(result, "_fields") else type(result)(stopped)


def copied_in_trace(tensor: torch.Tensor) -> torch.Tensor:
    """The same in the trace, which forward may write into: the input stays as it was, and the copy is no leaf of
    autograd's graph, as the caller's tensor may be none."""
    with untraced():
        copy = cloned(tensor)
    set_value_trace(copy, get_value_trace(tensor))
    return copy
