"""Measures how fast this machine multiplies and moves bytes, and says with that how long a plan's step takes."""

from __future__ import annotations

import math
import threading
import time
from functools import cache
from typing import NamedTuple

import torch
from onnx import TensorProto, helper

from ortmodule import _core
from ortmodule.engine.memory_goal import Costs
from ortmodule.engine.session import Session

TIMES = 3  # of each measurement, after one that makes the plan and touches the memory; the fastest counts
SIZES, SIZES_OF_GPUS = (256, 512, 512), (4096, 4096, 4096)  # of a product
BYTES = 32 << 20  # of a tensor that is moved
#: What a byte and a multiplication in 16 bits cost on a usual processor, in multiplications in float32
#: (csrc/plan/cost.c), and by which factor it is another's at most: what is measured while others compute says little.
USUAL_BYTE, USUAL_NARROW, MOST_BY = 16.0, 1.0, 4.0
_lock = threading.Lock()


class Rates(NamedTuple):
    """Seconds for one of what `Plan.work` counts."""

    product: float
    narrow_product: float
    other: float
    byte: float
    moved: float


def _session(operator: str, inputs: int, dtype: int, sizes: list[list[int]]) -> Session:
    names = ["a", "b"][:inputs]
    given = [helper.make_tensor_value_info(name, dtype, size) for name, size in zip(names, sizes, strict=True)]
    result = helper.make_tensor_value_info("y", dtype, None)
    graph = helper.make_graph([helper.make_node(operator, names, ["y"])], operator, given, [result])
    return Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString())


def _seconds(session: Session, tensors: list[torch.Tensor], gpu: torch.device | None) -> float:
    found = []
    for _ in range(1 + TIMES):
        if gpu is not None:
            torch.cuda.synchronize(gpu)
        start = time.perf_counter()
        session.run(tensors, [False] * len(tensors))
        if gpu is not None:
            torch.cuda.synchronize(gpu)
        found.append(time.perf_counter() - start)
    return min(found[1:])


@cache
def _measured(gpu: torch.device | None, threads: int) -> Rates:
    m, k, n = SIZES if gpu is None else SIZES_OF_GPUS
    there = torch.device("cpu") if gpu is None else gpu  # not the caller's default
    of_products = []
    for kind, dtype in ((TensorProto.FLOAT, torch.float32), (TensorProto.BFLOAT16, torch.bfloat16)):
        operands = [torch.ones(size, dtype=dtype, device=there) for size in ((m, k), (k, n))]
        session = _session("MatMul", 2, kind, [[m, k], [k, n]])
        of_products.append(_seconds(session, operands, gpu) / (2 * m * k * n))
    x = torch.ones(BYTES // 4, dtype=torch.float32, device=there)
    byte = _seconds(_session("Abs", 1, TensorProto.FLOAT, [[BYTES // 4]]), [x], gpu) / (2 * BYTES)
    wide, narrow = of_products
    slower = _core.slower_files if gpu is None else _core.slower_buses
    return Rates(wide, narrow, _core.slower_kernels * wide, byte, byte * slower)


def rates(gpu: torch.device | None) -> Rates:
    """Of this machine's CPU, with the threads that torch has now, or of a GPU; measured once in a process."""
    with _lock:
        return _measured(gpu, torch.get_num_threads())


def costs() -> Costs:
    """Of this machine's CPU, for the choice of what is computed again. In steps of a half power of two, so that
    processes on one machine choose alike."""
    found = rates(None)
    narrow, byte = found.narrow_product / found.product, found.byte / found.product
    return _in_steps(narrow, USUAL_NARROW), found.other / found.product, _in_steps(byte, USUAL_BYTE)


def _in_steps(value: float, usual: float) -> float:
    within = min(max(value, usual / MOST_BY), usual * MOST_BY)
    return 2 ** (round(2 * math.log2(within)) / 2)


def seconds_of(plan: _core.Plan, gpu: torch.device | None) -> float:
    """Of a forward and a backward, predicted."""
    return sum(count * rate for count, rate in zip(plan.work, rates(gpu), strict=True))
