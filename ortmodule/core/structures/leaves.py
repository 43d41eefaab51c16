"""Writes and reads the kinds of values that contain no others, for :mod:`ortmodule.core.pytree`.

A kind has ``write(writer, value, cls)``, which appends tokens, and ``read(reader, cls)``, if the first token is a type.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from ortmodule.core.errors import NotTraceable, Unflattenable
from ortmodule.core.lazy_tensor import Deferred
from ortmodule.core.structures import dtensor_results, sparse_arguments
from ortmodule.core.structures.made_alike import MadeAlike, function_token_of, token_of
from ortmodule.core.structures.tokens import GENERATOR, PARAMETER, TENSOR, WHOLE


def name_of(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


class Leaf:
    container = False


class TensorLeaf(Leaf):
    @staticmethod
    def write(writer: Any, value: torch.Tensor, cls: type) -> None:
        if value.layout is torch.sparse_coo and not writer.results and not value.requires_grad:
            return sparse_arguments.write(writer, value)
        if value.layout is not torch.strided or value.is_quantized:
            raise Unflattenable(f"a tensor with layout {value.layout}")
        if value.is_neg():
            raise Unflattenable("a tensor whose memory holds the negated numbers")
        if not writer.is_twin(value):
            writer.tokens.append(TENSOR)
            writer.tensors.append(value)
        return None


class ParameterLeaf(TensorLeaf):
    """Among arguments forward can tell one from another tensor."""

    @staticmethod
    def write(writer: Any, value: torch.Tensor, cls: type) -> None:
        if not writer.results and id(value) not in writer.twins:
            writer.tokens.append(PARAMETER)
        TensorLeaf.write(writer, value, cls)


def as_parameter(tensor: Any) -> Any:
    """What stands for a parameter, as one. (It need not be a leaf, which `nn.Parameter(...)` makes.)"""
    if type(tensor) is torch.Tensor:
        tensor.__class__ = torch.nn.Parameter
    return tensor


class DeferredLeaf(Leaf):
    """Logits that another module gave back: arguments are what they stand for."""

    @staticmethod
    def write(writer: Any, value: Deferred, cls: type) -> None:
        TensorLeaf.write(writer, value if writer.results else value.materialised(), torch.Tensor)


class SubclassLeaf(Leaf):
    @staticmethod
    def write(writer: Any, value: torch.Tensor, cls: type) -> None:
        if writer.results and dtensor_results.write(writer, value):
            return
        raise Unflattenable(f"a tensor of type {name_of(cls)}")


class GeneratorLeaf(Leaf):
    @staticmethod
    def write(writer: Any, value: torch.Generator, cls: type) -> None:
        if writer.results:
            return WholeLeaf.write(writer, value, cls)
        writer.tokens += (GENERATOR, value.device)
        writer.generators.append(value)
        return None


class ConstantLeaf(Leaf):
    @staticmethod
    def write(writer: Any, value: Any, cls: type) -> None:
        writer.tokens += (cls, value)

    @staticmethod
    def read(reader: Any, cls: type) -> Any:
        return next(reader.tokens)


class CodeLeaf(Leaf):
    """Functions and classes: among what forward gives away, it may have made them."""

    @staticmethod
    def write(writer: Any, value: Any, cls: type) -> None:
        if writer.makes:
            value = function_token_of(value) if cls is types.FunctionType else token_of(value)
        writer.tokens += (cls, value)

    @staticmethod
    def read(reader: Any, cls: type) -> Any:
        value = next(reader.tokens)
        return value.made if type(value) is MadeAlike else value


class FloatLeaf(Leaf):
    """As text: NaN equals itself, and -0.0 is not 0.0."""

    @staticmethod
    def write(writer: Any, value: float, cls: type) -> None:
        writer.tokens += (cls, value.hex())

    @staticmethod
    def read(reader: Any, cls: type) -> float:
        return float.fromhex(next(reader.tokens))


class PrivateLeaf:
    """The value of an attribute with a leading underscore, while it is written: what it is may remain unknown (a
    tokenizer keeps what it has found out about a text)."""

    container = False

    def __init__(self, value: Any) -> None:
        self.value = value

    @staticmethod
    def write(writer: Any, private: PrivateLeaf, cls: type) -> None:
        before, generators, twins = writer.size(), len(writer.generators), len(writer.twins)
        try:
            writer.add(private.value)
        except Unflattenable:
            del writer.generators[generators:]
            writer.cut(before, twins)
            writer.tokens.append(Unseen)


class Unseen(Leaf):
    """What stands for such a value in a trace, which must not look at it."""

    @staticmethod
    def write(writer: Any, value: Any, cls: type) -> None:
        writer.tokens.append(Unseen)

    @staticmethod
    def read(reader: Any, cls: type) -> Any:
        return Unseen()

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        raise NotTraceable(f"forward looks at a private attribute of an argument, for its {name}")


class WholeLeaf(Leaf):
    """An object that is no container: only results may have one."""

    @staticmethod
    def write(writer: Any, value: Any, cls: type) -> None:
        if not writer.results:
            raise Unflattenable(f"a value of type {name_of(cls)}, which may change while the module runs")
        writer.tokens += (WHOLE, len(writer.objects))
        writer.objects.append(value)
