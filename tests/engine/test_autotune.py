"""Tuning: what is measured is used, kept, read again, and never in the way of training."""

import ctypes
import json
import multiprocessing
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, _core, explain
from ortmodule.core import config
from ortmodule.engine import autotune


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """Sets variables; afterwards nothing is measured or chosen."""

    def set_all(**values):
        for name, value in values.items():
            monkeypatch.setenv(f"ORTMODULE_{name}", str(value))

    config.warn_once.cache_clear()
    _core.tuning_clear()
    autotune._measured.clear()
    yield set_all
    _core.tuning_clear()
    autotune._measured.clear()
    config.warn_once.cache_clear()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 24))


def step(model, dtype=torch.float32, autocast=False):
    """The loss and the gradients."""
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cpu", enabled=autocast):
        loss = model(torch.randn(16, 48, dtype=dtype)).float().square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def products_of(file):
    """{class: entry} that hold here."""
    return autotune._here(json.loads(file.read_text()))["products"]


def used():
    return sum(_core.tuning_uses().values())


def test_products_are_measured_kept_and_read_again(settings, tmp_path):
    folder = tmp_path / "new" / "results"
    settings(ENABLE_TUNING=1, TUNING_RESULTS_PATH=folder)
    model = ORTModule(net())
    step(model)
    report = explain(model)
    products = products_of(folder / autotune.FILE_NAME)
    # y = x w' and dw = dy' x of both layers, dx of the second; and those of the first, small run that checks the graph
    assert report.tuned == len(products) >= 3 and report.seconds["tune"] > 0 and "tuned" in str(report)
    for entry in products.values():
        assert entry["way"] in entry["seconds"] and len(entry["seconds"]) > 1
    before = used()
    values = step(model)
    assert used() > before and explain(model).tuned == report.tuned

    _core.tuning_clear()
    settings(ENABLE_TUNING=0)
    again = ORTModule(net())
    torch.testing.assert_close(step(again), values, rtol=0, atol=0)  # the same file, the same choices, the same bits
    assert explain(again).tuned == 0 and "tune" in explain(again).seconds
    settings(ENABLE_TUNING=1)
    third = ORTModule(net())
    step(third)
    assert explain(third).tuned == 0  # nothing is measured twice


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize(
    "way", ["packed_f32", "packed_bf16", "packed_amx", "packed_amx_f32", "blas", "torch", "reference"]
)
def test_a_forced_choice_runs_and_changes_nothing_but_rounding(settings, tmp_path, way, kind):
    file = tmp_path / "mine.json"
    settings(ENABLE_TUNING=1, TUNING_RESULTS_PATH=file)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    of = (dtype, kind == "autocast")
    expected = step(net().to(dtype), *of)
    step(ORTModule(net().to(dtype)), *of)
    if not file.exists():
        pytest.skip("this CPU has one way for these products, and nothing to measure")
    content = json.loads(file.read_text())
    entries = autotune._here(content)["products"].values()
    can = [way in entry["seconds"] for entry in entries]
    for entry in entries:
        entry["way"] = way
    file.write_text(json.dumps(content))
    _core.tuning_clear()
    settings(ENABLE_TUNING=0)
    model = ORTModule(net().to(dtype))
    before = _core.tuning_uses()
    found = step(model, *of)
    after = _core.tuning_uses()
    changed = {name for name in after if after[name] != before[name]}
    assert changed <= {way} and (way in changed or not any(can))
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if kind == "float32" else {"rtol": 0.05, "atol": 0.5}
    torch.testing.assert_close(found, expected, **tolerance)


