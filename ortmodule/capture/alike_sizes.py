"""Chooses sizes for a second trace at which Python reads the same numbers from sizes as in the first.

`x.split(3)` of eight elements has three parts, and of six two: traces at these sizes do not agree, but those at eight
and nine do, and a graph of both serves all lengths with three parts. What was read is a formula of sizes, and each of
these follows a dimension that varies, by a constant rate where it is a size of something computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ortmodule.capture.scalar_guards import Read
from ortmodule.capture.trace_sizes import Dim


@dataclass(frozen=True)
class _Group:
    """Dimensions that have one length in the first trace, and one in the second."""

    first: int
    other: int

    def candidates(self) -> list[int]:
        n = self.first
        found = (n + max(2, n // 4), 2 * n, n + 3, n + 2, n - 2, n + 1, n - 1)
        return [size for size in dict.fromkeys(found) if size > 1]


_Rate = tuple[_Group | None, int, int]  # a size that grows with a group: its first value, and by how much


def alike(
    first: Mapping[Dim, int], other: Mapping[Dim, int], varied: frozenset[Dim],
    reads: Sequence[Read], others: Sequence[Read] | None,
) -> dict[Dim, int] | None:  # fmt: skip
    """Lengths for another trace; None: it is not to be expected that one agrees.

    ``first``, ``other``: of two traces that do not, which differ in dimensions that are ``varied``; ``reads``,
    ``others``: what they have read from sizes; None: the other has failed."""
    groups = {dim: _Group(first[dim], other[dim]) for dim in varied if first[dim] != other[dim]}
    pairs = [(one, None) for one in reads] if others is None else _aligned(reads, others)
    found = [(one, _rates(one, two, [*groups.values()])) for one, two in pairs if one.formula is not None]
    involved: dict[_Group, None] = {}
    there = {group: group.other for group in groups.values()}
    for read, rates in found:
        if not _is_same(read, rates, there):
            involved |= dict.fromkeys(group for group, _, _ in rates if group is not None)
    if not involved:
        return None
    lengths = there | {group: group.first for group in involved}
    for group in involved:
        for n in group.candidates():
            if all(_is_same(read, rates, lengths | {group: n}) for read, rates in found):
                lengths[group] = n
                break
        else:
            return None
    return dict(other) | {dim: lengths[group] for dim, group in groups.items()}


def _aligned(reads: Sequence[Read], others: Sequence[Read]) -> list[tuple[Read, Read | None]]:
    """What both have read, up to the first difference."""
    found: list[tuple[Read, Read | None]] = []
    for one, two in zip(reads, others, strict=False):
        if one.place != two.place:
            break
        found.append((one, two))
        if not one.is_value(two.value):
            break
    return found


def _rates(read: Read, other: Read | None, groups: Sequence[_Group]) -> list[_Rate]:
    """How the sizes in a read's formula follow the groups."""
    assert read.formula is not None
    sizes = read.formula.sizes
    alike_made = other is not None and other.formula is not None and len(other.formula.sizes) == len(sizes)
    if other is None or other.formula is None or not alike_made:
        return [(next((g for g in groups if g.first == n), None), n, 1) for n in sizes]
    return [_rate(n, m, groups) for n, m in zip(sizes, other.formula.sizes, strict=True)]


def _rate(first: int, other: int, groups: Sequence[_Group]) -> _Rate:
    same = [group for group in groups if (group.first, group.other) == (first, other)]
    whole = [group for group in groups if (other - first) % (group.other - group.first) == 0]
    group = next(iter(same + whole), None) if first != other else None
    return group, first, 1 if group is None else (other - first) // (group.other - group.first)


def _is_same(read: Read, rates: Sequence[_Rate], lengths: Mapping[_Group, int]) -> bool:
    assert read.formula is not None
    sizes = [n if group is None else n + by * (lengths[group] - group.first) for group, n, by in rates]
    found = read.formula.at(sizes)
    return found is not None and read.is_value(float(found))
