"""Kernels against ATen's and against what memory can deliver.

    python -m benchmarks.kernels
    python -m benchmarks.kernels --only LayerNorm Gelu --dtypes bfloat16 --megabytes 64 --out results/kernels

A kernel is one operator's forward or backward in a plan of its own, on tensors larger than the caches. GB/s count what
it has to read and write, each tensor once; "of a copy's": of the rate at which one such tensor is copied into another
by PyTorch in the same run. Products are counted in GFLOP/s. Ours, ATen's and the copy take turns. Times are the fastest
of all turns, which others on the machine disturb least; quotients are the medians of each turn's, since where a machine
is faster at times, these are not the same for all three. The C library keeps what ATen frees, or page faults
would be most of its time. ATen's backward has no figure where it gives back the gradient that it got, or a view of it.
"""

import argparse
import ctypes
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from benchmarks.report import machine, write
from ortmodule.engine.session import DTYPES, Run, Session

KINDS = {torch.float32: TensorProto.FLOAT, torch.bfloat16: TensorProto.BFLOAT16, torch.int64: TensorProto.INT64}
WIDTH, VOCABULARY, HEADS = 768, 30_000, 12


@dataclass
class Kernel:
    """`node`: operator, attributes. `operands(rows, dtype)`: tensors. `eager`: the same in PyTorch."""

    name: str
    node: tuple
    operands: object
    eager: object
    flops: object = None  # of (operands): a product
    free: bool = False  # ATen's backward computes nothing
    fixed: tuple = ()  # operands whose gradient would be dy itself: not asked for


def rows_of(rows, dtype, width=WIDTH):
    return [torch.randn(rows, width).to(dtype)]


def normed(count):
    return lambda rows, dtype: rows_of(rows, dtype) + [torch.rand(WIDTH).to(dtype) for _ in range(count)]


