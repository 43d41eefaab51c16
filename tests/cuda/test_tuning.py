"""Tuning on a GPU: of cuBLASLt's algorithms the one that is measured to be the fastest (blas_tune.c).

Products are told apart by their sizes, and one that has run stays as it is: every test has sizes of its own.
"""

import gc
import itertools
import json

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, _core, explain
from ortmodule.core import config
from ortmodule.engine import autotune
from tests.cuda.failing_calls import FailingCalls
from tests.cuda.test_emulated import driver, library  # noqa: F401  (a fixture)
from tests.cuda.test_epilogues import Fixed, layers
from tests.cuda.test_graphs import aligned

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

WIDTHS = itertools.count(101, 2)


@pytest.fixture
def blas(driver, monkeypatch):  # noqa: F811
    """The library; ``settings`` sets variables. Afterwards nothing is chosen."""
    fake = library("libcublasLt.so.13")
    fake.settings = lambda **values: [monkeypatch.setenv(f"ORTMODULE_{n}", str(v)) for n, v in values.items()]

    def forget():
        _core.tuning_clear()
        autotune._measured.clear()
        config.warn_once.cache_clear()

    forget()
    yield fake
    fake.fake_blas_fastest(0, -1)
    driver.fake_captured_by_others(0)
    forget()


def net(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 24), nn.GELU(approximate="tanh"), nn.Linear(24, width))


def step(model, width):
    """The loss and the gradients."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(torch.randn(7, width)).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def used(blas):
    return [blas.fake_blas_used(i) for i in range(4)]


def steps_use(blas, model, width):
    """{answer: how many products ran by it} of one step."""
    before = used(blas)
    step(model, width)
    return {i: n - b for i, (n, b) in enumerate(zip(used(blas), before, strict=True)) if n != b}


def entries(file):
    return autotune._here(json.loads(file.read_text()), _core.cuda_place(0))["products"]


def test_the_fastest_is_taken_kept_and_read_again(blas, tmp_path):
    width, file = next(WIDTHS), tmp_path / "results.json"
    blas.settings(ENABLE_TUNING=1, TUNING_RESULTS_PATH=file)
    blas.fake_blas_fastest(2, -1)
    model = ORTModule(net(width))
    values = step(model, width)
    torch.testing.assert_close(values, step(net(width), width))
    assert steps_use(blas, model, width) == {2: 5}  # two products of forward, three of backward
    report, products = explain(model), entries(file)
    assert report.tuned == len(products) >= 5 and report.seconds["tune"] > 0
    for entry in products.values():
        assert set(entry["seconds"]) == {"0", "1", "2"} and min(entry["seconds"], key=entry["seconds"].get) == "2"
    assert {"164", "208"} <= {text.split("epilogue ")[1].split()[0] for text in products}

    _core.tuning_clear()
    blas.settings(ENABLE_TUNING=0)
    blas.fake_blas_fastest(0, -1)
    again = ORTModule(net(width))
    assert all(torch.equal(a, b) for a, b in zip(step(again, width), values, strict=True))
    assert steps_use(blas, again, width) == {2: 5} and explain(again).tuned == 0
    blas.settings(ENABLE_TUNING=1)
    third = ORTModule(net(width))
    step(third, width)
    assert steps_use(blas, third, width) == {2: 5} and explain(third).tuned == 0  # nothing is measured twice


def test_without_tuning_it_is_the_librarys_guess(blas):
    width = next(WIDTHS)
    blas.fake_blas_fastest(2, -1)
    model = ORTModule(net(width))
    assert steps_use(blas, model, width).keys() == {0}


def test_the_benchmark_goes_back_and_forth(blas):
    """Between the guess and what was measured, for products that have run (benchmarks/choices.py)."""
    from benchmarks import choices

    blas.fake_blas_fastest(2, -1)
    ways = choices.products({"dtype": "bfloat16", "tokens": 8, "width": 16}, "cpu")
    assert [way.notes.get("other than guessed", 0) > 0 for way in ways.values()] == [False, True, False, True]
    assert "MatMulGelu(" in ways["epilogues"].plan.text() and "MatMulGelu(" not in ways["chains"].plan.text()
    for name, way in [*ways.items(), *ways.items()]:
        way.prepare()
        before = used(blas)
        way.step()
        answers = {i for i, (n, b) in enumerate(zip(used(blas), before, strict=True)) if n != b}
        assert answers == ({2} if "measured" in name else {0})


def test_what_has_run_stays_as_it_is(blas):
    width = next(WIDTHS)
    first = ORTModule(net(width))
    step(first, width)
    blas.settings(ENABLE_TUNING=1)
    blas.fake_blas_fastest(1, -1)
    second = ORTModule(net(width))
    assert steps_use(blas, second, width).keys() == {0} and explain(second).tuned == 0
    assert steps_use(blas, first, width).keys() == {0}


def test_a_choice_holds_when_the_library_is_told_anew(blas):
    """So many products that all are forgotten."""
    width = next(WIDTHS)
    blas.settings(ENABLE_TUNING=1)
    blas.fake_blas_fastest(2, -1)
    model = ORTModule(net(width))
    step(model, width)
    blas.fake_blas_fastest(0, -1)
    from tests.cuda.test_products import PLAIN, session

    for n in range(1, 1100):
        a, b = torch.randn(1, 3), torch.randn(3, n)
        session(PLAIN, [a, b]).run([a, b], [False] * 2)
    assert steps_use(blas, model, width) == {2: 5}


def test_an_answer_that_does_not_run_is_not_chosen(blas, tmp_path):
    width, file = next(WIDTHS), tmp_path / "results.json"
    blas.settings(ENABLE_TUNING=1, TUNING_RESULTS_PATH=file)
    blas.fake_blas_fastest(1, 1)
    model = ORTModule(net(width))
    torch.testing.assert_close(step(model, width), step(net(width), width))
    assert steps_use(blas, model, width) == {0: 5}
    assert all(set(entry["seconds"]) == {"0", "2"} for entry in entries(file).values())


def test_nothing_is_measured_during_a_capture(blas, driver):  # noqa: F811
    """Of the caller's: a plan that is there already is not measured, and none is made."""
    width = next(WIDTHS)
    rows, _ = layers(True, True, True)
    fixed = Fixed(rows, [torch.randn(s) for s in [(7, width), (24, width), (width, 24), (24,)]])
    needed, *_ = _core.cuda_tune(fixed.plan, 0)
    blas.settings(ENABLE_TUNING=1)
    model = ORTModule(net(width))
    driver.fake_captured_by_others(1)
    assert _core.cuda_tune(fixed.plan, 0, 0.0, aligned(needed))[1] == []
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        step(model, width)
    driver.fake_captured_by_others(0)
    step(model, width)
    assert explain(model).tuned > 0


