"""The machine code of kernels that stream through memory reads and writes 16 bytes, as NVIDIA's compilers make it.

There is no local memory, no division of 64 bits, and 16-bit floats are rounded by the instruction for it. Nothing is
run.

Chains are those of the benchmarked models (benchmark_chains.py), compiled by NVRTC with the engine's options for an
H100. With --full those of all rows, and for sm_80 and sm_100, too.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ortmodule import _core
from tests.cuda import sass
from tests.cuda.nvidia import ROOT, library, needed, tool
from tests.selection import each

ARCHITECTURES = [80, 90, 100]
#: Of benchmarks/rows.py: dropout, padding, rotary embeddings, and a loss of each kind.
ROWS = ["minilm", "bert-base", "gpt2", "llama-50m"]
#: Functions of which CUDA's code has a table in local memory, for arguments that are huge: Payne and Hanek's reduction.
WITH_TABLE = re.compile(r"\b(sin|cos|tan)\(")
#: Bytes of an element, by the numbers of core/dtype.h.
SIZES = {1: 4, 2: 8, 3: 2, 4: 2, 5: 8, 6: 4, 7: 2, 8: 1, 9: 1, 10: 1}
BF16 = 3

#: In a process of its own: two libraries of one name do not get on with each other.
COMPILER = """
import ctypes, json, sys
from pathlib import Path
nvrtc, folder, architecture, options = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
for builtins in Path(nvrtc).parent.glob("libnvrtc-builtins.so.*"):
    ctypes.CDLL(str(builtins))
library = ctypes.CDLL(nvrtc)
headers = {n.encode(): h.encode() for n, h in json.loads((folder / "headers.json").read_text()).items()}
strings = ctypes.c_char_p * len(headers)
for file in sorted(folder.glob("*.cu")):
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    made = library.nvrtcCreateProgram(ctypes.byref(program), file.read_bytes(), b"chain.cu", len(headers),
                                      strings(*headers.values()), strings(*headers))
    given = [b"--gpu-architecture=sm_%d" % architecture, *(option.encode() for option in options)]
    result = library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    library.nvrtcGetProgramLog(program, log)
    assert made == result == 0, file.name + log.value.decode()
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetCUBIN(program, image) == 0
    (folder / f"{file.stem}.sm_{architecture}.cubin").write_bytes(image.raw)
    library.nvrtcDestroyProgram(ctypes.byref(program))
"""


def compile_in(folder, architecture, options):
    (nvrtc,) = needed(library, "libnvrtc.so.13")
    command = [sys.executable, "-c", COMPILER, nvrtc, folder, architecture, *options]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def chains(request, tmp_path_factory):
    """A folder of chains as text, and the options that the engine gives for them."""
    if not _core.emulated:
        pytest.skip("a build with an emulated GPU is needed")
    needed(library, "libnvrtc.so.13")
    needed(tool, "nvdisasm")
    folder = tmp_path_factory.mktemp("chains")
    rows = [] if request.config.getoption("--full") else ROWS
    command = [sys.executable, "-m", "tests.cuda.benchmark_chains", str(folder), *rows]
    environment = {**os.environ, "ORTMODULE_BUILD": str(Path(_core.__file__).resolve().parents[1])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *options = (folder / "options").read_text().splitlines()
    assert first.startswith("--gpu-architecture=sm_")
    return folder, options


def expected_pieces(text):
    """Of 16 bytes, that the whole part of a chain's text reads and writes."""
    at_once = int(re.search(r"#define AT_ONCE (\d)", text)[1])
    pieces = {"LD": 0, "ST": 0}
    for way, type_ in re.findall(r" (read|write)_\w+\(a\.\w+\[\d+\](?:\.data)?, (\d+),", text):
        pieces["LD" if way == "read" else "ST"] += at_once * SIZES[int(type_)] // 16
    return pieces


