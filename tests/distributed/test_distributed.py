"""Processes over gloo: what ORTModule trains is what PyTorch trains. Two of them, and four, run many cases."""

import functools
import json

import pytest

from tests.workers import ROOT, texts_of_ranks

#: (how many processes, case): each is a function of a file here.
CASES = [
    (2, "shard_cases:usual"), (2, "shard_cases:half"), (2, "shard_cases:lengths_of_one_rank"),
    (2, "shard_cases:groups"), (2, "shard_cases:layers_alone"), (2, "shard_cases:wrapped_first"),
    (2, "shard_cases:gpt2"), (2, "shard_cases:prefetch"),
    (2, "wrapper_cases:data_parallel"), (2, "wrapper_cases:overlap"), (2, "wrapper_cases:layers_first"),
    (2, "pipeline_cases:schedules"), (2, "tensor_cases:columns_and_rows"),
    (2, "collective_cases:inside"), (2, "collective_cases:one_captures_alone"),
    (2, "collective_cases:overlap"),
    (2, "collective_cases:one_in_pytorch"), (2, "collective_cases:left_to_pytorch"),
    (2, "collective_cases:context_parallel"), (2, "collective_cases:messages"),
    (2, "tensor_cases:decoders"), (2, "tensor_cases:overlap"), (2, "tensor_cases:sequence"),
    (2, "tensor_cases:modes"), (2, "tensor_cases:left_to_pytorch"),
    (2, "tensor_cases:two_dimensions"),
    (2, "tensor_cases:parallel_loss"), (2, "tensor_cases:data_parallel"),
    (4, "tensor_cases:data_parallel"), (4, "tensor_cases:two_dimensions"),
    (2, "wrapper_cases:without_communication"),
    (2, "example_cases:data_parallel"), (2, "example_cases:ways_of_data_parallel"),
    (2, "example_cases:sharded"), (2, "example_cases:tensor_parallel"),
    (2, "example_cases:sequence_parallel"), (2, "example_cases:context_parallel"),
    (2, "example_cases:pipelines"), (4, "example_cases:two_dimensions"),
    (2, "trainer_cases:trainer_pipeline"), (2, "trainer_cases:trainer_horizontal"),
    (2, "trainer_cases:trainer_checkpoints"), (2, "trainer_cases:trainer_messages"),
    (4, "trainer_cases:trainer_and_data_parallel"),
]  # fmt: skip

#: What the cases import when they run.
LATER = ["torch._dynamo", "torch.export._trace", "torch._functorch.partitioners"]


@functools.cache
def found_by(ranks, folder, names):
    """What each of these cases returned in every process; what they printed."""
    imports = dict.fromkeys(f"tests.distributed.{name.partition(':')[0]}" for name in names)
    start = ("tests.distributed.worker", folder, str(folder), *names)
    texts = texts_of_ranks(*start, imports=[*imports, *LATER], seconds=300, ranks=ranks)
    return [dict(json.loads(line) for line in text.splitlines() if line.startswith('["')) for text in texts], texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return functools.cache(lambda ranks: tmp_path_factory.mktemp(f"of-{ranks}"))


@pytest.fixture
def cases_of(request):
    """The cases of so many processes that this run tests."""

    def cases(ranks):
        ours = [i for i in request.session.items if i.path == request.path and i.originalname == "test_case"]
        return tuple(i.callspec.params["name"] for i in ours if i.callspec.params["ranks"] == ranks)

    return cases


@pytest.mark.together("ranks")
@pytest.mark.parametrize("ranks, name", CASES)
def test_case(ranks, name, folder, cases_of, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    found, texts = found_by(ranks, folder(ranks), cases_of(ranks))
    for results, text in zip(found, texts, strict=True):
        assert results.get(name) == "same", results.get(name) or text[-3000:]
