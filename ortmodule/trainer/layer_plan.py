"""Finds which linear layers of a model can be cut among processes, and cuts them with `parallelize_module`.

A pair is linear layers that are given one tensor, cut by rows of their weights (output features), and the one that
runs next, cut by columns (input features): between them each process has a part of the features, or of the heads, and
one sum follows. Whether that is what the model computes is tried out: the model runs with a pair computed in parts, on
a real batch, and has to return what it returns whole (M. Shoeybi et al., Megatron-LM, 2019, has the scheme).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ortmodule.core.errors import ArgumentError
from ortmodule.trainer.processes import Processes

#: How far results may be apart, as a part of the largest: rounding, in float32 and in narrower types.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_NARROW = 3e-2


@dataclass(frozen=True)
class Pair:
    """Names of modules: ``first`` are given one tensor, ``then`` what comes of them."""

    first: tuple[str, ...]
    then: str

    @property
    def kind(self) -> str:
        """The same in all layers: their numbers are left out."""
        return " ".join(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in (*self.first, self.then))


class LayerPlan:
    """Cuts ``model`` among the processes of ``processes.model_group``.

    Args:
        model: what is cut, in place: its weights become DTensors.
        run: runs the model on a batch, and returns its results.
        given: ``{pattern of names: "colwise", "rowwise" or a ParallelStyle}``; empty: pairs are looked for.

    Raises:
        ValueError: nothing can be cut, a pattern names no module, or the cut model computes something else.
    """

    def __init__(
        self, model: nn.Module, run: Callable[[], Sequence[Any]], processes: Processes, given: Mapping[str, Any]
    ) -> None:
        from torch.distributed.tensor.parallel import parallelize_module  # it has a process group at hand by now

        self._model, self._run, self._processes = model, run, processes
        with _evaluating(model):
            self._whole = _tensors(run())
            plan = self._named(given) if given else self._found()
            parallelize_module(model, processes.mesh["horizontal"], plan)
            self.names = tuple(plan)  #: the modules that are cut
            self._check()
        del self._whole

    def _check(self) -> None:
        """Raises ValueError unless the cut model computes what the whole one did."""
        cause: Exception | None = None
        try:
            same = self._is_same()
        except Exception as error:  # a shape that the model's own code counts on: in all processes alike
            same, cause = False, error
        if not self._processes.agree(same):
            raise ArgumentError(
                "the option distributed.horizontal_parallel_plan makes the model compute something else: "
                "between a colwise module and the rowwise one that follows each feature is computed by itself"
                + (f" ({cause})" if cause is not None else "")
            ) from cause

    def _named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        names = [name for name, _ in self._model.named_modules() if name]
        plan: dict[str, Any] = {}
        for pattern, how in given.items():
            found = fnmatch.filter(names, pattern)
            if not found:
                raise ArgumentError(
                    f"the option distributed.horizontal_parallel_plan has {pattern!r}, and the model has no such module"
                )
            plan |= {name: _style(how) for name in found}
        return plan

    def _found(self) -> dict[str, Any]:
        pairs: dict[str, list[Pair]] = {}
        for pair in pairs_of(self._model, self._run):
            pairs.setdefault(pair.kind, []).append(pair)
        plan: dict[str, Any] = {}
        for some in pairs.values():
            if self._can_be_cut(some):
                for pair in some:
                    plan |= {**dict.fromkeys(pair.first, "colwise"), pair.then: "rowwise"}
        if not plan:
            raise ArgumentError(
                f"the option distributed.horizontal_parallel_size is {self._processes.horizontal_size}, and no two "
                "torch.nn.Linear of the model were found that can be cut; "
                "name them in distributed.horizontal_parallel_plan"
            )
        return {name: _style(how) for name, how in plan.items()}

    def _can_be_cut(self, pairs: Sequence[Pair]) -> bool:
        with _computed_in_parts(self._model, pairs, self._processes):
            try:
                same = self._is_same()
            except Exception:  # a shape that the model's own code counts on: in all processes alike
                same = False
        return self._processes.agree(same)

    def _is_same(self) -> bool:
        found = _tensors(self._run())
        return len(found) == len(self._whole) and all(
            a.shape == b.shape and _near(a, b) for a, b in zip(found, self._whole, strict=True)
        )


def _style(how: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if isinstance(how, str):
        if how not in ("colwise", "rowwise"):
            raise ArgumentError(
                "the option distributed.horizontal_parallel_plan has 'colwise', 'rowwise' and objects of "
                f"torch.distributed.tensor.parallel, not {how!r}"
            )
        return ColwiseParallel() if how == "colwise" else RowwiseParallel()
    return how


def _tensors(results: Sequence[Any]) -> list[Tensor]:
    return [t.detach().clone() for t in results if isinstance(t, Tensor)]


def _near(found: Tensor, whole: Tensor) -> bool:
    if not whole.is_floating_point():
        return torch.equal(found, whole)
    largest = whole.abs().nan_to_num().max() if whole.numel() else 0.0
    apart = _TOLERANCE.get(whole.dtype, _NARROW) * (largest + 1e-3)
    return bool(((found - whole).abs() <= apart).logical_or(found.isnan() & whole.isnan()).all())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode, without gradients, and without the layers that compute several others at once."""
    modes = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in modes.items():
            module.training = mode


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers whose weight has no other use, and whose forward is PyTorch's."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and "forward" not in vars(module) and uses[id(module.weight)] == 1
    }


