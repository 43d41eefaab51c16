"""Lists the kernels of a step of ours from its plan for a GPU, without weights or a run."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from benchmarks.roofline_account import Kernel, attention_flops
from ortmodule import Config, ORTModule, _core
from ortmodule.debug.memory.peak import Peak, peak_of

BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1, "uint8": 1,
         "int8": 1}  # fmt: skip
SPEC = re.compile(r"(float32|float64|bfloat16|float16|bool|int64|int32|uint8|int8)\[([0-9, ]*)\]")
NODE = re.compile(r"((?:%\d+, |-, )*(?:%\d+)) = (\w+)\((.*)\) ([^()]*?)(?:  ; (.*))?$")
OPERAND = re.compile(r"%(\d+)")
BETWEEN = re.compile(r", (?![^\[]*\])")  # operands
PRODUCTS = {"MatMul": 0, "MatMulBias": 0, "MatMulTotals": 0, "MatMulAdd": 1}  # which operand is the left one
CAUSAL = "torch=2"
#: torch's kernels allocate what they return: it is copied (csrc/cuda/kernels/torch_attention.cu), and the sums of rows
#: are turned by a small kernel.
BY_TORCH = re.compile(r"\btorch=[123]")
#: Of attention over lists of rows: how many sequences they are of.
LISTED_OF = re.compile(r"\bbatch=(\d+)")
#: Sums of squares of lengths, beside the square of their mean, where lengths are spread evenly from 0 to twice that.
SPREAD = 4 / 3
SUM_OUT = 3  # of FusedNorm's results
OWNED = "Contiguous, of a gradient"  # a gradient that is copied to its owner's memory, since it was made elsewhere
#: Of a linear layer's loss on a GPU, as csrc/ops/losses/linear_loss.c has them: rows of a part and what they are a
#: multiple of, bytes that the logits of a part and their gradient may have, elements that a line is a multiple of.
MOST_ROWS, TILE, MOST_BYTES, LINE = 4096, 128, 3 << 29, 8
MANY_CLASSES = 512  # from so many on, in 16 bits, those that fill no line are products of their own
KEPT_WIDTH = 8192  # of rows whose gradients one kernel has (csrc/cuda/kernels/norm.cu)
#: Of sums that a chain adds up, as csrc/cuda/kernels/fused.cu has them: blocks that a GPU is busy with and threads of
#: one, pieces of a thread in a part, threads of neighbouring columns, and of a warp.
BUSY, FOLD_THREADS, WORTH_A_PART, FEWEST_ACROSS, WARP = 512, 256, 2, 4, 32
FOLDED = re.compile(r"\bfolded=\[([0-9, ]*)\], axes=\[([0-9, ]*)\]")


def without_memory(model: nn.Module) -> nn.Module:
    """A model on the meta device as one of zeros on the CPU, whose pages have no memory until written."""
    kinds = {torch.float32: "f4", torch.int64: "i8", torch.bool: "?", torch.float16: "f2"}

    def zeros(t: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(numpy.zeros(tuple(t.shape), kinds[t.dtype])) if t.is_meta else t

    model._apply(zeros)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model


def plan_of(build: Callable[[], nn.Module], batch: dict[str, Any], autocast: torch.dtype | None) -> tuple[Any, Peak]:
    """The plan of a training step for a GPU, whose logits are not read, and its peak with AdamW's state. Raises
    RuntimeError in another build."""
    if not _core.emulated:
        raise RuntimeError("a build with an emulated GPU is needed: ORTMODULE_BUILD=build/emulated")
    ctypes.CDLL(str(Path(_core.__file__).parent / "libtorch_cuda.so"), ctypes.RTLD_GLOBAL)  # stands for torch's kernels
    with torch.device("meta"):
        model = build()
    wrapped: Any = ORTModule(without_memory(model).train(), config=Config(defer_logits="1"))
    wrapped._ortmodule.compiler.checks = False
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        graph, call = wrapped._ortmodule.prepare((), batch)
        plan = graph.sketch(call.shapes, lambda: call.inputs, None)
    return plan, peak_of(graph, graph.executables.specs_for(call.shapes), plan, "adamw")


def specs_in(text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(kind, tuple(int(d) for d in dims.split(",") if d.strip())) for kind, dims in SPEC.findall(text)]


def bytes_of(spec: tuple[str, tuple[int, ...]]) -> int:
    return BYTES[spec[0]] * math.prod(spec[1])


def sequences_of(shape: tuple[int, ...], batch: int) -> tuple:
    """[B, S, H, D] of attention's operand; of a list of rows [T, H, D] the mean length is S."""
    return shape if len(shape) == 4 else (batch, shape[0] / batch, *shape[1:])


