"""Lists the kernels of a step of eager PyTorch on a GPU from a trace of ATen operators.

Each operator that is no view reads its
operands once and writes its results once. `scaled_dot_product_attention` counts as one kernel forward, three backward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from benchmarks.roofline_account import Kernel, attention_flops

aten = torch.ops.aten
FREE = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh",
        "is_same_size"}  # fmt: skip
#: What Inductor joins with no neighbour.
ALONE = {"embedding_dense_backward", "sort", "cumsum", "topk", "nonzero", "index_put"}
DEVICE = "cpu"


def bytes_of(t: torch.Tensor) -> int:
    """What a kernel reads of it: dimensions that are broadcast count once."""
    shape = [n for n, stride in zip(t.shape, t.stride(), strict=True) if stride or n == 0]
    return math.prod(shape) * t.element_size()


class Storages:
    """Numbers of storages, and how many bytes of those are alive."""

    def __init__(self) -> None:
        self.peak, self._alive, self._next = 0, {}, 0
        self._bytes = 0

    def number(self, t: torch.Tensor) -> int:
        storage = t.untyped_storage()
        found = self._alive.get(storage._cdata)
        if found is None or found[0].expired():
            if found is not None:
                self._bytes -= found[2]
            self._next += 1
            found = (StorageWeakRef(storage), self._next, storage.nbytes())
            self._alive[storage._cdata] = found
            self._bytes += found[2]
        return found[1]

    def look(self) -> None:
        """Forgets those that are gone, and notes the most."""
        for key in [key for key, found in self._alive.items() if found[0].expired()]:
            self._bytes -= self._alive.pop(key)[2]
        self.peak = max(self.peak, self._bytes)


class Trace(TorchDispatchMode):
    """Kernels of what runs inside."""

    def __init__(self, full: bool = True) -> None:
        """``full``: the answer where Python asks for a truth in data."""
        super().__init__()
        self.full = full
        self.kernels: list[Kernel] = []
        self.storages, self.backward = Storages(), False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function is aten._local_scalar_dense.default:
            return self.full if args[0].dtype is torch.bool else 1
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::").removesuffix("_")
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        results = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.storages.look()
        if not function.is_view and name not in FREE and results:
            self._kernel(function, name, operands, results, args, kwargs or {}, result)
        else:
            for t in results:
                self.storages.number(t)
        return result

    def _kernel(
        self, function: Any, name: str, operands: list, results: list, args: tuple, kwargs: dict, result: Any
    ) -> None:
        reads, given = {}, {self.storages.number(t) for t in operands}
        if name in ("_reshape_alias", "_unsafe_view") or (name == "reshape" and results[0].is_contiguous()):
            return
        if name == "_to_copy" and len(given) == 1 and self.storages.number(results[0]) in given:
            return
        for t in operands:
            reads[self.storages.number(t)] = max(bytes_of(t), reads.get(self.storages.number(t), 0))
        writes = {self.storages.number(t): bytes_of(t) for t in results}
        packet = function._overloadpacket
        flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
        kind = "other" if name in ALONE else "stream"
        if flops:
            kind = "product" if operands[-1].element_size() == 2 else "product float32"
        if name in ("embedding", "index_select", "gather"):
            reads[self.storages.number(operands[0])] = min(bytes_of(operands[0]), bytes_of(results[0]))
        size = max(t.numel() for t in operands + results)
        self.kernels.append(Kernel(name, kind, reads, writes, flops, size, backward=self.backward))
        self.storages.look()

    def attention(
        self, operands: list, results: list, causal: bool, dropout: bool, backward: bool, seen: tuple
    ) -> None:
        """A kernel whose operands and results these are. ``seen``: shapes of queries, keys, and the values' width."""
        reads = {self.storages.number(t): bytes_of(t) for t in operands}
        writes = {self.storages.number(t): bytes_of(t) for t in results}
        name = "attention backward" if backward else "attention"
        kernel = Kernel(name, "attention", reads, writes, backward=backward)
        kernel.kind += " dropout" if dropout else ""
        kernel.flops = attention_flops(*seen, causal, backward)
        kernel.count, kernel.more = (3, 2 * 4 * math.prod(seen[0])) if backward else (1, 0)
        kernel.size = max(t.numel() for t in operands)
        self.kernels.append(kernel)
        self.storages.look()


