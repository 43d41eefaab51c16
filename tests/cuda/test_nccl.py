"""NCCL is found at run time (csrc/cuda/libraries/nccl.c): a sentence where it, or a function of it, is missing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ortmodule import _core

HEADER = Path(__file__).parents[2] / "csrc/cuda/libraries/nccl.h"
FUNCTIONS = re.findall(r"F\((nccl\w+),", HEADER.read_text(encoding="utf-8"))


def said(folder, missing=None, version="*out = 22809; return 0;"):
    """What a process says of NCCL that finds a library of ours in ``folder``, or none."""
    others = "".join(f"int {name}(void) {{ return 0; }}\n" for name in FUNCTIONS[1:] if name != missing)
    source = f"int ncclGetVersion(int *out) {{ {version} }}\n{others}"
    (folder / "nccl.c").write_text(source)
    if missing != "libnccl.so.2":
        command = ["gcc", "-shared", "-fPIC", "-o", folder / "libnccl.so.2", folder / "nccl.c"]
        subprocess.run(command, check=True)
    program = """
from ortmodule import _core
try:
    print(_core.nccl_version())
    print(_core.nccl_version())
except _core.Error as error:
    print(error)
"""
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    places = {"PYTHONPATH": str(Path(_core.__file__).parents[1]), "LD_LIBRARY_PATH": ":".join(p for p in paths if p)}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **places}, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_its_version(tmp_path):
    assert len(FUNCTIONS) > 10
    assert said(tmp_path) == ["22809", "22809"]


def test_there_is_none(tmp_path):
    [sentence] = said(tmp_path, missing="libnccl.so.2")
    assert "there is no NCCL: libnccl.so.2 was not found" in sentence


@pytest.mark.parametrize("name", [FUNCTIONS[1], FUNCTIONS[-1]])
def test_one_without_a_function(tmp_path, name):
    [sentence] = said(tmp_path, missing=name)
    assert f"the NCCL is too old: libnccl.so.2 has no {name}" in sentence


def test_one_that_fails(tmp_path):
    [sentence] = said(tmp_path, version="*out = 0; return 2;")
    assert "NCCL error 2 in ncclGetVersion: a call of the system failed" in sentence