def name_is_attention(name: str) -> bool:
    return name in ("FusedAttention", "FusedAttentionGrad")


def chunk_rows(size: int, samples: int, classes: int) -> int:
    """Rows whose logits a linear layer's loss has at a time. ``size``: bytes of an element of the operands."""
    each = -(-classes // LINE) * LINE * (4 + 2 if size == 2 else size)
    most = max(min(MOST_BYTES // each // TILE * TILE, MOST_ROWS), TILE)
    chunks = max(-(-samples // most), 1)
    return samples if chunks == 1 else -(-samples // chunks // TILE) * TILE


def linear_loss(
    kernel: Kernel, hidden: tuple[str, tuple[int, ...]], weight: tuple[int, ...], gradients: bool, biased: bool
) -> None:
    """What a linear layer's loss computes, and moves beside its operands and results. ``gradients``: with them, in one
    sweep; ``biased``: of the layer, whose gradient is wanted then, too."""
    size, width = BYTES[hidden[0]], hidden[1][-1]
    rows, classes = math.prod(hidden[1]) // width, math.prod(weight) // width
    sums = max(size, 4)
    chunks = -(-rows // chunk_rows(size, rows, classes)) if rows else 0
    rest = classes % LINE > 0 and classes >= MANY_CLASSES and size == 2
    kernel.flops = 2.0 * rows * width * classes * (3 if gradients else 1)
    logit = sums * 2  # a logit is written, and read by the loss
    if gradients:  # read once more; its gradient written, as the products read it, and read by both
        logit += sums + 3 * size
    if biased:  # the bias is filled in, and read by the product; gradients are written and added up unrounded
        logit += sums * 2 + (sums * 2 if gradients and size == 2 else sums if gradients else 0)
    kernel.more = rows * classes * logit
    kernel.more += (chunks - 1) * size * width * classes  # the weight, once a part
    if gradients:  # the weight by two products, the hidden states by one; the weight's gradient is added to
        kernel.more += chunks * size * width * classes + rows * width * size + 2 * sums * width * classes * (chunks - 1)
    kernel.count = 2 + chunks * ((5 if gradients else 2) + biased * (2 if gradients else 1))
    kernel.count += chunks * rest * (3 if gradients else 1)


def fold_parts(shape: tuple[int, ...], axes: set[int], at_once: int) -> tuple[int, int]:
    """Of what a chain adds up over neighbouring axes: how many results there are, and in how many parts each is."""
    gone = [d for d in range(len(shape)) if d in axes and shape[d] > 1] or [0]
    length = math.prod(shape[d] for d in axes)
    outer, inner = math.prod(shape[: gone[0]]), math.prod(shape[gone[-1] + 1 :])
    across, lanes, pieces = 1 if inner == 1 else FEWEST_ACROSS, 1, -(-(length if inner == 1 else inner) // at_once)
    while across < (FOLD_THREADS if inner == 1 else WARP) and across < pieces:
        across *= 2
    if inner == 1:
        blocks = -(-outer * across // FOLD_THREADS)
        most = 1 if across < FOLD_THREADS else pieces // (FOLD_THREADS * WORTH_A_PART)
    else:
        across = FOLD_THREADS if outer * pieces >= BUSY * FOLD_THREADS else across
        while lanes < FOLD_THREADS // across and (lanes < length or lanes * across < WARP):
            lanes *= 2
        blocks, most = outer * -(-pieces // across), length // (lanes * WORTH_A_PART * 2)
    return outer * inner, max(min(BUSY // max(blocks, 1), most), 1)


class Account:
    """Reads the text of a plan. ``kernels``: in order; ``kept``: values that outlive the step."""

    def __init__(self, text: str, instructions: dict[int, int]) -> None:
        """``instructions``: {a node's first result: its instruction, -1 for a view}."""
        self.kernels: list[Kernel] = []
        self.kept: set[int] = set()
        self.names: list[str] = []
        self._specs: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._base: dict[int, tuple[int, int]] = {}  # of a view: the value that has its memory, and bytes to read
        self._backward = False
        self._gradients: set[int] = set()  # what belongs to parameters and inputs
        lines = text.splitlines()
        nodes = [found for line in lines if (found := NODE.match(line))]
        for line in lines:
            if line.startswith("input"):
                self._specs[int(OPERAND.search(line)[1])] = specs_in(line)[0]
            elif line.startswith(("output", "grad", "write")):
                ends = {int(n) for n in OPERAND.findall(line.split("<-")[-1])}
                self.kept |= ends
                self._gradients |= ends if line.startswith("grad") else set()
        self._used = {int(n) for found in nodes for n in OPERAND.findall(found[3])} | self.kept
        for line in lines:
            if line in ("forward", "backward"):
                self._backward = line == "backward"
            elif found := NODE.match(line):
                self._node(found, instructions)
        self.kept = {self._base.get(v, (v, 0))[0] for v in self.kept}

    def _node(self, found: re.Match, instructions: dict[int, int]) -> None:
        results = [int(n) for n in OPERAND.findall(found[1])]
        specs = specs_in(found[4])
        if found[2].startswith("FusedNorm") and len(specs) < len(results):
            specs.insert(SUM_OUT, ("uint8", (0,)))  # the sum, where nothing is added
        self._specs |= dict(zip(results, specs, strict=False))
        operands = [int(n) for n in OPERAND.findall(found[3])]
        if instructions.get(results[0], 0) < 0:
            base, count = self._base.get(operands[0], (operands[0], bytes_of(self._specs[operands[0]])))
            self._base[results[0]] = (base, min(count, bytes_of(self._specs[results[0]])))
            return
        name = OWNED if found[2] == "Contiguous" and results[0] in self._gradients else found[2]
        kernel = Kernel(name, "stream", launch=False, backward=self._backward)
        for v in operands:
            base, count = self._base.get(v, (v, bytes_of(self._specs[v])))
            kernel.reads[base] = max(kernel.reads.get(base, 0), count)
        for text in BETWEEN.split(found[3]):
            if (match := SPEC.match(text)) and text.startswith(match[0] + " of"):  # a constant, not a small one
                kernel.reads[text] = bytes_of(specs_in(text)[0])
        for v in results:
            if v in self._used and v in self._specs:
                kernel.writes[v] = bytes_of(self._specs[v])
        kernel.size = max(math.prod(self._specs[v][1]) for v in operands + results if v in self._specs)
        self._by_operator(kernel, found, operands, results)
        self._add(kernel, found)
        if name_is_attention(found[2]) and BY_TORCH.search(found[3]):
            copies = [bytes_of(specs[i]) for i in range(3 if found[2].endswith("Grad") else 1)]
            self._add(
                Kernel("attention's results copied", "other", more=2 * sum(copies), size=max(copies),
                       count=1 + len(copies), backward=self._backward), found)  # fmt: skip

    def _add(self, kernel: Kernel, found: re.Match) -> None:
        self.kernels.append(kernel)
        self.names.append(found[5] or "")

    def _by_operator(self, kernel: Kernel, found: re.Match, operands: list[int], results: list[int]) -> None:
        """Kind, FLOPs, and bytes where an operator does not read or write all of its tensors once."""
        name, specs = found[2], self._specs
        if name in PRODUCTS:
            text = BETWEEN.split(found[3])[PRODUCTS[name]]
            left = specs[int(text[1:].split()[0])] if text.startswith("%") else specs_in(text)[0]
            kernel.flops = 2.0 * math.prod(specs[results[0]][1]) * left[1][-1]
            kernel.kind = "product" if BYTES[left[0]] == 2 else "product float32"
        elif name_is_attention(name):
            q, k, v = (specs[n] for n in operands[:3])
            backward, dropout = name.endswith("Grad"), "ratio=0," not in found[3]
            causal = CAUSAL in found[3]
            batch = int(found_batch[1]) if (found_batch := LISTED_OF.search(found[3])) else 0
            of_q, of_k = sequences_of(q[1], batch), sequences_of(k[1], batch)
            kernel.flops = attention_flops(of_q, of_k, v[1][-1], causal, backward)
            kernel.flops *= SPREAD if len(q[1]) == len(k[1]) == 3 else 1
            kernel.kind = "attention dropout" if dropout else "attention"
            kernel.launch, kernel.count = True, 3 if backward else 1
            kernel.more = 2 * 4 * math.prod(q[1]) if backward else 0  # sums of dq in float32, written and read
        elif name == "Gather":
            rows = sum(kernel.writes.values())
            kernel.reads[operands[0]] = min(kernel.reads[operands[0]], rows)
        elif name == "Embedding":
            rows = sum(kernel.writes.values())
            kernel.reads = {v: min(count, rows) for v, count in kernel.reads.items()}
        elif name.startswith("FusedReduce"):
            folded, axes = ([int(n) for n in text.split(",")] for text in FOLDED.search(found[3]).groups())
            whole = specs[results[0]] if len(results) > len(folded) else specs[operands[0]]
            made = results[: len(results) - len(folded)]
            narrow = any(BYTES[specs[v][0]] < 4 and math.prod(specs[v][1]) > 1 for v in [*operands, *made])
            totals, parts = fold_parts(whole[1], set(axes), 8 if narrow else 4)
            if parts > 1:  # in float64, written and read by a second kernel
                kernel.count, kernel.more = 2, 2 * 8 * totals * parts * len(folded)
        elif name == "GatherGrad":
            kernel.kind, kernel.count = "other", 3
            kernel.more = 2 * sum(kernel.reads.values())  # sorts, and adds to rows that were zeroed
        elif name in ("LayerNormGrad", "RMSNormGrad"):
            self._norm_gradient(kernel, operands)
        elif name.startswith("LinearCrossEntropy"):
            hidden, weight = self._linear(operands)
            gradients = name.endswith("Grad") or any(specs[v][1] == weight[1] for v in kernel.writes)
            kernel.kind = "product" if BYTES[hidden[0]] == 2 else "product float32"
            biased = BETWEEN.split(found[3])[5 if name.endswith("Grad") else 3].startswith("%")
            linear_loss(kernel, hidden, weight[1], gradients, biased)

    def _norm_gradient(self, kernel: Kernel, operands: list[int]) -> None:
        """Sums of both vectors are left by parts of the rows; those that are wanted are read."""
        (type_, shape), (of_scale, scale) = self._specs[operands[1]], self._specs[operands[2]]
        width = math.prod(scale)
        vectors, parts = len(kernel.writes) - 1, min(max(math.prod(shape) // width // 16, 1), 512)
        kernel.more = (2 + vectors) * max(BYTES[type_], 4) * width * parts if vectors else 0
        kernel.count = 1 + (vectors > 0)
        if width % 64 or width > KEPT_WIDTH or of_scale != type_:  # sums have a kernel of their own, which reads both
            kernel.count += vectors > 0
            kernel.more += sum(bytes_of(self._specs[v]) for v in operands[:2]) if vectors else 0

    def _linear(self, operands: list[int]) -> list:
        """Specs of the hidden states and of the weight: the two largest operands that have a float's type."""
        floats = [self._specs[v] for v in operands if self._specs[v][0] not in ("int64", "int32", "bool")]
        largest = sorted(floats, key=lambda spec: -math.prod(spec[1]))[:2]
        return sorted(largest, key=floats.index)


def kernels_of(plan: Any) -> Account:
    instructions = {row[4][0]: row[6] for row in plan.graph() if row[4]}
    return Account(plan.text(), instructions)
