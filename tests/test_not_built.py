"""`import ortmodule` without its compiled part, or with one that does not load, says how to build it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ortmodule

BUILD = "python setup.py build_ext --inplace"


@pytest.fixture
def tree(tmp_path):
    """A source tree with the package and nothing compiled."""
    package = Path(ortmodule.__file__).parent
    shutil.copytree(package, tmp_path / "ortmodule", ignore=shutil.ignore_patterns("_core*", "__pycache__"))
    (tmp_path / "setup.py").touch()
    return tmp_path


def imported(tree):
    """The last line that a Python says which was started there. It has the environment's packages, but no .pth files:
    those would find this project first. torch is replaced, for it takes seconds."""
    (tree / "torch.py").touch()
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = [{str(tree)!r}]; import ortmodule"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.splitlines()


def test_not_built(tree):
    last = imported(tree)[-1]
    assert last.startswith(
        f"ImportError: ortmodule is not built: its compiled part, ortmodule._core, is missing from {tree}"
    )
    for word in (
        BUILD,
        "pip install -e . --no-build-isolation",
        "protobuf-c-compiler",
        "libprotobuf-c-dev",
        "python3-dev",
    ):
        assert word in last


def test_of_another_platform(tree):
    (tree / "ortmodule" / "_core.cpython-311-darwin.so").touch()
    last = imported(tree)[-1]
    assert "ortmodule is not built for this Python" in last and "_core.cpython-311-darwin.so" in last
    assert BUILD in last


def test_does_not_load(tree):
    """The loader's own reason is kept."""
    (tree / "ortmodule" / "_core.abi3.so").write_bytes(b"not a shared object")
    lines = imported(tree)
    assert "ortmodule's compiled part does not load:" in lines[-1] and BUILD in lines[-1]
    (first,) = [line for line in lines if line.startswith("ImportError:")][:-1]
    reason = first.removeprefix("ImportError: ")
    assert "_core.abi3.so" in reason and reason in lines[-1]


def test_installed(tree):
    """Where there are no sources, there is nothing to build."""
    (tree / "setup.py").unlink()
    last = imported(tree)[-1]
    assert "ortmodule is not built" in last and "pip install ." in last and BUILD not in last
