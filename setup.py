"""Builds ortmodule._core, the C engine, from every source under csrc/; the rest of the project is in pyproject.toml.

    python setup.py build_ext --inplace     the extension, for working in the tree
    python setup.py test_c                  the C tests in tests/c, without Python
    python setup.py build_broken --target=F an extension with mistakes, for tests of what finds them
    python setup.py build_fuzz              the fuzz targets in tests/fuzz, without Python (docs/fuzzing.md)

Only what changed, or is to be compiled otherwise, is compiled again. Switches, from the environment:

    MAX_JOBS=N          so many files are compiled at a time (all cores that this process may use)
    ORTMODULE_CUDA=1    with the kernels of csrc/cuda/kernels, compiled by nvcc for all architectures; 80,90: for these;
                        0: no kernels.
                        Unset, an installation gets those for the GPUs of this machine, if it has GPUs and nvcc
    SANITIZE=1          address and undefined-behaviour sanitizers
    THREADS=1           the thread sanitizer, instead of these two
    COVERAGE=1          what a run reaches is counted, for fuzz targets
    DEBUG=1             -O1 -g, and the graph is verified after every stage
    ORTMODULE_WERROR=1  warnings are errors (always so in the two builds above)
    ORTMODULE_CPU=avx2  for tests: chooses kernels as if the CPU had nothing newer; baseline: nor AVX2
    EMULATED=1          with the same kernels as C, run by an emulated GPU whose memory is the CPU's, for tests
    RACES=1             besides: every access of these kernels to memory is looked at (tests/cuda/races.h)
"""

import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Command, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, OptionError, PlatformError


def switch(name):
    return os.environ.get(name, "0") not in ("", "0")


def jobs():
    limit = os.environ.get("MAX_JOBS", "")
    if limit and not (limit.isdecimal() and int(limit)):
        raise SystemExit(f"error: MAX_JOBS={limit} is not a number of files to compile at a time")
    return int(limit) if limit else len(os.sched_getaffinity(0))


def find_nvcc():
    """In PATH, or in CUDA's folder, which is often not in it."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [os.environ.get("PATH", os.defpath), *(os.path.join(home, "bin") for home in homes)]
    return shutil.which("nvcc", path=os.pathsep.join(places))


def gpus_here():
    """The architectures of this machine's GPUs, as nvcc names them: "90"."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted({line.replace(".", "") for line in said.split() if re.fullmatch(r"\d+\.\d", line)}, key=int)


def architectures():
    """Those that kernels are compiled for, and why it is these. In the tree kernels are asked for by ORTMODULE_CUDA."""
    asked = os.environ.get("ORTMODULE_CUDA", "")
    if asked == "1":
        return ALL_ARCHITECTURES, "all architectures (ORTMODULE_CUDA=1)"
    if asked not in ("", "0"):
        if not re.fullmatch(r"\d{2,3}(,\d{2,3})*", asked):
            raise SystemExit(f"error: ORTMODULE_CUDA={asked} is neither 0 nor 1 nor architectures such as 80,90")
        return asked.split(","), f"ORTMODULE_CUDA={asked}"
    if asked == "0":
        return [], "ORTMODULE_CUDA=0"
    if SANITIZE or DEBUG or EMULATED or not {"bdist_wheel", "install"} & set(sys.argv):
        return [], "ORTMODULE_CUDA=1 compiles them"
    if find_nvcc() is None:
        return [], "there is no nvcc in PATH or CUDA_HOME"
    here = gpus_here()
    return here, "the GPUs here" if here else "there is no GPU here; ORTMODULE_CUDA=1 compiles them for all"


JOBS = jobs()
SANITIZE, DEBUG, EMULATED, RACES = map(switch, ("SANITIZE", "DEBUG", "EMULATED", "RACES"))
THREADS, COVERAGE = map(switch, ("THREADS", "COVERAGE"))
ALL_ARCHITECTURES = ["75", "80", "90", "100"]
CUDA, CUDA_REASON = architectures()


