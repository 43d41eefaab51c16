"""Times of operators: tables, traces for Perfetto, and the engine's operators in traces of torch.profiler."""

import json
import sys

import pytest
import torch
from torch import nn

import ortmodule
from ortmodule import Config, ORTModule, _core
from ortmodule.__main__ import main
from ortmodule.debug.profile import node_times, train_step
from ortmodule.engine.session import PLAN_MADE
from tests.twins import Doubled


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)

    def forward(self, x):
        y = self.up(self.norm(x))
        return x + self.down(y * 0.5 * (1 + torch.erf(y * 0.5**0.5)))  # what gelu_fusion finds


class Model(nn.Module):
    """Ends with a custom function, which PyTorch runs."""

    def __init__(self):
        super().__init__()
        self.words, self.layers = nn.Embedding(32, 16, padding_idx=0), nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(16, 32)

    def forward(self, ids, labels):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(Doubled.apply(x)).flatten(0, 1), labels.flatten())


def batch(rows=4):
    ids = torch.arange(rows * 6).reshape(rows, 6) % 31
    return ids, torch.where(ids == 0, -100, ids)


def step(model, rows=4):
    train_step(model, batch(rows), {})


def test_times_of_all_steps_between_with_and_its_end():
    model, other = ORTModule(Model()), ORTModule(nn.Linear(3, 3))
    step(model)
    with ortmodule.profile(model) as measured:
        step(model)
        step(model)
        step(model, 5)  # other sizes: a plan that is made here
        other(torch.ones(2, 3))
    runs = [{time.runs for time in times} for times in measured.plans]
    assert not PLAN_MADE and measured.steps == 3 and runs == [{2}, {1}]
    of = {(time.operator, time.module, time.part) for time in measured.times}
    assert ("Embedding", "words", "forward") in of and any(m == "layers.1.up" and p == "backward" for _, m, p in of)
    for rows in (measured.by_operator(), measured.by_module(), measured.by_pass()):
        assert sum(rows.values()) == pytest.approx(measured.seconds) and measured.seconds > 0
        assert list(rows.values()) == sorted(rows.values(), reverse=True)
    assert {"gelu_fusion", "as exported"} <= measured.by_pass().keys()
    parts = {time.part for time in measured.times if time.made_by == "matmul_fusion"}
    assert parts == {"forward", "backward"}  # gradients count with what they are of
    assert {"HostCall", "HostGrad"} <= measured.by_operator().keys()
    assert "by module" in str(measured) and "(the module itself)" in str(measured)
    step(model)
    plans = [p for m in (model, other) for p in m._ortmodule.latest.session.plans.values()]
    assert plans and not any(t.seconds for plan in plans for t in node_times(plan))  # it is over
    assert measured.steps == 3 and [{time.runs for time in times} for times in measured.plans] == runs


def test_what_backward_computes_again_is_told_apart():
    model = ORTModule(Model(), config=Config(memory_opt_level=2))
    with ortmodule.profile(model) as measured:
        step(model)
    made = [time for time in measured.times if time.recomputed]
    assert made and all(time.part == "backward" for time in made)
    assert measured.by_pass()["computed again by backward"] == pytest.approx(sum(time.seconds for time in made))


def test_of_a_plain_module():
    with pytest.raises(TypeError, match="profile.. wants an ORTModule, not Linear"):
        ortmodule.profile(nn.Linear(1, 1))


@pytest.mark.parametrize(
    "name, path",
    [
        ("/layers/layers.0/norm/Add", "layers.0.norm"), ("/Add", ""), ("Add", ""), ("", ""), ("/a/b/Add_1", "a.b"),
        ("/a/a.0/a.0.1/MatMul", "a.0.1"), ("/a/ab/MatMul", "a.ab"), ("/h.1/h.1/x", "h.1.h.1"), ("/ä/ä.0/x", "ä.0"),
        ("/a/a.0/checkpoint#12/b/Add", "a.0.b"), ("/checkpoint#1/a/a.0/Add@3", "a.0"), ("/a/checkpoint#1/Add", "a"),
    ],
)  # fmt: skip
def test_the_submodule_of_a_node(name, path):
    assert _core.module_path(name) == path


# --- a trace for Perfetto ---------------------------------------------------------------------------------------------


def inside(inner, outer):
    start, end = outer["ts"], outer["ts"] + outer["dur"]
    return start - 1e-3 <= inner["ts"] and inner["ts"] + inner["dur"] <= end + 1e-3


