"""Examples of many processes (examples/parallel): the engine runs them, and they learn what they learn in PyTorch."""

import importlib
import math

from examples.parallel import shared
from tests.workers import ROOT

SMALL = ["--text", str(ROOT / "LICENSE"), "--batch-size", "4", "--length", "32", "--width", "32", "--layers", "2"]


def compared(name, *given, steps=6, most=0.02, fall=0.5):
    """Trains an example by both backends in the processes that there are. ``most``: by which losses may differ;
    ``fall``: by which they fall at least."""
    module, found = importlib.import_module(f"examples.parallel.{name}"), {}
    for backend in ("eager", "ortmodule"):
        told = [*SMALL, "--steps", str(steps), "--backend", backend, *given]
        args = shared.arguments_of(told, arguments=getattr(module, "arguments", None))
        found[backend] = module.train(args, shared.place())
    ours, theirs = found["ortmodule"], found["eager"]
    assert ours["engine"] >= 0.9 and theirs["engine"] is None, ours
    assert abs(theirs["losses"][0] - math.log(shared.WORDS)) < 0.5, theirs
    assert theirs["losses"][-1] < theirs["losses"][0] - fall, theirs
    for mine, expected in zip(ours["losses"], theirs["losses"], strict=True):
        assert abs(mine - expected) < most, (ours, theirs)
    return "same"


def data_parallel(rank, folder):
    return compared("ddp", "--accumulate", "2")


def ways_of_data_parallel(rank, folder):
    compared("ddp", "--hook", "bf16")
    compared("ddp", "--hook", "powersgd", steps=8, most=0.1)
    compared("ddp", "--static-graph")
    return compared("ddp", "--find-unused-parameters")


def sharded(rank, folder):
    return compared("fsdp2")


def tensor_parallel(rank, folder):
    return compared("tensor_parallel")


def sequence_parallel(rank, folder):
    return compared("tensor_parallel", "--sequence")


def two_dimensions(rank, folder):
    return compared("tensor_parallel", "--data", "2")


def context_parallel(rank, folder):
    return compared("context_parallel")


def pipelines(rank, folder):
    compared("pipeline", "--schedule", "1f1b")
    return compared("pipeline", "--schedule", "interleaved", "--layers", "4")
