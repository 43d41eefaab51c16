"""setup.py: when the kernels for GPUs are compiled, what a build says, and what stops it."""

import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from setuptools.errors import CompileError, ExecError, PlatformError

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="the sources are not there")


HOMES = ("CUDA_HOME", "CUDA_PATH")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The only one in which programs are looked for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("ORTMODULE_CUDA", "EMULATED", "SANITIZE", "DEBUG", "MAX_JOBS", "CC", "CFLAGS", "LDFLAGS", *HOMES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    return folder


def program(path, text):
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(stat.S_IRWXU)


@pytest.fixture
def setup(monkeypatch, folder):
    """What setup.py says of itself when it is called with a command, in an environment with or without nvcc and GPUs.
    With `--name` it does no more than that."""

    def call(command, nvcc=None, gpus=None, **environment):
        (folder / "nvcc").unlink(missing_ok=True)
        if nvcc is not None:
            program(folder / "nvcc", nvcc)
        if gpus is not None:
            program(folder / "nvidia-smi", f"print({gpus!r})")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["setup.py", "--name", command])
        return runpy.run_path("setup.py", run_name="__main__")

    return call


ALL = ["75", "80", "90", "100"]


@pytest.mark.parametrize(
    "command, nvcc, gpus, environment, architectures, sentence",
    [
        ("bdist_wheel", "", "9.0\n10.0\n9.0", {}, ["90", "100"], "sm_90, sm_100: the GPUs here.*ORTMODULE_CUDA=0"),
        ("bdist_wheel", "", None, {}, [], "no GPU here; ORTMODULE_CUDA=1"),
        ("bdist_wheel", "", "No devices were found", {}, [], "no GPU here; ORTMODULE_CUDA=1"),
        ("bdist_wheel", None, "9.0", {}, [], "no nvcc"),
        ("bdist_wheel", None, "9.0", {"CUDA_HOME": "{folder}/cuda"}, ["90"], "sm_90: the GPU"),
        ("bdist_wheel", "", "9.0", {"ORTMODULE_CUDA": "0"}, [], "ORTMODULE_CUDA=0"),
        ("bdist_wheel", "", "9.0", {"SANITIZE": "1"}, [], "without kernels"),
        ("bdist_wheel", "", "9.0", {"ORTMODULE_CUDA": "1"}, ALL, r"all architectures.* \d+ files"),
        ("build_ext", "", "9.0", {}, [], "ORTMODULE_CUDA=1 compiles them"),
        ("build_ext", "", None, {"ORTMODULE_CUDA": "1"}, ALL, "all architectures"),
        ("build_ext", None, None, {"ORTMODULE_CUDA": "1"}, ALL, "all architectures"),
        ("build_ext", None, None, {"ORTMODULE_CUDA": "80,120"}, ["80", "120"], "sm_80, sm_120"),
    ],
)
def test_when_kernels_are_compiled(setup, folder, command, nvcc, gpus, environment, architectures, sentence):
    """An installation gets those for the GPUs that are there, where there is nvcc; in the tree they are asked for."""
    (folder / "cuda" / "bin").mkdir(parents=True)
    program(folder / "cuda" / "bin" / "nvcc", "")
    found = setup(command, nvcc, gpus, **{name: value.format(folder=folder) for name, value in environment.items()})
    assert found["CUDA"] == architectures
    assert re.search(sentence, found["kernels_sentence"]())


@pytest.mark.parametrize(
    "name, value, sentence",
    [
        ("ORTMODULE_CUDA", "yes", "ORTMODULE_CUDA=yes is neither 0 nor 1 nor architectures such as 80,90"),
        ("MAX_JOBS", "all", "MAX_JOBS=all is not a number"),
        ("MAX_JOBS", "0", "MAX_JOBS=0 is not a number"),
    ],
)
def test_wrong_switches(setup, name, value, sentence):
    with pytest.raises(SystemExit, match=sentence):
        setup("build_ext", **{name: value})


def test_as_many_jobs_as_cores(setup):
    assert setup("build_ext")["JOBS"] == len(os.sched_getaffinity(0))
    assert setup("build_ext", MAX_JOBS="17")["JOBS"] == 17


def test_progress(setup, capsys):
    """Each file that is compiled is counted; those that are there already are not."""
    in_parallel, done = setup("build_ext", MAX_JOBS="1")["in_parallel"], []
    capsys.readouterr()
    in_parallel([(Path("a.c"), lambda: done.append("a")), (Path("b.c"), lambda: done.append("b"))])
    assert capsys.readouterr().out == "[1/2] a.c\n[2/2] b.c\n" and done == ["a", "b"]