def test_a_trace_of_the_engines_own(tmp_path):
    model = ORTModule(Model())
    with ortmodule.profile(model) as measured:
        step(model)
    measured.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    for event in events:
        assert {"name", "ph", "pid", "tid", "ts"} <= event.keys() and event["ph"] in "MX"
        assert event["ph"] == "M" or (event["dur"] >= 0 and event["ts"] >= 0)
    slices = [event for event in events if event["ph"] == "X"]
    operators = [event for event in slices if event["cat"] == "operator"]
    (times,) = measured.plans
    assert [event["name"] for event in operators] == [time.operator for time in times]
    for before, after in zip(operators, operators[1:], strict=False):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    submodules = [event for event in slices if event["cat"] == "module"]
    for event in operators:
        of = event["args"]["module"]
        assert not of or any(inside(event, m) for m in submodules if m["args"]["module"] == of), event
    assert {event["name"] for event in slices if event["cat"] == "part"} == {"forward", "backward"}
    assert sum(event["dur"] for event in operators) == pytest.approx(1e6 * measured.seconds, abs=1)


SCRIPT = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)), torch.ones(16, 8)
"""


def test_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "profiled_by_a_test.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    target = "profiled_by_a_test:make"
    assert main(["profile", target, "--steps", "2", "--trace", "t.json", "--onnx", "mine"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Sequential: ") and "by operator" in text and "by module" in text and "by pass" in text
    trace = json.loads((tmp_path / "t.json").read_text())
    assert {e["args"]["runs"] for e in trace["traceEvents"] if e.get("cat") == "operator"} == {2}
    stages = {path.name for path in tmp_path.glob("mine_*.onnx")}
    assert stages >= {"mine_torch_exported_training.onnx", "mine_execution_model_training.onnx"}
    assert main(["profile", target, "--trace", "none/t.json"]) == 1 and "none" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["profile", target, "--steps", "0"])
    assert "0: the number of steps is 1 or more" in capsys.readouterr().err
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_FORCE_TORCH_FORWARD")
    with pytest.warns(UserWarning, match="asks for it"):
        assert main(["profile", target]) == 1
    assert "PyTorch runs it, so there is nothing of the engine's to measure" in capsys.readouterr().err


# --- torch's profiler -------------------------------------------------------------------------------------------------


def test_torchs_profiler_sees_the_operators(tmp_path):
    model = ORTModule(Model())
    step(model)
    with torch.profiler.profile(record_shapes=True) as profiler, torch.profiler.record_function("a step"):
        step(model)
    profiler.export_chrome_trace(str(tmp_path / "kineto.json"))
    events = json.loads((tmp_path / "kineto.json").read_text())["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    (whole,) = [event for event in events if event["name"] == "a step"]
    ours = {name: [e for e in events if e["name"] == f"ortmodule::{name}"] for name in ("forward", "backward")}
    ran = [e for e in events if e["name"].startswith("ortmodule::") and e not in ours["forward"] + ours["backward"]]
    assert all(inside(e, whole) for e in ran)
    assert all(any(inside(e, part) for part in ours["forward"] + ours["backward"]) for e in ran)
    names = {e["name"] for e in ran}
    assert {"ortmodule::Embedding words", "ortmodule::HostCall"} <= names
    assert any(name.endswith(" layers.1.up") for name in names)
    embedding, *_ = [e for e in ran if e["name"] == "ortmodule::Embedding words"]  # backward may run it again
    assert embedding["args"]["Input Dims"] == [[32, 16], [4, 6]]
    gradients = [e for e in ran if any(inside(e, part) for part in ours["backward"])]
    assert any(e["name"].endswith(" layers.0.down") for e in gradients)
    *_, plan = [p for p in model._ortmodule.latest.session.plans.values() if not p.prologue]  # that adds to gradients
    assert len(ran) >= sum(plan.nodes)


def test_without_a_profiler_a_run_looks_at_one_flag():
    class Name(str):
        asked = 0

        def __hash__(self):
            Name.asked += 1
            return super().__hash__()

    model, profiler = ORTModule(nn.Linear(4, 3)), vars(torch.autograd.profiler)
    train_step(model, (torch.ones(5, 4),), {})
    try:
        _core.profiled_by({"on": False}, Name("on"))
        before = Name.asked
        train_step(model, (torch.ones(5, 4),), {})
        assert Name.asked - before == 2  # a forward and a backward
    finally:
        _core.profiled_by(profiler, "_is_profiler_enabled")
    with pytest.raises(TypeError):
        _core.profiled_by("no dictionary", "on")
