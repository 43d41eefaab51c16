"""What csrc/cuda declares by hand of CUDA's libraries, against the real headers.

The checks come from the engine's own tables, so a new row is checked as it is: its parameters against the header's
function (in C++, which can take a function's type apart), and its structures member by member. A number that stands for
a name of the header's must be in NUMBERS, or in OWN if it is ours alone.
"""

import re
import shlex
import subprocess
from dataclasses import dataclass, field

import pytest

from tests.cuda.nvidia import ROOT, include_folder, needed

CSRC = ROOT / "csrc"


def source(name):
    """The path of a file of csrc/cuda."""
    (found,) = (CSRC / "cuda").rglob(name)
    return found


#: A header of the same folder that has the table of a file's entry points.
TABLE_OF = {"functions.h": "driver.c"}


def text_of(name):
    """A file's text, with the header that has its table in place of its include."""
    text = source(name).read_text()
    for header in (header for header, file in TABLE_OF.items() if file == name):
        include = f'#include "cuda/host/{header}"\n'
        assert text.count(include) == 1
        text = text.replace(include, source(header).read_text())
    return text


@dataclass(frozen=True)
class Library:
    """A file of csrc/cuda that calls a library."""

    headers: tuple  # of the library
    table: str = ""  # of its entry points
    numbers: dict = field(default_factory=dict)  # ours: the header's
    own: frozenset = frozenset()  # numbers of ours that are not the library's
    structures: dict = field(default_factory=dict)  # ours: (the header's, {member: member})
    more: tuple = ()  # pairs of expressions that are equal
    beside: str = ""  # another file whose numbers are declared for this one


ALIGNMENT = "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT"
ANSWER = {"algorithm": "algo", "workspace": "workspaceSize", "state": "state", "waves": "wavesCount"}
CUDNN_ANSWER = {"algorithm": "algo", "status": "status", "time": "time", "workspace": "memory"}
CUDNN_ANSWER |= {"deterministic": "determinism", "math": "mathType", "reserved": "reserved"}
RUNTIME = ("cuda_runtime_api.h", "crt/host_defines.h")  # what the libraries' headers include
CUDNN = (*RUNTIME, "cudnn.h")
RUNTIME_TYPES = {"F32": "CUDA_R_32F", "F64": "CUDA_R_64F", "F16": "CUDA_R_16F", "BF16": "CUDA_R_16BF"}
TYPES = {"F32": "FLOAT", "F64": "DOUBLE", "F16": "HALF", "BF16": "BFLOAT16"}

