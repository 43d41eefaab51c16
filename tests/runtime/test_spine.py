"""How long the way of a warm call is: files of ours and Python frames before and behind the engine."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import ortmodule
from ortmodule import ORTModule

PACKAGE = str(Path(ortmodule.__file__).parent)
MOST_FILES, MOST_FRAMES = 5, 35


class Frames:
    """The Python functions that are entered inside, in this thread and in those that begin meanwhile."""

    def __init__(self):
        self.found = []

    def _note(self, frame, event, argument):
        if event == "call":
            self.found.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    def __enter__(self):
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        threading.setprofile(None)

    def since(self, name):
        """Those from the first call of ``name`` on."""
        return self.found[next(i for i, (_, function) in enumerate(self.found) if function.endswith(name)) :]


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)


def step(ours, x, y):
    with Frames() as forward:
        loss = ours(x, y)
    with Frames() as backward:
        loss.backward()
    # What torch does between `loss.backward()` and our node is its own.
    return forward.since("_wrapped_call_impl") + backward.since("BackwardCFunction.apply")


def test_a_warm_training_call():
    ours, x, y = ORTModule(MLP()), torch.randn(3, 8), torch.randn(3, 4)
    for _ in range(3):
        ours(x, y).backward()
    frames = [f for f in step(ours, x, y) if not f[1].startswith(("Frames.", "step"))]
    files = {file for file, _ in frames if file.startswith(PACKAGE)}
    shown = "\n".join(f"{Path(file).name}  {name}" for file, name in frames)
    assert len(files) <= MOST_FILES, shown
    assert len(frames) <= MOST_FRAMES, shown
    assert any(name == "Bridge.backward" for _, name in frames)


@pytest.mark.parametrize("rows", [5, 7])
def test_the_first_call_at_a_shape_is_longer(rows):
    """So the count sees what it counts."""
    ours, y = ORTModule(MLP()), torch.randn(rows, 4)
    ours(torch.randn(3, 8), torch.randn(3, 4)).backward()
    assert len(step(ours, torch.randn(rows, 8), y)) > MOST_FRAMES
