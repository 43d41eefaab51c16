"""ORTMODULE_CACHE_DIR: a later run exports nothing, and never gets a graph that is not its own."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.capture import export_cache
from ortmodule.core.settings import safe_files
from ortmodule.lowering import export
from tests.twins import Doubled

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join([str(Path(export_cache.__file__).resolve().parents[1]), str(ROOT)])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Net(nn.Module):
    def __init__(self, width=6, scale=2.0, flip=False, rate=0.0):
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)
        self.scale, self.flip, self.rate = scale, flip, rate
        self.table = torch.arange(3.0)

    def forward(self, x, extra=None):
        hidden = nn.functional.dropout(torch.relu(self.first(x)), self.rate, self.training)
        y = self.last(hidden) * self.scale + torch.tensor([1.0, 2.0, 3.0 if self.flip else 4.0]) + self.table
        return y.flip(0) if self.flip else y if extra is None else y + extra


def x(rows=2):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


def run(make=Net, args=(), dtype=torch.float32, train=True, **settings):
    """A step in a fresh wrapper, compared with PyTorch; returns (hits, misses) of its cache."""
    torch.manual_seed(0)
    module = make(**settings).to(dtype).train(train)
    model = ORTModule(module)
    for rows in (2, 5):
        expected = module.forward(x(rows).to(dtype), *args)
        result = model(x(rows).to(dtype), *args)
        torch.testing.assert_close(result, expected)
        result.sum().backward()
    report = explain(model)
    assert report.captured, report.fallback
    return model._ortmodule.compiler.cache.hits, model._ortmodule.compiler.cache.misses


def test_a_later_run_exports_nothing(folder, monkeypatch):
    assert run() == (0, 1)
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(export, "export", lambda *args: pytest.fail("it was exported"))
    assert run() == (1, 0)


def test_another_process(folder):
    assert run() == (0, 1)
    text = "from tests.capture.test_export_cache import run; print(run())"
    environment = {**os.environ, "PYTHONPATH": PATH, "ORTMODULE_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", text], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split("\n")[-2] in ("(1, 0)", "(0, 1)"), done.stderr
    again = subprocess.run([sys.executable, "-c", text], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert again.stdout.split("\n")[-2] == "(1, 0)", again.stderr


class Other(Net):
    """The same tensors and settings, other code."""

    def forward(self, x, extra=None):
        return self.last(torch.tanh(self.first(x))) * self.scale


def test_off_by_default(monkeypatch):
    monkeypatch.delenv("ORTMODULE_CACHE_DIR", raising=False)
    assert ORTModule(Net())._ortmodule.compiler.cache is None


@pytest.mark.parametrize(
    "other",
    [
        {"scale": 2.0000000000000004},
        {"scale": -2.0},
        {"flip": True},
        {"width": 7},
        {"rate": 0.25, "train": True},
        {"make": Other},
        {"dtype": torch.float64},
        {"args": (1.5,)},
    ],
    ids=str,
)
def test_whatever_the_graph_depends_on(other, folder):
    """Made with one, asked for with the other: it is exported again, and right."""
    assert run(train=other.get("train", True)) == (0, 1)
    if "rate" in other:
        torch.manual_seed(0)
        model = ORTModule(Net(rate=0.25))
        assert not torch.equal(model(x()), model(x()))
        assert (model._ortmodule.compiler.cache.hits, model._ortmodule.compiler.cache.misses) == (0, 1)
    else:
        assert run(**other) == (0, 1)
    assert len(list(folder.iterdir())) == 2


def test_options(folder, monkeypatch):
    assert run() == (0, 1)
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "19")
    assert run() == (0, 1)
    assert run() == (1, 0)


def test_versions(folder, monkeypatch):
    assert run() == (0, 1)
    monkeypatch.setattr(export_cache, "_versions", lambda: ("another torch",))
    assert run() == (0, 1)


def test_evaluation_and_autocast_have_graphs_of_their_own(folder):
    def calls(model):
        model(x()).sum().backward()
        model.eval()
        with torch.no_grad():
            model(x())
        with torch.autocast("cpu", torch.bfloat16):
            model(x())
        return model._ortmodule.compiler.cache.hits, model._ortmodule.compiler.cache.misses

    first = calls(ORTModule(Net(rate=0.5)))
    assert first == (0, 3)
    assert calls(ORTModule(Net(rate=0.5))) == (3, 0)


# --- damage, two at a time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["empty", "half", "one bit", "another file"])
def test_a_damaged_file_is_made_again(damage, folder, caplog):
    run()
    file = next(folder.iterdir())
    data = bytearray(file.read_bytes())
    if damage == "one bit":
        data[-20] ^= 1
    file.write_bytes({"empty": b"", "half": bytes(data[: len(data) // 2]), "another file": b"text"}.get(damage, data))
    assert run() == (0, 1)
    assert "damaged" in caplog.text
    assert run() == (1, 0)


def test_nothing_half_written_is_left(folder, monkeypatch, caplog):
    """A disk that is full stops no training."""

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safe_files.os, "replace", full)
    assert run() == (0, 1)
    assert "No space left" in caplog.text and not list(folder.iterdir())


def test_two_processes_at_once(folder):
    text = "from tests.capture.test_export_cache import run\nprint([run(scale=float(s)) for s in range(1, 4)])"
    environment = {**os.environ, "PYTHONPATH": PATH, "ORTMODULE_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", text]
    both = [subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    for process in both:
        process.stdout.close()
    assert len(list(folder.iterdir())) == 3 and all(file.suffix == ".graph" for file in folder.iterdir())


# --- what is not kept -------------------------------------------------------------------------------------------------


def test_own_translations_are_not_kept(folder, caplog):
    from torch.onnx._internal.torchscript_exporter import registration

    registration.registry.register("aten::relu", 18, lambda g, x: g.op("Relu", x), custom=True)
    try:
        assert run() == (0, 0)
        assert not folder.exists() or not list(folder.iterdir())
        assert "not kept" in caplog.text and "translations of operators are registered" in caplog.text
    finally:
        registration.registry.unregister("aten::relu", 18)


class WithFunction(Net):
    def forward(self, x):
        return Doubled.apply(self.first(x))


def test_python_functions_are_not_kept(folder, caplog):
    """They are objects of a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = WithFunction()
        model = ORTModule(module)
        torch.testing.assert_close(model(x()), module.forward(x()))
    assert not list(folder.iterdir())
    assert "not kept" in caplog.text and "calls a function of Python" in caplog.text
