"""What a capture may and may not assume, and what it must leave alone."""

import array
import copy
import random
import threading
import warnings
import weakref

import numpy
import pytest
import torch
from torch import nn
from transformers import DynamicCache

from ortmodule import LogLevel, ORTModule, explain
from tests.twins import Pair, made, rows

pytestmark = pytest.mark.filterwarnings("ignore")


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_decision_about_data():
    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else self.linear(x) * 2

    pair = Pair(forward)
    for sign in (1, 1, -1, 1, -1):
        report = pair.check(rows(3, 4).abs() * sign)
    assert report.exports <= 4


def test_a_decision_about_the_whole_batch():
    """True for every part of the batch, not for all of it."""
    pair = Pair(lambda self, x: self.linear(x) * (2 if (x.sum() > 30).item() else 1))
    pair.check(torch.ones(64, 4))
    pair.check(torch.ones(4, 4))


def test_a_number_out_of_the_data():
    """Of one that is text a graph is for the value."""
    pair = Pair(lambda self, x: self.linear(x) * float(str(x.max().item())))
    for seed in range(3):
        torch.testing.assert_close(pair.ours(rows(3, 4, seed=seed)), pair.eager(rows(3, 4, seed=seed)))


def test_a_decision_about_a_buffer():
    def forward(self, x):
        return self.linear(x) if self.buffer.sum() > 0 else -self.linear(x)

    pair = Pair(forward)
    pair.check(rows(3, 4))
    for model in (pair.ours, pair.eager):
        model.buffer.neg_()
    assert pair.check(rows(3, 4)).exports == 2


def test_values_that_become_constants():
    """`torch.tensor` of a number that was computed from the data has no trace."""
    pair = Pair(
        lambda self, x: self.linear(x) + torch.as_tensor(x.detach().numpy().sum() if not x.requires_grad else 0)
    )
    pair.check(rows(30, 4), captured=False)
    assert "values out of a tensor" in explain(pair.ours).fallback


def test_memory_that_is_taken_and_filled():
    """By slices, as users do, it is in the graph; PyTorch fills some unseen by the tracer (lengths of `ctc_loss`)."""

    def by_slices(self, x):
        y = torch.empty(x.shape[0], 8)
        y[:, :4], y[:, 4:] = self.linear(x), x
        return y[:1].expand_as(torch.empty_like(y)) + torch.empty(0).sum() + torch.zeros_like(torch.empty_like(y))

    def by_pytorch(self, x):
        scores = self.linear(x).log_softmax(-1)
        lengths = (x.size(0),) * x.size(1)
        labels = torch.ones(2 * x.size(1), dtype=torch.int64)
        return nn.functional.ctc_loss(scores, labels, lengths, (2,) * x.size(1), reduction="mean", zero_infinity=True)

    Pair(by_slices).check(rows(3, 4))
    pair = Pair(by_pytorch)
    for n in (6, 9, 6):
        for _ in range(3):
            pair.check(rows(n, 3, 4))


def test_random_decisions():
    pair = Pair(lambda self, x: self.linear(x) if torch.rand([]) < 0.5 else x)
    pair.ours(rows(2, 4))
    assert "random" in explain(pair.ours).fallback
    never = Pair(lambda self, x: self.linear(x) if torch.rand([]) < 0.0 else x * 2)
    never.check(rows(2, 4))


def test_whether_numbers_overflow_is_asked_behind_dropout():
    def forward(self, x):
        y = nn.functional.dropout(self.linear(x), 0.5)
        return y if torch.isfinite(y).all() and not torch.isnan(y).any() else y.nan_to_num(0.0, 0.0, 0.0)

    ours = ORTModule(made(forward))
    for n in (3, 5, 3):
        y = ours(torch.randn(n, 4))
        assert 0 < (y == 0).sum() < y.numel()
        y.sum().backward()
    report = explain(ours)
    assert report.captured and report.exports == 1 and not report.python_ops
    y = ours(torch.full((3, 4), torch.inf))
    assert y.isfinite().all() and not y.any()  # in the engine or in PyTorch


def test_dropout_that_drops_nothing_draws_nothing():
    pair = Pair(lambda self, x: self.linear(x) if nn.functional.dropout(x, 0.0).sum() > 0 else -self.linear(x))
    for sign in (1, -1, 1):
        pair.check(sign * torch.ones(3, 4))
    assert explain(pair.ours).captured and not explain(pair.ours).python_ops


def test_numbers_among_the_arguments():
    pair = Pair(lambda self, x, scale, flag=False: self.linear(x) * scale if flag else self.linear(x) + scale)
    for scale, flag, exports in ((1, False, 1), (2, False, 2), (1, True, 3), (1, False, 3), (1.0, False, 4)):
        assert pair.check(rows(2, 4), scale, flag=flag).exports == exports
    for i in range(20):  # one that changes is an input of the graph
        assert pair.check(rows(2, 4), i + 0.5).exports <= 6
    pair.check(rows(2, 4), 1)


