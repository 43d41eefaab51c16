"""Makes Triton kernels for the engine: compiles them for a GPU, or runs them by Triton's interpreter on the CPU."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import linecache
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from ortmodule import _core
from ortmodule.core.errors import TritonError
from ortmodule.triton_kernels import interpreted
from ortmodule.triton_kernels.attention import FIRST, Attention, kernels
from ortmodule.triton_kernels.source import KernelSource, source_of

#: Elements that a block of the kernel takes, as long as rows are not longer.
_ELEMENTS = 1024
_ROWS_OF = 4096
#: The least compute capability that Triton compiles for.
LEAST_ARCHITECTURE = 80

_numbers = itertools.count()


class Shape(NamedTuple):
    """How a kernel is cut: rows or elements of a block, its warps, and stages of loops."""

    block: int
    warps: int
    stages: int


class Kernel(NamedTuple):
    """A compiled kernel. ``block``: rows or elements of a block; ``scratch``: pointers after its arguments."""

    cubin: bytes
    name: str
    threads: int
    block: int
    shared: int
    scratch: int


@functools.cache
def triton_module() -> ModuleType | None:
    """The package triton; None where there is none. Its import takes a second, so only who needs it asks."""
    try:
        return importlib.import_module("triton")
    except Exception:  # a broken installation raises all kinds
        return None


def refusal(gpu: torch.device | None) -> str:
    """Why there are no Triton kernels for this GPU, or for the CPU; "" if there are."""
    if triton_module() is None:
        return "the package triton is not installed, or cannot be imported"
    if gpu is None or gpu.type != "cuda":
        return "" if interpreted.is_on() else "Triton compiles for GPUs, and this module is on the CPU"
    if interpreted.is_on():
        return "Triton's interpreter (TRITON_INTERPRET) runs kernels on the CPU, and this module is on a GPU"
    major, minor = torch.cuda.get_device_capability(gpu)
    if 10 * major + minor < LEAST_ARCHITECTURE:
        return f"this GPU has compute capability {major}.{minor}, and kernels are compiled from 8.0 on"
    return ""


def room_of(width: int) -> int:
    """The power of two that has room for a row."""
    return 1 << max(0, width - 1).bit_length()


def shape_of(has_rows: bool, room: int) -> Shape:
    """How a kernel is cut where it has not been measured."""
    if not has_rows:
        return Shape(_ELEMENTS, 4, 1)
    elements = max(room, _ROWS_OF if room < 256 else 2048)
    return Shape(min(64, max(1, elements // room)), 4 if elements <= 2048 else 8 if elements <= 8192 else 16, 1)


def shapes_of(has_rows: bool, room: int) -> list[Shape]:
    """:func:`shape_of`, and others that tuning compares with it."""
    first = shape_of(has_rows, room)
    found = [first, first._replace(warps=min(16, 2 * first.warps)), first._replace(warps=max(1, first.warps // 2))]
    if not has_rows:
        found += [Shape(_ELEMENTS // 2, 4, 1), Shape(2 * _ELEMENTS, 8, 1)]
    else:
        found += [first._replace(block=max(1, first.block // 2)), first._replace(block=min(64, 2 * first.block))]
    return list(dict.fromkeys(found))


def function_of(source: KernelSource) -> Any:
    """The kernel as a function of Triton's."""
    file = f"<triton kernel {next(_numbers)}>"
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "ortmodule.triton_kernels.generated"}
    exec(compile(source.text, file, "exec"), namespace)
    if interpreted.is_on():
        interpreted.complete(namespace)
    return namespace[source.name]


class Job(NamedTuple):
    """A kernel to be compiled or run. ``constants``: what is fixed in it; ``arguments``: {name: Triton's type}."""

    function: Any
    arguments: dict[str, str]
    constants: dict[str, int | bool]
    block: int
    warps: int
    stages: int


def chain_job(program: str, how: str, width: int, way: str = "") -> Job:
    """A kernel of csrc/ops/chains/triton.c, cut in a way of :func:`ways_of`."""
    source, has_rows, room = source_of(program, how), program.startswith("rows"), room_of(width)
    shape = Shape(*_numbers_of(way)) if way else shape_of(has_rows, room)
    constants = {"BLOCK": shape.block} | ({"ROOM": room} if has_rows else {})
    return Job(_functions(program, how), source.arguments, constants, *shape)


