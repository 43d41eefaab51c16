"""Holds the places of NumPy's arrays among the arguments, in a trace.

The array is an input of the graph. Tensors that forward makes of it, and parts that it takes, are traced; what NumPy
computes with it is a node (:mod:`ortmodule.capture.randomness.drawn_values`). Another look at its values is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch

from ortmodule.capture.numbers import numpy_numbers, symbolic_numbers
from ortmodule.capture.output_aliasing import Sighting
from ortmodule.capture.randomness.drawn_values import DrawnArray, NodeMaker, method
from ortmodule.capture.scalar_guards import user_line
from ortmodule.capture.trace_record import Source, Write
from ortmodule.core import pytree
from ortmodule.core.errors import NotTraceable
from ortmodule.core.structures.numpy_values import DTYPES, dtype_of
from ortmodule.core.structures.tokens import ARRAY


class GivenArray(DrawnArray):
    """An array among the arguments, or a part of one."""

    __hash__ = None  # as NumPy's
    origin = "that is an argument"

    def __init__(self, make: NodeMaker, tensor: torch.Tensor) -> None:
        super().__init__(make, tensor, dtype_of(tensor))

    def as_tensor(self) -> torch.Tensor:
        return self.tensor

    def _of(self, tensor: torch.Tensor) -> GivenArray:
        return GivenArray(self.make, tensor)

    def __getitem__(self, index: Any) -> Any:
        parts = index if type(index) is tuple else (index,)
        if not all(part is None or part is ... or _is_whole(part) or _goes_up(part) for part in parts):
            return super().__getitem__(index)
        part = self.tensor[parts]
        if part.dim() or ... in parts:
            return self._of(part)
        return _number(part, self.dtype)

    def item(self, *index: Any) -> Any:
        return super().item(*index) if index else self.tensor.item()  # type: ignore[misc]  # found by __getattr__

    def tolist(self) -> Any:
        return self.tensor.tolist()

    def __float__(self) -> float:
        return float(self.tensor)

    def __int__(self) -> int:
        return int(self.tensor)

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        kind = numpy.dtype(dtype)
        rounds = self.dtype.kind in "fc" and kind.kind not in ("b", self.dtype.kind)
        if args or kwargs or rounds or kind not in DTYPES:
            return self.computed(method("astype"), (self, kind, *args), kwargs)
        return self._of(self.tensor.to(getattr(torch, kind.name), copy=True))

    def reshape(self, *sizes: Any, **kwargs: Any) -> Any:
        if kwargs:
            return self.computed(method("reshape"), (self, *sizes), kwargs)
        return self._of(self.tensor.reshape(*sizes))

    def copy(self) -> Any:
        return self._of(self.tensor.clone())

    @property
    def T(self) -> Any:  # noqa: N802  # NumPy's name
        return self._of(self.tensor.permute(*reversed(range(self.ndim))))


def _goes_up(value: Any) -> bool:
    return type(value) is slice and (value.step is None or (type(value.step) is int and value.step > 0))


def _is_whole(value: Any) -> bool:
    return type(value) is int or (symbolic_numbers.is_one(value) and not symbolic_numbers.is_float(value))


def _number(tensor: torch.Tensor, dtype: numpy.dtype) -> Any:
    number = tensor.item()
    return numpy_numbers.typed(number, dtype.type) if symbolic_numbers.is_one(number) else dtype.type(number)


class GivenArrays:
    """The arrays among the arguments of a trace."""

    def __init__(self, node: Callable[..., Any]) -> None:
        """``node``: makes one of what NumPy computes (`Regions.node`)."""
        self._make = functools.partial(node, "numpy")
        self._held: set[int] = set()  # ids of their tensors

    def of(self, tensor: torch.Tensor) -> GivenArray:
        """What stands for the array that ``tensor`` is a copy of."""
        self._held.add(id(tensor))
        return GivenArray(self._make, tensor)

    def check(
        self, tensors: Sequence[torch.Tensor], sources: Iterable[Source], views: dict[int, Sighting],
        writes: Iterable[Write],
    ) -> None:  # fmt: skip
        """Raises NotTraceable where forward writes into the memory of an array, or gives that away: a run has a copy.
        ``tensors``: the inputs; ``sources``: of results; ``views``: results that are such."""
        places = {i for i, tensor in enumerate(tensors) if id(tensor) in self._held}
        given = [*((source.kind, source.key) for source in sources), *(view.base for view in views.values())]
        if any(kind == "input" and key in places for kind, key in given):
            raise NotTraceable("forward gives away a tensor in the memory of an array, an argument")
        if any(write.target.kind == "input" and write.target.key in places for write in writes):
            raise NotTraceable("forward changes an array, an argument")


class _Kind:
    """What PyTorch runs is given an array."""

    container = False

    @staticmethod
    def write(writer: Any, value: GivenArray, cls: type) -> None:
        if writer.results:
            raise NotTraceable(f"{user_line()} returns, or keeps, an array that is an argument")
        writer.tokens.append(ARRAY)
        writer.add(value.tensor)


pytree.register(GivenArray, _Kind)