@each("architecture", ARCHITECTURES, [90])
def test_chains(chains, architecture):
    folder, options = chains
    compile_in(folder, architecture, options)
    files = sorted(folder.glob("*.cu"))
    assert len(files) >= 16  # models have some; rotary embeddings are none of them
    wide, wrong = 0, {}
    for file in files:
        text = file.read_text()
        (code,) = sass.read(folder / f"{file.stem}.sm_{architecture}.cubin").values()
        found = sass.faults(code)
        if WITH_TABLE.search(text) and "local memory is used" in found:
            found.remove("local memory is used")
        have, expected = sass.pieces(code), expected_pieces(text)
        found += [f"{have[way]} pieces, not {n}: {way}" for way, n in expected.items() if have[way] < n]
        if f", {BF16}, first, v" in text and not any("BF16" in line for _, line in code):
            found.append("bfloat16 is rounded without its instruction")
        wide += sum(expected.values())
        if found:
            wrong[file.name] = found
    assert not wrong, wrong
    assert wide > 2 * len(files), "most chains have operands that lie as their result does"
    texts = "".join(file.read_text() for file in files)
    for name in ("row_total_float(", "row_total_double(", "column_totals_float(", "column_totals_double("):
        assert f"{name}total0" in texts or f"{name}&a.folds" in texts, "chains of each kind are added up"


# --- the gates themselves ---------------------------------------------------------------------------------------------

