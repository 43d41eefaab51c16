"""Whole models on the emulated GPU: training steps are PyTorch's, and PyTorch runs no node of them."""

import pytest

from ortmodule import _core, explain
from tests.models.test_architectures import Pair

pytestmark = [
    pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed"),
    pytest.mark.filterwarnings("ignore"),  # of the exporter and of transformers
]

#: As in tests/models/zoo.py, whose first these are.
NAMES = [
    "gpt2", "llama", "qwen3", "mistral", "opt", "bert", "bert-classifier", "roberta", "distilbert", "electra", "albert",
    "t5", "bart",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_training_steps(name):
    pair = Pair(name)
    pair.check_step(0)
    pair.check_step(1)
    report = explain(pair.ours)
    assert report.captured, report.fallback
    assert not report.aten_ops and not report.python_ops
