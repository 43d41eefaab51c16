"""Counts bytes and operations of the kernels of a step, and what they take at most on an H100.

A kernel takes the larger of its bytes over the bandwidth and its operations over the rate of its kind, and a launch
where no CUDA graph starts it. Nothing here is measured but the rates, which docs/benchmarks-gpu.md has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

PEAK_BANDWIDTH, PEAK_PRODUCTS = 3.35e12, 989e12  # of an H100 SXM by its data sheet: bytes, 16-bit FLOPs a second
#: What kernels reach, from the operators that an H100 has measured: bytes a second of a cross entropy of 8192 x 32,000
#: floats (2.2e12) and of AdamW (2.1e12); FLOPs a second of a linear layer of 8192 x 1024 x 4096 in bfloat16 with its
#: gradients, of cuDNN's attention (8 x 1024 tokens, 16 heads of 64, causal), of flash attention with dropout.
BANDWIDTH, PRODUCTS, ATTENTION, ATTENTION_DROPOUT = 2.1e12, 564e12, 231e12, 137e12
#: float32 without TF32, by the same linear layer (4.21 ms).
PRODUCTS_FLOAT32 = 49e12
LAUNCH = 3e-6  # seconds of a kernel that no CUDA graph starts. Assumed, not measured
#: Products of attention, forward and backward: backward computes the scores again.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5

RATES = {
    "product": PRODUCTS, "product float32": PRODUCTS_FLOAT32, "attention": ATTENTION,
    "attention dropout": ATTENTION_DROPOUT, "stream": PRODUCTS, "other": PRODUCTS,
}  # fmt: skip


@dataclass
class Kernel:
    """One kernel; ``reads`` and ``writes``: {value: bytes}. ``size``: elements of its largest tensor."""

    name: str
    kind: str  # of RATES; neighbours of "stream" can be one kernel
    reads: dict = field(default_factory=dict)
    writes: dict = field(default_factory=dict)
    flops: float = 0.0
    size: int = 0
    launch: bool = True  # a CUDA graph does not start it
    more: int = 0  # bytes that it reads or writes besides, again or in memory of its own
    count: int = 1  # of kernels
    backward: bool = False

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values()) + self.more

    @property
    def seconds(self) -> float:
        launch = LAUNCH * self.count if self.launch else 0.0
        return max(self.bytes / BANDWIDTH, self.flops / RATES[self.kind]) + launch


def attention_flops(queries: tuple, keys: tuple, value_width: int, causal: bool, backward: bool) -> float:
    """Of [B, S, H, D] queries and [B, T, G, D] keys; half of them where keys after the query do not count."""
    batch, length, heads, width = queries
    once = batch * heads * length * keys[1] * (width + value_width)  # of a product of each kind: 2 * D / 2
    products = BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS
    return once * products * (0.5 if causal else 1.0)


def groups_of(kernels: list[Kernel], same_size: bool) -> list[list[int]]:
    """Which kernels could be one: a stream joins the latest kernel that it reads from, if that is a stream, too.

    ``same_size``: only if their largest tensors have equally many elements.
    """
    groups: list[list[int]] = []
    made: dict = {}  # the group that wrote a value
    for i, kernel in enumerate(kernels):
        latest = max((made[v] for v in kernel.reads if v in made), default=-1)
        first = kernels[groups[latest][0]] if latest >= 0 else None
        joins = (
            first is not None
            and kernel.kind == first.kind == "stream"
            and kernel.backward == first.backward
            and (not same_size or kernel.size == first.size)
        )
        if not joins:
            latest = len(groups)
            groups.append([])
        groups[latest].append(i)
        made |= dict.fromkeys(kernel.writes, latest)
    return groups


def fused(kernels: list[Kernel], kept: Iterable, same_size: bool) -> list[Kernel]:
    """The same step with one kernel a group: it reads what comes from elsewhere once, and writes what is read elsewhere
    or is among the values ``kept``."""
    kept, found = set(kept), []
    groups = groups_of(kernels, same_size)
    readers = defaultdict(set)
    for g, group in enumerate(groups):
        for i in group:
            for value in kernels[i].reads:
                readers[value].add(g)
    for g, group in enumerate(groups):
        parts = [kernels[i] for i in group]
        if len(parts) == 1:
            found.append(parts[0])
            continue
        written = {v: b for part in parts for v, b in part.writes.items()}
        reads = {v: b for part in parts for v, b in part.reads.items() if v not in written}
        writes = {v: b for v, b in written.items() if v in kept or readers[v] - {g}}
        name = " + ".join(dict.fromkeys(part.name for part in parts))
        size = max(part.size for part in parts)
        found.append(Kernel(name, "stream", reads, writes, sum(p.flops for p in parts), size, parts[0].launch))
    return found


def least_bytes(kernels: list[Kernel], kept: Iterable) -> list[int]:
    """Of each kernel, how many of its bytes stay where all neighbouring streams are one kernel."""
    kept, least = set(kept), [0] * len(kernels)
    groups = groups_of(kernels, same_size=False)
    owner = {i: g for g, group in enumerate(groups) for i in group}
    readers, made = defaultdict(set), {}
    for i, kernel in enumerate(kernels):
        made |= dict.fromkeys(kernel.writes, owner[i])
        for value in kernel.reads:
            readers[value].add(owner[i])
    for g, group in enumerate(groups):
        seen = set()
        for i in group:
            for value, count in kernels[i].reads.items():
                if made.get(value) != g and value not in seen:
                    least[i] += count
                    seen.add(value)
            least[i] += sum(b for v, b in kernels[i].writes.items() if v in kept or readers[v] - {g})
    return least


def adamw(parameters: int, tensors: int, launch: bool = True) -> Kernel:
    """A fused step over float32 parameters: reads parameter, gradient and both moments, writes all but the gradient."""
    four = 4 * parameters
    many = -(-tensors // 32)  # tensors that one kernel takes, about
    return Kernel("AdamW", "other", {"p": four, "g": four, "m": four, "v": four},
                  {"p'": four, "m'": four, "v'": four}, 0.0, parameters, launch, count=many)  # fmt: skip


@dataclass
class Total:
    """A step by the account."""

    kernels: int
    bytes: int
    flops: float
    seconds: float


def total(kernels: list[Kernel]) -> Total:
    return Total(
        sum(k.count for k in kernels), sum(k.bytes for k in kernels), sum(k.flops for k in kernels),
        sum(k.seconds for k in kernels),
    )  # fmt: skip
