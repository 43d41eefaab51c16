"""Finds memory in a trace that nothing has written.

Some operators of PyTorch make a tensor of Python's numbers: they allocate memory, which the tracer records, and fill
it, which the tracer does not see. In a graph such a tensor would hold whatever its memory held before.
"""

from __future__ import annotations

from ortmodule.core.errors import NotTraceable
from ortmodule.core.torch_private import TracedGraph, TracedNode


def _kinds(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


EMPTY = _kinds("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")
_VIEWS = _kinds(
    "slice select view reshape expand expand_as unsqueeze squeeze transpose permute narrow as_strided t alias detach "
    "diagonal movedim swapaxes flatten unflatten view_as view_as_real real imag chunk split unbind unfold"
)
#: They look at sizes and types of their first operand alone.
_LOOKING = _kinds(
    "size numel dim is_floating_point zeros_like ones_like full_like rand_like randn_like randint_like new_zeros "
    "new_ones new_full bernoulli exponential normal uniform random fill zero copy"
)
#: Of others they look at the sizes and types.
_LIKE_ANOTHER = _kinds("type_as to expand_as view_as")
#: x, a, b, beta, alpha: beta * x + alpha * (a @ b), or alpha * (a @ b) where beta is 0, whatever x is.
_ADDED_PRODUCTS = _kinds("addmm baddbmm addmv addbmm addr")


def check_written(graph: TracedGraph) -> None:
    """Raises NotTraceable, with the ``node``, where an operator reads memory that no operator has written before."""
    fresh: set[int] = set()  # values that are such memory
    of: dict[int, int] = {}  # views, lists: what they are of
    for node in graph.nodes():
        kind, inputs = node.kind(), [of.get(value.unique(), value.unique()) for value in node.inputs()]
        if kind in EMPTY:
            sizes = node.output().type().sizes()
            if sizes is None or 0 not in sizes:
                fresh.add(node.output().unique())
        elif not fresh.isdisjoint(inputs):
            if kind.startswith("prim::") or (kind in _VIEWS and inputs[0] in fresh):
                root = next(value for value in inputs if value in fresh)
                of |= {value.unique(): root for value in node.outputs()}
            elif not kind.startswith("aten::") or _writes(node):
                fresh -= set(inputs)
            elif kind not in _LOOKING and (inputs[0] in fresh or kind not in _LIKE_ANOTHER) and not _ignores_it(node):
                raise _at(node, f"{kind} reads memory that is written where a trace does not show it")


def _ignores_it(node: TracedNode) -> bool:
    """Is nothing of its first operand added to a product: `torch.baddbmm(torch.empty(...), q, k, beta=0)`?"""
    return node.kind() in _ADDED_PRODUCTS and node.inputsAt(3).toIValue() == 0


def _at(node: TracedNode, text: str) -> NotTraceable:
    # (No frame may know the exception that it raises: tensors would live on.)
    error = NotTraceable(text)
    error.node = node
    return error


def _writes(node: TracedNode) -> bool:
    name = node.kind().removeprefix("aten::")
    return (name.endswith("_") and not name.endswith("__")) or "(a!)" in node.schema()
