"""setup.py: when the kernels for GPUs are compiled, and what stops a build that has them."""

import os
import runpy
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools.errors import CompileError, ExecError

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="the sources are not there")


@pytest.fixture
def setup(monkeypatch, tmp_path, capsys):
    """What setup.py says of itself when it is called with a command, in an environment with or without nvcc. With
    `--name` it does no more than that."""

    def call(command, nvcc=None, **environment):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "nvcc").unlink(missing_ok=True)
        if nvcc is not None:
            (folder / "nvcc").write_text(f"#!{sys.executable}\n{nvcc}")
            (folder / "nvcc").chmod(stat.S_IRWXU)
        monkeypatch.setenv("PATH", str(folder))
        for name in ("ORTMODULE_CUDA", "EMULATED", "SANITIZE", "DEBUG"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["setup.py", "--name", command])
        monkeypatch.chdir(ROOT)
        return runpy.run_path("setup.py", run_name="__main__")

    return call


@pytest.mark.parametrize(
    "command, nvcc, environment, with_kernels",
    [
        ("bdist_wheel", "", {}, True),  # pip install .
        ("bdist_wheel", None, {}, False),
        ("bdist_wheel", "", {"ORTMODULE_CUDA": "0"}, False),
        ("bdist_wheel", "", {"SANITIZE": "1"}, False),
        ("build_ext", "", {}, False),
        ("build_ext", "", {"ORTMODULE_CUDA": "1"}, True),
        ("build_ext", None, {"ORTMODULE_CUDA": "1"}, True),
    ],
)
def test_kernels_are_found(setup, command, nvcc, environment, with_kernels):
    """Whoever installs gets them where there is nvcc; who works in the tree asks for them."""
    assert setup(command, nvcc, **environment)["CUDA"] == with_kernels


def test_no_nvcc(setup, tmp_path):
    found = setup("build_ext", None, ORTMODULE_CUDA="1")
    with pytest.raises(ExecError, match="nvcc is not installed"):
        found["compile_kernels"](Path("csrc/cuda/rows.cu"), tmp_path)


SPILLS = """
import sys
open(sys.argv[sys.argv.index("-o") + 1], "w").write("kernels")
open(sys.argv[sys.argv.index("-MF") + 1], "w").write("x: csrc/cuda/rows.cu")
print("ptxas info    : Compiling entry function 'f' for 'sm_90'")
print("    8 bytes stack frame, {} bytes spill stores, 0 bytes spill loads")
print("ptxas info    : Used 255 registers")
"""


def test_a_kernel_that_spills_fails_the_build(setup, tmp_path):
    source = Path("csrc/cuda/rows.cu")
    compile_kernels = setup("build_ext", SPILLS.format(4), ORTMODULE_CUDA="1")["compile_kernels"]
    with pytest.raises(CompileError, match=r"a kernel of csrc/cuda/rows.cu does not fit into registers"):
        compile_kernels(source, tmp_path)
    assert not (tmp_path / source.with_suffix(".fatbin")).exists()
    compile_kernels = setup("build_ext", SPILLS.format(0), ORTMODULE_CUDA="1")["compile_kernels"]
    assert compile_kernels(source, tmp_path).read_text() == "kernels"


def test_all_architectures_are_compiled(setup):
    command = " ".join(map(str, setup("build_ext")["NVCC"]))
    for architecture in ("sm_80", "sm_90", "sm_100", "compute_100]"):
        assert architecture in command


@pytest.mark.parametrize("spilled, code", [(0, 0), (4, 1)])
def test_what_kernels_use_is_listed(tmp_path, spilled, code):
    log = tmp_path / "rows.log"
    log.write_text(
        "ptxas info    : Compiling entry function 'f' for 'sm_80'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 40 registers, 128 bytes smem, 400 bytes cmem[0]\n"
        "ptxas info    : Compiling entry function 'f' for 'sm_90'\n"
        f"    8 bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 32 registers, 256 bytes smem\n"
    )
    command = [sys.executable, ROOT / "scripts" / "kernel-use", log]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == code
    assert done.stdout.splitlines()[1].split() == ["rows", "f", "40", "256", str(spilled)]
