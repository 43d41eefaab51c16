"""Follows a wrapped module from call to call: its tensors, flags, hooks and attributes."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ortmodule import _core
from ortmodule.core.errors import Cause, NotInEngine
from ortmodule.core.torch_private import KEEPS, PARAMETRIZE
from ortmodule.guards.hook_analysis import Reach
from ortmodule.guards.module_tree import Tree

#: Trees of modules that are remembered with their graphs: parts come and go.
MOST_TREES = 4


class ModuleState(NamedTuple):
    """A module between two changes."""

    tree: Tree
    watch: _core.Watch  # sees most changes
    polled: bool  # others can happen without a sign
    reach: Reach | None  # what hooks read that are a part of graphs
    hooked: tuple[str, ...]  # submodules with hooks that a graph would not call; "": all have
    key: int  # stands for what the tree says of its tensors and training flags
    epoch: int  # another one after every change

    def check(self) -> None:
        """Raises NotInEngine where something around the module's calls is no part of any graph."""
        if "" in self.hooked:
            raise NotInEngine(Cause.TORCH_MODEL, "there are hooks on every module, which a graph would not call")
        if PARAMETRIZE.get(KEEPS) and any(map(is_parametrized, self.tree.modules.values())):
            text = "it is called inside of parametrize.cached(), which keeps what its parametrizations compute"
            raise NotInEngine(Cause.TORCH_MODEL, text)


class ModuleStates:
    """The state of one module, looked at again when something has changed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.latest: ModuleState | None = None
        self._trees: list[Tree] = []
        self._epochs = itertools.count()

    def look(self) -> ModuleState:
        """The state of now, when :attr:`latest` does not hold."""
        tree = next((tree for tree in self._trees if tree.is_current()), None)
        if tree is None:
            # Graphs take their tensors from places that may be gone.
            tree = Tree(self.module)
            if self._trees:
                tree.inherit(self._trees[0])
            self._trees = [tree, *self._trees[: MOST_TREES - 1]]
        tree.attributes.look(tree.described_names())
        tree.learn_changes()
        watch, hooked = tree.watch(), tree.hooks.look()
        self.latest = ModuleState(tree, watch, tree.polled, tree.hooks.reach, hooked, tree.number(), next(self._epochs))
        return self.latest

    def forget(self) -> None:
        """There is more to watch now."""
        self.latest = None
