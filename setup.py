"""Builds ortmodule._core, the C engine, from every source under csrc/; the rest of the project is in pyproject.toml.

    python setup.py build_ext --inplace     the extension, for working in the tree
    python setup.py test_c                  the C tests in tests/c, without Python
    python setup.py build_broken --target=F an extension with mistakes, for tests of what finds them

Only what changed, or is to be compiled otherwise, is compiled again. Switches, from the environment:

    SANITIZE=1          address and undefined-behaviour sanitizers
    DEBUG=1             -O1 -g, and the graph is verified after every stage
    ORTMODULE_WERROR=1  warnings are errors (always so in the two builds above)
    ORTMODULE_CUDA=1    with csrc/cuda, compiled by nvcc
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, OptionError, PlatformError

JOBS = 2


def switch(name):
    return os.environ.get(name, "0") not in ("", "0")


SANITIZE, DEBUG, CUDA = switch("SANITIZE"), switch("DEBUG"), switch("ORTMODULE_CUDA")
BUILD = "-".join(name for name in ("sanitize", "debug", "cuda") if globals()[name.upper()]) or "release"

CC = shlex.split(os.environ.get("CC", "gcc"))
CFLAGS = ["-std=gnu11", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
CFLAGS += ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Icsrc"]
CFLAGS += ["-O1", "-g"] if SANITIZE or DEBUG else ["-O3"]
# Debian's libprotobuf-c.a is not position-independent. It goes into a shared object only because hiding its symbols
# lets the linker resolve the library's references to itself.
LDFLAGS = ["-fopenmp", "-l:libprotobuf-c.a", "-Wl,--exclude-libs,ALL", "-ldl", "-lm"]
if SANITIZE or DEBUG or switch("ORTMODULE_WERROR"):
    CFLAGS += ["-Werror"]
if DEBUG:
    CFLAGS += ["-DORT_VERIFY"]
if SANITIZE:
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    CFLAGS += ["-DORT_SANITIZE", "-fno-omit-frame-pointer", *sanitizers]
    LDFLAGS += sanitizers
if CUDA:
    CFLAGS += ["-DORT_CUDA"]
CFLAGS += shlex.split(os.environ.get("CFLAGS", ""))
LDFLAGS += shlex.split(os.environ.get("LDFLAGS", ""))


# --- compiling and linking -------------------------------------------------------------------------------------------


def execute(what, *command):
    print(f"{what}\n", end="", flush=True)
    command = [str(word) for word in command]
    try:
        code = subprocess.run(command).returncode
    except FileNotFoundError:
        raise ExecError(f"{command[0]} is not installed; see README.md for the packages a build needs") from None
    if code != 0:
        raise CompileError(f"exit status {code}: {shlex.join(command)}")


def is_fresh(command, target, depends, recorded):
    """Whether `target` was made by this command, and is newer than this file and all that the compiler read for it."""
    if not target.exists() or not depends.exists() or not recorded.exists() or recorded.read_text() != command:
        return False
    read = depends.read_text().replace("\\\n", " ").partition(": ")[2].split()
    made = target.stat().st_mtime
    return all(os.path.exists(file) and os.path.getmtime(file) < made for file in [__file__, *read])


def compile_object(command, source, target):
    """The object appears whole or not at all, and dated from before its source was read."""
    depends, recorded, part = (target.with_suffix(suffix) for suffix in (".d", ".command", f".{os.getpid()}"))
    if not is_fresh(shlex.join(map(str, command)), target, depends, recorded):
        began = time.time()
        target.parent.mkdir(parents=True, exist_ok=True)
        execute(source, *command, "-MMD", "-MF", depends, "-c", source, "-o", part)
        os.utime(part, (began, began))
        part.replace(target)
        recorded.write_text(shlex.join(map(str, command)))
    return target


def compile_c(sources, temp, flags=()):
    """`sources` lie in this folder or under `temp`; returns the objects."""

    def compile_one(source):
        target = (source if temp in source.parents else temp / source).with_suffix(".o")
        return compile_object([*CC, *CFLAGS, *flags], source, target)

    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(compile_one, sources))


def link(objects, target, *flags):
    """Replaces `target` at once: a process that has the old one mapped keeps it."""
    part = target.with_suffix(f".{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    execute(target, *CC, *objects, "-o", part, *LDFLAGS, *flags)
    part.replace(target)


# --- what is compiled ------------------------------------------------------------------------------------------------


def c_sources(folder):
    return sorted(Path(folder).rglob("*.c"))


def generate_onnx(folder):
    """ONNX's messages as C, from the definition inside the onnx package, which is found but not imported."""
    spec = importlib.util.find_spec("onnx")
    if spec is None:
        raise PlatformError("the onnx package is needed to build: its .proto file is the file format's definition")
    proto = Path(spec.origin).parent / "onnx-ml.proto"
    generated = folder / "onnx-ml.pb-c.c"
    if not generated.exists() or generated.stat().st_mtime < proto.stat().st_mtime:
        part = folder / str(os.getpid())
        part.mkdir(parents=True, exist_ok=True)
        execute(generated, "protoc-c", f"-I{proto.parent}", f"--c_out={part}", proto)
        for file in part.iterdir():
            file.replace(folder / file.name)
        part.rmdir()
    return generated


