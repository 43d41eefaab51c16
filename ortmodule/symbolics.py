"""ONNX for operators that the TorchScript exporter does not know, where no other operator of torch says the same.

:func:`installed` puts them in place for the duration of one export; the exporter's own tables stay untouched. Two
operators of the engine's own domain say what ONNX cannot: ``Embedding`` (no gradient for the padding row) and
``StopGradient`` (the value goes on, its gradient does not: `detach()`, `torch.no_grad()`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.onnx import errors, symbolic_helper
from torch.onnx._internal.torchscript_exporter import jit_utils, utils

DOMAIN = "ortmodule"

_SYMBOLICS: dict[str, Callable] = {}


@contextmanager
def installed() -> Iterator[None]:
    """Inside, exports use the translations of this file."""
    original = utils._run_symbolic_function

    def run(graph, block, node, inputs, env, values_in_env, new_nodes, *rest):
        own = _SYMBOLICS.get(node.kind().removesuffix("_"))
        opset = utils.GLOBALS.export_onnx_opset_version
        parts = {"params_dict": utils._params_dict, "env": env, "values_in_env": values_in_env, "new_nodes": new_nodes}
        g = jit_utils.GraphContext(graph=graph, block=block, opset=opset, original_node=node, **parts)
        result = NotImplemented if own is None else own(g, *inputs)
        if result is NotImplemented:
            result = original(graph, block, node, inputs, env, values_in_env, new_nodes, *rest)
        return result

    utils._run_symbolic_function = run
    try:
        yield
    finally:
        utils._run_symbolic_function = original


def knows(kind: str) -> bool:
    """Is this operator translated here?"""
    return kind in _SYMBOLICS


def _tensor_type(value: torch._C.Value) -> torch._C.TensorType | None:
    kind = value.type()
    return kind if isinstance(kind, torch._C.TensorType) else None


def _is_float(value: torch._C.Value) -> bool:
    kind = _tensor_type(value)
    return kind is not None and kind.dtype() is not None and kind.dtype().is_floating_point


def _like(value: torch._C.Value, made: torch._C.Value) -> torch._C.Value:
    """`made` with the type of `value`: the exporter knows nothing about operators of other domains.

    Never with the type of a traced value: its sizes are those of the trace, and would become constants.
    """
    made.setType(value.type())
    return made


def _symbolic(*kinds: str, args: str = "") -> Callable:
    """Registers the translation of these operators; `args` are the letters of `symbolic_helper.parse_args`."""

    def register(function):
        parsed = symbolic_helper.parse_args(*args.split())(function) if args else function
        _SYMBOLICS.update(dict.fromkeys(kinds, parsed))
        return function

    return register


# --- gradients that stop ----------------------------------------------------------------------------------------------


@_symbolic("aten::detach")
def _detach(g, x):
    if not _is_float(x) or not torch.is_grad_enabled():
        return x
    return _like(x, g.op(f"{DOMAIN}::StopGradient", x))


# --- embedding --------------------------------------------------------------------------------------------------------


@_symbolic("aten::embedding", args="v v i b v")
def _embedding(g, weight, indices, padding_idx, scale_grad_by_freq, sparse):
    if scale_grad_by_freq and torch.is_grad_enabled():
        raise errors.SymbolicValueError("embedding with scale_grad_by_freq", weight)
    gathered = g.op("Gather", weight, indices)
    if padding_idx < 0 or not torch.is_grad_enabled():
        return gathered
    return _like(gathered, g.op(f"{DOMAIN}::Embedding", weight, indices, padding_idx_i=padding_idx))


# --- plain functions --------------------------------------------------------------------------------------------------

for _name in ("Sinh", "Cosh", "Asinh", "Acosh", "Atanh"):
    _SYMBOLICS[f"aten::{_name.lower()}"] = lambda g, x, name=_name: g.op(name, x)
