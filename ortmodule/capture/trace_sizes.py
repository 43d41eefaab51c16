"""Chooses the sizes of a capture's traces: small parts of the caller's batch, and others for a second trace.

Dimensions of one size probably vary together, and are cut together. Integers that add up to the size of a dimension are
lengths of what is packed there (`x.split(n.tolist())`), and integers that rise to it from 0 are where its parts begin
(`cu_seqlens`): where the dimension is cut, so are they.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from ortmodule.core.objects.tensor_copies import with_attributes
from ortmodule.guards.reads.size_tables import Key

Dim = tuple[int, int]  # (tensor, dimension)
SHORT = 8  # lengths are cut to this for tracing


@dataclass
class Sizes:
    """Sizes to trace at, and where each row begins: other values for another trace."""

    lengths: dict[Dim, int]
    shift: bool = False
    varied: frozenset[Dim] = field(default=frozenset())
    other_rows: frozenset[Dim] = field(default=frozenset())  # dimensions in which the second takes the first's place
    kept: frozenset[int] = field(default=frozenset())  # tensors of which the first rows are taken in any case
    packed: tuple[tuple[int, Dim], ...] = ()  # tensors of lengths, or of offsets, and a dimension that is their sum
    count: int = 1 << 62  # of the caller's tensors: what the module holds behind them may belong to the sizes

    def cut(self, tensors: Sequence[torch.Tensor], numbers: frozenset[int]) -> list[torch.Tensor]:
        """``numbers``: those of ``tensors`` that are Python numbers of the caller's."""
        parts = [self._another(t) if i in numbers else self._cut_one(i, t) for i, t in enumerate(tensors)]
        for i, dim in self.packed:
            parts[i] = with_attributes(_adding_up(parts[i], self.lengths[dim], _rises(tensors[i])), parts[i])
        return parts

    def _another(self, number: torch.Tensor) -> torch.Tensor:
        if not self.shift:
            return number.clone()
        return number + 1 if number.dtype == torch.int64 else number * 0.9375 + (number == 0) * 0.0625

    def _cut_one(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        part, shift = tensor.detach(), self.shift and index not in self.kept
        for d, size in enumerate(tensor.shape):
            length = self.lengths[index, d]
            first = size - length if shift and length < size else 1 if shift and (index, d) in self.varied else 0
            if (length, first) != (size, 0):
                part = part.index_select(d, (torch.arange(length, device=part.device) + first) % size)
            if (index, d) in self.other_rows and length > 1:
                part = part.index_select(d, torch.arange(length, device=part.device).clamp(min=1))
        if self.shift and not self.varied and part.is_floating_point() and part.dim() and index < self.count:
            part = part.roll(1, -1)
        part = part.clone() if part is tensor or part.data_ptr() == tensor.data_ptr() else part
        return with_attributes(part.requires_grad_(tensor.requires_grad), tensor)


BATCH, LENGTH, SPACE, FEATURE = range(4)  # what a dimension probably is; nothing but the order of attempts rests on it


class Dims:
    """The dimensions of the inputs, in groups that have one size and so probably vary together."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], resized: int = 0, ranks: int = 1,
        follows: Mapping[str, Key] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """``resized``: how many of ``tensors``, the last ones, are the module's. ``ranks``: among so many dimensions
        may be split. ``follows``: attributes of the module with numbers that follow from sizes of the call."""
        self.ranks = ranks
        self.given: dict[Dim, int] = {(i, d): n for i, t in enumerate(tensors) for d, n in enumerate(t.shape)}
        self.count = len(tensors) - resized
        totals = {i: total for i, t in enumerate(tensors[: self.count]) if (total := _total(t)) is not None}
        firsts = Counter(t.shape[0] for t in tensors[: self.count] if t.dim() and t.shape[0] not in totals.values())
        self.batch = firsts.most_common(1)[0][0] if firsts else 0
        self.kind = {
            (i, d): self._kind(tensors[i], d) if i < self.count else _kind_in_table(tensors[i].shape, d)
            for i, d in self.given
        }
        self.pinned = FEATURE + 1  # kinds from this on are not varied
        #: Integers that begin with 0 and do not get smaller: offsets of bags or graphs, which no other row may begin.
        self.rising = frozenset(i for i, t in enumerate(tensors) if _rises(t))
        #: Tensors of lengths or offsets, and the dimensions of the others that are as long as all of these together.
        self.packed = {i: found for i, total in totals.items() if (found := self._of_size(total, i))}
        self.equal: list[frozenset[Dim]] = []  # dimensions whose sizes are equal in every trace
        self.follows = follows
        self._first: dict[str, float] = {}  # these numbers in the first trace
        #: Has a second trace the same numbers, where their sizes do not vary? Had the one that agreed?
        self.fixed = self.kept = False
        self.together = True  # is it tried whether dimensions may vary while they are equal?

    def _kind(self, tensor: torch.Tensor, d: int) -> int:
        if d == 0:
            return BATCH if tensor.shape[0] == self.batch else LENGTH
        if not tensor.is_floating_point():
            return LENGTH
        if tensor.dim() >= 4:
            return FEATURE if d == 1 else SPACE
        return LENGTH if (tensor.dim(), d) == (3, 1) else FEATURE

    def numbers_at(self, sizes: Sizes, second: bool) -> dict[str, float]:
        """What numbers of the module are in a trace at these ``sizes``. Where a ``second`` trace does not say, they are
        others than in the first."""
        found = {name: key.at_lengths(sizes.lengths) for name, key in self.follows.items()}
        numbers = {name: n for name, n in found.items() if n is not None}
        if not second:
            self._first = numbers
            return numbers
        staying = self.staying(sizes.varied)
        moved = {name: n + (n == self._first.get(name)) for name, n in numbers.items() if name not in staying}
        return moved | {name: self._first[name] for name in staying if self.fixed and name in self._first}

    def staying(self, varied: frozenset[Dim]) -> list[str]:
        """The numbers that follow from sizes of other dimensions alone."""
        return [name for name, key in self.follows.items() if varied.isdisjoint(key.dims)]

    def _of_size(self, size: int, other_than: int) -> list[Dim]:
        """Dimensions of the other tensors that may be packed ones."""
        return [
            dim for dim, n in self.given.items() if n == size and dim[0] != other_than and self.kind[dim] != FEATURE
        ]

    def first_sizes(self, part: int) -> list[Sizes]:
        """What is tried for the first trace, in this order. ``part``: of the batch, at least."""
        small = self._cut({BATCH: lambda n: 2, LENGTH: lambda n: min(n, SHORT)})  # a batch of two, even of one
        rows = self._cut({BATCH: lambda n: min(n, 2)})
        found = [[self.sized(lengths, True), self.sized(lengths, False)] for lengths in (small, rows)]
        tried: list[Sizes] = []
        for each in [one for pair in found[part:] for one in pair] + [Sizes(dict(self.given))]:
            if each not in tried:
                tried.append(each)
        return tried

    def sized(self, lengths: dict[Dim, int], packed: bool) -> Sizes:
        """Of these ``lengths``; dimensions that are ``packed`` have two elements a part, where the caller's have."""
        if not (packed and self.packed):
            return Sizes(lengths)
        new = dict(lengths)
        for i, dims in self.packed.items():
            for dim in dims:
                new[dim] = max(new[dim], min(2 * lengths[i, 0], self.given[dim]))
        return Sizes(new, packed=tuple((i, dims[0]) for i, dims in self.packed.items()))

    def _cut(self, by_kind: dict[int, Callable[[int], int]]) -> dict[Dim, int]:
        """Dimensions of one size stay equal: the first of their kinds decides."""
        kind: dict[int, int] = {}
        for dim, n in self.given.items():
            kind[n] = min(self.kind[dim], kind.get(n, FEATURE))
        return {dim: by_kind.get(kind[n], int)(n) for dim, n in self.given.items()}

    def groups(self, sizes: Sizes) -> list[frozenset[Dim]]:
        """Dimensions of one size: they probably vary together. The batch comes first, features last. (Those that are
        of one size as they are cut are none.)"""
        found: dict[tuple[int, int], list[Dim]] = {}
        for dim, size in sizes.lengths.items():
            if size > 1 and self.kind[dim] < self.pinned:
                found.setdefault((size, self.given[dim]), []).append(dim)
        return [frozenset(g) for g in sorted(found.values(), key=lambda g: min(self.kind[d] for d in g))]

    def parts(self, group: frozenset[Dim]) -> list[frozenset[Dim]]:
        """A group, and its dimensions of each kind: their sizes may be equal by accident."""
        kinds = sorted({self.kind[dim] for dim in group})
        if len(kinds) == 1:
            return [group]
        return [group, *(frozenset(d for d in group if self.kind[d] == kind) for kind in kinds)]

    def probe(
        self, sizes: Sizes, varied: frozenset[Dim], otherwise: bool = False, keeping: bool = False
    ) -> Sizes:  # fmt: skip
        """Other sizes for the dimensions that vary, other values for all. ``otherwise``: longer, and a batch that stays
        as large as it is loses its first row. ``keeping``: those that rise begin as they do, and nothing is longer
        than it is in the call."""
        new = dict(sizes.lengths)
        for dim in varied:
            kind = next((min(self.kind[d] for d in group) for group in self.equal if dim in group), self.kind[dim])
            size = sizes.lengths[dim]
            # A table that is larger than the call needs it stays so.
            alone = all(i >= self.count for (i, d), n in sizes.lengths.items() if n == size and (i, d) in varied)
            new[dim] = _other(size, LENGTH if alone else kind, otherwise or alone)
            if self.ranks > 1 and size % self.ranks == 0:
                down = new[dim] // self.ranks * self.ranks
                new[dim] = down if down and new[dim] < size else -(-new[dim] // self.ranks) * self.ranks
                new[dim] += self.ranks if new[dim] == size else 0
            if keeping:
                new[dim] = min(new[dim], self.given[dim])
        rows = {dim for dim in new if self.kind[dim] == BATCH and dim not in varied} if otherwise else ()
        kept = self.rising if keeping else frozenset()
        return Sizes(new, shift=True, varied=varied, other_rows=frozenset(rows), kept=kept, count=self.count)

    def probes(self, sizes: Sizes, varied: frozenset[Dim], otherwise: bool) -> list[Sizes]:
        """What is tried, in this order. Of the whole batch it is not known yet whether anything is packed."""
        ways = (False, True) if self.rising else (False,)
        plain = [self.probe(sizes, varied, otherwise, keeping) for keeping in ways]
        fitting = [self._fitting(each, sizes) for each in plain if self.packed]
        return fitting if sizes.packed else fitting + plain

    def _fitting(self, other: Sizes, sizes: Sizes) -> Sizes:
        """``other``, with packed dimensions as :meth:`sized` has them, but where ``sizes`` has the same."""
        fit = self.sized(other.lengths, True)
        same = {dim: n for dim, n in other.lengths.items() if fit.lengths[dim] == sizes.lengths[dim]}
        return replace(other, lengths=fit.lengths | same, packed=fit.packed)


def _kind_in_table(shape: torch.Size, d: int) -> int:
    """Of a mask all sizes but ones are lengths, of a table of positions all but the last."""
    return FEATURE if d == len(shape) - 1 and shape[d] not in shape[:d] else LENGTH


MOST_OFFSETS = 1 << 20  # looked at for rising and for their sum: a copy is made of them


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool) and tensor.dim() > 0


def _total(tensor: torch.Tensor) -> int | None:
    """How long all parts are together, if these are lengths of parts or where they begin and end."""
    if not _is_whole(tensor) or tensor.dim() != 1 or not 1 < tensor.numel() <= MOST_OFFSETS:
        return None
    values = tensor.detach()
    return int(values[-1] if _rises(tensor) else values.sum()) if bool((values >= 0).all()) else None


def _adding_up(part: torch.Tensor, total: int, begins: bool) -> torch.Tensor:
    """Lengths in about the proportion of these that add up to ``total``; as offsets, where they are. No part is empty
    that was not, if that can be."""
    lengths = (part.diff() if begins else part).clamp(min=0).to(torch.int64)
    if not lengths.numel() or int(lengths.sum()) == total and not (begins and part[0]):
        return part
    least = (lengths > 0).to(torch.int64)
    least = least if int(least.sum()) <= total else torch.zeros_like(least)
    shares = lengths.clamp(min=1).double()
    ends = (shares.cumsum(0) * ((total - int(least.sum())) / shares.sum())).round().to(torch.int64) + least.cumsum(0)
    if begins:
        return torch.cat([ends.new_zeros(1), ends]).to(part.dtype)
    return ends.diff(prepend=ends.new_zeros(1)).to(part.dtype)


def _rises(tensor: torch.Tensor) -> bool:
    if not _is_whole(tensor):
        return False
    rows = tensor.detach()
    return (
        rows.shape[-1] > 1
        and 0 < rows.numel() <= MOST_OFFSETS
        and not rows[..., 0].any()
        and bool((rows.diff() >= 0).all())
    )


def _other(size: int, kind: int, longer: bool) -> int:
    """A different size of at least two: a little smaller, since positions may be limited, where that is possible.

    Its half is different, too: what Python computes from a size is to show.
    """
    if kind == BATCH:
        return size + 3
    if longer:
        return size + max(2, size // 4)
    if size < 4:
        return size + 2
    if kind == SPACE and size < 64:
        return size + size // 2
    return max(2, size * 3 // 4)