def compile_engine(temp):
    """The engine without its Python side. Only the reader and the writer see the file format's messages."""
    generated = generate_onnx(temp / "generated")
    everything = c_sources("csrc")
    onnx = [s for s in everything if s.parts[1] == "onnx"]
    rest = [s for s in everything if s.parts[1] not in ("onnx", "py")]
    return compile_c(rest, temp) + compile_c([generated, *onnx], temp, [f"-I{generated.parent}"]) + compile_cuda(temp)


def compile_python_side(temp):
    flags = ["-DPy_LIMITED_API=0x030b0000", "-isystem", sysconfig.get_path("include")]
    return compile_c(c_sources("csrc/py"), temp, flags)


# --- CUDA ------------------------------------------------------------------------------------------------------------

NVCC = ["nvcc", "-O3", "-std=c++17", "-Icsrc", "-DORT_CUDA", "-cudart", "static"]
NVCC += ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90"]
NVCC += ["-gencode=arch=compute_100,code=[sm_100,compute_100]"]
# Without these the host side needs libstdc++; plain gcc links it as it is.
NVCC += ["-Xcompiler=-fPIC,-fvisibility=hidden,-fno-threadsafe-statics,-fno-exceptions,-fno-rtti"]


def compile_cuda(temp):
    if not CUDA:
        return []
    sources = sorted(Path("csrc/cuda").rglob("*.cu"))
    return [compile_object(NVCC, source, temp / source.with_suffix(".cu.o")) for source in sources]


def cuda_libraries():
    """The CUDA runtime, linked statically: the extension loads on a machine without one."""
    if not CUDA:
        return []
    plan = subprocess.run(["nvcc", "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
    folders = re.findall(r'"(-L[^"]+)"', plan)
    return [*folders, "-lcudart_static", "-lrt", "-lpthread"]


# --- commands --------------------------------------------------------------------------------------------------------


class BuildCore(build_ext):
    def build_extension(self, ext):
        temp = Path(self.build_temp, BUILD)
        objects = compile_engine(temp) + compile_python_side(temp)
        link(objects, Path(self.get_ext_fullpath(ext.name)), "-shared", *cuda_libraries())


class BuildBroken(Command):
    """The extension with an interpreter that spoils a result, for tests of what has to notice (csrc/exec/exec.c)."""

    description = "build the extension in which the operator that ORTMODULE_BROKEN names is wrong"
    user_options = [("target=", None, "the shared object to write")]

    def initialize_options(self):
        self.target = None

    def finalize_options(self):
        if self.target is None:
            raise OptionError("--target is needed")

    def run(self):
        temp = Path(self.get_finalized_command("build_ext").build_temp, BUILD)
        objects = compile_engine(temp) + compile_python_side(temp)
        source = Path("csrc/exec/exec.c")
        broken = compile_object([*CC, *CFLAGS, "-DORT_BROKEN"], source, temp / "broken" / "exec.o")
        link([broken if o == (temp / source).with_suffix(".o") else o for o in objects], Path(self.target), "-shared")


class TestC(Command):
    """Links tests/c with the engine into one program and runs it: no Python, so leaks can be found."""

    description = "build and run the C tests"
    user_options = [("only=", None, "run the tests whose name or file contains this")]

    def initialize_options(self):
        self.only = None

    def finalize_options(self):
        pass

    def run(self):
        temp = Path(self.get_finalized_command("build_ext").build_temp, BUILD)
        program = temp / "test_c"
        objects = compile_engine(temp) + compile_c(c_sources("tests/c"), temp)
        link(objects, program, *cuda_libraries())
        code = subprocess.run([program, *([self.only] if self.only else [])]).returncode
        if code != 0:
            sys.exit(1)


sources = [str(source) for source in c_sources("csrc")]
setup(
    packages=find_packages(include=["ortmodule", "ortmodule.*"]) + ["ortmodule.optim"],
    package_dir={"ortmodule.optim": "optim"},
    ext_modules=[Extension("ortmodule._core", sources, py_limited_api=True)],
    cmdclass={"build_ext": BuildCore, "build_broken": BuildBroken, "test_c": TestC},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
