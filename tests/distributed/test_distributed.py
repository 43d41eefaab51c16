"""Processes over gloo: what ORTModule trains is what PyTorch trains. Two of them, or four, run many cases."""

import functools
import json

import pytest

from tests.selection import each
from tests.workers import ROOT, texts_of_ranks

#: (which processes, case): each is a function of a file here.
CASES = [
    ("pair", "shard_cases:usual"), ("shard", "shard_cases:half"), ("shard", "shard_cases:lengths_of_one_rank"),
    ("shard", "shard_cases:groups"), ("shard", "shard_cases:layers_alone"), ("shard", "shard_cases:wrapped_first"),
    ("shard", "shard_cases:gpt2"), ("shard", "shard_cases:prefetch"),
    ("pair", "wrapper_cases:data_parallel"), ("pair", "wrapper_cases:overlap"), ("pair", "wrapper_cases:layers_first"),
    ("pair", "pipeline_cases:schedules"), ("pair", "tensor_cases:columns_and_rows"),
    ("pair", "collective_cases:inside"), ("pair", "collective_cases:one_captures_alone"),
    ("pair", "collective_cases:overlap"),
    ("pair", "collective_cases:one_in_pytorch"), ("shard", "collective_cases:left_to_pytorch"),
    ("shard", "collective_cases:context_parallel"), ("pair", "collective_cases:messages"),
    ("pair", "tensor_cases:decoders"), ("pair", "tensor_cases:overlap"), ("shard", "tensor_cases:sequence"),
    ("shard", "tensor_cases:modes"), ("shard", "tensor_cases:left_to_pytorch"),
    ("shard", "tensor_cases:two_dimensions"),
    ("pair", "tensor_cases:parallel_loss"), ("shard", "tensor_cases:data_parallel"),
    ("four", "tensor_cases:data_parallel"), ("four", "tensor_cases:two_dimensions"),
    ("pair", "wrapper_cases:without_communication"),
    ("pair", "example_cases:data_parallel"), ("shard", "example_cases:ways_of_data_parallel"),
    ("pair", "example_cases:sharded"), ("pair", "example_cases:tensor_parallel"),
    ("shard", "example_cases:sequence_parallel"), ("pair", "example_cases:context_parallel"),
    ("pair", "example_cases:pipelines"), ("four", "example_cases:two_dimensions"),
]  # fmt: skip
SHORT = [case for case in CASES if case[0] == "pair"]


@functools.cache
def found_by(ranks, folder, names):
    """What each of these cases returned in every process; what they printed."""
    texts = texts_of_ranks(["-m", "tests.distributed.worker"], folder, str(folder), *names, seconds=300, ranks=ranks)
    return [dict(json.loads(line) for line in text.splitlines() if line.startswith('["')) for text in texts], texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return functools.cache(lambda pair: tmp_path_factory.mktemp(pair))


@pytest.fixture
def cases_of(request):
    """The cases of a pair that this run tests."""

    def cases(pair):
        full = request.config.getoption("--full")
        ours = [i for i in request.session.items if i.path == request.path and i.originalname == "test_case"]
        parameters = [i.callspec.params for i in ours if full or not i.get_closest_marker("full")]
        return tuple(each["name"] for each in parameters if each["pair"] == pair)

    return cases


@pytest.mark.together("pair")
@each("pair, name", CASES, SHORT)
def test_case(pair, name, folder, cases_of, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    found, texts = found_by(4 if pair == "four" else 2, folder(pair), cases_of(pair))
    for results, text in zip(found, texts, strict=True):
        assert results.get(name) == "same", results.get(name) or text[-3000:]
