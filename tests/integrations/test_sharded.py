"""DeepSpeed's stages and FSDP2 with real text: losses, reloaded weights, resumed trainings are PyTorch's."""

import importlib.util
import json

import pytest

from tests.integrations.small import WORK
from tests.selection import each
from tests.workers import ROOT, texts_of_ranks

ROADS = ["FSDP2", "DeepSpeed 0", "DeepSpeed 1", "DeepSpeed 2", "DeepSpeed 3"]
STEPS = 6


@each("road", ROADS, ["FSDP2"])
def test_training_saving_and_resuming(road, tmp_path, monkeypatch):
    if road != "FSDP2" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    texts = texts_of_ranks("tests.integrations.sharded_worker", tmp_path, road, str(tmp_path), seconds=400)
    ranks = [json.loads(next(line for line in text.splitlines() if line.startswith('{"theirs"'))) for text in texts]
    assert ranks[0]["reloaded"]
    for found in ranks:
        assert found["ours"] == pytest.approx(found["theirs"], rel=1e-4) and found["ours"][-1] < found["ours"][0]
        assert found["resumed"] == pytest.approx(found["ours"][STEPS // 2 :], rel=1e-5)
        assert found["reports"] and found["share"] >= WORK, found["share"]
        for report in found["reports"]:
            assert report["captured"] and not report["outside"] and report["unreached"] == 0, report
            assert report["engine"] >= WORK * STEPS and report["pytorch"] <= (1 - WORK) * STEPS, report
