"""The rules of the tree that a compiler does not check."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
#: A folder may include itself and folders above it in this list. `ops/op.h` and `ops/pointwise.h` are records and
#: types that everything below `graph` may see; the families in `ops/` come after `exec`.
ORDER = ["core", "optim", "graph", "ops/op.h", "onnx", "shape", "grad", "passes", "plan", "exec", "ops", "cuda", "py"]
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