def build_folder(*switches):
    """Of objects: also for an editable installation, so that the C tests link what it has compiled."""
    name = "-".join(name for name in switches if globals()[name.upper()]) or "release"
    if CUDA and CUDA != ALL_ARCHITECTURES and "cuda" in switches:
        name += "-" + "-".join(CUDA)
    return Path("build", f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}", name)


TEMP = build_folder("sanitize", "threads", "coverage", "debug", "cuda", "emulated", "races")
ENGINE = build_folder("sanitize", "threads", "coverage", "debug")  # of the engine, which is the same for all devices

CC = shlex.split(os.environ.get("CC", "gcc"))
CFLAGS = ["-std=gnu11", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
CFLAGS += ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Icsrc"]
CFLAGS += ["-Werror=implicit-function-declaration", "-Werror=int-conversion", "-Werror=incompatible-pointer-types"]
# Sanitizers name lines, no variables: without these gcc takes three fifths of its time.
CFLAGS += ["-O1", "-g" if DEBUG else "-g1"] if SANITIZE or THREADS or DEBUG else ["-O3"]
# Debian's libprotobuf-c.a is not position-independent. It goes into a shared object only because hiding its symbols
# lets the linker resolve the library's references to itself.
LDFLAGS = ["-fopenmp", "-l:libprotobuf-c.a", "-Wl,--exclude-libs,ALL", "-ldl", "-lm"]
if SANITIZE or DEBUG or switch("ORTMODULE_WERROR"):
    CFLAGS += ["-Werror", "-Wvla"]  # no array on the stack whose size data decides
if DEBUG:
    CFLAGS += ["-DORT_VERIFY"]
if SANITIZE:
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    CFLAGS += ["-DORT_SANITIZE", "-fno-omit-frame-pointer", *sanitizers]
    LDFLAGS += sanitizers
if THREADS:
    CFLAGS += ["-fsanitize=thread", "-Wno-tsan"]  # gcc's does not know fences
    LDFLAGS += ["-fsanitize=thread"]
COUNTED = ["-fsanitize-coverage=trace-pc"] * COVERAGE
#: Sources of many instances of one kernel. gcc takes three fifths of its time at -O3, and what it makes is as fast
#: (docs/benchmarks.md): of what -O3 adds these matter.
QUICK = ["-O2", "-fvect-cost-model=dynamic", "-funswitch-loops", "-fpeel-loops", "-fsplit-loops"]
QUICK_SOURCES = ("ops/losses/loss.c", "ops/norms/norm.c", "ops/reductions/softmax.c", "ops/spatial/grid_sample.c")
CAP = os.environ.get("ORTMODULE_CPU", "")
if CAP:
    if CAP not in ("avx2", "baseline"):
        raise SystemExit(f"error: ORTMODULE_CPU={CAP} is neither avx2 nor baseline")
    LDFLAGS += ["-Wl,--wrap=__cpu_indicator_init"]  # for the one in tests/cap.c
if EMULATED:
    LDFLAGS += ["-Wl,-rpath,$ORIGIN"]
CFLAGS += shlex.split(os.environ.get("CFLAGS", ""))
LDFLAGS += shlex.split(os.environ.get("LDFLAGS", ""))


# --- compiling and linking -------------------------------------------------------------------------------------------


def execute(*command):
    command = [str(word) for word in command]
    try:
        code = subprocess.run(command).returncode
    except FileNotFoundError:
        raise ExecError(f"{command[0]} is not installed; see README.md for the packages a build needs") from None
    if code != 0:
        raise CompileError(f"exit status {code}: {shlex.join(command)}")


def in_parallel(tasks):
    """Runs these, (name, function) each, JOBS at a time, and says which one begins."""
    counter = itertools.count(1)

    def begin(task):
        name, run = task
        print(f"[{next(counter)}/{len(tasks)}] {name}\n", end="", flush=True)
        run()

    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(begin, tasks))


