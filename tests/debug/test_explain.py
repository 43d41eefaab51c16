"""What explain() says is what happened."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain


def step(model, *inputs):
    model(*inputs).square().sum().backward()


def test_before_and_after_a_call():
    model = ORTModule(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    report = explain(model)
    assert not report.captured and report.fallback is None and "no call yet" in str(report)
    step(model, torch.randn(5, 4))
    step(model, torch.randn(6, 4))
    report = explain(model)
    assert report.captured and report.fallback is None
    assert report.aten_ops == [] and report.python_ops == [] and "runs nothing" in str(report)
    assert (report.exports, report.plans) == (1, 2)
    assert report.nodes_exported == 3 and report.nodes_run > 3
    assert report.peak_bytes >= 6 * 3 * 4  # what the ReLU gave is kept for backward
    assert set(report.seconds) >= {"capture", "read", "plan"} and all(t >= 0 for t in report.seconds.values())


def test_what_torch_runs_inside_the_graph_is_named():
    """Convolutions of some size go through torch's own, from C."""
    model = ORTModule(nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3)))
    step(model, torch.randn(4, 16, 20, 20))
    report = explain(model)
    assert report.aten_ops == ["aten::convolution", "aten::convolution_backward"]
    assert "aten::convolution" in str(report)


def test_a_fallback_gives_its_reason():
    class Odd(nn.Module):
        def forward(self, x):
            return x * max(map(max, x.tolist()))

    model = ORTModule(Odd())
    with pytest.warns(UserWarning):
        model(torch.randn(5, 5))
        model(torch.randn(5, 5))
    report = explain(model)
    assert not report.captured and report.fallback and report.fallback in str(report)


def test_not_an_ortmodule():
    with pytest.raises(TypeError, match="not Linear"):
        explain(nn.Linear(1, 1))
