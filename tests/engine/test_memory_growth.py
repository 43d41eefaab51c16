"""A process grows in a step by what is predicted: counted at malloc, and where the engine takes blocks."""

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, _core, memory
from tests.selection import each

SOURCE = Path(__file__).with_name("counting_malloc.c")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(32), nn.Linear(32, 10)

    def forward(self, x):
        x = self.norm(self.second(self.first(x).relu())).relu()
        return self.last(x.mean((2, 3))).square().mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.last = nn.LSTM(64, 256, 2, batch_first=True), nn.Linear(256, 8)

    def forward(self, x):
        return self.last(self.cells(x)[0]).square().mean()


class Wide(nn.Module):
    """Its gradients are as large as what forward keeps."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)) for _ in range(4))
        )

    def forward(self, x):
        return self.layers(x).square().mean()


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 1024), nn.Tanh())

    def forward(self, x):
        return self.layers(x)


class NarrowPictures(nn.Module):
    """Convolutions in 16 bits that are products of each image by the same weights."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(c, 3072 - c, 1), nn.ReLU()) for c in (1024, 2048, 1024, 2048))
        )

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x).float().square().mean()


FAMILIES = {
    "attention": (Attention, (32, 128, 128)),  # (a megabyte is of threads' own)
    "pictures": (Pictures, (96, 3, 32, 32)),
    "recurrent": (Recurrent, (64, 64, 64)),
    "perceptron": (Perceptron, (2048, 256)),
    "wide": (Wide, (768, 1024)),
    "narrow pictures": (NarrowPictures, (96, 1024, 7, 7)),
}


def growth(name):
    """(predicted, measured) bytes of a step beside the module and its inputs. The counting malloc is preloaded."""
    count = ctypes.CDLL(os.environ["LD_PRELOAD"]).most_growth
    count.restype = ctypes.c_long
    make, shape = FAMILIES[name]
    torch.manual_seed(0)
    model, x = ORTModule(make()), torch.randn(shape)
    peak = memory.predict(model, x)
    for _ in range(2):  # the first makes the plan
        model.zero_grad(set_to_none=True)
        gc.collect()
        count()
        _core.memory_most()
        before = _core.memory()["used"]
        result = model(x)
        result.backward(torch.ones_like(result))
        small, large = count(), _core.memory_most() - before
        del result
    return peak.total - peak.parameters - peak.inputs, small + large


@pytest.fixture
def grown(tmp_path):
    """:func:`growth` of a family, in a process with the preloaded malloc."""
    if not sys.platform.startswith("linux") or "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("it needs glibc's malloc")
    library = tmp_path / "counting_malloc.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library)], check=True)

    def run(name):
        code = f"from tests.engine.test_memory_growth import growth; print(*growth({name!r}))"
        environment = {**os.environ, "LD_PRELOAD": str(library)}
        result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return tuple(map(int, result.stdout.split()))

    return run


@each("name", list(FAMILIES), ["attention", "wide", "narrow pictures"])
def test_the_process_grows_by_what_is_predicted(name, grown):
    predicted, measured = grown(name)
    assert predicted > 10 << 20 and abs(measured / predicted - 1) <= 0.03, (predicted, measured)
