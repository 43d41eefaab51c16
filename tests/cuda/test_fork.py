"""Processes that are forked when a GPU has been used, as a DataLoader's workers are: CUDA is the parent's."""

import gc
import os

import pytest
import torch

from ortmodule import ORTModule, _core
from tests.cuda.test_emulated import driver  # noqa: F401  (a fixture)
from tests.cuda.test_graphs import Step

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

SENTENCE = "CUDA was initialised before this process was forked"


def in_child(work):
    """What ``work`` returns in a child of this process, a text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return text


@pytest.mark.parametrize("what", ["run", "plan", "devices", "number"])
def test_a_child_gets_a_sentence(driver, what):  # noqa: F811
    step = Step()
    step.run(1)
    number = _core.read(torch.tensor(3), 0)

    def work():
        if what == "run":
            step.run(1)
        elif what == "plan":
            Step()
        elif what == "number":
            number.value()
        else:
            _core.cuda_devices()

    assert in_child(work).startswith(f"EngineError: {SENTENCE}")
    assert in_child(lambda: driver.fake_complaint()) == "b''"
    assert number.value() == 3
    step.run(1)


def test_a_child_gives_nothing_back(driver):  # noqa: F811
    """Plans, their graphs and numbers under way are the parent's; a child that ends or collects them leaves them."""
    step = Step()
    for _ in range(3):
        step.run(1)
    assert step.plan.graphs[2] > 0
    kept, calls = [step, _core.read(torch.tensor(3), 0)], driver.fake_calls()
    del step

    def work():
        kept.clear()
        gc.collect()
        return driver.fake_calls() - calls, driver.fake_complaint()

    assert in_child(work) == "(0, b'')"
    kept[0].run(1)


def test_a_child_leaves_the_module_to_pytorch(driver):  # noqa: F811
    """Where PyTorch can compute (its GPU's are not the child's, either) there is a warning that says why."""
    model, x = ORTModule(torch.nn.Linear(3, 2)), torch.randn(4, 3)
    y = model(x)

    def work():
        with pytest.warns(UserWarning, match=SENTENCE):
            torch.testing.assert_close(model(x), y)
        return driver.fake_complaint()

    assert in_child(work) == "b''"
