"""torch.profiler and the engine's own on a GPU: operators as they are started, also of steps that are CUDA graphs."""

import pytest
import torch
from torch import nn

import ortmodule
from ortmodule import Config, ORTModule
from ortmodule.debug.profile import train_step


def names(model, x):
    with torch.profiler.profile() as profiler:
        train_step(model, (x,), {})
    return [event.name for event in profiler.events() if event.name.startswith("ortmodule::")]


@pytest.mark.parametrize("graphs", [True, False])
def test_torchs_profiler_sees_steps(graphs):
    torch.manual_seed(0)
    model = ORTModule(nn.Sequential(nn.Linear(8, 16), nn.Tanh()), config=Config(enable_cuda_graphs=graphs))
    x = torch.randn(4, 8)
    for _ in range(4):
        train_step(model, (x,), {})
    found = names(model, x)
    assert found.count("ortmodule::forward") == found.count("ortmodule::backward") == 1
    if not graphs:
        assert any(name.startswith("ortmodule::MatMul") and " " in name for name in found), found


def test_a_profile_measures_what_is_started():
    model = ORTModule(nn.Sequential(nn.Linear(8, 16), nn.Tanh()))
    x = torch.randn(4, 8)
    for _ in range(4):
        train_step(model, (x,), {})
    with ortmodule.profile(model) as measured:
        train_step(model, (x,), {})
    assert measured.steps == 1 and {time.runs for time in measured.times} == {1} and measured.seconds > 0