def test_steps_as_graphs_use_the_choice(blas):
    width = next(WIDTHS)
    blas.fake_blas_fastest(2, -1)
    rows, _ = layers(True, True, True)
    fixed = Fixed(rows, [torch.randn(s) for s in [(7, width), (24, width), (width, 24), (24,)]])
    needed, *_ = _core.cuda_tune(fixed.plan, 0)
    _, found, _ = _core.cuda_tune(fixed.plan, 0, 0.0, aligned(needed))
    first, before = fixed.step(graphs=False), used(blas)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(fixed.step(), first, strict=True))
    assert fixed.plan.graphs[2] >= 3 and len(found) == 5 + 1  # the first operand has a gradient, too
    assert [n - b for n, b in zip(used(blas), before, strict=True)] == [0, 0, 4 * 6, 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda text, way: (text, "zz" * 64),
        lambda text, way: (text, way[:-1]),
        lambda text, way: (text.replace("float32", "float31"), way),
        lambda text, way: (text + " ", way),
    ],
)
def test_entries_that_are_none(blas, tmp_path, change):
    """One sentence, and the library's guess."""
    width, file = next(WIDTHS), tmp_path / "results.json"
    blas.settings(ENABLE_TUNING=1, TUNING_RESULTS_PATH=file)
    blas.fake_blas_fastest(2, -1)
    step(ORTModule(net(width)), width)
    content = json.loads(file.read_text())
    place = autotune._here(content, _core.cuda_place(0))
    changed = (change(text, entry["way"]) + (entry,) for text, entry in place["products"].items())
    place["products"] = {text: {**entry, "way": way} for text, way, entry in changed}
    file.write_text(json.dumps(content))
    _core.tuning_clear()
    config.warn_once.cache_clear()
    blas.settings(ENABLE_TUNING=0)
    with pytest.warns(UserWarning, match="holds an entry that is not used"):
        model = ORTModule(net(width))
        step(model, width)
    assert steps_use(blas, model, width).keys() == {0}


def test_an_algorithm_of_another_library_is_not_used(blas, tmp_path):
    """The file says that it is of this version, the library does not take it."""
    width, file = next(WIDTHS), tmp_path / "results.json"
    blas.settings(ENABLE_TUNING=1, TUNING_RESULTS_PATH=file)
    step(ORTModule(net(width)), width)
    content = json.loads(file.read_text())
    for entry in autotune._here(content, _core.cuda_place(0))["products"].values():
        entry["way"] = "0" * 15 + "1" + "0" * 112
    file.write_text(json.dumps(content))
    _core.tuning_clear()
    blas.settings(ENABLE_TUNING=0)
    model = ORTModule(net(width))
    torch.testing.assert_close(step(model, width), step(net(width), width))
    assert steps_use(blas, model, width) == {0: 5}


def test_the_place_names_gpu_and_library(blas):
    assert _core.cuda_place(0) == "emulated (sm_90), cuBLASLt 13.1.0"
    with pytest.raises(_core.Error, match="there is no cuda:7"):
        _core.cuda_place(7)


def test_every_call_may_fail(blas, driver):  # noqa: F811
    """While a plan's products are measured: an error, and nothing is held that was not."""
    from tests.cuda.test_products import SUM, session

    calls = FailingCalls(driver, every=4)
    for attempt in calls:
        operands = [torch.randn(3, 5), torch.randn(5, attempt.n), torch.randn(attempt.n)]
        s = session(SUM, operands)
        plan = s.plan([("float32", tuple(t.shape)) for t in operands], [False] * 3, None, gpu=torch.device("cpu"))
        needed, found, _ = _core.cuda_tune(plan, 0)
        assert needed > 0 and found == []
        memory, held = aligned(needed), driver.fake_held()
        with attempt:
            _core.cuda_tune(plan, 0, 0.0, memory)
        if not attempt.reached:
            break
        assert not attempt.error or driver.fake_held() == held
        del plan
        gc.collect(1)
        torch.testing.assert_close(s.run(operands, [False] * 3).outputs[0], operands[0] @ operands[1] + operands[2])
    assert calls.failures > 5