LIBRARIES = {
    "driver.c": Library(
        headers=("cuda.h",),
        table="DRIVER_FUNCTIONS",
        numbers={
            "CUDA_OUT_OF_MEMORY": "CUDA_ERROR_OUT_OF_MEMORY",
            "CUDA_NOT_FOUND": "CUDA_ERROR_NOT_FOUND",
            "CUDA_CAPTURE_IMPLICIT": "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
            "PINNED_MEMORY": "(CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)",
            "CAPABILITY_MAJOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
            "CAPABILITY_MINOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
            "STREAM_NON_BLOCKING": "CU_STREAM_NON_BLOCKING",
            "CAPTURE_THREAD_LOCAL": "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL",
            "EVENT_WITHOUT_TIME": "CU_EVENT_DISABLE_TIMING",
            "DYNAMIC_SHARED_BYTES": "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
        },
        own={"SHARED_BY_DEFAULT"},
        structures={
            "update_result": (
                "CUgraphExecUpdateResultInfo",
                {"result": "result", "node": "errorNode", "from": "errorFromNode"},
            )
        },
    ),
    "blas.c": Library(
        headers=(*RUNTIME, "cublasLt.h"),
        table="BLAS_FUNCTIONS",
        beside="blas_product.h",
        numbers={
            "COMPUTE_F32": "CUBLAS_COMPUTE_32F",
            "COMPUTE_F64": "CUBLAS_COMPUTE_64F",
            "COMPUTE_TF32": "CUBLAS_COMPUTE_32F_FAST_TF32",
            "PRODUCT_TRANS_A": "CUBLASLT_MATMUL_DESC_TRANSA",
            "PRODUCT_TRANS_B": "CUBLASLT_MATMUL_DESC_TRANSB",
            "PRODUCT_EPILOGUE": "CUBLASLT_MATMUL_DESC_EPILOGUE",
            "PRODUCT_VECTOR": "CUBLASLT_MATMUL_DESC_BIAS_POINTER",
            "PRODUCT_EXTRA": "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER",
            "PRODUCT_EXTRA_LD": "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD",
            "LAYOUT_BATCH": "CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT",
            "LAYOUT_STEP": "CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET",
            "WISH_WORKSPACE": "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES",
            "WISH_REDUCTION": "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK",
            "WISH_ALIGNMENT_A": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES",
            "EPILOGUE_NONE": "CUBLASLT_EPILOGUE_DEFAULT",
            "EPILOGUE_BIAS": "CUBLASLT_EPILOGUE_BIAS",
            "EPILOGUE_GELU": "CUBLASLT_EPILOGUE_GELU",
            "WITH_EXTRA": "(CUBLASLT_EPILOGUE_GELU_AUX ^ CUBLASLT_EPILOGUE_GELU)",
            "EPILOGUE_GELU_SLOPE": "CUBLASLT_EPILOGUE_DGELU",
            "WITH_TOTALS": "(CUBLASLT_EPILOGUE_DGELU_BGRAD ^ CUBLASLT_EPILOGUE_DGELU)",
            "EPILOGUE_RIGHT_TOTALS": "CUBLASLT_EPILOGUE_BGRADA",
            "EPILOGUE_LEFT_TOTALS": "CUBLASLT_EPILOGUE_BGRADB",
            "REDUCE_IN_PLACE": "CUBLASLT_REDUCTION_SCHEME_INPLACE",
            "REDUCE_AS_COMPUTED": "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE",
            "OUT_OF_MEMORY": "CUBLAS_STATUS_ALLOC_FAILED",
            "INVALID_VALUE": "CUBLAS_STATUS_INVALID_VALUE",
            "NOT_SUPPORTED": "CUBLAS_STATUS_NOT_SUPPORTED",
        },
        own=frozenset(
            ["SLOTS", "MOST_PRODUCTS", "GELU_COLUMNS", "A_LAYOUT", "B_LAYOUT", "C_LAYOUT", "LAYOUTS", "BLAS_ALIGNED"],
        ),
        structures={
            "blas_answer": ("cublasLtMatmulHeuristicResult_t", ANSWER | {"reserved": "reserved"}),
            "blas_algorithm": ("cublasLtMatmulAlgo_t", {"data": "data"}),
        },
        more=(
            *((f"library_type[{ours}]", real) for ours, real in RUNTIME_TYPES.items()),
            ("EPILOGUE_GELU | EPILOGUE_BIAS", "CUBLASLT_EPILOGUE_GELU_BIAS"),
            ("EPILOGUE_GELU | EPILOGUE_BIAS | WITH_EXTRA", "CUBLASLT_EPILOGUE_GELU_AUX_BIAS"),
            ("EPILOGUE_GELU_SLOPE | WITH_TOTALS", "CUBLASLT_EPILOGUE_DGELU_BGRAD"),
            *((f"WISH_ALIGNMENT_A + {i}", f"{ALIGNMENT}_{x}_BYTES") for i, x in enumerate("ABCD")),
            *((f"{i}", f"{which}") for i, which in enumerate(["MAJOR_VERSION", "MINOR_VERSION", "PATCH_LEVEL"])),
        ),
    ),
    "dnn.c": Library(
        headers=CUDNN,
        table="DNN_FUNCTIONS",
        numbers={
            "NO_HOST_MEMORY": "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
            "NO_DEVICE_MEMORY": "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        },
        own=frozenset({"MOST_KNOWN"}),
        more=(
            *((f"dnn_type({ours})", f"CUDNN_DATA_{real}") for ours, real in TYPES.items()),
            ("dnn_is_refusal(CUDNN_STATUS_NOT_SUPPORTED)", "1"),
            ("dnn_is_refusal(CUDNN_STATUS_BAD_PARAM)", "1"),
        ),
    ),
    "dnn_conv.c": Library(
        headers=CUDNN,
        table="CONV_FUNCTIONS",
        numbers={
            "CROSS_CORRELATION": "CUDNN_CROSS_CORRELATION",
            "CHANNELS_FIRST": "CUDNN_TENSOR_NCHW",
            "DETERMINISTIC": "CUDNN_DETERMINISTIC",
            "MATH_DEFAULT": "CUDNN_DEFAULT_MATH",
            "MATH_TENSOR_CORES": "CUDNN_TENSOR_OP_MATH",
            "MATH_CONVERTED": "CUDNN_TENSOR_OP_MATH_ALLOW_CONVERSION",
            "MATH_NO_ROUNDING": "CUDNN_FMA_MATH",
        },
        own=frozenset(["X", "W", "Y", "WINDOW", "MOST_ANSWERS"]),
        structures={
            "answer": ("cudnnConvolutionFwdAlgoPerf_t", CUDNN_ANSWER),
            "answer ": ("cudnnConvolutionBwdDataAlgoPerf_t", CUDNN_ANSWER),
            "answer  ": ("cudnnConvolutionBwdFilterAlgoPerf_t", CUDNN_ANSWER),
        },
    ),
    "dnn_batchnorm.c": Library(
        headers=CUDNN,
        table="NORM_FUNCTIONS",
        numbers={"PLAIN": "CUDNN_BATCHNORM_SPATIAL"},
        own=frozenset(["RANK", "X", "CHANNELS", "MOST_IMAGES"]),
    ),
    "dnn_pool.c": Library(
        headers=CUDNN,
        table="POOL_FUNCTIONS",
        numbers={
            "AVERAGE_OF_ALL": "CUDNN_POOLING_AVERAGE_COUNT_INCLUDE_PADDING",
            "AVERAGE_OF_INSIDE": "CUDNN_POOLING_AVERAGE_COUNT_EXCLUDE_PADDING",
            "PROPAGATE_NAN": "CUDNN_PROPAGATE_NAN",
        },
        own=frozenset(["X", "Y", "WINDOW"]),
    ),
    "nccl.c": Library(
        headers=(*RUNTIME, "nccl.h"),
        table="NCCL_FUNCTIONS",
        beside="nccl.h",
        numbers={
            "NCCL_I8": "ncclInt8",
            "NCCL_U8": "ncclUint8",
            "NCCL_I32": "ncclInt32",
            "NCCL_I64": "ncclInt64",
            "NCCL_F16": "ncclFloat16",
            "NCCL_F32": "ncclFloat32",
            "NCCL_F64": "ncclFloat64",
            "NCCL_BF16": "ncclBfloat16",
            "NCCL_SUM": "ncclSum",
            "NCCL_PRODUCT": "ncclProd",
            "NCCL_MOST": "ncclMax",
            "NCCL_LEAST": "ncclMin",
            "NCCL_MEAN": "ncclAvg",
        },
        structures={"nccl_id": ("ncclUniqueId", {"bytes": "internal"})},
        more=tuple(
            (str(i), f"nccl{name}")
            for i, name in enumerate(
                ["Success", "UnhandledCudaError", "SystemError", "InternalError"]
                + ["InvalidArgument", "InvalidUsage", "RemoteError", "InProgress"]
            )
        ),
    ),
    "nvrtc.c": Library(
        headers=("nvrtc.h",),
        table="NVRTC_FUNCTIONS",
        numbers={"OUT_OF_MEMORY": "NVRTC_ERROR_OUT_OF_MEMORY", "COMPILATION_FAILED": "NVRTC_ERROR_COMPILATION"},
        own=frozenset({"MOST_LOG"}),
    ),
}


def compiler(language, *arguments):
    command = ["gcc", "-x", language, "-w", "-fopenmp", f"-I{CSRC}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def includes(library):
    return [f"-I{folder}" for folder in dict.fromkeys(needed(include_folder, *library.headers))]


def declared(file):
    """Names in the enums without a name of a file of ours, outside of functions."""
    text = re.sub(r"/\*.*?\*/", "", text_of(file), flags=re.S)
    for body in re.findall(r"^enum \{(.*?)\};", text, flags=re.S | re.M):
        for one in body.split(","):
            if one.strip():
                yield one.partition("=")[0].strip()


def test_every_number_is_known():
    """A number that a file has declared is compared with the header's, or said to be ours."""
    for file, library in LIBRARIES.items():
        names = {name for each in {file, library.beside} - {""} for name in declared(each)}
        assert names <= set(library.numbers) | library.own, file
    files = [*(CSRC / "cuda").rglob("*.c*"), *map(source, TABLE_OF)]
    calls = {TABLE_OF.get(p.name, p.name) for p in files if re.search(r"_FUNCTIONS\(F\)|LIBRARY_ONCE", p.read_text())}
    assert calls == set(LIBRARIES), "a file that loads a library is to be a row of LIBRARIES"


# --- numbers and structures -------------------------------------------------------------------------------------------


def members(structure, text):
    """Of one of our structures."""
    body = re.search(rf"typedef struct {structure} \{{(.*?)\}} {structure};", text, flags=re.S)[1]
    for declaration in body.split(";"):
        words = re.sub(r"\[.*?\]", "", declaration.strip())
        if words:
            first, *rest = words.split(",")
            yield from (re.split(r"[\s*]+", name.strip())[-1] for name in (first, *rest))


def differences(file, library, tmp_path, text=None):
    """Sentences on what is not as in the headers. `text` instead of the file's own."""
    own = text_of(file) if text is None else text
    beside = source(library.beside).read_text() if library.beside else ""
    choices = source("blas_choice.h").read_text() if file == "blas.c" else ""
    known = {name for each in {file, library.beside} - {""} for name in declared(each)}
    checks = [(ours, real) for ours, real in library.numbers.items() if ours in known]
    checks += library.more
    for ours, (real, names) in library.structures.items():
        ours = ours.strip()
        assert set(members(ours, own + beside + choices)) == set(names), ours
        checks.append((f"sizeof({ours})", f"sizeof({real})"))
        for name, other in names.items():
            for how in ("(long)offsetof({}, {})", "(long)sizeof((({} *)0)->{})"):
                checks.append((how.format(ours, name), how.format(real, other)))
    (tmp_path / "own.c").write_text(own)
    lines = [f"#include <{header}>" for header in library.headers]
    lines += ["#include <stdio.h>", "#include <stddef.h>", '#include "own.c"', "int main(void) {"]
    for ours, real in checks:
        lines.append(f"    if ((long)({ours}) != (long)({real}))")
        lines.append(f'        printf("{ours} is %ld, {real} is %ld\\n", (long)({ours}), (long)({real}));')
    program = tmp_path / "numbers.c"
    program.write_text("\n".join([*lines, "    return 0;", "}", ""]))
    target = tmp_path / "numbers"
    flags = ["-D_GNU_SOURCE", f"-I{tmp_path}", *includes(library), "-static", "-Wl,--unresolved-symbols=ignore-all"]
    done = compiler("c", program, *flags, "-o", target)
    assert done.returncode == 0, done.stderr[:3000]
    return subprocess.run([target], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("file", LIBRARIES)
def test_numbers_and_structures(file, tmp_path):
    assert differences(file, LIBRARIES[file], tmp_path) == []


def test_a_wrong_number_is_found(tmp_path):
    text = text_of("driver.c")
    assert "CAPABILITY_MINOR = 76" in text
    found = differences("driver.c", LIBRARIES["driver.c"], tmp_path, text.replace("MINOR = 76", "MINOR = 77"))
    assert found == ["CAPABILITY_MINOR is 77, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR is 76"]


def test_a_wrong_structure_is_found(tmp_path):
    text = source("dnn_conv.c").read_text()
    wrong = text.replace("    float time;\n    size_t workspace;", "    size_t workspace;\n    float time;")
    assert wrong != text
    found = differences("dnn_conv.c", LIBRARIES["dnn_conv.c"], tmp_path, wrong)
    assert any("offsetof(answer, workspace)" in line for line in found)


# --- prototypes -------------------------------------------------------------------------------------------------------

#: Whether a function of the library's may be called as ours is: the same number of arguments, each passed in the same
#: way. A handle of ours is `void *`, an enum of theirs `int`; what is pointed at is as large, and not written through a
#: pointer of ours to const.
RULES = """
#include <cstddef>
#include <cstdint>
#include <type_traits>

template <class T> constexpr bool is_whole = std::is_integral_v<T> || std::is_enum_v<T>;

template <class Ours, class Real> constexpr bool same_value();

template <class Ours, class Real> constexpr bool same_target() {
    using O = std::remove_cv_t<Ours>;
    using R = std::remove_cv_t<Real>;
    if constexpr (std::is_const_v<Ours> && !std::is_const_v<Real>) return false;
    else if constexpr (std::is_void_v<O> || std::is_void_v<R>) return true;
    else return same_value<O, R>();
}

template <class Ours, class Real> constexpr bool same_value() {
    using O = std::remove_cv_t<Ours>;
    using R = std::remove_cv_t<Real>;
    if constexpr (std::is_pointer_v<O> && std::is_pointer_v<R>)
        return same_target<std::remove_pointer_t<O>, std::remove_pointer_t<R>>();
    else if constexpr (is_whole<O> && is_whole<R>) return sizeof(O) == sizeof(R);
    else if constexpr (std::is_floating_point_v<O> && std::is_floating_point_v<R>) return sizeof(O) == sizeof(R);
    else if constexpr (std::is_class_v<O> && std::is_class_v<R>)
        return sizeof(O) == sizeof(R) && alignof(O) == alignof(R);
    else return false;
}

template <class Ours, class Real> struct same_call : std::false_type {};
template <class... O, class X, class... R> struct same_call<int (*)(O...), X (*)(R...)> {
    static constexpr bool test() {
        if constexpr (sizeof...(O) == sizeof...(R)) return same_value<int, X>() && (same_value<O, R>() && ...);
        else return false;
    }
    static constexpr bool value = test();
};
"""


def entry_points(library, text, tmp_path):
    """[(name, parameters)] of a table as the preprocessor leaves it, and the structures that parameters name."""
    file = tmp_path / "table.c"
    file.write_text(f"{text}\n#define ROW(name, parameters) @row name parameters\n{library.table}(ROW)\n")
    done = compiler("c", "-E", "-P", file)
    assert done.returncode == 0, done.stderr[:3000]
    rows = [re.match(r"\s*(\w+)\s*(\(.*\))\s*$", row, flags=re.S).groups() for row in done.stdout.split("@row")[1:]]
    structures = re.findall(r"typedef struct (\w+) \{([^{}]*)\} \1;", done.stdout)
    return rows, structures


def wrong_prototypes(library, text, tmp_path):
    rows, structures = entry_points(library, text, tmp_path)
    names = [ours.strip() for ours in library.structures]
    lines = ["#define __CUDA_API_VERSION_INTERNAL"] if "cuda.h" in library.headers else []
    lines += [f"#include <{header}>" for header in library.headers]
    lines.append(RULES)
    lines += [f"struct {name} {{{body}}};" for name, body in structures if name in names]
    for name, parameters in rows:
        lines.append(f'static_assert(same_call<int (*){parameters}, decltype(&{name})>::value, "is another: {name}");')
    program = tmp_path / "prototypes.cpp"
    program.write_text("\n".join(lines) + "\n")
    done = compiler("c++", "-std=c++17", "-fsyntax-only", *includes(library), program)
    assert rows
    found = re.findall(r"is another: (\w+)", done.stderr)
    assert found or done.returncode == 0, shlex.join(done.args) + "\n" + done.stderr[:3000]
    return sorted(set(found))


@pytest.mark.parametrize("file", LIBRARIES)
def test_prototypes(file, tmp_path):
    text = text_of(file)
    assert wrong_prototypes(LIBRARIES[file], text, tmp_path) == []


@pytest.mark.parametrize(
    ("ours", "wrong"),
    [
        ("(uint64_t memory, unsigned char value, size_t count,", "(uint64_t memory, unsigned char value, int count,"),
        ("(void *stream, int *out)", "(void *stream, char *out)"),
        ("(void *event, void *stream)", "(void *event)"),
        ("(float *milliseconds,", "(double *milliseconds,"),
    ],
)
def test_a_wrong_prototype_is_found(ours, wrong, tmp_path):
    text = text_of("driver.c")
    assert text.count(ours) == 1
    assert len(wrong_prototypes(LIBRARIES["driver.c"], text.replace(ours, wrong), tmp_path)) == 1
