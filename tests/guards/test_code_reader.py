"""What code objects use and change, as it is read in their bytecode."""

import os
import types

import torch

from ortmodule.guards import code_reader
from ortmodule.guards.code_reader import read

COUNT = 0


def plain(x, y):
    return abs(x.value) + COUNT + y


def setting(x):
    global COUNT
    COUNT = 1
    x.value = 2
    del x.other
    x["item"] = 3


def outer(x):
    def inside():
        x.deep = getattr(x, "text")  # noqa: B009
        return torch.float32

    return inside


class Derived(dict):
    def get(self, key):
        return super().get(key)


def test_reads():
    use = read(plain.__code__)
    assert use.globals == use.globals_read == ("abs", "COUNT") and use.attributes == {"value"}
    assert {"x", "y"} <= use.locals_read and not use.has_effects and not use.has_super


def test_effects():
    use = read(setting.__code__)
    assert use.has_effects and use.globals == ("COUNT",) and not use.globals_read
    assert use.attributes_set == {"value", "other"}
    assert not read((lambda x, y: x.__setitem__).__code__).has_effects  # a call of it is not made
    assert read(outer.__code__).has_effects  # it makes a function


def test_functions_inside():
    (inner,) = code_reader.inner(outer.__code__)
    assert list(code_reader.all_of(outer.__code__)) == [outer.__code__, inner]
    assert {"deep", "text", "torch", "float32", "getattr"} <= set(code_reader.names_in(outer.__code__))
    assert code_reader.attributes_set_in(outer.__code__) == {"deep"}
    assert "deep" not in read(outer.__code__).attributes_set


def test_whose_it_is():
    assert code_reader.is_torchs(torch.nn.functional.relu) and not code_reader.is_torchs(plain)
    assert code_reader.is_library(torch) and code_reader.is_librarys(dict) and not code_reader.is_librarys(Derived)


def test_packages_that_were_installed_elsewhere():
    """For one user, by the system: they are libraries, too."""
    for folder, expected in (("site-packages", True), ("dist-packages", True), ("projects", False)):
        module = types.ModuleType("given")
        module.__file__ = os.path.join(os.sep, "somewhere", folder, "given", "__init__.py")
        assert code_reader.is_library(module) is expected
