"""scripts/gpu: what travels, parts that stop and go on, a report; what runs on a GPU is rehearsed without one."""

import ast
import json
import os
import queue
import re
import subprocess
import sys
import time
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ortmodule import _core
from ortmodule.engine.session import Run
from tests.cpu import HAS_AVX512_BF16
from tests.cuda.nvidia import packages
from tests.rehearsal import AS_THERE, ROOT, Rehearsal, interpreter, script

TESTS = """
import pytest

def test_good():
    pass

def test_bad():
    assert {value} == 2, "one is not two"

def test_left_out():
    pytest.skip("no CUDA kernel")
"""


@pytest.fixture
def gpu():
    return script(ROOT)


ABOUT = {"device": "a GPU", "driver": "1.2"}
MACHINE = SimpleNamespace(device="cpu", environment=dict(os.environ), about=lambda: ABOUT)


def part_of_tests(tmp_path, value, name="some tests"):
    file = tmp_path / "test_part.py"
    file.write_text(TESTS.format(value=value))
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    return (name, "tests", [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(file)], {})


def last_part(results):
    return results.journal.records("part")[-1]


# --- the parts --------------------------------------------------------------------------------------------------------


def test_every_part_is_there(gpu):
    kinds = [kind for _, kind, _, _ in gpu.PARTS]
    assert set(kinds) == {"tests", "benchmark"}
    assert len({name for name, *_ in gpu.PARTS}) == len(gpu.PARTS)
    from benchmarks.rows import LARGE, LITTLE

    assert set(gpu.LARGE) == set(LARGE) and set(gpu.LITTLE) == set(LITTLE)


def test_every_test_for_gpus_is_in_one_part(gpu):
    """A file is run whole, or in shares that are all there. Filters by name left out 28 tests of optimizers."""
    commands = [command for _, kind, command, settings in gpu.PARTS if kind == "tests" and not settings]
    for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        ours = [c[c.index("no:cacheprovider") + 1 :] for c in commands if str(file.relative_to(ROOT)) in c]
        if len(ours) == 1:
            assert ours[0] == [str(file.relative_to(ROOT))]
        else:
            n = len(ours)
            expected = [[str(file.relative_to(ROOT)), "--share", f"{i}/{n}"] for i in range(1, n + 1)]
            assert n and ours == expected, f"{file.name}: {ours}"


