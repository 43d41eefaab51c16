"""Builds ortmodule._core, the C engine, from every source under csrc/; the rest of the project is in pyproject.toml.

    python setup.py build_ext --inplace     the extension, for working in the tree
    python setup.py test_c                  the C tests in tests/c, without Python
    python setup.py build_broken --target=F an extension with mistakes, for tests of what finds them

Only what changed, or is to be compiled otherwise, is compiled again. Switches, from the environment:

    SANITIZE=1          address and undefined-behaviour sanitizers
    DEBUG=1             -O1 -g, and the graph is verified after every stage
    ORTMODULE_WERROR=1  warnings are errors (always so in the two builds above)
    ORTMODULE_CUDA=1    with the kernels of csrc/cuda, compiled by nvcc; 0: without; a wheel has them if nvcc is there
    EMULATED=1          with the same kernels as C, run by an emulated GPU whose memory is the CPU's, for tests
    RACES=1             besides: every access of these kernels to memory is looked at (tests/cuda/races.h)
"""

import importlib.util
import os
import re
import shlex
import shutil
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


def wants_kernels():
    """What somebody says; otherwise what is to be installed gets them where there is a compiler for them."""
    if "ORTMODULE_CUDA" in os.environ:
        return switch("ORTMODULE_CUDA")
    installs = {"bdist_wheel", "install"} & set(sys.argv)
    return bool(installs) and not (SANITIZE or DEBUG or EMULATED) and shutil.which("nvcc") is not None


SANITIZE, DEBUG, EMULATED, RACES = map(switch, ("SANITIZE", "DEBUG", "EMULATED", "RACES"))
CUDA = wants_kernels()


def build_folder(*switches):
    """Of objects: also for an editable installation, so that the C tests link what it has compiled."""
    name = "-".join(name for name in switches if globals()[name.upper()]) or "release"
    return Path("build", f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}", name)


TEMP = build_folder("sanitize", "debug", "cuda", "emulated", "races")
ENGINE = build_folder("sanitize", "debug")  # of the engine, which is the same for all devices

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
if EMULATED:
    LDFLAGS += ["-Wl,-rpath,$ORIGIN"]
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
        if source.suffix == ".cu":  # what of it is for the host
            return compile_object([*CC, *CFLAGS, *flags, "-DORT_HOST", "-x", "c"], source, target.with_suffix(".cu.o"))
        return compile_object([*CC, *CFLAGS, *flags], source, target)

    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(compile_one, sources))


def link(objects, target, *flags):
    """Replaces `target` at once: a process that has the old one mapped keeps it."""
    part = target.with_name(f"{target.name}.{os.getpid()}")
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


def compile_engine():
    """The engine without its Python side. Only the reader and the writer see the file format's messages."""
    generated = generate_onnx(ENGINE / "generated")
    everything = c_sources("csrc")
    onnx = [s for s in everything if s.parts[1] == "onnx"]
    rest = [s for s in everything if s.parts[1] not in ("onnx", "py") and s != IMAGE]
    objects = compile_c([*rest, *KERNELS], ENGINE) + compile_c([generated, *onnx], ENGINE, [f"-I{generated.parent}"])
    return [*objects, compile_image(TEMP)]


def compile_python_side():
    flags = ["-DPy_LIMITED_API=0x030b0000", "-isystem", sysconfig.get_path("include")]
    return compile_c(c_sources("csrc/py"), TEMP, flags + ["-DORT_EMULATED"] * EMULATED)


# --- CUDA ------------------------------------------------------------------------------------------------------------

IMAGE = Path("csrc/cuda/image.c")
KERNELS = sorted(Path("csrc/cuda").glob("*.cu"))
#: No part of CUDA is linked: the driver is found when there is one (csrc/cuda/driver.c).
NVCC = ["nvcc", "-fatbin", "-std=c++17", "-O3", "-Icsrc", "-DORT_DEVICE", "-Werror=all-warnings", "-Xptxas=-v"]
NVCC += ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90"]
NVCC += ["-gencode=arch=compute_100,code=[sm_100,compute_100]"]
NVCC += ["-gencode=arch=compute_75,code=compute_75"]  # for those before: the driver compiles it, and keeps the result
NVCC += ["--compress-mode=size"]  # an eighth of the bytes; the driver unpacks them once
#: In what the pointwise operators are made of, alone and as chains, products and sums are rounded apart: their bits are
#: the same one by one and together (csrc/cuda/nvrtc.c). Elsewhere nvcc makes one instruction of both.
ROUNDED_APART = re.compile(r'#include "cuda/(steps|chain)\.h"')
SPILL = re.compile(r"[1-9]\d* bytes spill")


