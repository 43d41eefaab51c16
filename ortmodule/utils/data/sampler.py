"""Deals samples out to processes so that at each step all of them have about the same to do."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, distributed
from torch.utils.data import Sampler
from tqdm.auto import tqdm

from ortmodule.core.errors import ArgumentError, ArgumentTypeError, StateError

#: After so many seconds a progress bar says that complexities are being computed.
BAR_SECONDS = 2.0
#: Complexities are below; noise is added to them.
LARGEST = 2**61
_Item = TypeVar("_Item")


class _Resumable(Sampler[_Item], Generic[_Item]):
    """A sampler of one epoch at a time that can go on in the middle of one."""

    def __init__(self) -> None:
        self._yielded = 0  # of the items of this epoch
        self._pending = 0  # of them, those that the next iterator leaves out

    @abstractmethod
    def _items(self) -> list[_Item]:
        """What this process gets in this epoch."""

    @abstractmethod
    def _order(self) -> dict[str, Any]:
        """What the items depend on."""

    def __iter__(self) -> Iterator[_Item]:
        self._yielded, self._pending = self._pending, 0
        return self._from(self._items(), self._yielded)

    def _from(self, items: list[_Item], start: int) -> Iterator[_Item]:
        for i in range(start, len(items)):
            self._yielded = i + 1
            yield items[i]

    def _restart(self) -> None:
        self._yielded = self._pending = 0

    def state_dict(self, yielded: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, for :meth:`load_state_dict` on any rank.

        ``yielded``: how many items of the epoch (samples, or batches of a batch sampler) the script has used, where
        the workers of a DataLoader are ahead of it; torchdata's StatefulDataLoader keeps account of that itself.
        """
        return {**self._order(), "yielded": self._yielded if yielded is None else yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iterator goes on where the one of ``state`` was, and is the last that is not a whole epoch's.

        Raises ValueError, with nothing changed, for the state of a sampler that deals out in another order.
        """
        name, mine = type(self).__name__, self._order()
        if state.keys() != {*mine, "yielded"}:
            raise ArgumentError(f"this is not the state of a {name}: it has {sorted(state)}")
        for what, value in mine.items():
            if what != "epoch" and state[what] != value:
                raise ArgumentError(f"the state is of a {name} with {what} {state[what]}, this one has {value}")
        if not (isinstance(state["yielded"], int) and state["yielded"] >= 0):
            raise ArgumentError(f"the state of a {name} has yielded {state['yielded']!r}, no count")
        self._set_epoch(state["epoch"])
        self._yielded = self._pending = state["yielded"]

    @abstractmethod
    def _set_epoch(self, epoch: int) -> None:
        """Without a word on where in it to begin."""


class LoadBalancingDistributedSampler(_Resumable[int]):
    """Like `torch.utils.data.DistributedSampler`, but the samples that the ranks get at one step are alike.

    Samples are sorted by their complexity and cut into rows of one sample a rank. With ``shuffle`` rows are shuffled,
    and in each row the ranks, by ``seed`` and the epoch (:meth:`set_epoch`). Over all ranks an epoch has each sample
    once. Where the world does not divide their number, as many more as fill the last row come twice, or with
    ``drop_last`` as many as are too many are left out; other ones in each epoch, if it is shuffled.

    Complexities are computed when they are first needed, on each rank, with a progress bar on rank 0 where that takes
    seconds, and then kept.

    Args:
        dataset: maps 0, 1, ... to samples; has a length.
        complexity_fn: takes a sample, returns a whole number: the longer its step, the greater.
        world_size, rank: of the process; those of `torch.distributed` by default.
        shuffle: another order in each epoch; otherwise from the least complex to the most.
        group_size: sort within each group of so many samples that follow each other in the dataset, and shuffle groups
            instead of rows. By default all samples are one group.
        seed: the same on all ranks.
        drop_last: see above.
        random_level: from 0 to 1: up to this part of the range of complexities is added to each as noise, by ``seed``
            and the epoch, so that rows have other samples in each.

    Raises:
        ValueError: an argument is out of its range, or the dataset has fewer samples than there are processes.
        TypeError: the dataset has no length, or (when iterated) ``complexity_fn`` returned no whole number.
        RuntimeError: there is no process group and no ``world_size`` or ``rank``, or ``complexity_fn`` raised.
    """

    def __init__(
        self, dataset: Any, complexity_fn: Callable[[Any], int], world_size: int | None = None,
        rank: int | None = None, shuffle: bool = True, group_size: int | None = None, seed: int = 0,
        drop_last: bool = False, random_level: float = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        if not callable(complexity_fn):
            raise ArgumentTypeError(f"complexity_fn is called with a sample; {complexity_fn!r} cannot be called")
        if not hasattr(dataset, "__len__"):
            raise ArgumentTypeError(f"the dataset, a {type(dataset).__name__}, has no length")
        self.world_size = _of_group("world_size", world_size, distributed.get_world_size)
        self.rank = _of_group("rank", rank, distributed.get_rank)
        self.dataset, self.complexity_fn, self.shuffle, self.drop_last = dataset, complexity_fn, shuffle, drop_last
        self.group_size, self.seed, self.random_level, self.epoch = group_size, seed, random_level, 0
        self._length = len(dataset)
        self._check()
        rows = self._length / self.world_size
        self.num_samples = int(rows) if drop_last else -(-self._length // self.world_size)
        self.total_size = self.num_samples * self.world_size
        self._complexities: Tensor | None = None

    def _check(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ArgumentError(f"rank {self.rank} is none of a world of {self.world_size}")
        if self._length < self.world_size:
            raise ArgumentError(f"the dataset has {self._length} samples, fewer than the {self.world_size} processes")
        if self.group_size is not None and self.group_size < 1:
            raise ArgumentError(f"group_size must be 1 or more, not {self.group_size}")
        if not 0 <= self.random_level <= 1:
            raise ArgumentError(f"random_level must be from 0 to 1, not {self.random_level}")

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Shuffles anew: call it before each epoch, on all ranks. A position that was loaded for it is kept."""
        if epoch != self.epoch:
            self._restart()
        self._set_epoch(epoch)

    def _set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _order(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch, "seed": self.seed, "samples": self._length, "world_size": self.world_size,
            "shuffle": self.shuffle, "group_size": self.group_size, "drop_last": self.drop_last,
            "random_level": self.random_level,
        }  # fmt: skip

    def _items(self) -> list[int]:
        return self.rows()[:, self.rank].tolist()

    # --- the order ------------------------------------------------------------------------------------------------

    def rows(self) -> Tensor:
        """Indices of the samples of this epoch, int64 [num_samples, world_size]: a row a step, a column a rank."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        # The order of rows or groups is drawn first: it depends on their number alone.
        units = self.num_samples if self.group_size is None else -(-self.total_size // self.group_size)
        order = torch.randperm(units, generator=generator) if self.shuffle else torch.arange(units)
        taken = self._taken(generator)
        complexity = self._with_noise(self.complexities()[taken], generator)
        if self.shuffle:  # those that are alike come in another order
            mixed = torch.randperm(len(taken), generator=generator)
        else:
            mixed = torch.arange(len(taken))
        by_complexity = mixed[complexity[mixed].argsort(stable=True)]
        if self.group_size is None:
            rows = taken[by_complexity].view(-1, self.world_size)[order]
        else:
            place = torch.empty_like(order)
            place[order] = torch.arange(units)
            rows = taken[_rows_of_groups(by_complexity, place[by_complexity // self.group_size], self.world_size)]
        if self.shuffle:
            rows = rows.gather(1, torch.rand(rows.shape, generator=generator).argsort(1))
        return rows

    def _taken(self, generator: torch.Generator) -> Tensor:
        """The indices of the epoch's samples, ascending."""
        change = self.total_size - self._length
        if change == 0:
            return torch.arange(self._length)
        times = torch.ones(self._length, dtype=torch.int64)
        if self.shuffle:
            chosen = torch.randperm(self._length, generator=generator)[: abs(change)]
        else:
            chosen = torch.arange(self._length - abs(change), self._length)
        times[chosen] += 1 if change > 0 else -1
        return torch.arange(self._length).repeat_interleave(times)

    def _with_noise(self, complexity: Tensor, generator: torch.Generator) -> Tensor:
        most = int((complexity.max() - complexity.min()).item() * self.random_level)
        return complexity + torch.randint(most + 1, complexity.shape, generator=generator) if most else complexity

    # --- complexities ---------------------------------------------------------------------------------------------

    def complexities(self) -> Tensor:
        """What ``complexity_fn`` returns for each sample of the dataset, int64."""
        if self._complexities is None:
            bar = tqdm(
                range(self._length), desc="complexities of samples", unit="sample", delay=BAR_SECONDS, leave=False,
                disable=self.rank != 0,
            )  # fmt: skip
            self._complexities = torch.tensor([self._complexity_of(i) for i in bar], dtype=torch.int64)
        return self._complexities

    def _complexity_of(self, index: int) -> int:
        sample, name = self.dataset[index], getattr(self.complexity_fn, "__name__", repr(self.complexity_fn))
        try:
            value = self.complexity_fn(sample)
        except Exception as error:
            what = f"{type(error).__name__} for sample {index}: {error}"
            raise StateError(f"complexity_fn {name} raised {what}") from error
        try:
            number = operator.index(value)
        except TypeError:
            raise ArgumentTypeError(
                f"complexity_fn {name} returned {value!r} for sample {index}, a {type(value).__name__}: "
                "a complexity is a whole number"
            ) from None
        if abs(number) >= LARGEST:
            raise ArgumentError(f"complexity_fn {name} returned {number} for sample {index}, which is not below 2^61")
        return number


def _of_group(name: str, given: int | None, of_group: Callable[[], int]) -> int:
    if given is not None:
        return given
    if not (distributed.is_available() and distributed.is_initialized()):
        raise StateError(f"{name} is not given, and torch.distributed is not initialised")
    return of_group()


def _rows_of_groups(by_complexity: Tensor, place: Tensor, world: int) -> Tensor:
    """Rows of ``world`` that do not reach over groups, in the order of these; then those of what is left of groups.

    ``by_complexity``: all positions, the least complex first. ``place``: which group, as they are ordered, has each.
    """
    if world == 1:
        return by_complexity[place.argsort(stable=True)].view(-1, 1)
    sizes = torch.bincount(place)
    within = torch.empty_like(place)  # how many of the same group come before
    sorted_by_group = place.argsort(stable=True)
    within[sorted_by_group] = torch.arange(len(place)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    left = within < sizes[place] % world
    last = int(place.max()) + 1
    return by_complexity[place.where(~left, last).argsort(stable=True)].view(-1, world)


class LoadBalancingDistributedBatchSampler(_Resumable[list[int]]):
    """Makes batches of what each rank gets from a :class:`LoadBalancingDistributedSampler`, as many on all ranks.

    ::

        sampler = LoadBalancingDistributedSampler(dataset, complexity_fn=len)
        batches = LoadBalancingDistributedBatchSampler(sampler, batch_fn)
        for epoch in range(3):
            batches.set_epoch(epoch)
            for batch in DataLoader(dataset, batch_sampler=batches): ...

    Args:
        sampler: says which samples each rank gets; without ``drop_last``.
        batch_fn: takes a list of indices in the order of the sampler, returns a list of batches, lists of indices. It
            is called for every rank on each of them, so what it returns depends on the indices alone.
        drop_last: where ranks have different numbers of batches, all get the smallest of them; otherwise the largest,
            and those that have fewer begin again.

    Raises:
        TypeError: ``sampler`` is another, or (when iterated) ``batch_fn`` returned no batches of indices.
        ValueError: the sampler drops samples, or (when iterated) ``batch_fn`` returned an empty batch, or an index that
            it was not given.
    """

    def __init__(
        self, sampler: LoadBalancingDistributedSampler, batch_fn: Callable[[list[int]], list[list[int]]],
        drop_last: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise ArgumentTypeError(f"sampler is a LoadBalancingDistributedSampler, not a {type(sampler).__name__}")
        if sampler.drop_last:
            raise ArgumentError("the sampler has drop_last=True: give it to the batch sampler instead")
        self.sampler, self.batch_fn, self.drop_last = sampler, batch_fn, drop_last
        self._made: tuple[int, list[list[int]]] | None = None  # for the epoch

    def set_epoch(self, epoch: int) -> None:
        """Shuffles and makes batches anew: call it before each epoch, on all ranks."""
        if epoch != self.sampler.epoch:
            self._restart()
        self._set_epoch(epoch)

    def _set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def _order(self) -> dict[str, Any]:
        return {**self.sampler._order(), "drop_last": self.drop_last}

    def __len__(self) -> int:
        return len(self._items())

    def _items(self) -> list[list[int]]:
        epoch = self.sampler.epoch
        if self._made is None or self._made[0] != epoch:
            columns = self.sampler.rows().T.tolist()
            every = [self._batches(indices) for indices in columns]
            counts = [len(batches) for batches in every]
            count = min(counts) if self.drop_last else max(counts)
            mine = every[self.sampler.rank]
            self._made = epoch, [mine[i % len(mine)] for i in range(count)]
        return self._made[1]

    def _batches(self, indices: list[int]) -> list[list[int]]:
        name = getattr(self.batch_fn, "__name__", repr(self.batch_fn))
        batches = self.batch_fn(list(indices))
        if not isinstance(batches, (list, tuple)) or not all(isinstance(b, (list, tuple)) for b in batches):
            raise ArgumentTypeError(
                f"batch_fn {name} returned {_short(batches)}: it returns a list of lists of indices"
            )
        if not batches or not all(batches):
            raise ArgumentError(f"batch_fn {name} returned {'an empty batch' if batches else 'no batch'}")
        unknown = {index for batch in batches for index in batch} - set(indices)
        if unknown:
            raise ArgumentError(f"batch_fn {name} returned the index {unknown.pop()!r}, which it was not given")
        return [list(batch) for batch in batches]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