def test_sanitizers_see_where_tensors_end(gpu):
    """Each is an allocation of its own there: by a setting that torch's allocators know, as many as are at hand."""
    settings = [settings for _, _, command, settings in gpu.PARTS if command[0] == "compute-sanitizer"]
    assert settings == [{"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}] * 3
    for folder in packages():
        if (allocator := folder / "torch" / "lib" / "libc10_cuda.so").exists():
            assert all(name.encode() in allocator.read_bytes() for name in settings[0]), allocator


def test_the_page_names_the_parts(gpu):
    """Figures that are open stand beside the parts that measure them, and each part beside a figure."""
    page = (ROOT / "docs" / "benchmarks-gpu.md").read_text()
    section = page.partition("## Figures that are open")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line[:1] == "|"]
    named = [part.strip() for _, _, _, parts, _ in rows[2:] for part in parts.split(";")]
    found = {part: [n for n, *_ in gpu.PARTS if fnmatch(n, part)] for part in named}
    assert all(found.values()), f"no part has a name like {[part for part in found if not found[part]]}"
    assert {name for names in found.values() for name in names} == {name for name, *_ in gpu.PARTS}


def test_the_page_names_tests_that_are_there():
    """All of them; and each fault that was found by reading has one, or a sentence that says why it has none."""
    page = (ROOT / "docs" / "benchmarks-gpu.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    for file, test in named:
        defined = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert test in defined, f"{file} has no {test}"
    assert not set(re.findall(r"`[^`]*\b(test_\w+)`", page)) - {test for _, test in named}, "a test without its file"
    _, _, *rows = [line for line in page.partition("## What only a GPU can show")[2].splitlines() if line[:1] == "|"]
    for row in rows:
        fault, shown, left = (cell.strip() for cell in row.strip("|").split("|"))
        assert ("::test_" in shown or shown.startswith("none: ")) and left, fault
    assert len(rows) > 15


def test_part_goes_on_where_it_was(gpu, monkeypatch, tmp_path):
    """What has passed is not run again, in another folder either; a failure is in the record with its reason."""
    results = gpu.Results(tmp_path / "results")
    monkeypatch.setattr(gpu, "PARTS", [part_of_tests(tmp_path, 1)])
    assert gpu.run_parts([1], results, MACHINE) == 1
    record = last_part(results)
    assert record["counts"] == {"passed": 1, "failed": 1, "skipped": 1}, results.log.read_text()
    assert "one is not two" in record["failures"][0] and record["state"] == "exit status 1"
    monkeypatch.setattr(gpu, "PARTS", [part_of_tests(tmp_path, 2)])
    later = gpu.Results(tmp_path / "later", since=results.journal.path)
    assert gpu.run_parts([1], later, MACHINE) == 0
    record = last_part(later)
    assert record["counts"] == {"passed": 2, "failed": 0, "skipped": 1} and record["state"] == "done"
    assert "test_good" not in "".join(f["text"] for f in later.journal.records("file")[1:]), "it has run again"


def test_report_has_what_ran_and_nothing_else(gpu, monkeypatch, tmp_path):
    results = gpu.Results(tmp_path / "results")
    absent = ("a tool", "tests", ["no-such-sanitizer"], {})
    never = ("never run", "tests", ["true"], {})
    monkeypatch.setattr(gpu, "PARTS", [part_of_tests(tmp_path, 2), absent, never])
    assert gpu.run_parts([1, 2], results, MACHINE) == 0
    text = (tmp_path / "results" / "report.md").read_text()
    assert "device a GPU, driver 1.2" in text
    assert "| some tests | 2 | 0 | 1 | done |" in text
    assert "not run: there is no no-such-sanitizer" in text
    assert "never run" not in text
    assert {p.name for p in (tmp_path / "results").iterdir()} == {"results.jsonl", "report.md", "log"}


def test_what_a_part_has_kept_is_there_again(gpu, monkeypatch, tmp_path):
    """Of a benchmark: the files of the columns that were measured, as they were written last, and its table."""
    writes = "import sys, pathlib as p; o = p.Path(sys.argv[sys.argv.index('--out') + 1])"
    writes += "; d = o.parent / 'train-columns'; d.mkdir(exist_ok=True); f = d / 'eager.json'"
    writes += "; old = f.read_text() if f.exists() else ''"
    writes += "; f.write_text(old + 'x'); o.with_suffix('.md').write_text('seen ' + old); sys.exit(len(old) < 2)"
    monkeypatch.setattr(gpu, "PARTS", [("columns", "benchmark", [sys.executable, "-c", writes], {"SOME": "1"})])
    results = gpu.Results(tmp_path)
    for expected in ("", "x", "xx"):
        assert gpu.run_parts([1], results, MACHINE) == (expected != "xx")
        assert last_part(results)["table"] == f"seen {expected}", results.log.read_text()


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    from benchmarks.journal import Journal

    journal = Journal(tmp_path / "results.jsonl")
    journal.add("part", part="a")
    with journal.path.open("a") as file:
        file.write('{"kind": "part", "par')
    journal.add("part", part="b")
    assert list(journal.latest("part", "part")) == ["a", "b"]


SLOW = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(60)
"""


def is_running(pid):
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_part_that_takes_too_long_is_stopped(gpu, monkeypatch, tmp_path):
    """With what it has started, which would keep the GPU."""
    slow = [sys.executable, "-c", SLOW, str(tmp_path / "child")]
    monkeypatch.setattr(gpu, "PARTS", [("slow", "benchmark", slow, {})])
    results = gpu.Results(tmp_path / "results")
    assert gpu.run_parts([1], results, MACHINE, seconds=3) == 1
    assert "stopped" in last_part(results)["state"]
    pid = int((tmp_path / "child").read_text())
    for _ in range(100):
        if not is_running(pid):
            break
        time.sleep(0.1)
    assert not is_running(pid)


# --- triage -----------------------------------------------------------------------------------------------------------


class Script:
    """In place of a child: says the events of a list, in which a number is a pause without end."""

    def __init__(self, events):
        self.events, self.ended = list(events), 0

    def next(self, seconds):
        event = self.events.pop(0)
        if event == "nothing":
            raise queue.Empty
        return event

    def end(self):
        self.ended += 1
        return -9

    def why(self):
        return "SIGSEGV: the last line"


def triage(tmp_path, groups, *children, seconds=100):
    """What it makes of children that say these events: {item: record}, and the items that each child was given."""
    from benchmarks.journal import Journal
    from benchmarks.triage import Triage

    journal, given, waiting = Journal(tmp_path / "results.jsonl"), [], list(children)

    def start(names, more, log):
        given.append(list(names))
        return Script(waiting.pop(0))

    Triage(journal, None, time.monotonic() + seconds, [], start).run(groups)
    return journal.latest("triage", "item"), given


def test_triage_goes_on_after_a_crash_and_a_hang(tmp_path):
    from benchmarks.triage import Group

    good = {"state": "ok", "ours": 1.0}
    crash = [{"begin": "a"}, dict(good), {"begin": "b"}, None]
    hang = [{"begin": "c"}, "nothing"]
    found, given = triage(tmp_path, [Group("g", ("a", "b", "c", "d"), 5)], crash, hang, [{"begin": "d"}, dict(good)])
    assert [r["state"] for r in found.values()] == ["ok", "crashed", "stopped", "ok"]
    assert given == [["a", "b", "c", "d"], ["c", "d"], ["d"]]
    assert found["b"]["reason"] == "SIGSEGV: the last line" and "still running after 5 s" in found["c"]["reason"]


def test_triage_names_what_is_left_when_its_time_is_over(tmp_path):
    from benchmarks.triage import Group, chosen

    groups = [Group("g", ("a", "b"), 5), Group("h", ("c",), 5)]
    found, given = triage(tmp_path, groups, seconds=1)
    assert [r["state"] for r in found.values()] == ["left out"] * 3 and not given
    assert [g.items for g in chosen(groups, ["*"], {"a"})] == [("b",), ("c",)]


def test_a_child_that_crashes_is_named(tmp_path):
    """With its signal and its last words; one that hangs is ended."""
    from benchmarks import triage as module

    code = "import os, sys; sys.stderr.write('the last line'); sys.stderr.flush(); os.abort()"
    with (tmp_path / "log").open("w") as log:
        child = module.Child([], [], log, command=[sys.executable, "-c", code])
        assert child.next(30) is None
        assert child.why() == "SIGABRT: the last line"
        child = module.Child([], [], log, command=[sys.executable, "-c", "import time; time.sleep(600)"])
        with pytest.raises(queue.Empty):
            child.next(0.1)
        assert child.end() == -9


def test_every_item_of_triage_can_be_run():
    from benchmarks.triage import GROUPS
    from benchmarks.triage_items import ITEMS

    assert sorted(item for group in GROUPS for item in group.items) == sorted(ITEMS)


def test_results_that_are_wrong_are_named():
    """NaN too, and a gradient that only one side has."""
    from benchmarks.triage_items import compare

    exact, near = {"result": torch.ones(4)}, {"result": torch.tensor([1, 1, 1, 1 + 1e-6])}
    assert compare(near, exact, exact, torch.float32)["state"] == "ok"
    for bad in (torch.zeros(4), torch.tensor([1, 1, 1, torch.nan]), torch.ones(4) + 1e-3):
        found = compare({"result": bad}, exact, exact, torch.float32)
        assert found["state"] == "wrong" and "result is off by" in found["reason"]
    assert compare({**near, "gradient of w": torch.ones(1)}, exact, exact, torch.float32)["state"] == "wrong"


# --- the rehearsal ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    return Rehearsal(tmp_path_factory.mktemp("rehearsal"))


def check_results(rehearsal):
    """Everything is in few files, and it is build/gpu's package that ran."""
    assert len(list(rehearsal.out.rglob("*"))) <= 8
    machine = rehearsal.lines("machine")[-1]
    assert machine["engine"] == str(rehearsal.there / "build" / "gpu" / "ortmodule")
    assert machine["ortmodule"] == "of a rehearsal" and "onnx" in machine["from build/gpu"]


def test_what_travels_is_small(rehearsal):
    """A build with kernels for every architecture is less than 12 MiB larger than one without (docs/benchmarks-gpu.md);
    the stage `kernels-inside` looks at one for sm_90. Nothing of git's travels."""
    sizes = {file.relative_to(rehearsal.clone): file.stat().st_size for file in rehearsal.travelled}
    assert sum(sizes.values()) + (12 << 20) < rehearsal.script.MOST_BYTES
    assert not any(".git" in name.parts or "__pycache__" in name.parts for name in sizes)
    assert not (rehearsal.there / ".git").exists()
    assert any(name.match("build/gpu/packages/onnx/onnx/helper.py") for name in sizes)


def test_nothing_of_the_project_is_installed_there(rehearsal):
    for module in ("ortmodule", "onnx", "pytest", "hypothesis"):
        command = [rehearsal.python, "-P", "-c", f"import {module}"]
        done = subprocess.run(command, cwd="/", env={"PATH": os.defpath}, capture_output=True, text=True)
        assert f"No module named '{module}'" in done.stderr


def test_rehearsal_of_triage(rehearsal):
    """A line for each item that was asked for. That there is no GPU is one of them."""
    print(f"with {rehearsal.source}")
    items = ["device", "engine", "linear *", "llama float32"]
    done = rehearsal.run("triage", "--small", "--seconds", "900", "--items", *items)
    found = {line["item"]: line for line in rehearsal.lines("triage")}
    said = done.stdout + done.stderr + rehearsal.said_in_log()
    assert {name: line["state"] for name, line in found.items() if name != "engine"} == {
        "device": "ok", "linear float32": "ok", "linear bfloat16": "ok", "llama float32": "ok",
    }, said  # fmt: skip
    if not _core.emulated:
        assert found["engine"]["state"] == "failed" and "no CUDA kernels" in found["engine"]["reason"], said
    assert found["llama float32"]["ran"]["captured"]
    assert "| linear float32 | ok |" in (rehearsal.out / "report.md").read_text()
    assert len(list(rehearsal.out.rglob("*"))) <= 8


@pytest.mark.full
def test_rehearsal_of_a_step(rehearsal):
    item = "bert-large ortmodule"
    done = rehearsal.run("triage", "--small", "--seconds", "900", "--items", item)
    found = {line["item"]: line for line in rehearsal.lines("triage")}
    assert found[item]["state"] == "ok" and found[item]["peak"] > 0, done.stdout + done.stderr


@pytest.mark.full
def test_rehearsal_of_a_part(rehearsal):
    """To its end, with pytest from what has travelled."""
    done = rehearsal.run("--part", "1")
    (record,) = rehearsal.lines("part")
    said = done.stdout + done.stderr + rehearsal.said_in_log()
    assert done.returncode == 0 and record["state"] == "done", said
    assert record["counts"]["failed"] == 0 and record["counts"]["passed" if _core.emulated else "skipped"] > 28, said
    check_results(rehearsal)


@pytest.mark.full
@pytest.mark.skipif(interpreter() is None, reason=f"{AS_THERE}: not on this machine (scripts/test-with makes it)")
def test_rehearsal_in_full(rehearsal):
    """All of triage, and a part that measures, to its end, with the machine's versions of PyTorch and Python."""
    rehearsal.run("triage", "--small")
    states = {line["item"]: line["state"] for line in rehearsal.lines("triage")}
    from benchmarks.triage import GROUPS

    assert states.keys() == {item for group in GROUPS for item in group.items}
    names = [name for name, *_ in rehearsal.script.PARTS]
    done = rehearsal.run("--part", str(1 + names.index("bert-small, bfloat16 autocast")), timeout=1200)
    record = rehearsal.lines("part")[-1]
    assert record["state"] in ("done", "stopped: run it again"), done.stdout + done.stderr + rehearsal.said_in_log()
    assert "| eager |" in record["table"] and "| ortmodule |" in record["table"]
    check_results(rehearsal)


# --- what is measured there (benchmarks/large.py) ---------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    from benchmarks import large, rows

    config = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 61, "n_positions": 32}
    row = rows.large("tiny", rows.hf("GPT2LMHeadModel", "GPT2Config", **config), rows.language, 4, 12, 61)
    monkeypatch.setitem(rows.EVERY, "bert-small", row)
    return large, row


def arguments(**more):
    plain = {"device": "cpu", "dtype": torch.float32, "autocast": None, "steps": 3, "memory": 1 << 40, "fill": 0.5}
    plain |= {"together": False}
    return SimpleNamespace(**{**plain, "row": "bert-small", "batch": 4, **more})


@pytest.mark.parametrize("column", ["eager", "ortmodule"])
def test_a_column_is_measured(tiny, column):
    large, row = tiny
    found = large.measure(row, arguments(column=column, autocast=torch.bfloat16))
    assert found["step"]["median"] > 0 and found["first_step"] > 0 and found["peak_bytes"] > 0
    assert found["busy"] is None and 2 < found["loss"] < 6


def test_a_batch_that_fills_memory(tiny):
    large, row = tiny
    assert large.samples_that_fit([(4, 140), (8, 180)], 300) == 16  # 100 bytes and 10 a sample: 20, a multiple of 8
    assert large.samples_that_fit([(4, 140), (8, 180)], 171) == 7
    assert large.samples_that_fit([(4, 140), (8, 180)], 50) == 1
    found = large.look_for_batch(row, arguments())
    assert [count for count, _ in found["points"]] == [4, 8] and found["batch"] % 8 == 0


def test_share_of_time(tiny):
    """Kernels that overlap count once; time before the first and after the last is not looked at."""
    large, _ = tiny
    assert large.share_of_time([]) is None
    assert large.share_of_time([(2, 4), (3, 5), (3, 4), (9, 12), (10, 11)]) == 0.6
    assert large.share_of_time([(0, 10), (2, 3)]) == 1


@pytest.mark.parametrize("name", ["bert-large-padded", "t5-base-padded", "llama-1b-padded"])
def test_half_of_a_batch_is_padding(name):
    from benchmarks.rows import LARGE

    batch = LARGE[name].sized(64)(torch.Generator().manual_seed(0))
    mask, labels = batch["attention_mask"].bool(), batch["labels"]
    assert 0.4 < mask.float().mean() < 0.6 and mask[0].all()
    assert (batch["input_ids"][~mask] == 0).all()
    if name == "llama-1b-padded":
        assert torch.equal(labels != -100, mask)
    elif name == "t5-base-padded":
        assert 0.4 < (labels != -100).float().mean() < 0.6
    else:
        assert (labels[~mask] == -100).all() and (labels != -100).any()


def test_columns_that_are_there_are_not_asked_again(tiny, monkeypatch, tmp_path, capsys):
    """One that failed is asked again; what cannot be measured, and what failed, is in the table with its reason."""
    large, _ = tiny
    asked, answers = [], {"eager": {}, "ortmodule": {}, "liger": {"missing": "Liger-Kernel is not installed"}}
    for name, milliseconds, size in (("eager", 40, 200), ("ortmodule", 20, 120)):
        step = {"median": milliseconds / 1e3, "low": milliseconds / 1e3, "high": milliseconds / 1e3}
        answers[name] = {"step": step, "first_step": 2.0, "peak_bytes": size * 10**9, "busy": 0.985, "loss": 3.5}

    def child(command, **_):
        name = command[command.index("--column") + 1]
        asked.append(name)
        if name in answers:
            Path(command[command.index("--answer") + 1]).write_text(json.dumps(answers[name]))
        return SimpleNamespace(returncode=name not in answers, stderr="Traceback\nRuntimeError: no memory\n")

    monkeypatch.setattr(large.subprocess, "run", child)
    columns = ["eager", "compile", "liger", "ortmodule"]
    args = arguments(columns=columns, fill=None, out=str(tmp_path / "train"))
    assert large.run(args) == 1 and asked == columns
    assert large.run(args) == 1 and asked == [*columns, "compile"]
    text = (tmp_path / "train.md").read_text()
    assert "| compile | failed: RuntimeError: no memory |" in text
    assert "| liger | Liger-Kernel is not installed |" in text
    assert "| ortmodule | 20 ±0 | 200 | 2.00 | – | 120.00 | 60% | 98.5% | 2.0 | 3.500 |" in text
    answers["compile"] = {**answers["eager"], "step": {"median": 0.03, "low": 0.03, "high": 0.03}}
    assert large.run(args) == 0
    assert "| ortmodule | 20 ±0 | 200 | 2.00 | 1.50 |" in (tmp_path / "train.md").read_text()
    assert json.loads((tmp_path / "train.json").read_text())["columns"]["liger"] == answers["liger"]


CHILD = """
import json, pathlib, sys
name, answer, log = sys.argv[1:]
def say(text):
    with open(log, "a") as file: print(text, file=file)
say(f"{name} starts")
if name == "liger": sys.exit("ValueError: no such layer")
print("ready", flush=True)
sys.stdin.readline()
say(f"{name} begins"); say(f"{name} ends")
pathlib.Path(answer).write_text(json.dumps({"missing": name}))
"""


def test_columns_make_ready_together_and_run_in_turn(tiny, monkeypatch, tmp_path):
    """None is measured before all are ready, or have ended, and none beside another."""
    large, _ = tiny
    log = tmp_path / "log"

    def child(args, file, *more):
        assert "--together" in more
        return [sys.executable, "-c", CHILD, more[more.index("--column") + 1], str(file), str(log)]

    monkeypatch.setattr(large, "command", child)
    args = arguments(columns=["eager", "liger", "ortmodule"])
    found = dict(large.ask_together(args, tmp_path, 4))
    assert found["eager"] == {"missing": "eager"} and found["liger"] == {"failed": "ValueError: no such layer"}
    said = log.read_text().splitlines()
    assert sorted(said[:3]) == ["eager starts", "liger starts", "ortmodule starts"]
    assert said[3:] == ["eager begins", "eager ends", "ortmodule begins", "ortmodule ends"]
    assert dict(large.ask_together(args, tmp_path, 4)) == found  # only the one that failed is asked again
    assert log.read_text().splitlines()[7:] == ["liger starts"]


# --- what the engine chooses between (benchmarks/choices.py) ----------------------------------------------------------


@pytest.fixture
def choices(monkeypatch):
    """With small sizes, one of each kind, and short turns."""
    from benchmarks import choices as module

    small = [{**size, "heads": 2} for size in module.ATTENTION[:1] + module.ATTENTION[-1:]]
    for size in small:
        size["length"] = 24
    sizes = {"attention": small, "products": [{**module.PRODUCTS[0], "tokens": 8, "width": 16}]}
    for name, subject in module.SUBJECTS.items():
        monkeypatch.setitem(module.SUBJECTS, name, replace(subject, sizes=sizes[name]))
    monkeypatch.setattr(module, "A_WHILE", 1e-4)
    yield module
    _core.tuning_clear()


def choose(choices, subject, tmp_path):
    code = choices.run(SimpleNamespace(subject=subject, device="cpu", turns=3, out=str(tmp_path / "train")))
    return code, json.loads((tmp_path / "train.json").read_text())["rows"], (tmp_path / "train.md").read_text()


def test_attention_in_both_ways(choices, tmp_path):
    code, rows, text = choose(choices, "attention", tmp_path)
    assert code == 0 and len(rows) == 2
    for row in rows:
        assert all(way["median"] > 0 for way in row["ways"].values())
        assert row["ways"]["one operator"]["kernels"] in ("ours", "torch")
    assert "| bfloat16 | 1 | 24 | False | 2 |" in text and "| float16 | 1 | 24 | True | 2 |" in text
    assert text.count("one operator is faster") == 2


@pytest.mark.parametrize("causal", [False, True])
def test_both_ways_are_attention(choices, causal):
    size = {"dtype": "bfloat16", "batch": 2, "length": 40, "heads": 2, "causal": causal}
    ways, results = choices.attention(size, "cpu"), []
    (a, b), (shape, *_) = [[x.plan.text() for x in ways.values()], [x.dy.shape for x in ways.values()]]
    assert "FusedAttention(" not in a and "FusedAttentionGrad(" in b
    inputs = [x.float().transpose(1, 2).requires_grad_() for x in ways["products"].inputs]
    y = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal).transpose(1, 2)
    for way in ways.values():
        way.inputs, way.dy = ways["products"].inputs, torch.ones(shape, dtype=torch.bfloat16)
        made = Run(way.plan, way.inputs, 0)
        results.append([made.outputs[0], *made.backward([way.dy])])
    expected = [y, *(g.transpose(1, 2) for g in torch.autograd.grad(y.sum(), inputs))]
    for found in results:
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.float() - theirs).abs().max() <= 3e-2 * max(1, theirs.abs().max())