def test_sums_left_in_float32_may_be_those_of_mkl(settings, tmp_path):
    """Gradients of weights under autocast: torch's wheels happen to export the product for them."""
    settings(ENABLE_TUNING=1, TUNING_RESULTS_PATH=tmp_path / "mine.json")
    step(ORTModule(net()), autocast=True)
    sums = {c: e["seconds"] for c, e in products_of(tmp_path / "mine.json").items() if c.startswith("bfloat16+c ")}
    torch_has = ctypes.CDLL(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    if not sums or not hasattr(torch_has, "gemm_bf16bf16f32_"):
        pytest.skip("this CPU rounds sums, or this torch has no such product")
    assert all("blas" in seconds for seconds in sums.values())


def test_a_limit_still_measures(settings, tmp_path):
    settings(ENABLE_TUNING=1, MAX_TUNING_DURATION_MS=1)
    model = ORTModule(net())
    step(model)
    assert explain(model).tuned > 0 and list(tmp_path.iterdir()) == []


def test_off_is_off(settings):
    model = ORTModule(net())
    before = used()
    step(model)
    assert model._ortmodule.tuning is None and used() == before and "tune" not in explain(model).seconds


@pytest.mark.parametrize("key", ["device", "engine", "torch"])
def test_entries_for_others_are_left_alone(settings, tmp_path, key):
    file = tmp_path / "results.json"
    theirs = {**autotune._place(), key: "another", "products": {"float32 NN 1x1x1 pairs 1 threads 1": {"way": "blas"}}}
    file.write_text(json.dumps({"results": [theirs]}))
    settings(TUNING_RESULTS_PATH=file)
    before = used()
    step(ORTModule(net()))
    assert used() == before
    settings(ENABLE_TUNING=1)
    step(ORTModule(net()))
    content = json.loads(file.read_text())
    assert theirs in content["results"] and len(content["results"]) == 2 and products_of(file)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"results": 3}', '{"results": [3]}', '{"results": [{"products": 1}]}', "\udcff"]
)
def test_a_damaged_file_is_named_and_kept(settings, tmp_path, text):
    file = tmp_path / "results.json"
    data = text.encode("utf-8", "surrogateescape")
    file.write_bytes(data)
    settings(ENABLE_TUNING=1, TUNING_RESULTS_PATH=file)
    with pytest.warns(UserWarning, match="results.json cannot be used"):
        model = ORTModule(net())
    with pytest.warns(UserWarning, match="results.json cannot be written"):
        step(model)
    assert file.read_bytes() == data and explain(model).captured and explain(model).tuned > 0


@pytest.mark.parametrize(
    "entry, sentence",
    [
        ({"float32 XX 1x1x1 pairs 1 threads 1": {"way": "blas"}}, "no class of products"),
        ({"float32 NN 1x1x1 pairs 1 threads 1": {"way": "abacus"}}, "no way to multiply"),
        ({"float32 NN 1x1x1 pairs 1 threads 1": {}}, "has no way"),
        ({"float32 NN 1x1x1 pairs 1 threads 1": 7}, "has no way"),
    ],
    ids=["class", "way", "empty", "number"],
)
def test_a_bad_entry_is_named_and_the_others_used(settings, tmp_path, entry, sentence):
    file = tmp_path / "results.json"
    settings(ENABLE_TUNING=1, TUNING_RESULTS_PATH=file)
    step(ORTModule(net()))
    content = json.loads(file.read_text())
    autotune._here(content)["products"].update(entry)
    file.write_text(json.dumps(content))
    _core.tuning_clear()
    settings(ENABLE_TUNING=0)
    with pytest.warns(UserWarning, match=sentence):
        model = ORTModule(net())
    before = used()
    step(model)
    assert used() > before


def test_a_place_that_cannot_be_written(settings, tmp_path):
    (tmp_path / "file").write_text("")
    settings(ENABLE_TUNING=1, TUNING_RESULTS_PATH=tmp_path / "file" / "results.json")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = ORTModule(net())
        step(model)
    assert any("results.json cannot be" in str(w.message) for w in caught)
    assert explain(model).captured and explain(model).tuned > 0


def test_nothing_to_read(settings, tmp_path):
    settings(TUNING_RESULTS_PATH=tmp_path / "none.json")
    with pytest.warns(UserWarning, match="there is no such file"):
        step(ORTModule(net()))


@pytest.mark.parametrize(
    "name, value", [("MAX_TUNING_DURATION_MS", "-1"), ("MAX_TUNING_DURATION_MS", "long"), ("ENABLE_TUNING", "perhaps")]
)
def test_a_bad_value(settings, name, value):
    settings(**{name: value})
    with pytest.raises(ValueError, match=name):
        ORTModule(net())


def add_some(file, number):
    for i in range(20):
        autotune._add(file, {f"class {number} {i}": {"way": "blas", "seconds": {}}})


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    file = tmp_path / "results.json"
    context = multiprocessing.get_context("spawn")  # a copy of a process with threads may wait for ever
    writers = [context.Process(target=add_some, args=(file, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert len(products_of(file)) == 60
    assert sorted(os.listdir(tmp_path)) == ["results.json", "results.json.lock"]
