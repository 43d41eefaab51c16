"""Private names of PyTorch are in one table; a missing one is told of, once, and has a way around."""

import ast
import importlib
import os
import pkgutil
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from ortmodule import ORTModule, _core, explain
from ortmodule.core import torch_private
from tests.workers import package_path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for folder in ("ortmodule", "optim") for path in (ROOT / folder).rglob("*.py"))
TABLE = ROOT / "ortmodule" / "core" / "torch_private.py"


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def privates(tree):
    """The private names of torch that a module's source has, as far as they go by names that it imports."""
    torchs = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    torchs[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    if any(map(is_private, alias.name.split("."))):
                        yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                torchs[alias.asname or alias.name] = path
                if any(map(is_private, path.split("."))):
                    yield path

    def path_of(node):
        parts = []
        while isinstance(node, ast.Attribute):
            parts, node = [node.attr, *parts], node.value
        return ".".join((torchs[node.id], *parts)) if isinstance(node, ast.Name) and node.id in torchs else None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and path_of(node):
            yield path_of(node)
        elif isinstance(node, ast.Call):  # getattr(torch, "_x") and the like
            for owner, name in zip(node.args, node.args[1:], strict=False):
                told = isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value)
                if told and path_of(owner):
                    yield f"{path_of(owner)}.{name.value}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_module_names_one(path):
    found = set(privates(ast.parse(path.read_text())))
    assert path == TABLE or not found, f"{sorted(found)} belong into {TABLE.name}"


def test_what_is_looked_for_is_found():
    text = "import torch\nimport torch._decomp\nfrom torch import nn\nfrom torch._C import Node as N\n"
    text += "def f(x: torch._C.Value): return nn.functional._x(x), getattr(nn, '_y'), x._version, torch.Tensor.__add__"
    assert set(privates(ast.parse(text))) == {
        "torch._decomp", "torch._C.Node", "torch._C", "torch.nn.functional._x", "torch.nn._y"
    }  # fmt: skip


def test_every_name_is_used():
    texts = "".join(path.read_text() for path in SOURCES if path != TABLE)
    own = TABLE.read_text()
    names = [name for name in vars(torch_private) if not name.startswith("__") and name != "annotations"]
    assert not [name for name in names if name not in texts and own.count(name) < 2]


# --- each name in turn ------------------------------------------------------------------------------------------------


@pytest.fixture
def without(monkeypatch):
    """The table as it is where torch lacks some names."""

    def load(*hidden):
        resolve = pkgutil.resolve_name

        def found(path):
            if path in hidden:
                raise AttributeError(path)
            return resolve(path)

        monkeypatch.setattr(pkgutil, "resolve_name", found)
        return types.SimpleNamespace(**runpy.run_path(str(TABLE)))

    return load


PRESENT = [path for path, row in torch_private.TABLE.items() if row.found]


@pytest.mark.parametrize("path", PRESENT)
def test_a_missing_one_is_a_sentence(without, path):
    table = without(path)
    row = table.TABLE[path]
    assert row.without and row.use and not row.found
    sentences = table.missing()
    if row.without == table.UNNEEDED:
        assert not sentences
        return
    assert sentences == [f"torch {torch.__version__} has no {path} ({row.use}): {row.without}"]
    told = []
    table.tell(told.append)
    table.tell(told.append)
    if row.without == table.CAPTURE:  # it is why PyTorch runs a module, and told as that
        assert not told
        with pytest.raises(table.MissingPrivate, match=path):
            table.check_capture()
    else:
        assert told == sentences
        table.check_capture()


def test_one_that_a_capture_needs_raises_where_it_is_used(without):
    table = without("torch._C._get_value_trace")
    with pytest.raises(table.MissingPrivate, match="the traced value of a tensor"):
        table.get_value_trace(torch.zeros(1))


def test_other_ways(without):
    hidden = [path for path in PRESENT if "_autograd" in path or "_foreach" in path or "RawStream" in path]
    table = without(*hidden)
    assert table.keeps_graph() and table.saving_hooks() is not None and len(hidden) >= 5
    tensors = [torch.randn(3), torch.randn(2, 2, dtype=torch.float64)]
    norms = table.foreach_norm(tensors)
    torch.testing.assert_close(norms, torch_private.foreach_norm(tensors))
    assert all(norm.dtype is torch.float64 for norm in norms)
    copies = [torch.empty_like(t, dtype=torch.float32) for t in tensors]
    table.foreach_copy_(copies, tensors)
    table.foreach_mul_(copies, 3)
    torch.testing.assert_close(copies, [t.float() * 3 for t in tensors])


# --- a process in which names are missing -----------------------------------------------------------------------------