# What the compiler cannot find here it says as if it were not installed; the linker's words are those of GNU ld.
NO_LIBRARY = """
import os, sys
if "-shared" in sys.argv:
    sys.exit("/usr/bin/ld: cannot find -l:libprotobuf-c.a: No such file or directory")
os.execv({gcc!r}, sys.argv)
"""


@pytest.mark.parametrize(
    "lacks, sentence, package",
    [
        ("gcc", "there is no gcc", "gcc"),
        ("protoc-c", "there is no protoc-c", "protobuf-c-compiler"),
        ("protobuf-c.h", "the compiler finds no protobuf-c/protobuf-c.h", "libprotobuf-c-dev"),
        ("Python.h", "the compiler finds no Python.h", "python3-dev"),
        ("libprotobuf-c.a", "the linker finds no libprotobuf-c.a", "libprotobuf-c-dev"),
        (None, None, None),
    ],
)
def test_what_is_not_installed(lacks, sentence, package, monkeypatch, folder, setup):
    """The sentence names the package before a file is compiled."""
    gcc = shutil.which("gcc", path=os.defpath)
    for name in {"gcc", "protoc-c", "as", "ld"} - {lacks}:
        (folder / name).symlink_to(shutil.which(name, path=os.defpath))
    environment = {}
    if lacks == "protobuf-c.h":
        environment = {"CFLAGS": "-nostdinc"}
    elif lacks == "Python.h":
        monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    elif lacks == "libprotobuf-c.a":
        (folder / "gcc").unlink()
        program(folder / "gcc", NO_LIBRARY.format(gcc=gcc))
    check_packages = setup("build_ext", **environment)["check_packages"]
    if lacks is None:
        return check_packages()
    with pytest.raises(PlatformError, match=f"{sentence}: on Debian the package {package} has it"):
        check_packages()


def test_a_build_stops_before_it_compiles(folder):
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", folder, "--build-temp", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "[1/" not in done.stdout
    assert "there is no gcc: on Debian the package gcc has it" in done.stderr and "README.md" in done.stderr


@pytest.mark.parametrize("package", ["gcc", "python3-dev", "protobuf-c-compiler", "libprotobuf-c-dev"])
def test_packages_are_named(package):
    """Where a build that stops says they are named, and where scripts/test installs them."""
    assert package in (ROOT / "README.md").read_text()
    assert package in (ROOT / "scripts" / "common.sh").read_text()


def kernels(found, source, folder):
    (one,) = [o for o in found["kernel_objects"](folder) if o.source == source]
    found["compile_objects"]([one])
    return one.target


def test_no_nvcc(setup, tmp_path):
    found = setup("build_ext", None, ORTMODULE_CUDA="1")
    with pytest.raises(ExecError, match="nvcc is not installed.*ORTMODULE_CUDA=0"):
        kernels(found, Path("csrc/cuda/kernels/rows.cu"), tmp_path)


SPILLS = """
import sys
open(sys.argv[sys.argv.index("-o") + 1], "w").write("kernels")
open(sys.argv[sys.argv.index("-MF") + 1], "w").write("x: csrc/cuda/kernels/rows.cu")
print("ptxas info    : Compiling entry function 'f' for 'sm_90'")
print("    8 bytes stack frame, {} bytes spill stores, 0 bytes spill loads")
print("ptxas info    : Used 255 registers")
"""


def test_a_kernel_that_spills_fails_the_build(setup, tmp_path):
    source = Path("csrc/cuda/kernels/rows.cu")
    found = setup("build_ext", SPILLS.format(4), ORTMODULE_CUDA="1")
    with pytest.raises(CompileError, match=r"a kernel of csrc/cuda/kernels/rows.cu does not fit into registers"):
        kernels(found, source, tmp_path)
    assert not (tmp_path / source.with_suffix(".fatbin")).exists()
    found = setup("build_ext", SPILLS.format(0), ORTMODULE_CUDA="1")
    assert kernels(found, source, tmp_path).read_text() == "kernels"


def codes(found):
    return [word.rpartition("code=")[2] for word in found["NVCC"] if word.startswith("-gencode")]


def test_architectures_are_compiled(setup):
    """Machine code, and PTX of the newest; of all, PTX alone of the oldest."""
    found = codes(setup("build_ext", ORTMODULE_CUDA="1"))
    assert found == ["[compute_75]", "[sm_80]", "[sm_90]", "[sm_100,compute_100]"]
    assert codes(setup("build_ext", ORTMODULE_CUDA="90")) == ["[sm_90,compute_90]"]
    assert codes(setup("build_ext", ORTMODULE_CUDA="75,80")) == ["[sm_75]", "[sm_80,compute_80]"]


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