def is_fresh(command, target, depends, recorded):
    """Whether `target` was made by this command, and is newer than this file and all that the compiler read for it."""
    command = shlex.join(map(str, command))
    if not target.exists() or not depends.exists() or not recorded.exists() or recorded.read_text() != command:
        return False
    read = depends.read_text().replace("\\\n", " ").partition(": ")[2].split()
    made = target.stat().st_mtime
    return all(os.path.exists(file) and os.path.getmtime(file) < made for file in [__file__, *read])


@dataclass
class Object:
    """What is compiled from `source` by `command`. It appears whole or not at all, and dated from before its source
    was read."""

    command: list
    source: Path
    target: Path

    def beside(self, suffix):
        return self.target.with_suffix(suffix)

    def is_fresh(self):
        return is_fresh(self.command, self.target, self.beside(".d"), self.beside(".command"))

    def compile(self):
        part, began = self.beside(f".{os.getpid()}"), time.time()
        execute(*self.command, "-MMD", "-MF", self.beside(".d"), "-c", self.source, "-o", part)
        os.utime(part, (began, began))
        part.replace(self.target)
        self.beside(".command").write_text(shlex.join(map(str, self.command)))


def compile_objects(objects):
    """Those that are not there yet; returns all their files."""
    stale = [o for o in objects if not o.is_fresh()]
    for folder in {o.target.parent for o in stale}:
        folder.mkdir(parents=True, exist_ok=True)
    in_parallel([(o.source, o.compile) for o in stale])
    return [o.target for o in objects]


def c_objects(sources, temp, flags=()):
    """`sources` lie in this folder or under `temp`."""
    objects = []
    for source in sources:
        target = (source if temp in source.parents else temp / source).with_suffix(".o")
        if source.suffix == ".cu":  # what of it is for the host
            host = [*CC, *CFLAGS, *flags, "-DORT_HOST", "-x", "c"]
            objects.append(Object(host, source, target.with_suffix(".cu.o")))
        else:
            quick = QUICK if "-O3" in CFLAGS and str(source).endswith(QUICK_SOURCES) else []
            objects.append(Object([*CC, *CFLAGS, *quick, *flags], source, target))
    return objects


def link(objects, target, *flags):
    """Replaces `target` at once: a process that has the old one mapped keeps it."""
    part = target.with_name(f"{target.name}.{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"{target}\n", end="", flush=True)
    execute(*CC, *objects, "-o", part, *LDFLAGS, *flags)
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
        execute("protoc-c", f"-I{proto.parent}", f"--c_out={part}", proto)
        for file in part.iterdir():
            file.replace(folder / file.name)
        part.rmdir()
    return generated


def engine_objects():
    """The engine without its Python side. Only the reader and the writer see the file format's messages."""
    generated = generate_onnx(ENGINE / "generated")
    everything = c_sources("csrc")
    onnx = [s for s in everything if s.parts[1] == "onnx"]
    rest = [s for s in everything if s.parts[1] not in ("onnx", "py") and s != IMAGE]
    include = f"-I{generated.parent}"
    return c_objects([*rest, *KERNELS], ENGINE, COUNTED) + c_objects([generated, *onnx], ENGINE, [*COUNTED, include])


def python_objects():
    flags = ["-DPy_LIMITED_API=0x030b0000", *PYTHON_HEADERS]
    return c_objects(c_sources("csrc/py"), TEMP, flags + ["-DORT_EMULATED"] * EMULATED)


def compile_all(*others):
    """The engine and these, then its kernels: those take longer, and mistakes of the engine show before."""
    check_packages()
    print(f"{JOBS} files are compiled at a time (MAX_JOBS)\n{kernels_sentence()}\n", end="", flush=True)
    cap = [Object([*CC, *CFLAGS, f"-DORT_CAP_{CAP.upper()}"], Path("tests/cap.c"), TEMP / f"{CAP}.o")] if CAP else []
    return [*compile_objects([*engine_objects(), *others, *cap]), compile_image(TEMP)]


# --- what a build needs ----------------------------------------------------------------------------------------------

PYTHON_HEADERS = ["-isystem", sysconfig.get_path("include")]
PACKAGES = "gcc, python3-dev, protobuf-c-compiler and libprotobuf-c-dev"


def missing(what, package):
    return PlatformError(f"{what}: on Debian the package {package} has it. A build needs {PACKAGES} (see README.md)")


def run_compiler(text, *flags):
    """What the compiler says to a C file of this text, if it refuses it."""
    command = [*CC, *CFLAGS, "-x", "c", "-", *flags]
    english = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=english)
    return done.stderr if done.returncode else ""


