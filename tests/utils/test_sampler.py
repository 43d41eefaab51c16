"""Samplers balance the work of ranks: what an epoch has, how even it is, going on in its middle."""

import inspect
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from ortmodule.utils.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler, sampler
from tests.selection import each

WORDNET = Path("/usr/share/wordnet/data.noun")  # Debian's wordnet-base


class Numbers(torch.utils.data.Dataset):
    """Samples that are their complexity."""

    def __init__(self, count, seed=0, most=1000):
        self.values = torch.randint(most, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
        self.read = 0

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        self.read += 1
        return self.values[index]


def itself(value):
    return value


def ranks_of(dataset, world, complexity=itself, **options):
    return [LoadBalancingDistributedSampler(dataset, complexity, world, rank, **options) for rank in range(world)]


def epoch_of(samplers, epoch):
    """[what each rank gets]."""
    for one in samplers:
        one.set_epoch(epoch)
    return [list(one) for one in samplers]


def in_batches(size):
    def batches(indices):
        return [indices[i : i + size] for i in range(0, len(indices), size)]

    return batches


# --- what an epoch has ------------------------------------------------------------------------------------------------


@settings(max_examples=max(12, settings.default.max_examples // 4))
@given(
    st.integers(1, 60), st.integers(1, 6), st.booleans(), st.booleans(), st.sampled_from([None, 1, 4, 7, 12, 100]),
    st.sampled_from([0, 0.3, 1]),
)  # fmt: skip
def test_each_sample_once(count, world, shuffle, drop_last, group, level):
    dataset = Numbers(max(count, world), count)
    samplers = ranks_of(
        dataset, world, shuffle=shuffle, drop_last=drop_last, group_size=group, random_level=level, seed=count
    )
    over = len(dataset) % world
    for epoch in range(3):
        dealt = epoch_of(samplers, epoch)
        assert {len(d) for d in dealt} == {len(samplers[0])}
        seen = Counter(index for d in dealt for index in d)
        assert sum(seen.values()) == len(dataset) + (0 if not over else -over if drop_last else world - over)
        if over and drop_last:
            assert max(seen.values()) == 1
        else:
            assert set(seen) == set(range(len(dataset))) and max(seen.values()) <= 2


def test_epochs_differ_and_come_back():
    samplers = ranks_of(Numbers(64), 4)
    first, second, third = (epoch_of(samplers, epoch) for epoch in (0, 1, 2))
    assert first != second != third != first
    assert epoch_of(samplers, 1) == second and epoch_of(ranks_of(Numbers(64), 4), 1) == second
    assert epoch_of(ranks_of(Numbers(64), 4, seed=5), 1) != second


def test_ranks_are_alike_at_each_step():
    dataset = Numbers(400)
    ordered = sorted(dataset.values)
    rows = [set(ordered[i : i + 4]) for i in range(0, 400, 4)]
    for epoch in range(2):
        steps = zip(*epoch_of(ranks_of(dataset, 4), epoch), strict=True)
        found = [{dataset.values[index] for index in step} for step in steps]
        assert sorted(map(sorted, found)) == sorted(map(sorted, rows)) and found != rows


def test_what_is_left_out_or_repeated_differs():
    """The most complex samples, for instance, are not dropped in every epoch."""
    dataset = Numbers(23)
    for drop, changed in ((True, 0), (False, 2)):
        samplers, found = ranks_of(dataset, 4, drop_last=drop), set()
        for epoch in range(12):
            seen = Counter(index for d in epoch_of(samplers, epoch) for index in d)
            found |= {index for index in range(23) if seen[index] == changed}
        assert len(found) > 5


@pytest.mark.parametrize("world", [1, 3])
def test_groups(world):
    """Rows stay inside of groups, which are shuffled as wholes; what is left of them comes last."""
    dataset = Numbers(50)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(3)).tolist()
    dealt = epoch_of(ranks_of(dataset, world, group_size=8, drop_last=True, seed=3), 0)
    steps = [sorted(step) for step in zip(*dealt, strict=True)]
    groups = [{index // 8 for index in step} for step in steps]
    if world == 1:
        assert [g.pop() for g in groups] == [group for group in order for _ in range(2 if group == 6 else 8)]
        values = [dataset.values[step[0]] for step in steps]
        sizes = [2 if group == 6 else 8 for group in order]
        parts = torch.tensor(values).split(sizes)
        assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    else:
        assert all(len(g) <= 2 for g in groups[:10])  # one sample is dropped: groups are off by one at most
    unshuffled = epoch_of(ranks_of(dataset, 1, group_size=8, shuffle=False), 0)[0]
    assert unshuffled == [i for g in range(0, 50, 8) for i in sorted(range(g, min(g + 8, 50)), key=dataset.__getitem__)]


def test_rows_do_not_reach_over_groups():
    dataset = Numbers(45)
    dealt = epoch_of(ranks_of(dataset, 3, group_size=10), 1)
    groups = [{index // 10 for index in step} for step in zip(*dealt, strict=True)]
    assert [len(g) for g in groups[:13]] == [1] * 13  # three rows of each of four groups, and one of the last's five


def test_noise():
    dataset = Numbers(400)
    plain, noisy, noisiest = (
        torch.tensor(epoch_of(ranks_of(dataset, 4, random_level=level, shuffle=False), 0)[0]) for level in (0, 0.01, 1)
    )
    values = torch.tensor(dataset.values)
    assert not torch.equal(plain, noisy)
    assert (values[plain].diff() >= 0).all() and not (values[noisy].diff() >= 0).all()
    assert values[noisy].diff().abs().sum() < values[noisiest].diff().abs().sum() / 5


def test_complexities_are_computed_once_and_late():
    dataset, calls = Numbers(30), []
    one = LoadBalancingDistributedSampler(dataset, lambda value: calls.append(value) or value, 2, 0)
    assert len(one) == 15 and not calls and not dataset.read
    for epoch in range(3):
        one.set_epoch(epoch)
        list(one)
    assert len(calls) == dataset.read == 30


def test_a_bar_where_it_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(sampler, "BAR_SECONDS", 0)
    for rank, shown in ((1, False), (0, True)):
        list(LoadBalancingDistributedSampler(Numbers(3000), itself, 2, rank))
        assert ("complexities of samples" in capsys.readouterr().err) == shown
    monkeypatch.undo()
    list(LoadBalancingDistributedSampler(Numbers(30), itself, 2, 0))
    assert not capsys.readouterr().err


# --- how even the work is ---------------------------------------------------------------------------------------------


def texts():
    """Glosses of WordNet where it is installed; otherwise docstrings of Python's."""
    if WORDNET.exists():
        lines = WORDNET.read_text(encoding="utf-8").splitlines()
        return [line.partition(" | ")[2] for line in lines[:8000] if not line.startswith("  ")]
    modules = [torch, torch.nn, torch.Tensor, torch.nn.functional, inspect, warnings, pytest, str, dict]
    found = {inspect.getdoc(getattr(m, name)) or "" for m in modules for name in dir(m)}
    return sorted(line for text in found for line in text.splitlines() if line)


def spread(dealt, lengths, batch):
    """Between the slowest and the fastest rank of each step, added up. A batch is padded to its longest text."""
    costs = torch.tensor([[max(lengths[i] for i in b) * len(b) for b in in_batches(batch)(d)] for d in dealt])
    return int((costs.max(0).values - costs.min(0).values).sum())


@pytest.mark.parametrize("batch", [1, 16])
def test_spread_of_real_lengths(batch):
    lengths = [len(text.split()) for text in texts()]
    assert len(lengths) > 5000 and max(lengths) > 4 * sorted(lengths)[len(lengths) // 2]
    ours = ranks_of(lengths, 4)
    theirs = [DistributedSampler(lengths, 4, rank) for rank in range(4)]
    for epoch in range(2):
        found, before = (spread(epoch_of(each, epoch), lengths, batch) for each in (ours, theirs))
        assert found <= 0.4 * before, (found, before)


# --- batches ----------------------------------------------------------------------------------------------------------


def by_budget(lengths, budget):
    """Batches of at most so much padded work: ranks get different numbers of them."""

    def batches(indices):
        made = [[]]
        for index in indices:
            longest = max(lengths[i] for i in [*made[-1], index])
            if made[-1] and longest * (len(made[-1]) + 1) > budget:
                made.append([])
            made[-1].append(index)
        return made

    return batches


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches(drop_last):
    dataset = Numbers(203)
    batch_fn = by_budget(dataset.values, 2000)
    samplers = [
        LoadBalancingDistributedBatchSampler(one, batch_fn, drop_last) for one in ranks_of(dataset, 3, random_level=0.5)
    ]
    for epoch in range(3):
        dealt = epoch_of(samplers, epoch)
        whole = [batch_fn(d) for d in epoch_of(ranks_of(dataset, 3, random_level=0.5), epoch)]
        counts = {len(batches) for batches in whole}
        count = min(counts) if drop_last else max(counts)
        assert [len(one) for one in samplers] == [count] * 3
        assert dealt == [[batches[i % len(batches)] for i in range(count)] for batches in whole]
        seen = {index for d in dealt for batch in d for index in batch}
        assert drop_last or seen == set(range(203))


@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader(workers):
    dataset = Numbers(40)
    batches = LoadBalancingDistributedBatchSampler(
        LoadBalancingDistributedSampler(dataset, itself, 2, 1), in_batches(6)
    )
    keep = {"persistent_workers": True} if workers else {}
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=workers, **keep)
    for epoch in range(2):
        batches.set_epoch(epoch)
        loaded = [batch.tolist() for batch in loader]
        assert len(loaded) == len(loader) == 4
        assert loaded == [[dataset.values[i] for i in batch] for batch in batches]


# --- going on in the middle of an epoch -------------------------------------------------------------------------------


def both(dataset):
    one = LoadBalancingDistributedSampler(dataset, itself, 2, 1)
    return one, LoadBalancingDistributedBatchSampler(
        LoadBalancingDistributedSampler(dataset, itself, 2, 0), in_batches(3)
    )


@pytest.mark.parametrize("kind", [0, 1])
def test_resume(kind):
    one, other = both(Numbers(40))[kind], both(Numbers(40))[kind]
    one.set_epoch(1)
    whole = list(one)
    iterator = iter(one)
    for _ in range(5):
        next(iterator)
    state = one.state_dict()
    assert state["yielded"] == 5 and state == one.state_dict(yielded=5)
    other.load_state_dict(state)
    assert other.state_dict() == state
    other.set_epoch(1)  # as the loop of a script does
    assert list(other) == whole[5:] == list(iterator)
    assert list(other) == whole
    other.load_state_dict(state)
    other.set_epoch(2)
    one.set_epoch(2)
    assert list(other) == list(one) != whole


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [0, 1])
def test_stateful_dataloader(kind, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    dataset = Numbers(40)

    def loader():
        made = both(dataset)[kind]
        how = {"batch_sampler": made} if kind else {"sampler": made, "batch_size": 3}
        return made, stateful(dataset, num_workers=workers, **how)

    first, loading = loader()
    first.set_epoch(1)
    whole = [batch.tolist() for batch in loading]
    iterator = iter(loading)
    next(iterator), next(iterator)
    state = loading.state_dict()
    second, resumed = loader()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == whole[2:]
    assert (second.sampler if kind else second).epoch == 1
    assert [batch.tolist() for batch in resumed] == whole


# --- bad input --------------------------------------------------------------------------------------------------------


def half(value):
    return value / 2


def broken(value):
    raise KeyError("length")


def huge(value):
    return 2**62


@pytest.mark.parametrize(
    "function, error, text",
    [
        (
            half,
            TypeError,
            r"half returned .*\.[05] for sample 0, a float: a complexity is a whole number",
        ),
        (broken, RuntimeError, "complexity_fn broken raised KeyError for sample 0: 'length'"),
        (huge, ValueError, "complexity_fn huge returned 4611686018427387904 for sample 0"),
    ],
)
def test_bad_complexities(function, error, text):
    one = LoadBalancingDistributedSampler(Numbers(4), function, 2, 0)
    for _ in range(2):
        with pytest.raises(error, match=text):
            iter(one)


def test_whole_numbers_of_other_types():
    for kind in (torch.tensor, lambda value: torch.tensor(value).numpy(), bool):
        list(LoadBalancingDistributedSampler(Numbers(4), kind, 2, 0))


@each(
    "given, error, text",
    [
        ({"dataset": [1, 2, 3], "world_size": 4}, ValueError, "the dataset has 3 samples, fewer than the 4 processes"),
        ({"rank": 2}, ValueError, "rank 2 is none of a world of 2"),
        ({"rank": -1}, ValueError, "rank -1 is none of a world of 2"),
        ({"group_size": 0}, ValueError, "group_size must be 1 or more, not 0"),
        ({"random_level": 1.5}, ValueError, "random_level must be from 0 to 1, not 1.5"),
        ({"complexity_fn": 3}, TypeError, "complexity_fn is called with a sample; 3 cannot be called"),
        ({"dataset": iter([])}, TypeError, "the dataset, a list_iterator, has no length"),
        ({"world_size": None}, RuntimeError, "world_size is not given, and torch.distributed is not initialised"),
    ],
    lambda _: True,
)
def test_bad_arguments(given, error, text):
    arguments = {"dataset": [1, 2, 3], "complexity_fn": itself, "world_size": 2, "rank": 0}
    with pytest.raises(error, match=text):
        LoadBalancingDistributedSampler(**arguments | given)


@pytest.mark.parametrize(
    "function, error, text",
    [
        (lambda indices: None, TypeError, "returned None: it returns a list of lists"),
        (lambda indices: indices, TypeError, "returned .* a list of lists"),
        (lambda indices: [], ValueError, "returned no batch"),
        (lambda indices: [indices, []], ValueError, "returned an empty batch"),
        (lambda indices: [[99]], ValueError, "returned the index 99, which it was not given"),
    ],
)
def test_bad_batches(function, error, text):
    batches = LoadBalancingDistributedBatchSampler(LoadBalancingDistributedSampler(Numbers(4), itself, 2, 0), function)
    with pytest.raises(error, match=text):
        iter(batches)


def test_bad_samplers():
    with pytest.raises(TypeError, match="not a DistributedSampler"):
        LoadBalancingDistributedBatchSampler(DistributedSampler(Numbers(4), 2, 0), in_batches(2))
    with pytest.raises(ValueError, match="drop_last=True: give it to the batch sampler"):
        dropping = LoadBalancingDistributedSampler(Numbers(4), itself, 2, 0, drop_last=True)
        LoadBalancingDistributedBatchSampler(dropping, in_batches(2))


@pytest.mark.parametrize(
    "change, text",
    [
        ({"samples": 5}, "with samples 5, this one has 4"),
        ({"world_size": 4}, "with world_size 4, this one has 2"),
        ({"seed": 1}, "with seed 1, this one has 0"),
        ({"yielded": -1}, "yielded -1, no count"),
        ({"other": 1}, "not the state of a LoadBalancingDistributedSampler"),
    ],
)
def test_bad_states(change, text):
    one = LoadBalancingDistributedSampler(Numbers(4), itself, 2, 0)
    before = one.state_dict()
    with pytest.raises(ValueError, match=text):
        one.load_state_dict({**before, "epoch": 3, **change})
    assert one.state_dict() == before
