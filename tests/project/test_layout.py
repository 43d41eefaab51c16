"""The rules of the tree that a compiler does not check."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
#: A folder may include itself and folders above it in this list. `ops/op.h` has the operator records, which everything
#: below `graph` may see; the families in `ops/` come after `exec`.
ORDER = [
    "core", "optim", "gemm", "graph", "ops/op.h", "onnx", "shape", "grad", "passes", "plan", "exec", "ops", "cuda",
    "py",
]  # fmt: skip
RECORD_USERS = {"graph"}  # its sources emit nodes, so they read records
SOURCES = sorted(p for p in CSRC.rglob("*.[ch]*") if p.suffix in {".c", ".h", ".cu", ".cuh"})


def level(path: str) -> int:
    return ORDER.index(path) if path in ORDER else ORDER.index(path.split("/")[0])


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(CSRC)))
def test_includes_go_upwards(source):
    own = str(source.relative_to(CSRC))
    folder = own.split("/")[0]
    for included in re.findall(r'^#include "([^"]+)"', source.read_text(), re.M):
        if "/" not in included:  # generated code
            continue
        if included == "ops/op.h" and folder in RECORD_USERS:
            continue
        same = included.split("/")[0] == folder
        assert same or level(included) <= level(own), f"{own} includes {included}, which is below it"


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(CSRC)))
def test_only_py_sees_python(source):
    if source.relative_to(CSRC).parts[0] != "py":
        assert "Python.h" not in source.read_text()


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(CSRC)))
def test_engine_never_aborts_or_prints(source):
    text = re.sub(r"/\*.*?\*/|\"(\\.|[^\"\\])*\"", "", source.read_text(), flags=re.S)
    assert not re.search(r"\b(abort|exit|printf|puts|fputs|perror)\s*\(", text)


def test_one_openmp_region():
    """Pragmas elsewhere would lose the CPU-specific clone of their function."""
    for source in SOURCES:
        if source.name != "parallel.c":
            assert "omp parallel" not in source.read_text().replace("`#pragma omp parallel`", ""), source


def test_memory_of_a_gpu_is_torchs():
    """Its allocator counts and limits what there is, so nothing here asks the driver for any."""
    for source in SOURCES:
        assert not re.search(r"\b(cuMemAlloc|cuMemCreate|cuMemPool|cudaMalloc)\w*", source.read_text()), source


# --- the Python package -----------------------------------------------------------------------------------------------

#: A package imports itself and those before it; modules at the root may import all.
PACKAGES = ["core", "guards", "host", "lowering", "engine", "capture", "runtime", "debug"]
PACKAGE = ROOT / "ortmodule"
MODULES = sorted(path for name in PACKAGES for path in (PACKAGE / name).rglob("*.py"))


def imports(tree):
    """(package, line) for each import of one of our packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            names = [f"ortmodule.{a.name}" for a in node.names] if node.module == "ortmodule" else [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for first, _, rest in (name.partition(".") for name in names):
            if first == "ortmodule" and rest.partition(".")[0] != "_core":
                yield rest.partition(".")[0], node.lineno


def test_every_package_has_a_place():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == {*PACKAGES, "compat"}
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "module.py", "with_loss.py", "not_built.py"}


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_upwards(module):
    own = PACKAGES.index(module.relative_to(PACKAGE).parts[0])
    for package, line in imports(ast.parse(module.read_text())):
        assert package in PACKAGES[: own + 1], f"{module}:{line} imports ortmodule.{package}, which is below it"


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_stand_at_the_top(module):
    tree = ast.parse(module.read_text())
    inner = [
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.Lambda))
        for node in ast.walk(function)
    ]
    found = list(imports(ast.Module([node for node in inner if isinstance(node, (ast.Import, ast.ImportFrom))], [])))
    assert not found, f"{module} imports inside of a function: {found}"