STEPS = """
import logging, pkgutil, sys, warnings
hidden, resolve = sys.argv[1:], pkgutil.resolve_name
def found(path):
    if path in hidden:
        raise AttributeError(path)
    return resolve(path)
pkgutil.resolve_name = found

import torch
from torch import nn
from ortmodule import ORTModule, explain

class Keeper(logging.Handler):
    def emit(self, record):
        print("LOG", record.getMessage())

logging.getLogger("ortmodule").addHandler(Keeper())
warnings.simplefilter("ignore")
for bias in (True, False):
    eager = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.GELU(), nn.Linear(6, 2))
    ours = ORTModule(__import__("copy").deepcopy(eager))
    for n in (3, 5):
        x = torch.randn(n, 4)
        for module in (eager, ours):
            module.zero_grad()
            module(x).pow(2).sum().backward()
        grads = [[p.grad for p in module.parameters()] for module in (eager, ours)]
        torch.testing.assert_close(*grads)
    report = explain(ours)
    print("CAPTURED", report.captured)
    for sentence in report.missing:
        print("MISSING", sentence)
        assert sentence in str(report)
"""


def lines(script, *arguments, **environment):
    """What a process prints, by first words."""
    environment = os.environ | {"PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-P", "-c", script, *arguments]  # not the package that lies here
    run = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=600)
    assert run.returncode == 0, run.stderr
    found = {}
    for line in run.stdout.splitlines():
        found.setdefault(line.partition(" ")[0], []).append(line.partition(" ")[2])
    return found


def told(found, name):
    return [line for line in found.get("LOG", ()) if name in line]


def test_without_all_that_there_is_a_way_around():
    rows = [row for row in torch_private.TABLE.values() if row.found and row.without is not torch_private.CAPTURE]
    found = lines(STEPS, *(row.path for row in rows))
    assert found["CAPTURED"] == ["True", "True"]
    for row in rows:
        expected = row.without is not torch_private.UNNEEDED
        assert len(told(found, f" {row.path} ")) == expected, row.path  # once, for two modules
        assert sum(f" {row.path} " in line for line in found["MISSING"]) == 2 * expected


@pytest.mark.parametrize(
    "path",
    [
        "torch._C._set_value_trace",
        "torch._C._functorch.peek_interpreter_stack",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.onnx._internal.torchscript_exporter.utils._run_symbolic_function",
        "torch._C.Value",
    ],
)
def test_without_one_that_a_capture_needs(path):
    found = lines(STEPS, path)
    assert found["CAPTURED"] == ["False", "False"] and len(found["MISSING"]) == 2
    assert path in found["MISSING"][0] and torch_private.CAPTURE in found["MISSING"][0]
    said = told(found, path)
    assert len(said) == 2 and all("PyTorch runs this module" in line for line in said)  # as for any other reason


# --- the engine's C ---------------------------------------------------------------------------------------------------

HIDES = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

void *dlsym(void *restrict handle, const char *restrict name) {
    static void *(*real)(void *, const char *);
    const char *hidden = getenv("HIDDEN_SYMBOL");

    if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    return hidden && strcmp(hidden, name) == 0 ? NULL : real(handle, name);
}
"""

EACH = """
import ctypes, os, torch
from ortmodule import _core
names = [name for name, _, _ in _core.torch_symbols()]
put = ctypes.CDLL(None).setenv
for name in names:
    put(b"HIDDEN_SYMBOL", name.encode(), 1)
    print(name, *[other for other, use, found in _core.torch_symbols() if not found])
"""


@pytest.fixture(scope="module")
def preload(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hides")
    (folder / "hides.c").write_text(HIDES)
    command = ["gcc", "-shared", "-fPIC", "-o", folder / "hides.so", folder / "hides.c"]
    if subprocess.run(command, capture_output=True).returncode or os.environ.get("LD_PRELOAD"):
        pytest.skip("there is no compiler, or a sanitizer is to be loaded first")
    return {"LD_PRELOAD": str(folder / "hides.so")}


def symbols():
    return {name: use for name, use, found in _core.torch_symbols() if found}


def test_this_torch_has_all():
    assert not torch_private.missing() and len(symbols()) == len(_core.torch_symbols()) > 20
    assert all(symbols().values())


def test_each_symbol_in_turn(preload):
    found = lines(EACH, **preload)
    there_without_a_library = {
        name for name in found if "cuda_" in name and name != "aoti_torch_device_type_cuda" and not torch.version.cuda
    }
    assert found.keys() == symbols().keys()
    for name, missing in found.items():
        assert missing == ([""] if name in there_without_a_library else [name]) or missing == [name]


THREAD_STATE = "_ZN3c104impl26raw_local_dispatch_key_setE"  # what keeps autocast away from torch's functions


@pytest.mark.parametrize("name", [THREAD_STATE, "aoti_torch_create_tensor_from_blob", "sgemm_"])
def test_a_missing_symbol_is_a_sentence(preload, name):
    found = lines(STEPS, HIDDEN_SYMBOL=name, **preload)
    assert found["CAPTURED"] == ["True", "True"]
    assert len(told(found, name)) == 1 and "slower" in told(found, name)[0]
    assert len(found["MISSING"]) == 2 and all(name in line for line in found["MISSING"])


def test_a_user_who_imports_the_exporters_helpers(monkeypatch):
    """torch then has another module under the name that translations use."""
    monkeypatch.setattr(torch.onnx, "symbolic_helper", importlib.import_module("torch.onnx.symbolic_helper"))
    ours = ORTModule(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Mish()))
    ours(torch.randn(3, 4)).sum().backward()
    assert explain(ours).captured and not explain(ours).aten_ops
