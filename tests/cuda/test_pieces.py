"""Kernels walk rows eight elements at a time: rows of any length, at any address, in every float type."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortmodule import ORTModule, _core, explain
from tests.cuda.test_emulated import driver, session  # noqa: F401  (a fixture)
from tests.selection import each

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

#: Rows and their length: less than a piece; pieces that begin at every place of a row; more than a block of 512 threads
#: has at a time, of eight elements or of as many as they keep; so many rows that their sums have parts;
#: rows of whole pieces, which have kernels of their own.
SHAPES = [(5, 1), (5, 7), (5, 8), (5, 65), (5, 264), (3, 4099), (200, 72), (2, 8256), (5, 64), (200, 192), (3, 1024)]
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
#: Roundings that are no error where PyTorch has fewer by chance; of float64 PyTorch's own is what is compared with.
FEW = dict.fromkeys(TYPES, 4) | {torch.float64: 64}


class Norm(nn.Module):
    def __init__(self, make, width):
        super().__init__()
        self.norm = make(width)
        with torch.no_grad():
            for p in self.norm.parameters():
                p.copy_(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return self.norm(x)


class Of(nn.Module):
    """A function of rows, and of a parameter, without which there is nothing to train."""

    def __init__(self, function):
        super().__init__()
        self.function, self.bias = function, nn.Parameter(torch.tensor(0.25))

    def forward(self, x):
        return self.function(x + self.bias)


def cross_entropy(smoothing=0.0):
    def loss(x):
        labels = torch.arange(x.shape[0], device=x.device) * 7 % x.shape[1]
        return F.cross_entropy(x, labels, label_smoothing=smoothing)

    return loss


class Sums(nn.Module):
    """Of all rows, beside a parameter, without which there is nothing to train."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(0.25))

    def forward(self, x):
        return x.sum(0) + self.bias


MODULES = {
    "layer_norm": lambda width: Norm(nn.LayerNorm, width),
    "rms_norm": lambda width: Norm(nn.RMSNorm, width),
    "softmax": lambda width: Of(lambda x: x.softmax(-1)),
    "softmax of columns": lambda width: Of(lambda x: x.softmax(0)),
    "sums": lambda width: Sums(),
    "log_softmax": lambda width: Of(lambda x: x.log_softmax(-1)),
    "cross_entropy": lambda width: Of(cross_entropy()),
    "smoothed cross_entropy": lambda width: Of(cross_entropy(0.1)),
}


def at_an_odd_place(x):
    """The same elements, one element behind an aligned address."""
    return torch.cat([x.new_zeros(1), x.detach().flatten()])[1:].view(x.shape)


def results(module, x, weight):
    """The output, and the gradients of x and of a norm's parameters."""
    module.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(weight.flatten()[: y.numel()].reshape(y.shape) if y.dim() else torch.tensor(1.5, dtype=y.dtype))
    of_norms = [p.grad for name, p in module.named_parameters() if name.endswith(("norm.weight", "norm.bias"))]
    return [y.detach(), x.grad, *of_norms]


@each(
    ("name", "dtype"),
    itertools.product(MODULES, TYPES),
    lambda pair: pair[0] != "softmax of columns" or pair[1] is torch.float32,  # the others take a second for each row
    pytest.mark.emulated_full,
)
def test_rows(driver, name, dtype):  # noqa: F811
    """As exact as PyTorch's, in the same bits wherever the operands lie."""
    torch.manual_seed(0)
    ours = module = None
    for rows, width in SHAPES:
        if ours is None or isinstance(module, Norm):
            module = MODULES[name](width).to(dtype)
            ours = ORTModule(copy.deepcopy(module))
        x, weight = (torch.randn(rows, width, dtype=dtype) for _ in range(2))
        expected = results(module, x, weight)
        exact = results(copy.deepcopy(module).double(), x.double(), weight.double())
        found = results(ours, x, weight)
        assert explain(ours).captured, explain(ours).fallback
        for i, (mine, theirs, true) in enumerate(zip(found, expected, exact, strict=True)):
            least = FEW[dtype] * torch.finfo(dtype).eps * true.abs().max().clamp(min=1)
            assert mine.dtype == theirs.dtype
            assert (mine - true).abs().max() <= 2 * (theirs - true).abs().max() + least, (width, i)
        elsewhere = results(ours, at_an_odd_place(x), at_an_odd_place(weight))
        assert all(torch.equal(a, b) for a, b in zip(found, elsewhere, strict=True)), width


@pytest.mark.parametrize("width", [8, 13, 1030])
@pytest.mark.parametrize("number", [0.1, -7e-20, 3e38])
def test_nothing_is_left_of_a_row_of_equal_numbers(driver, width, number):  # noqa: F811
    """Its mean is the number itself, so the result is the bias, however large the number."""
    operands = dict.fromkeys("sb", ("float32", 1)) | {"x": ("float32", 2)}
    s = session([("LayerNormalization", "x s b", "y", {})], operands, ("y", "float32", 2))
    given = {"s": torch.ones(width), "b": torch.linspace(-1, 1, width), "x": torch.full((3, width), number)}
    (found,) = s.run([given[name] for name in operands], [False] * 3).outputs
    assert torch.equal(found, given["b"].expand(3, -1))
