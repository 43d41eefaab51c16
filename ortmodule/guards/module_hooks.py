"""Sorts the hooks of submodules into a part of forward, and those that a graph would not call."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as nn_module

from ortmodule.core.snapshot import Items, Snapshot
from ortmodule.guards.code_reader import is_of, is_torchs
from ortmodule.guards.hook_analysis import Reach, description, once_is_enough, reach_of
from ortmodule.guards.sharding.sharded import is_of_parallel, standing_in

GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"
)  # fmt: skip
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: What else is known of hooks, by their keys.
HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")

#: What hooks are called with: their module, its arguments and those with names, its result.
MODULE, ARGUMENTS, NAMED, RESULT = "module", "arguments", "named", "result"

#: Packages whose hooks keep no tensor with its gradient. Those of DeepSpeed's ZeRO-3 gather and release partitions.
_KEEPING_NONE = ("torch", "deepspeed")


class ModuleHooks:
    """The hooks of the submodules of ``module``, as :meth:`look` found them."""

    def __init__(
        self, module: nn.Module, modules: dict[str, nn.Module], sharded: dict[str, nn.Module] | None = None,
        parallel: Container[str] = (),
    ) -> None:  # fmt: skip
        """``sharded``: of the submodules, those that FSDP2 shards; ``parallel``: those with hooks of tensor parallelism
        that graphs follow."""
        self._modules, self._sharded, self._parallel = modules, sharded or {}, parallel
        self._inner = [(name, m.__dict__) for name, m in modules.items() if m is not module]
        self._reaches: dict[int, tuple[Any, Reach | None]] = {}  # of forward hooks that were met, by their ids
        self.reach: Reach | None = None  # of the hooks that graphs follow
        self.followed: dict[str, dict[int, Any]] = {}  # those hooks, by the paths of their modules
        self.key: tuple = ()  # what every captured graph assumes of them
        self._aside: dict[tuple[str, str], dict[int, Any]] = {}  # what there is where they are not called

    def look(self) -> tuple[str, ...]:
        """The submodules with hooks that a graph would not call (those of the root run around it); "": all.

        :attr:`followed` and :attr:`key` say from now on which ones are a part of forward.
        """
        self.reach, self.followed, self.key = None, {}, ()
        if any(getattr(nn_module, name) for name in GLOBAL_HOOKS):
            return ("",)
        found, parallel = [], []
        for path, attributes in self._inner:
            count = sum([len(attributes[hooks]) for hooks in HOOKS])
            if path in self._parallel:
                inside = [h for name in HOOKS for h in attributes[name].values() if is_of_parallel(h)]
                count -= len(inside)
                parallel += [(path, hook) for hook in inside]
            if path in self._sharded or (count and len(self._follow(path, attributes)) < count):
                found.append(path)
        self.key = (*((path, self._described(hooks.values())) for path, hooks in self.followed.items()), *parallel)
        self._forget()
        return tuple(found)

    def _follow(self, path: str, attributes: dict[str, Any]) -> dict[int, Any]:
        """The transparent hooks of a submodule by their keys: those behind which nothing else follows."""
        kept: dict[int, Any] = {}
        for key, hook in attributes["_forward_hooks"].items():
            if (read := self.reach_of(hook)) is None or any(key in attributes[flags] for flags in HOOK_FLAGS):
                kept.clear()
            else:
                kept[key] = hook
                self.reach = self.reach or Reach()
                self.reach.include(read)
        if kept:
            self.followed[path] = kept
        return kept

    def _described(self, hooks: Iterable[Any]) -> tuple:
        """What followed hooks of a submodule compute, one after the other."""
        found: list[tuple] = []
        for hook in hooks:
            _, reach = self._reaches[id(hook)]
            what = description(hook, reach or Reach())
            if not found or found[-1] != what or not once_is_enough(hook.__code__):
                found.append(what)
        return tuple(found)

    def _forget(self) -> None:
        """Hooks that were removed."""
        there = {id(hook) for _, attributes in self._inner for hook in attributes["_forward_hooks"].values()}
        for identity in self._reaches.keys() - there:
            del self._reaches[identity]

    def reach_of(self, hook: Any) -> Reach | None:
        """What a forward hook reads, if it is transparent; as it was found the last time, if that still holds."""
        known, reach = self._reaches.get(id(hook), (None, None))
        if known is None or (reach is not None and not reach.holds()):
            reach = reach_of(hook)
            self._reaches[id(hook)] = hook, reach
        return reach

    def keeping(self, hooked: Iterable[str]) -> frozenset[str]:
        """Those of the submodules ``hooked`` with a hook that may keep what it is given, or run in backward."""
        found = []
        for path in hooked:
            for name in HOOKS:
                for hook in self._modules[path].__dict__[name].values():
                    if not is_of(hook, _KEEPING_NONE) and self._reaches.get(id(hook), (None, None))[1] is None:
                        found.append(path)
        return frozenset(found)

    def entries(self) -> dict[tuple[str, str], Items]:
        """The dictionaries of hooks, by their modules' paths and their names."""
        return {(path, name): Items(m.__dict__[name]) for path, m in self._modules.items() for name in HOOKS}

    def seeing(self, path: str) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """The hooks, but those that graphs follow, that see what a submodule is given, and what they are called with:
        parts of a call by their names (:data:`MODULE` and others). Also where they are :meth:`suspended`."""
        attributes, followed = self._modules[path].__dict__, self.followed.get(path, {})
        for hooks, flags, behind in (
            ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", ()),
            ("_forward_hooks", "_forward_hooks_with_kwargs", (RESULT,)),
        ):
            for key, hook in self._aside.get((path, hooks), attributes[hooks]).items():
                if hooks != "_forward_hooks" or key not in followed:
                    yield hook, (MODULE, ARGUMENTS, *((NAMED,) if key in attributes[flags] else ()), *behind)

    def busy(self, module: nn.Module, path: str) -> bool:
        """Would PyTorch, running ``module`` as a host node, leave out what hooks inside of it do for this forward?"""
        followed = self.followed.get(path, {})
        hooks = [h for h in module._forward_hooks.items() if h[0] not in followed]
        hooks += [h for part in module.modules() if part is not module for h in part._forward_hooks.items()]
        known = [self._reaches.get(id(hook)) for _, hook in hooks if not is_torchs(hook)]
        return any(found is None or (found[1] is not None and found[1].busy()) for found in known)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, hooks on submodules are not called, but transparent ones and those with which torch makes weights.
        Sharded submodules have made-up parameters when they run."""
        left = []
        self._aside = {(path, name): dict(attributes[name]) for path, attributes in self._inner for name in HOOKS}
        for _, attributes in self._inner:
            for name in HOOKS:
                for key, hook in attributes[name].items():
                    if not is_torchs(hook) and self._reaches.get(id(hook), (None, None))[1] is None:
                        left.append((attributes[name], key))
        with Snapshot([Items(hooks) for hooks in {id(hooks): hooks for hooks, _ in left}.values()]).around():
            for hooks, key in left:
                del hooks[key]
            with standing_in(self._sharded.values(), (*HOOKS, *HOOK_FLAGS)):
                yield
        self._aside = {}


@contextmanager
def without(hooks: dict[int, Any], left: Iterable[int]) -> Iterator[None]:
    """Inside, the hooks with these keys are not called."""
    with Snapshot([Items(hooks)]).around():
        for key in left:
            hooks.pop(key, None)
        yield