def attention_in(trace: Trace) -> Callable[..., torch.Tensor]:
    """In place of torch's scaled_dot_product_attention: what a fused kernel reads and writes, of [B, H, S, D]."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool) -> Any:
            out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)  # tokens first
            sums = q.new_empty(q.shape[:3], dtype=torch.float32)
            ctx.save_for_backward(q, k, v, mask, out, sums)
            ctx.given = (causal, dropout > 0, _shapes(q, k, v))
            trace.attention([t for t in (q, k, v, mask) if t is not None], [out, sums], causal, dropout > 0, False,
                            ctx.given[2])  # fmt: skip
            return out

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            q, k, v, mask, out, sums = ctx.saved_tensors
            made = [torch.empty_like(t) for t in (q, k, v)]
            trace.attention([t for t in (q, k, v, mask, out, sums, dy) if t is not None], made, ctx.given[0],
                            ctx.given[1], True, ctx.given[2])  # fmt: skip
            return (*made, None, None, None)

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        if torch.is_autocast_enabled(DEVICE):
            kind = torch.get_autocast_dtype(DEVICE)
            query, key, value = query.to(kind), key.to(kind), value.to(kind)
        return Attention.apply(query, key, value, attn_mask, dropout_p, is_causal)

    return attention


def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple:
    """As attention_flops takes them."""
    return tuple(q.transpose(1, 2).shape), tuple(k.transpose(1, 2).shape), v.shape[-1]


class AsOnGpus(TorchFunctionMode):
    """What a GPU does otherwise than the CPU whose fake tensors are traced: autocast computes more in float32, and
    dropout is one kernel."""

    WIDE = frozenset((nn.functional.layer_norm, nn.functional.softmax, nn.functional.log_softmax, torch.softmax,
                      torch.layer_norm, torch.pow, torch.rsqrt, torch.sum, torch.Tensor.pow, torch.Tensor.sum,
                      torch.Tensor.softmax))  # fmt: skip

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is nn.functional.dropout:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            dropped = given.get("p", 0.5) > 0 and given.get("training", True)
            return torch.native_dropout(given["input"], given.get("p", 0.5), True)[0] if dropped else given["input"]
        if function in self.WIDE and torch.is_autocast_enabled(DEVICE):
            args, kwargs = tree_map_only(torch.Tensor, _wide, (args, kwargs))
        return function(*args, **kwargs)


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


@contextlib.contextmanager
def replaced(attention: Callable) -> Iterator[None]:
    was = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = was


def trace_of(
    build: Callable[[], nn.Module], batch: dict[str, Any], kind: torch.dtype | None, full: bool = True
) -> tuple[Trace, set, int]:
    """Forward and backward of a step: its kernels, the values that stay, the most bytes that were alive with AdamW's
    states. The model's loss is ``.loss`` of what it returns, or what it returns. ``full``: no mask hides anything,
    which the model may ask.
    """
    fake, trace = FakeTensorMode(allow_non_fake_inputs=True), Trace(full)
    with torch.device("meta"):
        model = build().train()
    with fake:
        model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=DEVICE))
        if hasattr(model, "tie_weights"):
            model.tie_weights()
        given = {name: torch.empty(t.shape, dtype=t.dtype, device=DEVICE) for name, t in batch.items()}
        parameters = list({id(p): p for p in model.parameters()}.values())
        for t in [*parameters, *model.buffers(), *given.values()]:
            trace.storages.number(t)
        with trace, replaced(attention_in(trace)):
            with torch.autocast(DEVICE, kind, enabled=kind is not None), AsOnGpus():
                out = model(**given)
            loss = out if isinstance(out, torch.Tensor) else out.loss
            trace.backward = True
            loss.backward()
    kept = {trace.storages.number(p.grad) for p in parameters if p.grad is not None}
    kept.add(trace.storages.number(loss))
    if not isinstance(out, torch.Tensor) and getattr(out, "logits", None) is not None:
        kept.add(trace.storages.number(out.logits))
    states = sum(2 * p.nbytes for p in parameters)
    return trace, kept, trace.storages.peak + states
