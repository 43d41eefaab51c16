"""Samplers under ONNX Runtime's names: what scripts that import them rely on."""

import json

import pytest
import torch

from ortmodule import compat
from tests.compat.test_compat import python

COUNT, GROUP, BATCH = 90, 8, 11

#: Prints what each kind of sampler deals to each rank, in several epochs: [epoch][rank][index, or batch of them].
SCRIPT = f"""if True:
    import json, torch
    from onnxruntime.training.utils.data import LoadBalancingDistributedSampler as Sampler
    from onnxruntime.training.utils.data.sampler import LoadBalancingDistributedBatchSampler as BatchSampler

    class Rows(torch.utils.data.Dataset):  # pairs of a tensor and its complexity
        def __len__(self): return {COUNT}
        def __getitem__(self, index): return torch.tensor([float(index)]), COMPLEXITIES[index]

    COMPLEXITIES = torch.arange({COUNT // 2}).repeat(2)[torch.randperm({COUNT})].tolist()

    def dealt(world, batch_fn=None, **options):
        ranks = [Sampler(Rows(), complexity_fn=lambda row: row[1], world_size=world, rank=rank, **options)
                 for rank in range(world)]
        ranks = ranks if batch_fn is None else [BatchSampler(rank, batch_fn) for rank in ranks]
        found = []
        for epoch in range(3):
            for rank in ranks:
                if epoch: rank.set_epoch(epoch)  # as scripts that have only one do not
            found.append([list(rank) for rank in ranks])
        return found

    def batches(indices):
        return [indices[i : i + {BATCH}] for i in range(0, len(indices), {BATCH})]

    print(json.dumps({{
        "complexities": COMPLEXITIES,
        "ordered": dealt(2, shuffle=False), "shuffled": dealt(2, shuffle=True),
        "groups": dealt(1, shuffle=False, group_size={GROUP}),
        "shuffled groups": dealt(1, shuffle=True, group_size={GROUP}),
        "batches": dealt(1, batches, shuffle=False), "batches of two": dealt(2, batches),
    }}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    compat.enable(site)
    code, out, error = python(site, "-c", SCRIPT)
    assert code == 0, error
    return json.loads(out)


def work(found, indices):
    return [found["complexities"][index] for index in indices]


def groups_of(found):
    """The dataset's groups, each from the least complex sample to the most, as complexities."""
    every = found["complexities"]
    return [sorted(every[i : i + GROUP]) for i in range(0, COUNT, GROUP)]


def test_without_shuffling_no_rank_gets_easier_samples_later(found):
    for epoch in found["ordered"]:
        for rank in epoch:
            assert work(found, rank) == sorted(work(found, rank))


def test_ranks_have_as_much_to_do_in_each_step(found):
    """There are two samples of each complexity, and two ranks."""
    for epoch in found["shuffled"]:
        first, second = (work(found, rank) for rank in epoch)
        assert first == second and first != sorted(first)


def test_groups_are_sorted_where_they_are(found):
    for (rank,) in found["groups"]:
        assert work(found, rank) == sum(groups_of(found), [])


def test_sorted_groups_are_shuffled_by_the_seed_alone(found):
    """Their order is a permutation by the seed, 0 by default, and the epoch."""
    groups = groups_of(found)
    for epoch, (rank,) in enumerate(found["shuffled groups"]):
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(epoch)).tolist()
        assert work(found, rank) == sum((groups[i] for i in order), []), epoch


def test_batches_are_those_of_the_function(found):
    for epoch, (rank,) in enumerate(found["batches"]):
        assert [len(batch) for batch in rank] == [BATCH] * (COUNT // BATCH) + [COUNT % BATCH], epoch


@pytest.mark.parametrize("kind", ["ordered", "shuffled", "groups", "shuffled groups", "batches", "batches of two"])
def test_every_epoch_has_each_sample_once(kind, found):
    """The second and later ones, too."""
    for epoch in found[kind]:
        seen = [index for rank in epoch for index in rank]
        seen = sum(seen, []) if kind.startswith("batches") else seen
        assert sorted(seen) == list(range(COUNT))
    if "shuffled" in kind or kind.endswith("two"):
        assert found[kind][0] != found[kind][1] != found[kind][2]
