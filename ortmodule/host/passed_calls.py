"""Runs calls that are nodes of a graph where PyTorch has the module, or gives what they returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ortmodule.core.errors import StateError
from ortmodule.guards.module_tree import Tree
from ortmodule.host.host_node import Node


def _nothing(*args: Any) -> None:
    return None


class Passed:
    """The calls that are nodes of a graph, where the module runs without the engine. ``depth``: how many are open."""

    def __init__(self, tree: Tree, nodes: Sequence[Node]) -> None:
        self.tree = tree
        self.paths = {id(tree.modules[node.name]): node.name for node in nodes if node.kind == "module"}
        labels = [(*node.name.rpartition("."), node.name) for node in nodes if node.kind == "method"]
        self.methods = {(id(tree.modules[path]), name): label for path, _, name, label in labels}
        self.names: dict[int, str] = {}
        self.stack: list[str] = []
        self.depth = 0
        self.begins = self.traced = _nothing
        self.runs: Callable[[str | None], None] = _nothing  # before each outermost one, with the path of a submodule

    def active(self) -> bool:
        return True

    def function(self, cls: type, forward: Callable, args: tuple, kwargs: dict, grad: bool) -> tuple[Any, None]:
        return self.call(forward, args, kwargs), None

    def module(self, module: nn.Module, path: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        return self.call(original, (module, *args), kwargs, path)

    def method(self, module: nn.Module, name: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        return self.call(original, (module, *args), kwargs)

    def blame(self, error: BaseException, module: nn.Module) -> None:
        pass

    def call(self, original: Callable, args: tuple, kwargs: dict, path: str | None = None) -> Any:
        outermost = not self.depth
        self.depth += 1
        try:
            if outermost:
                self.runs(path)
            return original(*args, **kwargs)
        finally:
            self.depth -= 1


class Replayed(Passed):
    """Gives the first calls of ``nodes``, which are submodules, what they returned when they ran."""

    def __init__(self, tree: Tree, nodes: Sequence[Node], returned: Sequence[Any]) -> None:
        super().__init__(tree, nodes)
        self._left = list(zip(nodes, returned, strict=True))

    def module(self, module: nn.Module, path: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        if not self._left:
            return original(module, *args, **kwargs)
        node, result = self._left.pop(0)
        if node.name != path:
            raise StateError(f"forward calls {path}, where it called {node.name} when it was traced")
        return result


class Diverted(Passed):
    """Calls of submodules go to what is ``wrapped`` around them, by their paths."""

    def __init__(self, tree: Tree, wrapped: dict[str, nn.Module]) -> None:
        super().__init__(tree, ())
        self.wrapped, self.paths = wrapped, {id(tree.modules[path]): path for path in wrapped}

    def module(self, module: nn.Module, path: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        return self.wrapped[path](*args, **kwargs)