def attention_job(program: str, way: str = "") -> Job:
    """A kernel of csrc/ops/attention/triton_attention.c, cut in a way of :func:`ways_of`."""
    wanted, module = Attention.of(program), kernels()
    if interpreted.is_on():
        interpreted.complete(module.__dict__)
    block, other, warps, stages = _numbers_of(way) if way else wanted.cut()
    function = getattr(module, wanted.kernel)
    return Job(function, wanted.arguments(), wanted.constants(block, other, interpreted.is_on()), block, warps, stages)


_functions = functools.lru_cache(maxsize=1024)(lambda program, how: function_of(source_of(program, how)))


def job_of(program: str, how: str, width: int, way: str = "") -> Job:
    """The kernel that a program of the engine's asks for, cut in that way; "": as where nothing was measured."""
    return attention_job(program, way) if program.startswith(FIRST) else chain_job(program, how, width, way)


def ways_of(program: str, width: int) -> list[str]:
    """How a kernel may be cut, as texts; first as where nothing was measured."""
    if program.startswith(FIRST):
        return ["x".join(map(str, cut)) for cut in Attention.of(program).cuts()]
    return ["x".join(map(str, shape)) for shape in shapes_of(program.startswith("rows"), room_of(width))]


def _numbers_of(way: str) -> tuple[int, ...]:
    return tuple(map(int, way.split("x")))


def compiled(job: Job, architecture: int, aligned: bool) -> Kernel:
    """The kernel for an architecture (90: sm_90). ``aligned``: addresses and the width are multiples of 16.

    Raises what Triton raises, of any kind.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict(job.arguments) | dict.fromkeys(job.constants, "constexpr")
    names = list(signature)
    even = [name for name, kind in job.arguments.items() if kind[0] == "*" or name == "width"] if aligned else []
    made = triton.compile(
        ASTSource(job.function, signature, job.constants, {(names.index(n),): [["tt.divisibility", 16]] for n in even}),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": job.warps, "num_stages": job.stages, "enable_fp_fusion": False},
    )
    data = made.metadata
    scratch = _parameters(made.asm["ptx"], data.name) - len(job.arguments)
    return Kernel(made.asm["cubin"], data.name, 32 * data.num_warps, job.block, data.shared, scratch)


def _parameters(ptx: str, name: str) -> int:
    """How many parameters a kernel of PTX takes."""
    entry = ptx[ptx.index(f".entry {name}") :]
    return entry[: entry.index(")")].count(".param")


class Maker:
    """What the engine calls (csrc/py/triton.c). One of it is enough."""

    def interpret(
        self, program: str, how: str, rows: int, width: int, programs: int, times: int,
        arguments: Sequence[tuple[int, str, int]],
    ) -> None:  # fmt: skip
        """Runs a kernel on memory of the CPU. ``arguments``: (address, type, how many elements) or (number, "", 0)."""
        job = job_of(program, how, width)
        given = [interpreted.tensor_at(*argument) if argument[1] else argument[0] for argument in arguments]
        blocks = programs or -(-(rows if program.startswith("rows") else width) // job.block)
        with np.errstate(all="ignore"):  # as on a GPU, infinities and NaN are results
            job.function[(blocks * (times or 1),)](*given, **job.constants)

    def ways(self, program: str, how: str, width: int) -> list[str]:
        """:func:`ways_of` the kernel."""
        return ways_of(program, width)

    def compile(self, program: str, how: str, rows: int, width: int, architecture: int, way: str = "") -> Kernel | None:
        """The kernel for an architecture. TritonError, with Triton's reason, where it makes none; None where it makes
        none that is cut in this ``way``."""
        try:
            return compiled(job_of(program, how, width, way), architecture, "a" in how.split("|")[2])
        except Exception as error:
            if way:
                return None
            raise TritonError(
                f"Triton makes no kernel for sm_{architecture}: {type(error).__name__}: {error}"
            ) from error


@functools.cache
def install() -> None:
    """Has the engine ask this process's maker from now on."""
    _core.triton_maker(Maker(), interpreted.is_on())
