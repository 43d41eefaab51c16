"""CONV_ALGO_SEARCH=EXHAUSTIVE: of cuDNN's algorithms the one that is measured to be the fastest (dnn_conv.c).

Convolutions are told apart by their sizes, and one that has run stays as it is: every test has sizes of its own.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

from ortmodule import Config, ORTModule, _core, explain
from tests.cuda.failing_calls import FailingCalls
from tests.cuda.test_emulated import driver, library  # noqa: F401  (a fixture)
from tests.cuda.test_graphs import aligned
from tests.cuda.test_products import session

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

WIDTHS = itertools.count(5)
PRODUCTS = 3  # of a convolution: forward, the gradients of the image and of the weights
NOT_SUPPORTED = 3000


@pytest.fixture
def dnn(driver):  # noqa: F811
    """The library, whose heuristic thinks that the first of two algorithms is the faster one, and is wrong."""
    fake = library("libcudnn.so.9")
    _core.tuning_clear()
    fake.fake_dnn_prefer(1)
    yield fake
    fake.fake_dnn_prefer(0)
    fake.fake_dnn_fail(0, 0)
    _core.tuning_clear()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Tanh(), nn.Conv2d(2, 3, 3), nn.Tanh())


def wrapped(search="EXHAUSTIVE", **settings):
    return ORTModule(net(), config=Config(conv_algo_search=search, **settings))


def image(width):
    return torch.randn(2, 2, 4, width, generator=torch.Generator().manual_seed(1))


def step(model, width):
    """The result and the gradients."""
    x = image(width).requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def used(dnn, model, width):
    """(products of one step, how many of them by the second algorithm)."""
    before = dnn.fake_dnn_products(), dnn.fake_dnn_spare()
    step(model, width)
    return dnn.fake_dnn_products() - before[0], dnn.fake_dnn_spare() - before[1]


def test_the_fastest_is_taken(dnn):
    width = next(WIDTHS)
    model = wrapped()
    torch.testing.assert_close(step(model, width), step(net(), width))
    assert used(dnn, model, width) == (PRODUCTS, PRODUCTS)
    assert explain(model).tuned_convolutions == PRODUCTS and f"{PRODUCTS} convolutions" in str(explain(model))

    dnn.fake_dnn_prefer(0)
    again = wrapped()
    step(again, width)
    assert used(dnn, again, width) == (PRODUCTS, PRODUCTS)  # what was measured stays
    assert explain(again).tuned_convolutions == 0


def test_the_best_guess_stays_where_it_is_the_fastest(dnn):
    width = next(WIDTHS)
    dnn.fake_dnn_prefer(0)
    model = wrapped()
    step(model, width)
    assert used(dnn, model, width) == (PRODUCTS, 0) and explain(model).tuned_convolutions == PRODUCTS


def test_without_a_search_it_is_the_librarys_guess(dnn):
    """What has run so stays so."""
    width = next(WIDTHS)
    model = wrapped("HEURISTIC", enable_tuning=True)
    step(model, width)
    assert used(dnn, model, width) == (PRODUCTS, 0) and explain(model).tuned_convolutions == 0
    searching = wrapped()
    step(searching, width)
    assert used(dnn, searching, width) == (PRODUCTS, 0) and explain(searching).tuned_convolutions == 0


def test_an_algorithm_that_is_refused_is_not_chosen(dnn):
    """The second of them, the first time that it is tried; nothing is said, since nothing slower has run."""
    width = next(WIDTHS)
    model = wrapped().eval()
    dnn.fake_dnn_fail(3, NOT_SUPPORTED)  # the first algorithm runs twice before
    with torch.no_grad():
        torch.testing.assert_close(model(image(width)), net()(image(width)))
        spare = dnn.fake_dnn_spare()
        model(image(width))
    assert dnn.fake_dnn_spare() == spare and not explain(model).refused


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dnn, dtype):
    width = next(WIDTHS)
    model = wrapped().to(dtype)
    exact = copy.deepcopy(model._ortmodule.module).double()
    x = image(width).to(dtype)
    model(x), exact(x.double())
    products, spare = dnn.fake_dnn_products(), dnn.fake_dnn_spare()
    torch.testing.assert_close(model(x).double(), exact(x.double()), rtol=2e-2, atol=2e-2)
    assert dnn.fake_dnn_products() - products == dnn.fake_dnn_spare() - spare == 1


def test_every_call_may_fail(dnn, driver):  # noqa: F811
    """While a plan's convolutions are measured: an error, and nothing is held that was not."""
    calls = FailingCalls(driver, every=2)
    for attempt in calls:
        operands = [torch.randn(2, 2, 4, next(WIDTHS)), torch.randn(3, 2, 3, 3)]
        made = session([("Conv", "a b", {"kernel_shape": [3, 3]})], operands)
        plan = made.plan([("float32", tuple(t.shape)) for t in operands], [False] * 2, gpu=torch.device("cpu"))
        needed, *_ = _core.cuda_tune(plan, 0, 0.0, None, 0, False, True)
        memory, held = aligned(needed), driver.fake_held()
        with attempt:
            _core.cuda_tune(plan, 0, 0.0, memory, 0, False, True)
        if not attempt.reached:
            break
        assert not attempt.error or driver.fake_held() == held
        found = made.run(operands, [False] * 2).outputs[0]
        torch.testing.assert_close(found, nn.functional.conv2d(*operands), rtol=1e-5, atol=1e-5)
    assert calls.failures > 3
