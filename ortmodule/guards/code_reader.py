"""Reads code objects: which globals, attributes and local variables they use, what they change, whose they are."""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from ortmodule.core.structures.classes import is_made_by_statement

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
#: Folders of packages that were installed elsewhere: for one user, by the system, in an environment below this one.
_INSTALLED = ("site-packages", "dist-packages")
#: Instructions that change, import or make something beside local variables, by how they begin.
_EFFECTS = ("STORE_", "DELETE_", "IMPORT_", "MAKE_", "LOAD_BUILD", "BEFORE_", "YIELD", "RETURN_GENERATOR", "SEND")
_NAMELESS = "builtins"  # what a class says of its module that was made by code without a `__name__`
_LOCAL = ("STORE_FAST", "STORE_SUBSCR", "STORE_SLICE", "DELETE_FAST")


class CodeUse(NamedTuple):
    """What the instructions of one code object use; those of functions inside of it aside."""

    globals: tuple[str, ...]  # read or set, or imported
    globals_read: tuple[str, ...]
    globals_set: tuple[str, ...]  # or deleted
    imports: tuple[str, ...]  # modules
    attributes: frozenset[str]  # read
    attributes_set: frozenset[str]  # or deleted
    locals_read: frozenset[str]
    has_effects: bool  # beside local variables and items
    has_super: bool


@functools.lru_cache(maxsize=4096)
def read(code: types.CodeType) -> CodeUse:
    known: dict[str, None] = {}
    loaded: dict[str, None] = {}
    stored: dict[str, None] = {}
    imports: dict[str, None] = {}
    attributes: set[str] = set()
    attributes_set: set[str] = set()
    local: set[str] = set()
    has_effects = has_super = False
    for step in dis.get_instructions(code):
        kind, argument = step.opname, step.argval
        if kind.endswith(("_GLOBAL", "_NAME")):
            known[argument] = None
        if kind.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
            loaded[argument] = None
        elif kind in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            stored[argument] = None
        elif kind == "IMPORT_NAME":
            imports[argument] = None
        elif kind.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            attributes.add(argument)
        elif kind in ("STORE_ATTR", "DELETE_ATTR"):
            attributes_set.add(argument)
        if kind.startswith(("LOAD_", "STORE_FAST_LOAD")) and step.opcode not in dis.hasconst:
            local.update(argument if isinstance(argument, tuple) else (argument,))
        has_effects |= kind.startswith(_EFFECTS) and not kind.startswith(_LOCAL)
        has_super |= kind.startswith("LOAD_SUPER")
    names = frozenset(attributes), frozenset(attributes_set), frozenset(local)
    return CodeUse(tuple(known), tuple(loaded), tuple(stored), tuple(imports), *names, has_effects, has_super)


def inner(code: types.CodeType) -> list[types.CodeType]:
    """The functions inside of it."""
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def all_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code itself, and that of all functions inside of it."""
    yield code
    for part in inner(code):
        yield from all_of(part)


def names_in(code: types.CodeType) -> list[str]:
    """All attributes and globals in it, functions inside of it included, and texts, which `setattr` may take."""
    found: dict[str, None] = {}
    for part in all_of(code):
        found |= dict.fromkeys((*part.co_names, *(text for text in part.co_consts if isinstance(text, str))))
    return list(found)


def attributes_set_in(code: types.CodeType) -> set[str]:
    """Those of :func:`names_in` that are assigned or deleted as attributes."""
    return set().union(*(read(part).attributes_set for part in all_of(code)))


# --- whose code it is -------------------------------------------------------------------------------------------------


class Globals:
    """Stands for the module of code whose globals are those of no imported module: that of a file which a script loads
    by itself (`importlib`, `runpy`, IPython's `%run`), or of `exec`."""

    __name__ = "the globals of a function"  # where they have none

    def __init__(self, space: dict[str, Any]) -> None:
        self.__dict__ = space


#: What has globals.
MODULES = (types.ModuleType, Globals)
_spaces: weakref.WeakValueDictionary[int, Globals] = weakref.WeakValueDictionary()  # by the ids of their dictionaries


def module_of(space: dict[str, Any]) -> Any:
    """The module whose globals these are, or the one :class:`Globals` that stands for it."""
    name = space.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is not None and getattr(module, "__dict__", None) is space:
        return module
    found = _spaces.get(id(space))
    if found is None or vars(found) is not space:
        _spaces[id(space)] = found = Globals(space)
    return found


def globals_of(classes: Iterable[type]) -> list[Globals]:
    """Those of the methods of ``classes``."""
    methods = [part for cls in {*classes} for part in vars(cls).values() if isinstance(part, types.FunctionType)]
    spaces = {id(method.__globals__): method.__globals__ for method in methods}
    return [each for each in map(module_of, spaces.values()) if isinstance(each, Globals)]


def all_globals() -> list[Globals]:
    """Those that something holds."""
    return list(_spaces.values())


def is_library(module: Any) -> bool:
    """Is a module one of Python's, torch's, an installed package's, or ours?"""
    name = getattr(module, "__name__", "")
    if name.partition(".")[0] in ("torch", "ortmodule"):
        return True
    file = getattr(module, "__file__", None)
    if file is None:
        return getattr(module, "__spec__", None) is not None  # Python has found it, and no script has made it
    return file.startswith(_LIBRARIES) or any(f"{os.sep}{folder}{os.sep}" in file for folder in _INSTALLED)


def is_librarys(cls: type) -> bool:
    """Is a class one of such a module?"""
    name = cls.__module__
    for part in vars(cls).values():
        if isinstance(part, types.FunctionType) and part.__globals__.get("__name__", _NAMELESS) == name:
            return is_library(module_of(part.__globals__))
    if not isinstance(name, str):  # a class may say anything
        return True
    module = sys.modules.get(name)
    if module is None:
        return name.partition(".")[0] in ("torch", "ortmodule")
    return is_library(module) if name != _NAMELESS else not is_made_by_statement(cls)


def is_users_function(function: types.FunctionType) -> bool:
    """Is it none of such a module's?"""
    return not is_library(sys.modules.get(function.__module__ or "") or module_of(function.__globals__))


def is_torchs(hook: Any) -> bool:
    """Is a function, or an object that is called, one of torch's?"""
    return is_of(hook, ("torch",))


def is_of(hook: Any, packages: Collection[str]) -> bool:
    """Is a function, or an object that is called, defined in one of these packages?"""
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return isinstance(module, str) and module.partition(".")[0] in packages