def test_a_change_that_autograd_does_not_see():
    def forward(self, x):
        y = self.linear(x).sin()
        y.detach().view(-1).add_(1)
        return y * y

    pair = Pair(forward)
    for n in (2, 3, 4):
        pair.check(rows(n, 4))


def test_numbers_for_which_one_graph_will_not_do(monkeypatch):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "0")  # of values that come once none pays
    pair = Pair(lambda self, x, n: self.linear(x)[:, : n % 4 + 1] * len(str(n)))
    for n in range(20):
        torch.testing.assert_close(pair.ours(rows(2, 4), n), pair.eager(rows(2, 4), n))
    report = explain(pair.ours)
    assert not report.captured and report.exports == 1
    assert "numbers among its arguments change from call to call" in report.fallback


def test_numbers_as_tensors_are_inputs():
    pair = Pair(lambda self, x, scale: self.linear(x) / scale)
    for scale in (1.0, 2.0, 3.0):
        assert pair.check(rows(2, 4), torch.tensor(scale)).exports == 1


# --- structures and modes ---------------------------------------------------------------------------------------------


def test_structures_of_arguments():
    def forward(self, a, *rest, b=None, **more):
        total = self.linear(a)
        for value in (*rest, b, *more.values()):
            total = total if value is None else total + (value["x"] if isinstance(value, dict) else value[0])
        return total, {"again": [total * 2, None]}

    pair = Pair(forward)
    x, y = rows(2, 4), rows(2, 4, seed=1)
    calls = [
        ((x,), {}),
        ((x, [y]), {}),
        ((x,), {"b": (y,)}),
        ((x,), {"c": {"x": y}, "d": [y]}),
        ((), {"a": x, "b": None}),
    ]
    for _ in range(2):
        for args, kwargs in calls:
            report = pair.check(*args, **kwargs)
    assert report.exports == len(calls)


def test_the_order_of_keywords_is_not_a_structure():
    pair = Pair(lambda self, a, b: self.linear(a) - b)
    x, y = rows(2, 4), rows(2, 4, seed=1)
    pair.check(a=x, b=y)
    assert pair.check(b=y, a=x).exports == 1


def test_flips_are_cached():
    pair = Pair(lambda self, x: nn.functional.dropout(self.linear(x), 0.5, self.training and False))
    flips = [
        lambda: pair.ours.train(),
        lambda: pair.ours.eval(),
        lambda: pair.ours.linear.train(),
        lambda: pair.ours.requires_grad_(False),
        lambda: pair.ours.requires_grad_(True),
        lambda: pair.ours.double(),
        lambda: pair.ours.float(),
    ]

    def call():
        pair.ours(rows(2, 4).to(pair.ours.linear.weight.dtype))

    def round_trip():
        for flip in flips:
            flip()
            call()
        with torch.no_grad():
            call()
        with torch.autocast("cpu", torch.bfloat16):
            call()

    round_trip()
    exports = explain(pair.ours).exports
    round_trip()
    round_trip()
    assert explain(pair.ours).exports == exports and explain(pair.ours).captured


def test_autocast():
    pair = Pair(lambda self, x: (self.linear(x), self.linear(x).softmax(-1), x @ x.mT))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found, expected = pair.ours(rows(6, 4)), pair.eager(rows(6, 4))
        assert [t.dtype for t in found] == [t.dtype for t in expected]
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    pair.check(rows(6, 4))
    assert explain(pair.ours).exports == 3


def test_float32_results_of_a_bfloat16_computation():
    """The engine rounds GELU once, PyTorch each of its steps: that is no sign of another computation."""

    def forward(self, x):
        x = x.bfloat16()
        return (0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))).float()

    pair = Pair(forward)
    found, expected = pair.ours(rows(64, 4)), pair.eager(rows(64, 4))
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-2)
    assert explain(pair.ours).captured and not explain(pair.ours).python_ops


def test_unused_inputs_and_parameters():
    pair = Pair(lambda self, x, unused, nothing=None: x * self.buffer)
    pair.check(rows(2, 4), rows(3, 3))
    x = rows(2, 4).requires_grad_()
    pair.ours(x, rows(3, 3)).sum().backward()
    assert x.grad is not None and pair.ours.linear.weight.grad is None


def test_no_tensor_arguments():
    pair = Pair(lambda self, n: self.linear.weight * n)
    pair.check(2)


def test_results_that_nothing_computes():
    x = rows(2, 4)
    ours = ORTModule(made(lambda self, x: (x, self.linear.weight, None, "text", 3)))
    found = ours(x)
    assert found[0] is x and found[1] is ours.linear.weight and found[2:] == (None, "text", 3)


