"""Examples on several processes: a process is killed and all go on, accelerate, TwinBERT in its four settings."""

import functools
import importlib.util
import os
import re
import shutil
import socket
import sys

import pytest

from examples import processes
from examples.processes import printed, run
from tests.workers import ROOT, package_path, texts_of_ranks

LIMIT = 240  # seconds


def losses_of(folder, processes, steps, *options):
    """{step: loss, as printed last}, all that was printed."""
    given = [f"--folder={folder}", f"--steps={steps}", "--save-every=2", *options]
    environment = {"PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1"}
    text = run("examples.elastic.train", given, processes, LIMIT, ["--max-restarts=1"], **environment)
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) .*loss (\S+)", text)}, text


def test_killed_and_on_another_number_of_processes(tmp_path):
    whole, _ = losses_of(tmp_path / "whole", 1, 8)
    killed, text = losses_of(tmp_path / "killed", 2, 6, "--kill-at=3")
    assert re.search(r"failed \(exitcode: -9\) local_rank: 1", text), text[-3000:]
    assert "step 2 of 2 processes, from 0" in text and "step 2 of 2 processes, from 2" in text
    alone, text = losses_of(tmp_path / "killed", 1, 8)
    assert "step 6 of 1 processes, from 6" in text
    assert sorted(killed | alone) == sorted(whole)
    for step, loss in (killed | alone).items():
        assert loss == pytest.approx(whole[step], abs=2e-4), step


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """The example's processes are forked from one that has imported what they need, which torchrun's import anew."""

    def run_forked(module, given, ranks, limit, options=(), **environment):
        assert not options
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = str(listener.getsockname()[1])
        start = ["tests.distributed.example_worker", tmp_path, port, module, *given]
        imports = ["examples.twinbert.train", "examples.parallel.deepspeed_zero", "torch._dynamo", "deepspeed"]
        return "".join(texts_of_ranks(*start, imports=imports, seconds=limit, ranks=ranks))

    monkeypatch.setattr(processes, "run", run_forked)


@functools.cache
def trained(backend, *given):
    """What DeepSpeed's example measured on each rank."""
    from examples.parallel import deepspeed_zero, shared

    small = ["--steps=6", "--length=32", "--width=32", "--layers=2", f"--text={ROOT / 'LICENSE'}", f"--limit={LIMIT}"]
    told = [*small, *given, f"--backend={backend}"]
    return shared.main("examples.parallel.deepspeed_zero", "", deepspeed_zero.train, deepspeed_zero.arguments, told)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.together  # one process has what they share
@pytest.mark.parametrize("given", [["--stage=3"], ["--stage=2", "--dtype=bfloat16"], ["--pipeline"]])
def test_deepspeed(given, forked):
    """ZeRO and a pipeline learn the same with the engine."""
    plain = ["--pipeline"] if "--pipeline" in given else []  # all stages and types learn the same
    for ours, theirs in zip(trained("ortmodule", *given), trained("eager", *plain), strict=True):
        assert ours["engine"] >= 0.9 and theirs["engine"] is None
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=0.1 if "--dtype=bfloat16" in given else 0.02)
        assert ours["losses"][-1] < ours["losses"][0] - 0.5


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_launch():
    """`accelerate launch` on two processes learns the same with the engine, which runs every step."""
    start = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    start += ["--mixed_precision=no", "--dynamo_backend=no", "-m", "examples.recipes.accelerate_loop", "--steps=12"]
    environment = {"PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    found = {}
    for backend in ("eager", "ortmodule"):
        text = printed([*start, f"--backend={backend}"], LIMIT, **environment)
        found[backend] = sorted(re.findall(r"first_loss (\S+), last_loss (\S+?),?(?:\s|$)", text))
    assert "engine_calls 12, pytorch_calls 0" in text, text[-3000:]
    assert len(found["eager"]) == 2 and len(set(found["eager"])) == 2, found  # each rank has its rows
    for ours, theirs in zip(found["ortmodule"], found["eager"], strict=True):
        # Its dropout draws other numbers.
        assert list(map(float, ours)) == pytest.approx(list(map(float, theirs)), abs=0.05), found
        assert float(ours[1]) < float(ours[0]) - 0.3, found


def assert_settings_train(settings, losses, capsys, *options):
    """The example trains in the engine, or as it is, with losses between these two, and its table has a row for each
    setting. Returns its rows."""
    from examples.twinbert import train

    found = train.main([*options, "--steps", "3", "--limit", str(LIMIT), "--settings", *settings])
    assert list(found) == settings
    text = capsys.readouterr().out
    for setting, ranks in found.items():
        assert len(ranks) == 2 and all(each["fallback"] is None for each in ranks), ranks
        seen = [loss for each in ranks for loss in each["losses"]]
        assert f"| {setting} |" in text and losses[0] < min(seen) and max(seen) < losses[1], ranks
    return found


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("setting", ["ortmodule", "deepspeed"])
def test_twinbert(setting, forked, capsys):
    """The two settings that the next test does not train."""
    small = ["--text", str(ROOT / "LICENSE"), "--batch-size", "4", "--length", "12", "--width", "32", "--layers", "1"]
    assert_settings_train([setting], (0.6, 0.8), capsys, *small)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.skipif(shutil.which("bible") is None, reason="bible-kjv is not installed")
def test_memory_of_twinbert(forked, capsys):
    """Activations, gradients and the optimizer take at most 53 where PyTorch takes 84, as in the original's table.

    What processes take differs by a tenth from run to run: the least of three is theirs.
    """
    settings, measured = ["pytorch", "deepspeed-ortmodule"], []
    for _ in range(3):
        found = assert_settings_train(settings, (0.3, 1.5), capsys, "--layers=3")
        measured.append([max(rank["bytes"] for rank in ranks) for ranks in found.values()])
        theirs, ours = map(min, zip(*measured, strict=True))
        if ours <= 53 / 84 * theirs:
            return
    raise AssertionError((ours, theirs, measured))


def test_benchmark(monkeypatch, capsys):
    """Both wrappers learn the same with the engine and without, which has all of the weights."""
    from benchmarks import sharded

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    small = ["--width", "32", "--layers", "2", "--rows", "2", "--length", "12", "--steps", "2", "--warmup", "1"]
    rows = sharded.main([*small, "--limit", str(LIMIT)])["rows"]
    text = capsys.readouterr().out
    for wrapper in sharded.WRAPPERS:
        ours = rows[f"{wrapper} + ORTModule"]
        assert ours["losses"] == pytest.approx(rows[wrapper]["losses"], rel=1e-4) and len(ours["losses"]) == 3
        assert ours["engine"] >= 0.95 and f"| {wrapper} + ORTModule |" in text
