"""Finds out whether a hook may keep a tensor that carries a gradient.

PyTorch runs a submodule with such a hook, and its tensors belong to an autograd graph of the submodule's own. A loss
that uses one which the hook has kept would lose the gradients of the rest of the module. So the source of the hook is
read: what it is given may be returned, looked at, detached and computed with, but neither stored nor given to what may
store it. Where there is no source, the hook may keep anything.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterable
from typing import Any

from ortmodule.guards.code_reader import is_of
from ortmodule.guards.module_tree import Tree


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Attributes and methods of a tensor that carry no gradient.
_DETACHED = _words(
    "detach data item tolist numpy shape size dim ndim numel dtype device layout is_cuda requires_grad grad_fn stride "
    "is_contiguous element_size nelement isnan isinf isfinite any all argmax argmin"
)
#: Functions that keep nothing of what they are given, without a gradient in their result, and with one.
_HARMLESS = _words("print len isinstance issubclass type str repr float int bool id hash callable hasattr format range")
_COMPUTING = _words("torch F nn math numpy np sum abs max min tuple list dict zip enumerate reversed map")

#: Packages whose hooks keep no tensor with its gradient. Those of DeepSpeed's ZeRO-3 gather and release partitions;
#: what they are given goes through an autograd function, which the reader cannot follow.
_KEEPING_NONE = ("torch", "deepspeed")

_NOTHING_KEPT = (ast.Pass, ast.Break, ast.Continue, ast.Import, ast.ImportFrom, ast.Delete, ast.Raise)


def escape(tree: Tree, hooked: Iterable[str]) -> str | None:
    """A sentence on a hook of one of the submodules ``hooked`` that may keep a tensor with its gradient, if one may.

    Hooks of :data:`_KEEPING_NONE`, and those that are a part of forward, keep nothing that a graph would not know.
    """
    for path in hooked:
        module = tree.modules[path]
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if is_of(hook, _KEEPING_NONE) or tree.hooks.reach_of(hook) is not None:
                continue
            if (place := _kept_at(hook)) is not None:
                return (
                    f"a hook on {path} may keep a tensor with its gradient ({place}), which would be of a graph of its "
                    "own; the engine runs the module if it keeps `detach()`ed tensors"
                )
    return None


class _Keeps(Exception):
    """The line that stores something, or gives it to a function that may."""


@functools.lru_cache(maxsize=1024)
def _kept_in(code: types.CodeType, skipped: int) -> str | None:
    """The place where the function with this code may keep an argument, those before number ``skipped`` aside."""
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
    file = code.co_filename.rpartition("/")[2]
    try:
        source = textwrap.dedent("".join(inspect.getsourcelines(code)[0]))
        tree = _function_in(source, code)
    except (OSError, TypeError, SyntaxError, ValueError):
        return f"{file}:{code.co_firstlineno}"
    reader = _Reader(set(names[skipped : code.co_argcount]))
    try:
        while reader.goes_on(tree):
            pass
    except _Keeps as keeps:
        return f"{file}:{code.co_firstlineno + keeps.args[0] - tree.lineno}"
    return None


def _kept_at(hook: Any) -> str | None:
    skipped = 1  # the module
    while isinstance(hook, functools.partial):
        hook = hook.func
        skipped = 0
    if isinstance(hook, types.MethodType):
        hook, skipped = hook.__func__, skipped + 1
    if not isinstance(hook, types.FunctionType):
        hook, skipped = inspect.getattr_static(type(hook), "__call__", None), skipped + 1
    return _kept_in(hook.__code__, skipped) if isinstance(hook, types.FunctionType) else type(hook).__name__


def _function_in(source: str, code: types.CodeType) -> Any:
    """The function or lambda of this name. Raises ValueError where several may be meant."""
    try:
        parsed = ast.parse(source)
    except SyntaxError:  # a lambda in the middle of an expression
        parsed = ast.parse(source.strip().rstrip(",").strip(".").strip() or "0")
    kinds = ast.Lambda if code.co_name == "<lambda>" else (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(parsed) if isinstance(node, kinds)]
    found = [node for node in found if isinstance(node, ast.Lambda) or node.name == code.co_name]
    if len(found) != 1:
        raise ValueError
    return found[0]


class _Reader:
    """Follows what carries a gradient through one function. ``carrying``: names of local variables that do."""

    def __init__(self, carrying: set[str]) -> None:
        self.carrying = carrying
        self.outer: set[str] = set()  # global, nonlocal

    def goes_on(self, function: Any) -> bool:
        """Reads it once. Does another reading find more? (A loop may store what comes later.)"""
        before = len(self.carrying)
        if isinstance(function, ast.Lambda):
            self.carries(function.body)
        else:
            self.statements(function.body)
        return len(self.carrying) > before

    def statements(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, s: Any) -> None:
        if isinstance(s, (ast.Global, ast.Nonlocal)):
            self.outer |= set(s.names)
        elif isinstance(s, ast.Assign):
            if self.carries(s.value):
                for target in s.targets:
                    self.store(target)
        elif isinstance(s, (ast.AugAssign, ast.AnnAssign)):
            if s.value is not None and self.carries(s.value):
                self.store(s.target)
        elif isinstance(s, (ast.For, ast.AsyncFor)):
            if self.carries(s.iter):
                self.store(s.target)
            self.statements((*s.body, *s.orelse))
        elif isinstance(s, (ast.With, ast.AsyncWith)):
            for item in s.items:
                if self.carries(item.context_expr) and item.optional_vars is not None:
                    self.store(item.optional_vars)
            self.statements(s.body)
        elif isinstance(s, (ast.If, ast.While)):
            self.carries(s.test)
            self.statements((*s.body, *s.orelse))
        elif isinstance(s, ast.Try):
            self.statements((*s.body, *s.orelse, *s.finalbody))
            for handler in s.handlers:
                self.statements(handler.body)
        elif isinstance(s, (ast.Expr, ast.Return)):
            if s.value is not None:
                self.carries(s.value)
        elif isinstance(s, ast.Assert):
            self.carries(s.test)
        elif not isinstance(s, _NOTHING_KEPT) and self.names_one(s):
            raise _Keeps(s.lineno)

    def names_one(self, node: ast.AST) -> bool:
        """Is something that carries a gradient named in it?"""
        return any(isinstance(n, ast.Name) and n.id in self.carrying for n in ast.walk(node))

    def store(self, target: Any) -> None:
        """Something that carries a gradient is assigned."""
        if isinstance(target, ast.Name) and target.id not in self.outer:
            self.carrying.add(target.id)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self.store(each)
        elif isinstance(target, ast.Starred):
            self.store(target.value)
        else:
            raise _Keeps(target.lineno)

    def carries(self, e: Any) -> bool:
        """May the value of an expression carry a gradient?"""
        if isinstance(e, ast.Name):
            return e.id in self.carrying
        if isinstance(e, ast.Attribute):
            return self.carries(e.value) and e.attr not in _DETACHED
        if isinstance(e, ast.Call):
            return self.call(e)
        if isinstance(e, (ast.Compare, ast.JoinedStr)):
            for child in ast.iter_child_nodes(e):
                self.carries(child)
            return False
        if isinstance(e, ast.NamedExpr):
            if carries := self.carries(e.value):
                self.store(e.target)
            return carries
        if isinstance(e, (ast.Yield, ast.YieldFrom, ast.Await, ast.Lambda)):
            if self.names_one(e):
                raise _Keeps(e.lineno)
            return False
        if isinstance(e, ast.comprehension):
            if self.carries(e.iter):
                self.store(e.target)
            return any([self.carries(test) for test in e.ifs])
        children = list(ast.iter_child_nodes(e))
        children.sort(key=lambda child: not isinstance(child, ast.comprehension))  # names come from there
        return any([self.carries(child) for child in children])

    def call(self, e: ast.Call) -> bool:
        given = any([self.carries(a) for a in (*e.args, *(k.value for k in e.keywords))])
        function = e.func
        if isinstance(function, ast.Name):
            if given and function.id not in _HARMLESS | _COMPUTING:
                raise _Keeps(e.lineno)
            return given and function.id in _COMPUTING
        if isinstance(function, ast.Attribute):
            of = self.carries(function.value)
            root = function.value
            while isinstance(root, ast.Attribute):
                root = root.value
            computes = of or (isinstance(root, ast.Name) and root.id in _COMPUTING)
            if given and not computes and not isinstance(function.value, (ast.Constant, ast.JoinedStr)):
                raise _Keeps(e.lineno)
            return (of or given) and computes and function.attr not in _DETACHED
        if given:
            raise _Keeps(e.lineno)
        return self.carries(function)