def check_packages():
    """Before the first of a hundred files is compiled: the sentence names what is not installed."""
    for program, package in ((CC[0], "gcc"), ("protoc-c", "protobuf-c-compiler")):
        if shutil.which(program) is None:
            raise missing(f"there is no {program}", package)
    for header, package in (("protobuf-c/protobuf-c.h", "libprotobuf-c-dev"), ("Python.h", "python3-dev")):
        if f"{header}: No such file" in run_compiler(f"#include <{header}>\n", "-E", *PYTHON_HEADERS):
            raise missing(f"the compiler finds no {header}", package)
    with tempfile.TemporaryDirectory() as folder:
        said = run_compiler("int linked;\n", "-shared", "-o", f"{folder}/empty.so", *LDFLAGS)
    if "libprotobuf-c.a" in said:
        raise missing("the linker finds no libprotobuf-c.a", "libprotobuf-c-dev")
    if said:
        raise CompileError(f"{CC[0]} does not link an empty library:\n{said}")


# --- CUDA ------------------------------------------------------------------------------------------------------------

IMAGE = Path("csrc/cuda/host/image.c")
KERNELS = sorted(Path("csrc/cuda/kernels").glob("*.cu"))
#: No part of CUDA is linked: the driver is found when there is one (csrc/cuda/host/driver.c).
NVCC = [find_nvcc() or "nvcc", "-fatbin", "-std=c++17", "-O3", "-Icsrc", "-DORT_DEVICE"]
NVCC += ["-Werror=all-warnings", "-Xptxas=-v"]
for name in CUDA:
    # As PTX, too, the newest: the driver compiles it for later ones. Of all, the oldest is PTX alone.
    codes = [f"sm_{name}"] * (CUDA != ALL_ARCHITECTURES or name != min(CUDA, key=int))
    codes += [f"compute_{name}"] * (not codes or name == max(CUDA, key=int))
    NVCC += [f"-gencode=arch=compute_{name},code=[{','.join(codes)}]"]
NVCC += ["--compress-mode=size"]  # an eighth of the bytes; the driver unpacks them once
#: In what the pointwise operators are made of, alone and as chains, products and sums are rounded apart: their bits are
#: the same one by one and together (csrc/cuda/libraries/nvrtc.c). Elsewhere nvcc makes one instruction of both.
ROUNDED_APART = re.compile(r'#include "cuda/kernels/(steps|chain)\.h"')
SPILL = re.compile(r"[1-9]\d* bytes spill")


