"""Chooses what of a module PyTorch runs inside its graph: operators by kind, and submodules.

Which they are is found by trying. Where a capture or a graph fails, the smallest operator or submodule that is to blame
is left to PyTorch, and the capture is tried again, until it succeeds or only the module itself is to blame.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx
import torch
from torch import nn

from ortmodule import _core
from ortmodule.capture.dynamic_dims import Capture
from ortmodule.core.errors import CaptureError
from ortmodule.core.names import ADVANCES, CHANGES_PARAMETER, ONLY_CALLER, RECORDS, REENTRANT, RETURNS_GIVEN
from ortmodule.guards.guards import Guards
from ortmodule.guards.module_tree import Tree
from ortmodule.lowering import export

#: Change running statistics, which as nodes of a graph they would not.
_WRITING = frozenset({"aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm", "aten::copy_"})
_CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})


#: Of `nn.TransformerEncoder`, where it may take the way that a trace does not see.
FAST_PATH = (
    "nn.TransformerEncoder takes a faster way where no gradient is recorded and a padding mask is given, whose results "
    "are zeros at the padding, which no graph repeats; enable_nested_tensor=False takes the usual way"
)


class Partition:
    """What PyTorch runs of a module in one state; kept in its ``tree``."""

    def __init__(self, tree: Tree, key: int, hooked: Iterable[str]) -> None:
        """``key``: the state's number. ``hooked``: submodules with hooks."""
        self.tree = tree
        self._found = tree.caches.opaque.setdefault(key, {})
        self._switches = tree.caches.switches.setdefault(key, {})
        for path in [path for path, switches in self._switches.items() if switches.broken() is not None]:
            self._found.pop(path, None)
            self._switches.pop(path)
        self._given = {path: f"there are hooks on {path}, which a graph would not call" for path in hooked}
        self._given |= dict.fromkeys(tree.scripted, "it is scripted, and a trace may lose its control flow")
        self._given |= {path: f"{why}, which its own code alone can read" for path, why in tree.coded.items()}

    def modules(self) -> dict[str, str]:
        """The submodules by path, and methods as `path:name`, with the reasons; none is inside of another."""
        modules = self._found | self._given
        return {p: why for p, why in modules.items() if not any(p.startswith((f"{o}.", f"{o}:")) for o in modules)}

    def switches(self) -> dict[tuple[int, str], str]:
        """What a graph has to watch: attributes, and the lines that read them."""
        return {key: place for switches in self._switches.values() for key, place in switches.places.items()}

    def _watch(self, blamed: str, paths: Iterable[str]) -> None:
        """Watches the switches (attributes that are true, false or None) that the trace of ``blamed`` has read, and
        those of the same names in ``paths``."""
        tree, reads = self.tree, self.tree.caches.reads
        below = {p: m for p, m in tree.modules.items() if p == blamed or p.startswith(f"{blamed}.")}
        read = [
            (p.removeprefix(blamed), name, place)
            for p, m in below.items()
            for (i, name), place in reads.items()
            if i == id(m)
        ]
        for path in paths:
            owners = [(tree.modules.get(path + rest), name, place) for rest, name, place in read]
            switches = {(id(m), name): place for m, name, place in owners if _is_switch(m, name)}
            if switches:
                self._switches[path] = Guards(tree.attributes, switches, tree.described_names())

    def grow(self, error: Exception, captured: Capture | None = None) -> bool:
        """Leaves one operator or submodule more to PyTorch because of ``error``, which the capture raised or the
        engine, of a graph that was ``captured``. False: none is to blame."""
        if isinstance(error, CaptureError):
            return self._kind(error.kind) or self._submodule(error)
        text, caches = str(error), self.tree.caches
        if caches.left_for[0] == text:  # to leave these kinds to PyTorch was of no use
            caches.kinds -= caches.left_for[1]
            return self._around(text)
        if isinstance(error, _core.UnsupportedError) and captured is not None:
            return self._kinds(captured, text) or self._scripted(captured) or self._around(text)
        return self._around(text)

    def leave_fast_paths(self) -> bool:
        """Leaves encoders of PyTorch's own to it, where a graph did not compute what they do. False: there are none."""
        modules = self.modules()
        new = [path for path, m in self.tree.modules.items() if path and path not in modules and has_fast_path(m)]
        self._found |= dict.fromkeys(new, FAST_PATH)
        return bool(new)

    def _holds_sharded(self, path: str) -> bool:
        """Are there submodules inside that FSDP2 shards? Their collectives are not to be a part of a capture."""
        return any(other.startswith(f"{path}.") for other in self.tree.sharded)

    def _kind(self, kind: str) -> bool:
        new = {kind} - self.tree.caches.kinds if kind.startswith("aten::") else set()
        self.tree.caches.kinds |= new
        return bool(new)

    def _submodule(self, error: CaptureError) -> bool:
        """The submodule that a trace failed in, or if that is left already, what is around it."""
        path, modules, reason = error.submodule or "", self.modules(), str(error)
        if any(text in reason for text in (REENTRANT, ONLY_CALLER, ADVANCES, RECORDS)):
            return False
        if reason.endswith(RETURNS_GIVEN) and path in modules and self.tree.vary(path):
            return True
        for name in getattr(path, "methods", ()):
            if f"{path}:{name}" not in modules:
                self._found[f"{path}:{name}"] = reason
                return True
        if path in modules and CHANGES_PARAMETER in reason and CHANGES_PARAMETER not in modules[path]:
            self._found[path] = reason  # what it changes is put back then
            return True
        while path and any(path == other or path.startswith(f"{other}.") for other in modules):
            path = path.rpartition(".")[0]
        if not path or self._holds_sharded(path):
            return False
        cls = type(self.tree.modules[path])
        left = [path]
        if any(type(self.tree.modules.get(p)) is cls and why == reason for p, why in self._found.items()):
            # The second layer that fails at this place: the others will, too.
            left += [p for p, m in self.tree.modules.items() if p and type(m) is cls and p not in self._found]
        self._found |= dict.fromkeys(left, reason)
        self._watch(path, left)
        return True

    def _kinds(self, captured: Capture, text: str) -> bool:
        """The operators that the engine lacks, if PyTorch has them."""
        named = {node.name: node.op_type for node in captured.model.graph.node}
        operators = re.findall(r"(\w+) \(\d+\)", text)
        operators += [named[name] for name in _nodes_in(text) if name in named]
        new = export.kinds_behind(operators) - self.tree.caches.kinds - _WRITING
        self.tree.caches.kinds |= new
        self.tree.caches.left_for = text, new
        return bool(new)

    def _scripted(self, captured: Capture) -> bool:
        """The submodules that call scripted functions, some of which branch or loop."""
        found, nodes = captured.trace.scripted, captured.model.graph.node
        if not found or "" in found or found <= self._found.keys() or not _has_control_flow(nodes):
            return False
        self._found |= dict.fromkeys(found, "it calls a scripted function, which may branch or loop")
        return True

    def _around(self, text: str) -> bool:
        """The submodule that holds a node which the engine refuses."""
        for name in _nodes_in(text):
            path = _core.module_path(name)
            while path and path not in self.tree.modules:
                path = path.rpartition(".")[0]
            if path and path not in self._found and not self._holds_sharded(path):
                self._found[path] = text.partition("\n")[0]
                return True
        return False


def _is_switch(module: nn.Module | None, name: str) -> bool:
    value = None if module is None else vars(module).get(name, 0)
    return module is not None and (value is None or isinstance(value, bool))


def has_fast_path(module: nn.Module) -> bool:
    """May it take the way of :data:`FAST_PATH`, in the mode of now?"""
    nested = isinstance(module, nn.TransformerEncoder) and module.enable_nested_tensor
    return nested and not module.training and not torch.is_grad_enabled()


def _nodes_in(text: str) -> list[str]:
    """The names of nodes that an error of the engine mentions."""
    return re.findall(r"\(([^()]+)\)", text)


def _has_control_flow(nodes: Iterable[onnx.NodeProto]) -> bool:
    return any(node.op_type in _CONTROL_FLOW for node in nodes)
