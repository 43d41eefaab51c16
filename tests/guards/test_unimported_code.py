"""Code that no import has loaded, of a file or a string, is guarded as that of a module."""

import importlib.util
import runpy
import sys
import types

import pytest
import torch

from ortmodule import DebugOptions, LogLevel, ORTModule, explain

SOURCE = """
import functools
import random
import torch
from torch import nn

SCALE, TABLE, LOG, COUNT = 2.0, {"a": 1.0}, [], 0

def helper(h):
    return h * SCALE

@functools.lru_cache
def halves(n):
    return [n // 2, n - n // 2]

class Number(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * SCALE

class Function(Number):
    def forward(self, x):
        return helper(self.linear(x))

class Item(Number):
    def forward(self, x):
        return self.linear(x) * TABLE["a"]

class Appends(Number):
    def forward(self, x):
        y = self.linear(x)
        LOG.append(y.detach().mean())
        return y

class Counts(Number):
    def forward(self, x):
        global COUNT
        COUNT += 1
        return self.linear(x) * COUNT

class ReadsWhatItAppends(Number):
    def forward(self, x):
        LOG.append(1)
        return self.linear(x) * len(LOG)

class Sets(Number):
    def forward(self, x):
        global SCALE
        y = self.linear(x)
        SCALE = float(y.shape[0])
        return y

class OfAnother(Number):
    \"\"\"Reads an attribute of its class, and one of a class around it.\"\"\"
    factor = 2.0

    def forward(self, x):
        return self.linear(x) * self.factor * Settings.factor

class Settings:
    factor = 3.0

class Draws(Number):
    def forward(self, x):
        return self.linear(x) * (2 if random.random() < 0.5 else 1)

class Remembers(Number):
    def forward(self, x):
        a, b = self.linear(x).split(halves(x.shape[0]))
        return torch.cat([b, a])
"""


def imported(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imported_models", module := types.ModuleType("imported_models"))
    exec(compile(SOURCE, str(path), "exec"), vars(module))
    return vars(module)


def unregistered(path, monkeypatch):
    spec = importlib.util.spec_from_file_location("my_models", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def named_as_the_script(path, monkeypatch):
    """As IPython's `%run` leaves it."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    space = {"__name__": "__main__"}
    exec(SOURCE, space)
    return space


def without_a_name(path, monkeypatch):
    exec(SOURCE, space := {})
    return space


def run_by_path(path, monkeypatch):
    return runpy.run_path(str(path))


WAYS = (imported, unregistered, named_as_the_script, without_a_name, run_by_path)
CLASSES = [line.removeprefix("class ").rstrip(":") for line in SOURCE.splitlines() if line.startswith("class ")]
KINDS = [name.partition("(")[0] for name in CLASSES if name.endswith("Module)") or name.endswith("(Number)")]


def followed(space, kind, engine):
    """Results and globals of calls between which globals change."""
    torch.manual_seed(0)
    module, found = space[kind](), []
    if engine:
        module = ORTModule(module, DebugOptions(log_level=LogLevel.FATAL))
    variables = space[kind].forward.__globals__
    for i, rows in enumerate((2, 3, 2, 4, 2, 5)):
        if i == 2:
            variables["SCALE"], variables["TABLE"]["a"], variables["Settings"].factor = 3.0, 2.0, 5.0
        if i == 4:
            variables["helper"] = lambda h: h * 7
        torch.manual_seed(i)
        variables["random"].seed(i)
        y = module(torch.randn(rows, 4))
        y.sum().backward()
        state = [len(variables["LOG"]), variables["COUNT"], variables["SCALE"]]
        found += [y.detach(), torch.tensor(state, dtype=torch.float64)]
    return module, found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_globals(way, kind, tmp_path, monkeypatch):
    path = tmp_path / "some_models.py"
    path.write_text(SOURCE)
    _, expected = followed(way(path, monkeypatch), kind, False)
    module, found = followed(way(path, monkeypatch), kind, True)
    for i, (ours, eager) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(ours, eager, msg=lambda text, i=i: f"call {i // 2}: {text}")
    if kind in ("Number", "Function", "Item", "OfAnother", "Remembers"):
        assert explain(module).engine_calls