def scores(rows, dtype):
    length = 128
    return [torch.randn(max(rows * WIDTH // (length * length), 1), length, length).to(dtype)]


def labelled(rows, dtype):
    count = max(rows * WIDTH // VOCABULARY, 16)
    return [torch.randn(count, VOCABULARY).to(dtype), torch.randint(VOCABULARY, (count,))]


def looked_up(rows, dtype):
    return [torch.randn(VOCABULARY, WIDTH).to(dtype), torch.randint(VOCABULARY, (rows,))]


def factors(rows, dtype):
    return [torch.randn(1024, WIDTH).to(dtype), torch.randn(WIDTH, 4 * WIDTH).to(dtype)]


def two(rows, dtype):
    return rows_of(rows, dtype) + rows_of(rows, dtype)


KERNELS = [
    Kernel("Add", ("Add", {}), two, torch.add, free=True),
    Kernel("Mul", ("Mul", {}), two, torch.mul),
    Kernel("bias", ("Add", {}), normed(1), torch.add, fixed=(0,)),
    Kernel("Exp", ("Exp", {}), rows_of, torch.exp),
    Kernel("Tanh", ("Tanh", {}), rows_of, torch.tanh),
    Kernel("Sigmoid", ("Sigmoid", {}), rows_of, torch.sigmoid),
    Kernel("Relu", ("Relu", {}), rows_of, torch.relu),
    Kernel("Gelu", ("Gelu", {}), rows_of, F.gelu),
    Kernel("Gelu tanh", ("Gelu", {"approximate": "tanh"}), rows_of, lambda x: F.gelu(x, approximate="tanh")),
    Kernel("Silu", ("Swish", {}), rows_of, F.silu),
    Kernel(
        "LayerNorm", ("LayerNormalization", {}), normed(2), lambda x, w, b: F.layer_norm(x, w.shape, w, b, eps=1e-5)
    ),
    Kernel("RMSNorm", ("RMSNormalization", {}), normed(1), lambda x, w: F.rms_norm(x, w.shape, w, eps=1e-5)),
    Kernel("Softmax", ("Softmax", {"axis": -1}), scores, lambda x: x.softmax(-1)),
    Kernel(
        "CrossEntropy",
        ("SoftmaxCrossEntropyLoss", {"reduction": "mean", "ignore_index": -100}),
        labelled,
        lambda x, t: F.cross_entropy(x, t),
    ),
    Kernel("Embedding", ("Gather", {}), looked_up, lambda table, i: F.embedding(i, table)),
    Kernel("ReduceSum", ("ReduceSum", {"keepdims": 0}), rows_of, torch.sum, free=True),
    Kernel("Transpose", ("Transpose", {"perm": [1, 0]}), rows_of, lambda x: x.t().contiguous(), free=True),
    Kernel("MatMul", ("MatMul", {}), factors, torch.matmul, flops=lambda a, b: 2 * a.numel() * b.shape[1]),
]


def session_of(kernel, tensors):
    names = [f"x{i}" for i in range(len(tensors))]
    operator, attributes = kernel.node
    inputs = [
        helper.make_tensor_value_info(name, KINDS[t.dtype], list(t.shape))
        for name, t in zip(names, tensors, strict=True)
    ]
    node = helper.make_node(operator, names, ["y"], **attributes)
    graph = helper.make_graph([node], kernel.name, inputs, [onnx.ValueInfoProto(name="y")])
    opset = 24 if operator in ("Swish", "RMSNormalization") else 20
    return Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]).SerializeToString())


def phases(kernel, tensors):
    """{"forward" and "backward": (ours, ATen's, bytes)}; no memory is made in what is measured of ours."""
    session = session_of(kernel, tensors)
    needs = tuple(t.is_floating_point() and i not in kernel.fixed for i, t in enumerate(tensors))
    specs = tuple((DTYPES[t.dtype], tuple(t.shape)) for t in tensors)
    inference, training = session.plan(specs, (False,) * len(needs)), session.plan(specs, needs, (True,))
    run, trained = Run(inference, tensors, 0), Run(training, tensors, 0)
    dy = torch.randn(trained.outputs[0].shape).to(trained.outputs[0].dtype)
    work, kept = (torch.empty(plan.arena_bytes + 64, dtype=torch.uint8) for plan in (inference, training))
    arenas = [a[: p.arena_bytes] if p.arena_bytes else None for a, p in ((work, inference), (kept, training))]
    training.forward(arenas[1], tensors, trained.outputs, [], 0)
    grads = [None if s is None else torch.empty(s[1], dtype=getattr(torch, s[0])) for s in training.input_grads]
    read = [t if flag else None for t, flag in zip(tensors, training.reads_input, strict=True)]
    shown = [t if flag else None for t, flag in zip(trained.outputs, training.reads_output, strict=True)]

    leaves = [t.detach().clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    y = kernel.eager(*leaves)
    wrt = [t for t, need in zip(leaves, needs, strict=True) if need]
    size = sum(t.nbytes for t in tensors)
    touched = run.outputs[0].nbytes if kernel.name == "Embedding" else size
    detached = [t.detach() for t in leaves]
    return {
        "forward": (
            lambda: inference.forward(arenas[0], tensors, run.outputs, [], 0),
            lambda: kernel.eager(*detached),
            touched + run.outputs[0].nbytes,
        ),
        "backward": (
            lambda: training.backward(arenas[1], read, shown, [dy], grads, 0),
            lambda: torch.autograd.grad(y, wrt, dy, retain_graph=True),
            sum(t.nbytes for t in (*read, *shown, dy, *grads) if t is not None),
        ),
    }


def keep_memory():
    """glibc's malloc gives nothing back to the system from now on."""
    trim, mmap = -1, -3  # of mallopt
    library = ctypes.CDLL(None)
    library.mallopt(mmap, 1 << 30)
    library.mallopt(trim, 2**31 - 1)


def in_turns(functions, turns):
    """Seconds of each function in each turn; the first one is not counted."""
    times = [[] for _ in functions]
    for turn in range(turns + 1):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            if turn:
                taken.append(time.perf_counter() - start)
    return times


def quotient(these, those):
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def measure(kernel, dtype, megabytes, turns):
    tensors = kernel.operands(megabytes * 2**20 // WIDTH // torch.empty((), dtype=dtype).element_size(), dtype)
    source = torch.ones(megabytes << 18)
    target = torch.empty_like(source)
    for phase, (ours, aten, size) in phases(kernel, tensors).items():
        times = in_turns([ours, aten, lambda: target.copy_(source)], turns)
        own, eager, copy = map(min, times)
        measured = not (kernel.free and phase == "backward")
        work = kernel.flops(*tensors) * (1 if phase == "forward" else 2) if kernel.flops else None
        yield {
            "kernel": kernel.name,
            "dtype": DTYPES[dtype],
            "phase": phase,
            "bytes": size,
            "seconds": own,
            "aten_seconds": eager if measured else None,
            "speed": quotient(times[1], times[0]) if measured else None,
            "copy_bytes_per_second": 2 * source.nbytes / copy,
            "bytes_per_second": size / own,
            "of_a_copy": quotient(times[2], times[0]) * size / (2 * source.nbytes),
            "flops_per_second": work and work / own,
        }


def markdown(report):
    about = report["machine"]
    lines = [
        f"{about['cpu']}, {about['threads']} threads; " + ", ".join(f"{k} {about[k]}" for k in list(about)[3:]),
        "",
        "| kernel | type | | ms | ATen, ms | speed | GB/s | of a copy's | GFLOP/s |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["rows"]:
        flops, aten = row["flops_per_second"], row["aten_seconds"]
        cells = [
            row["kernel"],
            row["dtype"],
            row["phase"],
            f"{1e3 * row['seconds']:.2f}",
            f"{1e3 * aten:.2f}" if aten else "",
            f"{row['speed']:.2f}×" if aten else "",
            "" if flops else f"{row['bytes_per_second'] / 1e9:.1f}",
            "" if flops else f"{100 * row['of_a_copy']:.0f} %",
            f"{flops / 1e9:.0f}" if flops else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[kernel.name for kernel in KERNELS])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--megabytes", type=int, default=96, help="of the largest operand")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", default="results/kernels")
    args = parser.parse_args()
    keep_memory()
    torch.manual_seed(0)
    rows = []
    for kernel in KERNELS:
        for dtype in args.dtypes if not args.only or kernel.name in args.only else []:
            rows += measure(kernel, getattr(torch, dtype), args.megabytes, args.turns)
    report = {"machine": machine(), "rows": rows}
    write(report, markdown(report), Path(args.out))
    print(markdown(report))


if __name__ == "__main__":
    main()
