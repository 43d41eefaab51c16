"""Computes an exported graph in PyTorch, one node after the other.

Slow, and independent of the engine: this is what the engine is compared with when something is wrong, operator by
operator. Autograd goes through it. Random operators take their masks and numbers from the caller. An operator that is
not in the table raises :class:`Unknown`.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import torch

from ortmodule.core.errors import Unknown
from ortmodule.core.onnx_utils import RANDOM, attributes
from ortmodule.debug.onnx_operators import TABLE

Tensor = torch.Tensor
Values = dict[str, Tensor]


def evaluate(nodes: Sequence[onnx.NodeProto], values: Values, drawn: Values) -> None:
    """Computes the outputs of ``nodes`` into ``values``, which holds what they begin with.

    ``drawn``: by output name, numbers that a random node drew (for Dropout: under its first output, its mask). A node
    one of whose outputs is among ``values`` already is left out.
    """
    for node in nodes:
        if any(name in values for name in node.output if name):
            continue
        operands = [values[name] if name else None for name in node.input]
        results = _results(node, operands, drawn)
        for name, result in zip(node.output, results, strict=False):
            if name:
                values[name] = result


def _results(node: onnx.NodeProto, operands: list[Tensor | None], drawn: Values) -> Sequence[Tensor]:
    if node.op_type == "Dropout" and node.domain == "":
        return _dropout(operands, drawn.get(node.output[0]))
    if node.op_type in RANDOM and node.domain == "":
        return (drawn[node.output[0]],)
    function = TABLE.get((node.domain, node.op_type))
    if function is None:
        raise Unknown(f"{node.domain or 'ONNX'} {node.op_type}")
    try:
        results = function(attributes(node), len(node.output), *operands)
    except (Unknown, KeyError) as error:
        raise Unknown(f"{node.op_type} ({error})") from error
    return results if isinstance(results, (tuple, list)) else (results,)


def _dropout(operands: list[Tensor | None], mask: Tensor | None) -> Sequence[Tensor]:
    x = operands[0]
    assert x is not None, "its first operand"
    if mask is None:
        return x, torch.ones_like(x, dtype=torch.bool)
    rate = operands[1] if len(operands) > 1 else None
    ratio = 0.5 if rate is None else rate.item()
    return x * mask.to(x.dtype) * (1 / (1 - ratio) if ratio < 1 else 0), mask