# --- where autograd stops ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: self.linear(x).detach() * self.linear(x),
        lambda self, x: (self.linear(x).data + 1) * self.linear(x),
        lambda self, x: x + (self.linear(x).round() - x).detach(),
        lambda self, x: _without_grad(self, x),
    ],
    ids=["detach", "data", "straight-through", "no_grad"],
)
def test_gradients_stop(function):
    results = []
    pair = Pair(function)
    for model in (pair.ours, pair.eager):
        x = rows(3, 4).requires_grad_()
        y = model(x)
        y.pow(2).sum().backward()
        results.append([y, x.grad, *(p.grad for p in model.parameters())])
    for found, expected in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected)
    assert explain(pair.ours).captured and not explain(pair.ours).python_ops


def _without_grad(self, x):
    with torch.no_grad():
        y = self.linear(x)
        z = y.exp() / y.exp().sum(-1, keepdim=True)
    return self.linear(x) * z + y


def test_the_padding_row_gets_no_gradient():
    results = []
    torch.manual_seed(0)
    eager = nn.Embedding(7, 3, padding_idx=2)
    for model in (ORTModule(copy.deepcopy(eager)), eager):
        (model(torch.tensor([[1, 2], [2, 3]])) ** 2).sum().backward()
        results.append(model.weight.grad)
    torch.testing.assert_close(*results)
    assert results[0][2].abs().sum() == 0


# --- what is left alone -----------------------------------------------------------------------------------------------


def test_the_reason_names_the_shape_of_what_was_read():
    ours = ORTModule(made(lambda self, x: self.linear(x) * x.repeat(1, 9).tolist()[0][0]))
    x = rows(5, 4)
    assert torch.equal(ours(x), ours.linear(x) * x[0, 0].item())
    assert "takes the values out of a tensor of shape [5, 36]" in explain(ours).fallback


def test_random_state_is_that_of_pytorch():
    """A capture leaves no trace in it, and what forward draws is drawn at each call."""

    def forward(self, x):
        random.random(), numpy.random.rand()
        return nn.functional.dropout(self.linear(x), 0.0, self.training)

    def state():
        return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())

    eager = made(forward)
    ours = ORTModule(eager)
    found = []
    for module in (eager, ours):
        random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
        for _ in range(3):
            module(rows(5, 4))
        found.append(state())
    assert explain(ours).captured and found[0] == found[1]


def test_a_run_with_dropout_draws_one_seed():
    ours = ORTModule(made(lambda self, x: nn.functional.dropout(self.linear(x), 0.3)))
    ours(rows(5, 4))
    torch.manual_seed(3)
    first, after = ours(rows(5, 4)), torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(ours(rows(5, 4)), first) and torch.equal(torch.rand(1), after)
    assert not torch.equal(ours(rows(5, 4)), first)


def test_modes_and_buffers_are_untouched():
    eager = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 4))
    eager[1].eval()
    ours = ORTModule(eager)
    x = rows(64, 4)
    ours(x)
    torch.testing.assert_close(eager[0].running_mean, 0.1 * x.mean(0))
    assert eager[0].num_batches_tracked == 1
    assert [m.training for m in eager.modules()] == [True, True, False, True]


# --- what PyTorch runs ------------------------------------------------------------------------------------------------


def _adds_a_module(self, x):
    self.extra = nn.Identity()
    return self.linear(x)


def _changes_argument(self, batch):
    return self.linear(batch.pop("x"))


def _changes_parameter(self, x):
    with torch.no_grad():
        self.linear.weight.mul_(0.5)
    return self.linear(x)


