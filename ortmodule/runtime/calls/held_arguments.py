"""Finds arguments that the module holds, too: a graph takes them from where the module holds them.

Forward sees one tensor then (`x is self.weight`), and what is written into one is in the other. So the structure of
the arguments says in which place of the module such a tensor is, and it is no input of the graph.
"""

from __future__ import annotations

import torch

from ortmodule.core import pytree
from ortmodule.core.errors import Cause, NotInEngine
from ortmodule.guards.inventory import Inventory, NumberAttributes, Slot
from ortmodule.runtime.calls.module_state import ModuleState


def taken_from_module(
    inputs: list[torch.Tensor], arguments: pytree.Structure, state: ModuleState
) -> tuple[list[torch.Tensor], pytree.Structure]:
    """The inputs that the module does not hold, and the structure around them.

    Raises NotInEngine for one that it holds elsewhere than in an attribute.
    """
    state.tree.refresh()
    slots: dict[int, Slot] = {}
    for slot in state.tree.slots.values():
        if not isinstance(slot.holder, NumberAttributes):
            slots.setdefault(id(slot.get()), slot)
    places = [slots.get(id(tensor)) for tensor in inputs]
    for i, (tensor, place) in enumerate(zip(inputs, places, strict=True)):
        if place is None and state.watch.holds([tensor]):
            raise NotInEngine(Cause.DATA, f"input {i} is a tensor that forward reads from elsewhere, too")
    others = [tensor for tensor, place in zip(inputs, places, strict=True) if place is None]
    return others, arguments.with_held(places)


def reads_of(arguments: pytree.Structure, inventory: Inventory) -> dict[tuple[int, str], str]:
    """The attributes that hold such arguments, as a trace notes those that forward reads: a graph depends on their
    types and shapes."""
    holders = {id(module.__dict__): module for module in inventory.modules.values()}
    places = [token for token in arguments.tokens if isinstance(token, Slot) and id(token.holder) in holders]
    return {(id(holders[id(place.holder)]), str(place.key)): "an argument" for place in places}