def pairs_of(model: nn.Module, run: Callable[[], Any]) -> list[Pair]:
    """Layers that are given one tensor, and the next one, if it takes as many features as the first of them gives."""
    linears = _linears(model)
    calls: list[tuple[str, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given, name=name: calls.append((name, given[0])))
        for name, module in linears.items()
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    often = {name for i, (name, _) in enumerate(calls) if name in [other for other, _ in calls[:i]]}
    pairs, place = [], 0
    while place < len(calls):
        first = [calls[place]]
        while place + len(first) < len(calls) and calls[place + len(first)][1] is first[0][1]:
            first.append(calls[place + len(first)])
        place += len(first)
        names = tuple(name for name, _ in first)
        if place == len(calls) or often & {*names, calls[place][0]}:
            continue
        then = linears[calls[place][0]]
        if then.in_features == linears[names[0]].out_features and calls[place][0] not in names:
            pairs.append(Pair(names, calls[place][0]))
            place += 1
    return pairs


@contextmanager
def _computed_in_parts(model: nn.Module, pairs: Sequence[Pair], processes: Processes) -> Iterator[None]:
    """Each process computes its part of the pairs, and the parts are added up; weights stay whole."""
    size, group = processes.horizontal_size, processes.model_group
    rank = distributed.get_rank(group)
    changed = []
    for pair in pairs:
        for name in pair.first:
            layer: Any = model.get_submodule(name)
            changed.append(layer)
            layer.forward = lambda x, layer=layer: nn.functional.linear(x, *_rows(layer, rank, size))
        layer = model.get_submodule(pair.then)
        changed.append(layer)
        layer.forward = lambda x, layer=layer: _sum_of_parts(x, layer, rank, size, group)
    try:
        yield
    finally:
        for layer in changed:
            vars(layer).pop("forward", None)


def _part(count: int, rank: int, size: int) -> slice:
    if count % size:
        raise ArgumentError(f"{count} features are not cut into {size} parts")
    return slice(count // size * rank, count // size * (rank + 1))


def _rows(layer: nn.Linear, rank: int, size: int) -> tuple[Tensor, Tensor | None]:
    part = _part(layer.out_features, rank, size)
    return layer.weight[part], None if layer.bias is None else layer.bias[part]


def _sum_of_parts(x: Tensor, layer: nn.Linear, rank: int, size: int, group: Any) -> Tensor:
    found = nn.functional.linear(x, layer.weight[:, _part(layer.in_features, rank, size)]).contiguous()
    distributed.all_reduce(found, group=group)
    return found if layer.bias is None else found + layer.bias
