"""Paths belong to layers, and lines put layers of one list that are alike together."""

import pytest

from ortmodule.debug.layers import LayerReport, layer_lines, layer_of


@pytest.mark.parametrize(
    "path, layer",
    [
        ("encoder.layers.0.norm", "encoder.layers.0"), ("layers.11", "layers.11"), ("0", "0"),
        ("bert.embeddings.norm", "bert.embeddings"), ("head", "head"), ("", ""),
    ],
)  # fmt: skip
def test_layer_of(path, layer):
    assert layer_of(path) == layer


def report(path, exported=3, **others):
    counts = {"forward": 2, "backward": 4, "fused": 1, "recomputed": 0, "islands": 0} | others
    return LayerReport(path, exported, **counts)


def test_one_line():
    assert str(report("head")) == "head: 3 nodes exported, 2 + 4 run, 1 of them fused"
    assert str(report("", recomputed=5, islands=1)) == (
        "(the module itself): 3 nodes exported, 2 + 4 run, 1 of them fused, 5 compute again, 1 by PyTorch"
    )


def test_layers_that_are_alike():
    layers = [report("layers.0"), report("layers.1"), report("layers.2", exported=4), report("head"), report("tail")]
    lines = layer_lines(layers)
    assert [line.partition(":")[0] for line in lines] == ["layers.0 to 1, each", "layers.2", "head", "tail"]