WRONG = {
    "local memory is used": """
extern "C" __global__ void wrong(float *x, const int *at, int n) {
    float kept[64];
    for (int i = 0; i < n; i++) kept[at[i]] = x[i];
    for (int i = 0; i < n; i++) x[i] = kept[at[n - i]];
}""",
    "a division of 64 bits": """
extern "C" __global__ void wrong(long *x, long by) { x[threadIdx.x] /= by; }""",
    "16-bit floats are rounded by integer instructions": """
extern "C" __global__ void wrong(unsigned short *to, const unsigned *from) {
    const unsigned u = from[threadIdx.x];
    to[threadIdx.x] = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
}""",
    "": """
extern "C" __global__ void wrong(float4 *x) { float4 y = x[threadIdx.x]; y.x += 1; x[threadIdx.x] = y; }""",
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_slow_is_found(tmp_path, fault):
    needed(tool, "nvdisasm")
    (tmp_path / "headers.json").write_text('{"none.h": ""}')
    (tmp_path / "wrong.cu").write_text(WRONG[fault])
    compile_in(tmp_path, 90, [])
    (code,) = sass.read(tmp_path / "wrong.sm_90.cubin").values()
    assert sass.faults(code) == [fault] * bool(fault)
    assert sass.pieces(code) == ({"LD": 0, "ST": 0} if fault else {"LD": 1, "ST": 1})


# --- bfloat16 ---------------------------------------------------------------------------------------------------------

ROUNDING = """
#include <stdio.h>
#include <string.h>
#include "cuda/kernels/kernel.h"

/* What PTX says of cvt.rn.bf16.f32: the nearest of two neighbours, of both the one whose last bit is 0. */
static unsigned nearest(unsigned u) {
    const unsigned low = u & 0xffff0000u, sign = u & 0x80000000u;
    float x, below, above;
    unsigned high = low + 0x10000u;
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u | 0x400000u) >> 16; /* the engine's own rule, on CPUs too */
    memcpy(&x, &u, 4);
    if (low == u) return u >> 16;
    memcpy(&below, &low, 4);
    if ((high & 0x7fffffffu) == 0x7f800000u) { /* infinity is where the next number would be */
        const double step = 0x1p120, edge = 0x1p128;
        double to_edge = edge - (x < 0 ? -(double)x : (double)x);
        return (to_edge <= step / 2 ? 0x7f800000u | sign : low) >> 16;
    }
    memcpy(&above, &high, 4);
    const double down = (double)x - below, up = (double)above - x;
    const double a = down < 0 ? -down : down, b = up < 0 ? -up : up;
    return (a < b || (a == b && !(low >> 16 & 1)) ? low : high) >> 16;
}

int main(void) {
    static const unsigned lows[] = {0, 1, 2, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0x8002, 0xfffe, 0xffff, 0x1234, 0xabcd};
    unsigned long wrong = 0;
    for (unsigned high = 0; high < 0x10000; high++)
        for (unsigned i = 0; i < sizeof lows / sizeof *lows; i++) {
            const unsigned u = high << 16 | lows[i];
            float x;
            memcpy(&x, &u, 4);
            if (f32_to_bf16(x) != nearest(u) && wrong++ < 5) printf("%08x: %04x\\n", u, f32_to_bf16(x));
        }
    printf("%lu wrong\\n", wrong);
    return 0;
}
"""


def test_bfloat16_is_rounded_as_by_the_instruction(tmp_path):
    """All upper halves, with the lower ones that decide: what the emulated GPU computes is what a GPU does."""
    (tmp_path / "rounding.c").write_text(ROUNDING)
    program = tmp_path / "rounding"
    emulator = ["-DORT_DEVICE", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/cuda'}", "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run(["gcc", "-w", "-O1", *emulator, tmp_path / "rounding.c", "-o", program], check=True)
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout == "0 wrong\n"


#: What a compiler makes one instruction of, where it may: of chains it may not, or their bits would not be those of the
#: operators one by one.
ROUNDED_APART = """
extern "C" __global__ void twice(float *x, float y) { x[threadIdx.x] = x[threadIdx.x] * y + 1; }"""


def test_chains_round_products_and_sums_apart(chains, tmp_path):
    _, options = chains
    (tmp_path / "headers.json").write_text('{"none.h": ""}')
    (tmp_path / "twice.cu").write_text(ROUNDED_APART)
    for given, fused in ((options, False), ([o for o in options if "fmad" not in o], True)):
        compile_in(tmp_path, 90, given)
        (code,) = sass.read(tmp_path / "twice.sm_90.cubin").values()
        assert any(text.startswith("FFMA") for _, text in code) == fused


# --- families ---------------------------------------------------------------------------------------------------------


def built():
    """The kernels that the newest build has inside, a file each (scripts/test kernels)."""
    made = max(ROOT.glob("build/temp*/cuda*/images.h"), key=lambda path: path.stat().st_mtime)
    return sorted(made.parent.glob("csrc/cuda/kernels/*.fatbin"))


DIVIDES, LOCAL = "a division of 64 bits", "local memory is used"
#: What kernels of families have, by a pattern of their names, and why. nvcc divides in 32 bits where the upper halves
#: are 0, and calls a subroutine otherwise: a division costs more than `quotient` of kernel.h only in code.
NO_STREAM = {DIVIDES: ("", "a place is found once for a tile, a row or a sum of many elements")}
EXEMPT = {
    **dict.fromkeys(["attention", "attention_grad", "batchnorm", "cumulative", "groupnorm", "grouped"], NO_STREAM),
    **dict.fromkeys(["matmul", "reduce", "rnn_scan", "torch_attention"], NO_STREAM),
    **dict.fromkeys(["fold", "nonzero", "pool", "resize", "scan", "scatter", "topk"], NO_STREAM),
    "create": {DIVIDES: ("triangle_|range_integers", "numbers are computed, none are read")},
    "fused": {LOCAL: ("fused(_fold)?$", "the interpreter of chains, where there is no NVRTC, keeps its places there")},
    "grid_sample": NO_STREAM | {LOCAL: ("", "the taps along an axis are reached by their number")},
    "pointwise": {
        DIVIDES: ("(div|floor_div|mod|remainder)_i64", "the operators that divide integers of 64 bits"),
        LOCAL: ("", "loads and stores are functions that all share: inline they are 80 % more code"),
    },
    "random": {
        DIVIDES: ("multinomial", "a row is found once for a choice"),
        LOCAL: ("normal_", "tables of sine, cosine and logarithm"),
    },
    "rotary": {LOCAL: ("rotary_f64", "six pieces of eight doubles are more than a thread has registers for")},
    "rows": {DIVIDES: ("row_count", "a number is rounded up, once")},
}


needs_kernels = pytest.mark.skipif(
    Path(os.environ.get("ORTMODULE_BUILD", "")).name != "cuda", reason="a build with kernels is needed"
)


def kernels_of(family, folder):
    """[(architecture, {kernel: code})] of a family, for each architecture that this build is for: sm_90 in the ordinary
    run, with scripts/test --full all."""
    (file,) = [file for file in built() if file.stem == family]
    found = []
    for architecture in sass.architectures(file):
        own = folder / str(architecture)
        own.mkdir(parents=True)
        found.append((architecture, sass.read_all(file, own, architecture)))
    assert found
    return found


FAMILIES = sorted(path.stem for path in (ROOT / "csrc" / "cuda" / "kernels").glob("*.cu"))


@needs_kernels
def test_every_family_is_there():
    assert sorted(file.stem for file in built()) == FAMILIES and {*EXEMPT} <= {*FAMILIES}


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    needed(tool, "cuobjdump", "nvdisasm")
    exempt = EXEMPT.get(family, {})
    wrong, idle = {}, {*exempt}
    for architecture, kernels in kernels_of(family, tmp_path):
        for kernel, code in kernels.items():
            for fault in sass.faults(code):
                if fault in exempt and re.match(exempt[fault][0], kernel):
                    idle.discard(fault)
                else:
                    wrong.setdefault(f"sm_{architecture}: {kernel}", []).append(fault)
    assert not wrong, wrong
    assert not idle, "what no kernel has needs no reason"


@needs_kernels
def test_pointwise_kernels_round_as_chains_do(tmp_path):
    """x * (1 - y * y), of float32 and float64; other families multiply and add in one instruction."""
    needed(tool, "cuobjdump", "nvdisasm")
    for _, kernels in kernels_of("pointwise", tmp_path / "pointwise"):
        for name in ("tanh_grad_f32", "tanh_grad_f64"):
            assert not any(re.match(r"[FD]FMA\b", text) for label, text in kernels[name] if not label.startswith("$"))
    for _, kernels in kernels_of("norm", tmp_path / "norm"):
        assert any(text.startswith("FFMA") for code in kernels.values() for _, text in code)


#: Families whose kernels stream through rows or tensors: which of their kernels read pieces of 16 bytes, which write
#: them. Sums over rows write few numbers, and so do losses.
STREAMS = {
    "pointwise": ("", ""),
    "reduce": ("reduce_few_", "reduce_few_"),
    "index": ("gather_(16|grad_(parts|join)_)", "gather_(16|grad_(parts|join)_)"),
    "move": ("move_16", "move_16"),
    "norm": ("norm_(sum_|grad_)?(even_)?(rows|columns)_", "norm_(sum_|grad_)?(even_)?rows_"),
    "softmax": ("", ""),
    "loss": ("cross_entropy_(grad_)?[bf]", "cross_entropy_grad_"),
    "optim": ("(adam|sgd|adagrad|lamb|squares)_(?!join)", "(adam|sgd|adagrad|lamb)_"),
    "rows": ("(un)?pack_16", "(un)?pack_16"),
    "rotary": ("", ""),
    "random": ("dropout_[bf]", "dropout_[bf]"),
    "linear_loss": ("", "linear_loss_fill_"),
    "torch_attention": ("attention_listed_16", "attention_listed_16"),
}

PRODUCTS = "products decide how long it takes, and tiles come through shared memory"
BY_PLACE = "each element is found by an index or a window: neighbours need not lie together"
IN_TURN = "an element needs what is before it: threads go along rows in turn"
#: Why kernels of the other families need not.
NOT_STREAMS = {
    **dict.fromkeys(["attention", "attention_grad", "grouped", "matmul"], PRODUCTS),
    **dict.fromkeys(["fold", "grid_sample", "pool", "resize", "scatter"], BY_PLACE),
    **dict.fromkeys(["cumulative", "rnn_scan", "scan"], IN_TURN),
    **dict.fromkeys(["nonzero", "order", "topk"], "counts and sorts: an element is a key that decides where it goes"),
    "batchnorm": "cuDNN's are taken where it is there (cuda/libraries/dnn_batchnorm.c)",
    "groupnorm": "no benchmarked model has it: its threads take neighbours, an element each",
    "create": "nothing is read, and what is written are masks and ranges, not activations",
    "digest": "weights are read once in many steps, not in each",
    "fused": "the interpreter of chains: those that NVRTC compiles are above",
}


def test_each_family_is_a_stream_or_has_a_reason():
    families = {file.stem for file in (ROOT / "csrc/cuda/kernels").glob("*.cu")}
    assert families == STREAMS.keys() | NOT_STREAMS.keys()
    assert not STREAMS.keys() & NOT_STREAMS.keys()


@needs_kernels
@pytest.mark.parametrize("family", STREAMS)
def test_streams_read_and_write_16_bytes(tmp_path, family):
    needed(tool, "cuobjdump", "nvdisasm")
    for architecture, kernels in kernels_of(family, tmp_path / family):
        for way, pattern in zip(("LD", "ST"), STREAMS[family], strict=True):
            named = [kernel for kernel in kernels if re.match(pattern, kernel)]
            assert named
            wrong = [kernel for kernel in named if not sass.pieces(kernels[kernel])[way]]
            assert not wrong, f"no {way} of 16 bytes for sm_{architecture}"