def compile_kernels(source, temp):
    """The kernels of one family for every architecture. What they use of a GPU is kept beside the result (.log)."""
    target = temp / source.with_suffix(".fatbin")
    depends, recorded, log = (target.with_suffix(suffix) for suffix in (".fatbin.d", ".fatbin.command", ".log"))
    fused = "false" if ROUNDED_APART.search(source.read_text()) else "true"
    command = [*NVCC, f"-fmad={fused}", "-MD", "-MF", depends, source, "-o", target]
    if not is_fresh(shlex.join(map(str, command)), target, depends, recorded):
        print(f"{source}\n", end="", flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        except FileNotFoundError:
            raise ExecError("nvcc is not installed: CUDA 13 has it, and so has the package nvidia-cuda-nvcc") from None
        log.write_text(done.stdout + done.stderr)
        if done.returncode != 0:
            raise CompileError(f"exit status {done.returncode}: {shlex.join(map(str, command))}\n{done.stderr}")
        if SPILL.search(log.read_text()):
            target.unlink()
            raise CompileError(f"a kernel of {source} does not fit into registers: see {log}")
        recorded.write_text(shlex.join(map(str, command)))
    return target


def compile_image(temp):
    """The kernels as bytes in an object; without nvcc an object that says that there are none."""
    images = []
    if EMULATED:
        images = [temp / "emulated.image"]
        temp.mkdir(parents=True, exist_ok=True)
        images[0].write_text("emulated")
    elif CUDA:
        with ThreadPoolExecutor(JOBS) as pool:
            images = list(pool.map(lambda source: compile_kernels(source, temp), KERNELS))
    flags = []
    if images:
        made = max(image.stat().st_mtime_ns for image in images)
        rows = temp / "images.h"
        rows.write_text("".join(f'IMAGE({image.stem}, "{image.resolve()}")\n' for image in images) + f"/* {made} */\n")
        flags = [f'-DORT_CUDA_IMAGES="{rows.resolve()}"', f"-DORT_CUDA_MADE={made}"]
    return compile_object([*CC, *CFLAGS, *flags], IMAGE, temp / IMAGE.with_suffix(".o"))


LIBRARIES = {"fake_blas": "libcublasLt.so.13", "fake_nvrtc": "libnvrtc.so.13", "fake_dnn": "libcudnn.so.9"}
LIBRARIES |= {"fake_torch": "libtorch_cuda.so"}


def has_fma():
    """Whether this CPU multiplies and adds in one instruction, as nvcc has a GPU do it."""
    try:
        return re.search(r"^flags\b.*\bfma\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE) is not None
    except OSError:
        return False


def link_emulator(temp, folder):
    """Libraries beside the extension, which finds them there: an emulated GPU, its kernels as C, and LIBRARIES."""
    flags = [*CC, *CFLAGS, "-Itests/cuda", "-DORT_DEVICE"]
    objects = {s.stem: compile_object(flags, s, temp / s.with_suffix(".o")) for s in Path("tests/cuda").glob("*.c")}
    others = {name: [objects.pop(s) for s in sorted(objects) if s.startswith(name)] for name in LIBRARIES}
    # What this makes the compiler call is in tests/cuda/races.c.
    looked_at = ["-fsanitize=thread", "-O1", "-g"] if RACES else []
    fused = ["-ffp-contract=fast", "-mfma"] if has_fma() else []

    def compile_kernel(source):
        rounding = ["-ffp-contract=off"] if ROUNDED_APART.search(source.read_text()) else fused
        target = temp / source.with_suffix(".emulated.o")
        return compile_object([*flags, *looked_at, *rounding, "-x", "c"], source, target)

    with ThreadPoolExecutor(JOBS) as pool:
        kernels = list(pool.map(compile_kernel, KERNELS))
    driver = folder / "libcuda.so.1"
    link([*objects.values(), *kernels], driver, "-shared", f"-Wl,-soname,{driver.name}")
    for name, library in LIBRARIES.items():
        link([*others[name], driver], folder / library, "-shared", f"-Wl,-soname,{library}")


# --- commands --------------------------------------------------------------------------------------------------------


class BuildCore(build_ext):
    def build_extension(self, ext):
        objects = compile_engine() + compile_python_side()
        target = Path(self.get_ext_fullpath(ext.name))
        link(objects, target, "-shared")
        if EMULATED:
            link_emulator(TEMP, target.parent)


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
        objects = compile_engine() + compile_python_side()
        source = Path("csrc/exec/exec.c")
        broken = compile_object([*CC, *CFLAGS, "-DORT_BROKEN"], source, TEMP / "broken" / "exec.o")
        link([broken if o == (ENGINE / source).with_suffix(".o") else o for o in objects], Path(self.target), "-shared")


class TestC(Command):
    """Links tests/c with the engine into one program and runs it: no Python, so leaks can be found."""

    description = "build and run the C tests"
    user_options = [("only=", None, "run the tests whose name or file contains this")]

    def initialize_options(self):
        self.only = None

    def finalize_options(self):
        pass

    def run(self):
        program = TEMP / "test_c"
        objects = compile_engine() + compile_c(c_sources("tests/c"), TEMP)
        link(objects, program)
        runs = [[program, self.only]] if self.only else [[program, "", str(share)] for share in range(2)]
        with ThreadPoolExecutor(JOBS) as pool:
            counts = list(pool.map(count_tests, runs))
        passed, failed = map(sum, zip(*counts, strict=True))
        print(f"{passed} passed, {failed} failed")
        if failed or not passed:
            sys.exit(1)


def count_tests(command):
    """Shows what a test program says, and counts the tests that passed and failed; one that ends early has failed."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        lines = []
        for line in program.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    verdicts = [line.partition(" ")[0] for line in lines]
    failed = verdicts.count("FAILED")
    return verdicts.count("ok"), failed or int(program.returncode != 0)


sources = [str(source) for source in c_sources("csrc")]
setup(
    packages=find_packages(include=["ortmodule", "ortmodule.*"]) + ["ortmodule.optim"],
    package_dir={"ortmodule.optim": "optim"},
    ext_modules=[Extension("ortmodule._core", sources, py_limited_api=True)],
    cmdclass={"build_ext": BuildCore, "build_broken": BuildBroken, "test_c": TestC},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