def test_products_in_all_ways(choices, tmp_path):
    code, (row,), text = choose(choices, "products", tmp_path)
    assert code == 0 and list(row["ways"]) == ["chains", "chains, measured", "epilogues", "epilogues, measured"]
    assert (row["ways"]["epilogues, measured"]["products"] > 0) == HAS_AVX512_BF16  # other CPUs have one way for them
    assert "| bfloat16 | 8 | 16 |" in text


def test_rows_that_are_there_are_not_measured_again(choices, monkeypatch, tmp_path):
    """One that failed is, and the table says why."""
    asked, subject = [], choices.SUBJECTS["attention"]

    def ways(size, device):
        asked.append(size["dtype"])
        if len(asked) == 2:
            raise torch.OutOfMemoryError("no memory for scores")
        return subject.ways(size, device)

    monkeypatch.setitem(choices.SUBJECTS, "attention", replace(subject, ways=ways))
    code, _, text = choose(choices, "attention", tmp_path)
    assert code == 1 and "failed: OutOfMemoryError: no memory for scores" in text and "is faster" not in text
    code, rows, text = choose(choices, "attention", tmp_path)
    assert code == 0 and asked == ["bfloat16", "float16", "float16"] and text.count("is faster") == 2
    assert choose(choices, "attention", tmp_path)[1] == rows and len(asked) == 3


def test_from_how_many_scores_on(choices):
    assert choices.faster_from([(1, 0.5), (4, 1.2), (2, 0.9), (8, 1.5)]) == 4
    assert choices.faster_from([(1, 1.5), (4, 1.2), (4, 0.9), (8, 1.5)]) == 8
    assert choices.faster_from([(1, 1.5), (4, 1.2)]) == 1
    assert choices.faster_from([(1, 1.5), (8, 0.9)]) is None
