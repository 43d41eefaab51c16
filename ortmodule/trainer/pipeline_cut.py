"""Cuts a module into the stages of a pipeline: exports it with `torch.export`, and divides the graph.

A stage begins where forward enters a named submodule. It is given the tensors of earlier stages that it, or a later
one, still needs, if they have a gradient; the module's own inputs are at hand in all processes, and what is computed
from these alone (masks, positions) each stage computes for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ortmodule.core.errors import ArgumentError


@dataclass
class Stage:
    """``module(*received, *inputs)``: ``received`` from the stage before, ``inputs`` by place among the module's."""

    module: fx.GraphModule
    received: tuple[str, ...]
    inputs: tuple[int, ...]
    sent: tuple[str, ...]  #: what the next stage receives; of the last stage none: it returns the module's results


class CutGraph:
    """The stages of ``module`` for inputs of the sizes of ``inputs``, and of others that :meth:`fits` says yes to.

    Args:
        module: takes tensors in their order, returns a tuple of tensors.
        inputs: of a micro-batch.
        dynamic: of each input the axes whose size may be another one next time.
        starts: names of submodules at which the second and later stages begin.

    Raises ValueError where ``torch.export`` cannot export the module, forward does not come to a submodule, or a
    tensor without a gradient would have to be sent.
    """

    def __init__(
        self, module: nn.Module, inputs: Sequence[Tensor], dynamic: Sequence[Sequence[int]], starts: Sequence[str]
    ) -> None:
        self._graph = _exported(module, inputs, dynamic)
        nodes = [node for node in self._graph.graph.nodes if not _is_check(node)]
        self._checks = [node for node in self._graph.graph.nodes if node.op == "call_module"]
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._stage_of = _stages(nodes, starts)
        self._plain = _plain(nodes, self._graph)
        self.stages = [self._stage(nodes, k) for k in range(len(starts) + 1)]

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the stages hold for inputs of these sizes."""
        for node, tensor in zip(self._inputs, inputs, strict=True):
            known = node.meta["val"]
            fixed = [a == b for a, b in zip(known.shape, tensor.shape, strict=False) if isinstance(a, int)]
            if known.dim() != tensor.dim() or known.dtype != tensor.dtype or not all(fixed):
                return False
        try:
            for check in self._checks:
                self._graph.get_submodule(str(check.target))(*inputs)
        except AssertionError:
            return False
        return True

    def owners(self, k: int) -> dict[str, Tensor]:
        """Parameters that stage ``k`` reads, by their names in the module."""
        return dict(self.stages[k].module.named_parameters())

    def tensors(self, k: int) -> Iterator[Tensor]:
        """Parameters and buffers that stage ``k`` reads: the module's own."""
        yield from self.stages[k].module.parameters()
        yield from self.stages[k].module.buffers()

    def run(self, inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """What each stage returns, one after the other in this process."""
        found: list[tuple[Tensor, ...]] = []
        for stage in self.stages:
            found.append(stage.module(*(found[-1] if found else ()), *(inputs[i] for i in stage.inputs)))
        return found

    def _stage(self, nodes: Sequence[fx.Node], k: int) -> Stage:
        received = [] if k == 0 else self._crossing(nodes, k)
        last = k == max(self._stage_of.values())
        sent = [] if last else self._crossing(nodes, k + 1)
        result = next(node for node in nodes if node.op == "output").args[0]
        wanted: Any = tuple(result) if last and isinstance(result, (tuple, list)) else (result,) if last else sent
        needed = self._needed(wanted, received, nodes, k)
        made, graph = {}, fx.Graph()
        for node in received:
            made[node] = graph.placeholder(node.name)
        inputs = [i for i, node in enumerate(self._inputs) if node in needed]
        for i in inputs:
            made[self._inputs[i]] = graph.placeholder(self._inputs[i].name)
        written = {user.args[0] for user in needed if _writes(user)}
        for node in received:
            if node in written:  # what was received is a leaf, which cannot be written in place
                made[node] = graph.call_method("clone", (made[node],))
        for node in nodes:
            if node in needed and node not in made:
                made[node] = graph.node_copy(node, lambda given: made[given])
        graph.output(tuple([made[node] if isinstance(node, fx.Node) else node for node in wanted]))
        module = fx.GraphModule(self._graph, graph)
        return Stage(module, tuple(n.name for n in received), tuple(inputs), tuple(n.name for n in sent))

    def _crossing(self, nodes: Sequence[fx.Node], k: int) -> list[fx.Node]:
        """What stages before ``k`` make, and ``k`` or a later one uses, but what is computed of the inputs alone."""
        made = [n for n in nodes if n.op == "call_function" and n not in self._plain and self._stage_of[n] < k]
        crossing = [n for n in made if any(self._stage_of.get(user, -1) >= k for user in n.users)]
        for node in crossing:
            value = node.meta.get("val")
            if not isinstance(value, Tensor) or not value.is_floating_point():
                what = f"{list(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
                raise ArgumentError(
                    f"the option distributed.pipeline_cut_info_string cuts where {node.name} ({what}) is needed behind "
                    "the cut, which has no gradient and depends on weights: begin the stage at another module"
                )
        return crossing

    def _needed(
        self, wanted: Iterable[Any], received: Sequence[fx.Node], nodes: Sequence[fx.Node], k: int
    ) -> set[fx.Node]:
        """What a stage computes for ``wanted``, with what it writes in place."""
        waiting = [node for node in wanted if isinstance(node, fx.Node)]
        waiting += [node for node in nodes if _writes(node) and self._stage_of[node] == k]
        needed: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node in needed:
                continue
            needed.add(node)
            if node not in received:
                waiting += node.all_input_nodes
            if node in self._plain:
                waiting += [user for user in node.users if _writes(user) and user in self._plain]
        return needed - set(received)


def _exported(module: nn.Module, inputs: Sequence[Tensor], dynamic: Sequence[Sequence[int]]) -> fx.GraphModule:
    from torch.export import Dim, export

    axes = tuple({axis: Dim.AUTO for axis in some} for some in dynamic)
    try:
        with torch.enable_grad():
            made = export(module, tuple(inputs), dynamic_shapes={"inputs": axes}, strict=False)
        return made.module()
    except Exception as error:  # whatever torch.export finds
        why = str(error).partition("\n")[0]
        raise ArgumentError(
            f"the option distributed.pipeline_parallel_size is above 1, and torch.export cannot export the model: {why}"
        ) from error


def _is_check(node: fx.Node) -> bool:
    """Does it compute nothing?"""
    name = str(node.target)
    return node.op == "call_module" or node.op == "call_function" and (
        name.startswith(("aten._assert", "aten.sym_constrain"))
    )  # fmt: skip


def _writes(node: fx.Node) -> bool:
    return node.op == "call_function" and hasattr(node.target, "_schema") and node.target._schema.is_mutable


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _stages(nodes: Sequence[fx.Node], starts: Sequence[str]) -> dict[fx.Node, int]:
    """Where each node is computed; inputs and weights have no place."""
    stage, found = 0, {}
    for node in nodes:
        if node.op == "output":
            found[node] = len(starts)
        if node.op != "call_function":
            continue
        inside = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        while stage < len(starts) and any(f"{path}.".startswith(f"{starts[stage]}.") for path in inside):
            stage += 1
        found[node] = stage
    if stage < len(starts):
        raise ArgumentError(
            f"the option distributed.pipeline_cut_info_string names {starts[stage].removeprefix('model.')}, "
            "and forward does not come to it" + (f" behind {starts[stage - 1].removeprefix('model.')}" if stage else "")
        )
    return found


def _plain(nodes: Sequence[fx.Node], graph: fx.GraphModule) -> set[fx.Node]:
    """What depends on the inputs, and on weights and buffers that stay as they are, alone."""
    trained = {name for name, p in graph.named_parameters(remove_duplicate=False) if p.requires_grad}
    written = {node.args[0] for node in nodes if _writes(node)}
    plain: set[fx.Node] = set()
    for node in nodes:
        if node.op == "placeholder":
            plain.add(node)
        elif node.op == "get_attr":
            if node.target not in trained and node not in written:
                plain.add(node)
        elif node.op == "call_function" and not (_is_random(node) or _writes(node) or node in written):
            plain.update([node] if plain.issuperset(node.all_input_nodes) else [])
    return plain


def even_starts(module: nn.Module, count: int) -> list[str]:
    """Names of submodules that begin ``count`` parts of the longest row of layers, all but the first.

    Raises ValueError where no row has so many.
    """
    rows: list[list[str]] = []
    for name, parent in module.named_modules():
        if isinstance(parent, (nn.ModuleList, nn.Sequential)):
            rows.append([f"{name}.{child}".lstrip(".") for child, _ in parent.named_children()])
    longest = max(rows, key=len, default=[])
    if len(longest) < count:
        raise ArgumentError(
            f"the option distributed.pipeline_parallel_size is {count}, and the model has no ModuleList or Sequential "
            f"of {count} layers: name where stages begin in distributed.pipeline_cut_info_string"
        )
    return [longest[round(i * len(longest) / count)] for i in range(1, count)]
