"""Sizes that forward takes for Python's numbers: modules that it makes of them, `isinstance`, methods of numbers."""

import copy
import numbers
import threading

import pytest
import torch
from torch import distributions, nn
from torch.fx.experimental import symbolic_shapes
from torch.nn import functional as F

from ortmodule import ORTModule, explain

pytestmark = pytest.mark.filterwarnings("ignore")
MODULES = {
    "LayerNorm": lambda h: nn.LayerNorm(h.shape[-1])(h),
    "LayerNorm of a shape": lambda h: nn.LayerNorm(h.shape[2:])(h),
    "LayerNorm of a list": lambda h: nn.LayerNorm([h.shape[-1]])(h),
    "LayerNorm of arithmetic": lambda h: nn.LayerNorm(h.shape[-1] * 2 // 2)(h),
    "LayerNorm over a length": lambda h: nn.LayerNorm(h.shape[1])(h.transpose(1, 2)),
    "RMSNorm": lambda h: nn.RMSNorm(h.shape[-1])(h),
    "GroupNorm": lambda h: nn.GroupNorm(2, h.shape[-1])(h.transpose(1, 2)),
    "InstanceNorm1d": lambda h: nn.InstanceNorm1d(h.shape[-1])(h.transpose(1, 2)),
    "BatchNorm1d": lambda h: nn.BatchNorm1d(h.shape[-1])(h.transpose(1, 2)),
    "Linear": lambda h: filled(nn.Linear(h.shape[-1], 4))(h),
    "Conv1d": lambda h: filled(nn.Conv1d(h.shape[-1], 4, 1))(h.transpose(1, 2)),
    "Embedding": lambda h: h + filled(nn.Embedding(h.shape[1], 8))(torch.arange(h.shape[1])),
    "MultiheadAttention": lambda h: filled(nn.MultiheadAttention(h.shape[-1], 2, batch_first=True))(h, h, h)[0],
    "LSTM": lambda h: filled(nn.LSTM(h.shape[-1], 3, batch_first=True))(h)[0],
    "TransformerEncoderLayer": lambda h: filled(
        nn.TransformerEncoderLayer(h.shape[-1], 2, h.shape[-1] * 2, dropout=0.0, batch_first=True)
    )(h),
    "AvgPool1d": lambda h: nn.AvgPool1d(h.shape[1] // 2)(h.transpose(1, 2)),
    "AdaptiveAvgPool1d": lambda h: nn.AdaptiveAvgPool1d(h.shape[1] // 2)(h.transpose(1, 2)),
    "MaxPool1d": lambda h: nn.MaxPool1d(h.shape[1] // 2)(h.transpose(1, 2)),
    "Unflatten": lambda h: nn.Unflatten(1, (h.shape[1], h.shape[2]))(nn.Flatten()(h)),
    "Upsample": lambda h: nn.Upsample(size=h.shape[1] * 2)(h.transpose(1, 2)),
    "ConstantPad1d": lambda h: nn.ConstantPad1d(h.shape[1], 0.0)(h.transpose(1, 2)),
    "Parameter": lambda h: h + nn.Parameter(torch.ones(h.shape[1], 1)),
    "Normal": lambda h: distributions.Normal(0.0, h.shape[1]).log_prob(h),
    "Independent": lambda h: distributions.Independent(
        distributions.Normal(torch.zeros(h.shape[1:]), 1.0), h.dim() - 1
    ).log_prob(h),
    "Dirichlet": lambda h: h + distributions.Dirichlet(torch.ones(h.shape[1])).mean[:, None],
    "functional": lambda h: F.layer_norm(h, (h.shape[-1],)),
}
TYPES = {
    "int": (int,), "Integral": (numbers.Integral,), "Number": (numbers.Number,), "a pair": ((int, float),),
    "SymInt": ((int, torch.SymInt),), "Tensor": (torch.Tensor,), "float": (float,), "object": (object,),
    "bool": (bool,), "a union": (int | float,),
}  # fmt: skip
SIZES = {
    "shape": lambda h: h.shape[1], "size": lambda h: h.size(1), "computed": lambda h: h.shape[1] * 2 + 1,
    "halved": lambda h: h.shape[1] / 2, "numel": lambda h: h.numel(), "floor": lambda h: h.shape[1] // 2,
    "compared": lambda h: h.shape[0] > 0, "no size": lambda h: h.sum(), "integers": lambda h: torch.tensor(3),
}  # fmt: skip
METHODS = {
    "bit_length": lambda n: n.bit_length(), "conjugate": lambda n: n.conjugate(), "numerator": lambda n: n.numerator,
    "denominator": lambda n: n.denominator, "to_bytes": lambda n: len(n.to_bytes(2, "big")),
    "is_integer": lambda n: 1 + (n / 4).is_integer(), "as_integer_ratio": lambda n: (n / 4).as_integer_ratio()[1],
    "hasattr": lambda n: 1 + hasattr(n, "bit_length"), "deepcopy": copy.deepcopy,
}  # fmt: skip


def filled(module):
    """With weights that no generator draws."""
    for p in module.parameters():
        nn.init.constant_(p, 0.1)
    return module


class Made(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.layer(x))


def compare(function):
    torch.manual_seed(0)
    model = Made(function)
    wrapped = ORTModule(copy.deepcopy(model))
    for rows, length in ((2, 4), (3, 4), (2, 6), (4, 6), (2, 4)):
        x, found = torch.randn(rows, length, 8), []
        for each in (wrapped, model):
            each.zero_grad()
            y = each(x)
            (y * torch.arange(y.numel()).reshape(y.shape).cos()).sum().backward()
            found.append([y.detach(), *(p.grad for p in each.parameters())])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return explain(wrapped)


@pytest.mark.parametrize("name", MODULES)
def test_modules_made_in_forward(name):
    report = compare(MODULES[name])
    assert report.captured and report.exports <= 2, report


@pytest.mark.parametrize("kinds", TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_isinstance(size, kinds):
    report = compare(lambda h: h * (2 if isinstance(SIZES[size](h), *TYPES[kinds]) else 3))
    assert report.captured and report.exports == 1, report


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_numbers(name):
    assert compare(lambda h: h * METHODS[name](h.shape[1])).captured


def test_types_that_no_trace_can_tell():
    compare(lambda h: h * (2 if type(h.shape[1]) is int else 3))


def test_nothing_is_left():
    before = isinstance, nn.Parameter.__new__, torch.Tensor.__deepcopy__
    compare(MODULES["LayerNorm"])
    assert (isinstance, nn.Parameter.__new__, torch.Tensor.__deepcopy__) == before
    assert not hasattr(torch.zeros(()), "bit_length")


def test_other_threads_see_the_ordinary_one():
    """Also one that traces for itself."""
    sizes, done, wrong = [], threading.Event(), []
    values = torch.ones(3), torch.ones(()), 3, 3.0

    def look():
        def forward(x):
            sizes.append(isinstance(x.shape[0], torch.Tensor))
            return x * 2

        asked = 0
        while not done.is_set() or not asked:
            found = [isinstance(x, kind) for x in values for kind in (torch.Tensor, int)]
            wrong.extend(found if found != [True, False, True, False, False, True, False, False] else ())
            asked += 1
            if asked % 50 == 1:
                torch.jit.trace(forward, torch.ones(2, 3), check_trace=False)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for name in ("LayerNorm", "Linear", "Parameter"):
            assert compare(MODULES[name]).captured
    finally:
        done.set()
        thread.join()
    assert sizes and all(sizes) and not wrong


def test_code_that_asks_whether_it_is_traced():
    """What libraries do with sizes in a trace (transformers' attention): it sees a tensor there."""

    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            several = x.shape[0] > 1 and True
            if torch.jit.is_tracing() and isinstance(several, torch.Tensor):
                several = several.item()
            x = self.linear(x).view(1, -1, 4)
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=several)

    torch.manual_seed(0)
    module = Careful()
    ours = ORTModule(copy.deepcopy(module))
    for rows in (3, 5, 1, 4):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(ours(x), module(x))
    report = explain(ours)
    assert report.captured and not report.breaks and not report.python_ops, report


QUESTIONS = {
    name: getattr(symbolic_shapes, name)
    for name in ("guard_or_false", "guard_or_true", "statically_known_true", "statically_known_false")
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_what_torch_asks_about_sizes(question):
    """As its own code in Python does, when it gathers tensors for one. The answer decides: another size asks anew."""

    class Net(nn.Module):
        def forward(self, x):
            return x * 2 if question(x.shape[1] == 3) else x.sum(1)

    model, eager = ORTModule(Net()), Net()
    for width in (3, 5, 3, 4):
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(width))
        torch.testing.assert_close(model(x), eager(x))
    assert explain(model).captured and not explain(model).pytorch_calls, explain(model)
