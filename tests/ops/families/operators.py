"""Cases of rows of csrc/ops/pointwise/operators.h: those of our domain that no family has written cases for.

The reference is PyTorch's function of that name, and the operand any number. One whose domain is smaller, or that has
two operands, has its cases in unary.py or binary.py.
"""

import torch

from ortmodule import _core
from tests.ops.cases import curve
from tests.ops.families import activation, binary, unary

WRITTEN = {case.op for family in (activation, binary, unary) for case in family.CASES}
CASES = [
    case
    for name, function, operands in _core.pointwise_operators()
    if operands == 1 and f"ortmodule::{name}" not in WRITTEN and hasattr(torch, function)
    for case in curve(f"ortmodule::{name}", getattr(torch, function))
]
