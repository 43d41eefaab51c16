"""Autocast of a GPU computes other operators in float32 than the CPU's, some only a part of a trace's.

The table is put in place of the CPU's, so a machine without a GPU sees what a trace there looks like.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, explain
from tests.models.compare import loss_of
from tests.models.zoo import ARCHITECTURES

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")

#: Of autocast for CUDA, operators that get float32, where the CPU's has none or another rule.
WIDE = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
]
WIDE += ["tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "softplus", "layer_norm", "group_norm", "cosine_similarity"]
WIDE += ["logsumexp", "log_softmax.int", "softmax.int", "cumprod", "cumsum", "norm.ScalarOpt_dim", "linalg_vector_norm"]
WIDE += ["dist"]
#: They are not known to a GPU's autocast, as their parts are.
UNKNOWN = ("cross_entropy_loss", "huber_loss", "avg_pool3d", "trace")


def in_float32(name):
    packet, _, overload = name.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def widened(*args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            narrow = (torch.bfloat16, torch.float16)
            wide = [x.float() if isinstance(x, torch.Tensor) and x.dtype in narrow else x for x in args]
            return function(*wide, **kwargs)

    return widened


@pytest.fixture(autouse=True)
def table():
    library = torch.library.Library("aten", "IMPL")
    for name in WIDE:
        library.impl(name, in_float32(name), "AutocastCPU")
    for name in UNKNOWN:
        library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
    yield
    library._destroy()


LABELS, WEIGHTS = torch.tensor([1, 2, 3, 0]), torch.linspace(0.5, 1.5, 5)
FUNCTIONS = {
    "square": torch.square,
    "pairwise_distance": lambda x: F.pairwise_distance(x, x * x),
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS),
    "cross_entropy, weights": lambda x: F.cross_entropy(x, LABELS, weight=WEIGHTS),
    "cross_entropy, smoothing": lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1),
    "cross_entropy, probabilities": lambda x: F.cross_entropy(x, F.one_hot(LABELS, 5).float() * 0.8 + 0.04),
    "expm1": torch.special.expm1,
    "logit": lambda x: x.sigmoid().logit(),
    "norm": lambda x: x.norm(dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, [5]),
    "cumsum": lambda x: x.cumsum(-1),
    "cov": torch.cov,
    "softmin": lambda x: F.softmin(x, -1),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x * x, x.abs() + 1),
}


class After(nn.Module):
    """``function`` of a linear layer, whose result is bfloat16."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(5, 5), function

    def forward(self, x):
        return self.function(self.layer(x))


def step(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    y.backward(torch.linspace(0.5, 1.5, y.numel()).reshape(y.shape).to(y.dtype))
    return y.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_has_the_type_of_its_parts(name):
    torch.manual_seed(0)
    theirs, ours = After(FUNCTIONS[name]), After(FUNCTIONS[name])
    ours.load_state_dict(theirs.state_dict())
    ours, x = ORTModule(ours), torch.randn(4, 5)
    (y, grads), (expected, expected_grads) = step(ours, x), step(theirs, x)
    report = explain(ours)
    assert report.captured and not report.aten_ops, report.fallback
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    for g, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(g, other, rtol=5e-2, atol=5e-2 * other.abs().max().item())


@pytest.mark.parametrize("name", ["mlp", "cnn", "bert", "t5", "transformer", "lstm"])
def test_models_are_captured(name):
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = architecture.build().train()
    ours, batch = ORTModule(model), architecture.batch(model, 0, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        try:
            expected = loss_of(model(**batch))
        except RuntimeError as error:
            if "could not create a primitive" not in str(error):
                raise
            pytest.skip("PyTorch has none in bfloat16 for this CPU")
        loss = loss_of(ours(**batch))
    report = explain(ours)
    assert report.captured, report.fallback
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected, rtol=3e-2, atol=3e-2)
    loss.backward()