def _differentiates(self, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(self.linear(x).pow(2).sum(), x)[0]


def _hooks_a_gradient(self, x):
    y = self.linear(x)
    y.register_hook(lambda g: g * 2)
    return y


@pytest.mark.parametrize(
    "forward, words",
    [
        (_adds_a_module, "adds or removes extra"),
        (_changes_parameter, "parameter linear.weight"),
        (_differentiates, "differentiates inside forward"),
        (_hooks_a_gradient, "hook on a gradient"),
    ],
)
def test_fallback(forward, words, caplog):
    torch.manual_seed(0)
    eager = made(forward)
    ours = ORTModule(copy.deepcopy(eager))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            if words != "parameter linear.weight":
                torch.testing.assert_close(ours(rows(2 + step, 4)), eager(rows(2 + step, 4)))
            else:
                ours(rows(2 + step, 4))
    report = explain(ours)
    assert not report.captured and words in report.fallback
    assert len([w for w in caught if words in str(w.message)]) == 1
    assert len([r for r in caplog.records if words in r.getMessage()]) == 1
    if words != "differentiates inside forward":
        ours(rows(2, 4)).sum().backward()
        assert ours.linear.weight.grad is not None


def test_arguments_that_change():
    ours = ORTModule(made(_changes_argument))
    batch = {"x": rows(2, 4)}
    ours(batch)
    assert batch == {} and explain(ours).captured


def test_caches_as_arguments():
    ours = ORTModule(made(lambda self, x, cache: cache.update(self.linear(x)[None, None], x[None, None], 0)[0]))
    cache = DynamicCache()
    ours(rows(2, 4), cache)
    ours(rows(3, 4), cache)
    assert cache.get_seq_length() == 5 and explain(ours).captured


def test_hooks_run():
    pair = Pair(lambda self, x: self.linear(x))
    pair.check(rows(2, 4))
    seen = []
    handle = pair.ours.linear.register_forward_hook(lambda *args: seen.append(1))
    for _ in range(2):
        pair.ours(rows(2, 4))
    assert seen == [1, 1] and "(linear) hold 100% of the weights" in explain(pair.ours).fallback
    handle.remove()
    pair.check(rows(2, 4))
    pair.ours.register_forward_hook(lambda module, args, output: output * 2)
    torch.testing.assert_close(pair.ours(rows(2, 4)), 2 * pair.eager(rows(2, 4)))
    assert explain(pair.ours).captured and not explain(pair.ours).python_ops


def test_empty_inputs():
    pair = Pair(lambda self, x: self.linear(x).sum(-1))
    pair.check(rows(2, 4))
    pair.check(torch.empty(0, 4), captured=False)
    pair.check(rows(2, 4))


def test_a_failing_call_is_not_remembered():
    pair = Pair(lambda self, x: self.linear(x))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        pair.ours(rows(2, 5))
    pair.check(rows(2, 4))


def test_fallback_disabled(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    ours = ORTModule(made(lambda self, x: torch.fft.fft(self.linear(x))))
    with pytest.raises(Exception, match="fft"):
        ours(rows(2, 4))


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", range(17, 21))
def test_opsets(opset, monkeypatch):
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", str(opset))
    pair = Pair(lambda self, x: nn.functional.layer_norm(self.linear(x).relu(), (4,)).amax(0).split([1, 3]))
    pair.check(rows(5, 4))
    assert pair.ours._ortmodule.latest.capture.model.opset_import[0].version == opset


@pytest.mark.parametrize(
    "name, value",
    [("ONNX_OPSET_VERSION", "8"), ("ONNX_OPSET_VERSION", "x"), ("LOG_LEVEL", "LOUD"), ("FALLBACK_POLICY", "NO")],
)
def test_bad_settings(name, value, monkeypatch):
    monkeypatch.setenv(f"ORTMODULE_{name}", value)
    with pytest.raises(ValueError, match=f"ORTMODULE_{name}={value}"):
        ORTModule(nn.Linear(2, 2))


def test_log_level_from_the_environment(monkeypatch):
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "error")
    assert ORTModule(nn.Linear(2, 2))._ortmodule.config.log_level == LogLevel.ERROR


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_trace_lets_go_of_what_is_over():
    """Traces are made with a gradient, but nothing waits for a backward of theirs."""
    alive = array.array("b")  # no container that a graph would have to change
    note = alive.append

    def forward(self, x):
        first = self.linear(x)
        known = weakref.ref(first)
        second = first.sin()  # its gradient is made of `first`
        del first
        note(known() is not None)
        return second

    pair = Pair(forward)
    pair.eager(rows(3, 4))
    assert list(alive) == [True]
    pair.check(rows(3, 4))
    assert list(alive[1:3]) == [False, False], "the two traces"


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads():
    """Several threads meet a module that was never called: one capture, right results, gradients that add up."""
    pair = Pair(lambda self, x: nn.functional.dropout(self.linear(x), 0.0).tanh())
    errors = []

    def work(seed):
        try:
            for i in range(5):
                x = rows(3 + i, 4, seed=seed)
                torch.testing.assert_close(pair.ours(x), pair.eager(x))
                pair.ours(x).sum().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and explain(pair.ours).exports == 1
    pair.eager.zero_grad()
    for seed in range(4):
        for i in range(5):
            pair.eager(rows(3 + i, 4, seed=seed)).sum().backward()
    torch.testing.assert_close(pair.ours.linear.weight.grad, pair.eager.linear.weight.grad)


def test_an_error_that_forward_catches():
    """torch's tracer does not survive an operator that fails; PyTorch runs such a module, with whatever it does."""

    def forward(self, x):
        try:
            return self.linear(x).view(3, 4) * 2
        except RuntimeError:
            return self.linear(x) * 5

    pair = Pair(forward)
    for n, captured in ((6, False), (3, None), (6, False)):
        x = rows(n, 4)
        torch.testing.assert_close(pair.ours(x), pair.eager(x))
        assert captured is None or "goes on after an error: shape" in explain(pair.ours).fallback
