"""Writes a DTensor among results as this rank's part of it (:mod:`ortmodule.core.pytree`)."""

from __future__ import annotations

import sys
from typing import Any

from ortmodule.core.structures.tokens import SPLIT
from ortmodule.core.torch_private import get_tracing_state

#: The attribute of a DTensor of a trace that says what its part is: called without arguments.
PART_OF = "_ortmodule_part_of"


def write(writer: Any, value: Any) -> bool:
    """False: it is no DTensor, or one of which a trace does not know what its part is."""
    if not hasattr(type(value), "to_local"):
        return False
    part_of = getattr(value, PART_OF, None)
    if part_of is None and get_tracing_state() is not None:
        return False
    part = value.to_local() if part_of is None else part_of()
    writer.tokens += (SPLIT, value.device_mesh, tuple(value.placements))
    writer.add(part)
    return True


def read(reader: Any) -> Any:
    """A DTensor whose gradient becomes one of its part, as it lies."""
    mesh, placements = next(reader.tokens), next(reader.tokens)
    types: Any = sys.modules["torch.distributed.tensor"]  # which has made the mesh
    return types.DTensor.from_local(reader.value(), mesh, placements, run_check=False)