class Kernels(Object):
    """Those of one family for every architecture. What they use of a GPU is kept beside the result (.log)."""

    def compile(self):
        log, command = self.beside(".log"), [str(word) for word in self.command]
        command += ["-MD", "-MF", str(self.beside(".d")), str(self.source), "-o", str(self.target)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            raise ExecError(
                "nvcc is not installed: CUDA 13 has it, and so has the package nvidia-cuda-nvcc; "
                "ORTMODULE_CUDA=0 builds without kernels for GPUs"
            ) from None
        log.write_text(done.stdout + done.stderr)
        if done.returncode != 0:
            text = f"exit status {done.returncode}: {shlex.join(command)}\n{done.stderr}"
            raise CompileError(f"{text}\nORTMODULE_CUDA=0 builds without kernels for GPUs")
        if SPILL.search(log.read_text()):
            self.target.unlink()
            raise CompileError(f"a kernel of {self.source} does not fit into registers: see {log}")
        self.beside(".command").write_text(shlex.join(map(str, self.command)))


def rounds_apart(source):
    return ROUNDED_APART.search(source.read_text()) is not None


def kernel_objects(temp):
    return [
        Kernels([*NVCC, f"-fmad={'false' if rounds_apart(s) else 'true'}"], s, temp / s.with_suffix(".fatbin"))
        for s in KERNELS
    ]


def kernels_sentence():
    if EMULATED:
        return "with an emulated GPU and its kernels"
    if not CUDA:
        return f"without kernels for GPUs: {CUDA_REASON}"
    names = ", ".join(f"sm_{name}" for name in CUDA)
    return (
        f"with kernels for GPUs, {names}: {CUDA_REASON}. nvcc takes minutes for the {len(KERNELS)} files, "
        "after those of the engine; ORTMODULE_CUDA=0 leaves them out"
    )


def compile_image(temp):
    """The kernels as bytes in an object; without nvcc an object that says that there are none."""
    images = []
    if EMULATED:
        images = [temp / "emulated.image"]
        temp.mkdir(parents=True, exist_ok=True)
        images[0].write_text("emulated")
    elif CUDA:
        images = compile_objects(kernel_objects(temp))
    flags = []
    if images:
        made = max(image.stat().st_mtime_ns for image in images)
        rows = temp / "images.h"
        rows.write_text("".join(f'IMAGE({image.stem}, "{image.resolve()}")\n' for image in images) + f"/* {made} */\n")
        flags = [f'-DORT_CUDA_IMAGES="{rows.resolve()}"', f"-DORT_CUDA_MADE={made}"]
    return compile_objects(c_objects([IMAGE], temp, flags))[0]


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
    # The thread sanitizer does not know the emulator's fibers: it sees what calls the driver, and the driver's locks.
    flags = [*CC, *CFLAGS, "-Itests/cuda", "-DORT_DEVICE", *["-fno-sanitize=thread"] * THREADS, *["-DRACES"] * RACES]
    ours = [Object(flags, s, temp / s.with_suffix(".o")) for s in sorted(Path("tests/cuda").glob("*.c"))]
    # The calls that these make at every access are answered by tests/cuda/races.c.
    looked_at = ["-fsanitize=thread", "-O1", "-g1"] * RACES
    fused = ["-ffp-contract=fast", "-mfma"] * has_fma()
    kernels = []
    for s in KERNELS:
        own = [*looked_at, *(["-ffp-contract=off"] if rounds_apart(s) else fused), f"-DEMULATED_UNIT={s.stem}"]
        kernels.append(Object([*flags, *own, "-x", "c"], s, temp / s.with_suffix(".emulated.o")))
    compile_objects([*ours, *kernels])
    objects = {o.source.stem: o.target for o in ours}
    others = {name: [objects.pop(s) for s in sorted(objects) if s.startswith(name)] for name in LIBRARIES}
    driver = folder / "libcuda.so.1"
    link([*objects.values(), *(o.target for o in kernels)], driver, "-shared", f"-Wl,-soname,{driver.name}")
    for name, library in LIBRARIES.items():
        link([*others[name], driver], folder / library, "-shared", f"-Wl,-soname,{library}")


# --- commands --------------------------------------------------------------------------------------------------------


class BuildCore(build_ext):
    def build_extension(self, ext):
        objects = compile_all(*python_objects())
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
        objects = compile_all(*python_objects())
        source = Path("csrc/exec/exec.c")
        (broken,) = compile_objects([Object([*CC, *CFLAGS, "-DORT_BROKEN"], source, TEMP / "broken" / "exec.o")])
        link([broken if o == (ENGINE / source).with_suffix(".o") else o for o in objects], Path(self.target), "-shared")


#: What makes a plan. In the C tests it tells of every basic block that it runs (tests/c/test_scaling.c), but where they
#: look for something else: with sanitizers, and with kernels of older CPUs.
PLANNING = ("grad", "graph", "passes", "plan", "shape")
#: Of tests/c, those whose loops have clones, or that ask what the CPU has: with ORTMODULE_CPU others see nothing new.
OF_CPUS = ("attention_rows", "core", "gradient", "linear_loss", "philox", "pointwise", "product_passes", "products")
OF_CPUS += ("tuning", "vmath")


def counted(objects):
    """These, the folders of ``PLANNING`` compiled for that."""
    sources = [source for folder in PLANNING for source in c_sources(f"csrc/{folder}")]
    # Each block is counted by itself: there is one of each, not one for each place where a function was inlined.
    flags = [*CC, *CFLAGS, "-O1", "-fno-inline", "-fsanitize-coverage=trace-pc", "-Wno-maybe-uninitialized"]
    telling = compile_objects([Object(flags, s, (ENGINE / "counted" / s).with_suffix(".o")) for s in sources])
    instead = {(ENGINE / s).with_suffix(".o"): o for s, o in zip(sources, telling, strict=True)}
    return [instead.get(o, o) for o in objects]


class TestC(Command):
    """Links tests/c with the engine into one program and runs it: no Python, so leaks can be found."""

    description = "build and run the C tests"
    user_options = [("only=", None, "run the tests whose name or file contains this")]

    def initialize_options(self):
        self.only = None

    def finalize_options(self):
        pass

    def run(self):
        program = TEMP / f"test_c{'-' * bool(CAP)}{CAP}"
        chosen = {f"test_{name}" for name in OF_CPUS}
        tests = [s for s in c_sources("tests/c") if not CAP or s.stem in chosen or not s.stem.startswith("test_")]
        objects = compile_all(*c_objects(tests, TEMP, ["-O1", "-Werror"]))  # what they test has the release's flags
        link(objects if SANITIZE or CAP else counted(objects), program)
        runs = [[program, self.only]] if self.only else [[program, "", str(share)] for share in range(2)]
        with ThreadPoolExecutor(JOBS) as pool:
            counts = list(pool.map(count_tests, runs))
        passed, failed = map(sum, zip(*counts, strict=True))
        print(f"{passed} passed, {failed} failed")
        if failed or not passed:
            sys.exit(1)


class BuildFuzz(Command):
    """Programs of the fuzz targets in tests/fuzz. The engine's loops run on threads that sanitizers see
    (tests/fuzz/parallel.c), not on OpenMP's."""

    description = "build the fuzz targets"
    user_options = [("target=", None, "only this one"), ("folder=", None, "where the programs go")]

    def initialize_options(self):
        self.target, self.folder = None, None

    def finalize_options(self):
        self.folder = Path(self.folder or TEMP / "fuzz")

    def run(self):
        targets = c_sources("tests/fuzz/targets")
        if self.target:
            targets = [source for source in targets if source.stem == self.target]
        shared = [*Path("tests/fuzz").glob("*.c"), *(Path("tests/c") / f"{name}.c" for name in ("machine", "blob"))]
        ours = c_objects([*shared, *targets], TEMP, ["-Itests/c", "-Itests/fuzz"])
        objects = compile_all(*ours)
        left_out = {o.target for o in ours if o.source in targets} | {ENGINE / "csrc/core/parallel.o"}
        for target in targets:
            program = [o for o in objects if o not in left_out] + [TEMP / target.with_suffix(".o")]
            link(program, self.folder / target.stem)


def count_tests(command):
    """Shows what a test program says, and counts the tests that passed and failed; one that ends early has failed."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # threads asleep do not take the other program's core
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
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
    cmdclass={"build_ext": BuildCore, "build_broken": BuildBroken, "test_c": TestC, "build_fuzz": BuildFuzz},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
