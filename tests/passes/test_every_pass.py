"""Every pass, switched on and off, against PyTorch: a model for each pass that test_passes.py has no case for.

A module trains one step with all passes and one without the pass in question; results and gradients are PyTorch's both
times. No model here draws random numbers. A test at the end holds the list of passes against these two files.
"""

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from ortmodule import ORTModule, _core, explain
from scripts import passes_page
from tests.models.zoo import without_dropout
from tests.passes import test_passes
from tests.passes.test_rows import LANGUAGE, SMALL, Loss, graphs, language, without

#: Passes that are compared with PyTorch in another way, and where.
ELSEWHERE = {
    "triton_fusion": "../triton_kernels/test_cases.py",
    "clean_up": "test_passes.py::test_clean_up",
    "softmax_dropout": "test_dropout.py::test_dropout_within_a_softmax",
    "relu_dropout": "test_dropout.py::test_dropout_behind_a_relu",
    "packed_weights": "test_packed_weights.py::test_the_same_bits",
    "product_epilogue": "../cuda/test_epilogues.py",
    "flash_dropout": "../cuda/test_torch_attention.py",
    "score_mask": "test_score_mask.py::test_beside_pytorch",
    "mask_removal": "../cuda/test_torch_attention_lists.py::test_a_mask_that_hides_nothing",
}
#: Difference allowed, relative to the largest number of each tensor; of models with 16-bit products a few of their
#: roundings.
EXACT, NARROW, SHARE = 5e-6, 2e-2, 1e-4


class Layer(nn.Module):
    """`function(x, weight, labels)`; the weight is that of a Linear, transposed."""

    def __init__(self, function, width, columns):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.weight = function, nn.Parameter(torch.randn(columns, width) / width**0.5)

    def forward(self, x, labels):
        return self.function(x, self.weight.t(), labels)


def layer(function, *shape, columns=6, ignored=0):
    """A module and its batch: x of this shape, and a label for each of its rows, the first ``ignored`` left out."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(x[..., 0].numel()).view(x.shape[:-1]) % columns
    labels.view(-1)[:ignored] = -100
    return Layer(function, shape[-1], columns), {"x": x.requires_grad_(), "labels": labels}


def loss_of_shifted(x, w, labels):
    return F.cross_entropy((x @ w)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def loss_of_rows(x, w, labels):
    each = F.cross_entropy(x @ w, labels, reduction="none")
    return (each * torch.linspace(0.1, 2, len(each))).sum() / 7


def detached(x, w, labels):
    y = x @ w
    return (y - y.detach().amax(-1, keepdim=True)).exp() * F.hardtanh(y, -0.5, 0.7)


def padded():
    """BERT without dropout: labels for some tokens, sequences of different lengths."""
    kind, _, config = LANGUAGE["bert"]
    torch.manual_seed(0)
    made = without_dropout(transformers.AutoConfig.for_model(kind, **{**SMALL, **config}))
    model = transformers.AutoModelForMaskedLM.from_config(made).train()
    return Loss(model), language("right", 1.1)


def bfloat16(x):
    return x.bfloat16()


#: {pass: (module and batch, tolerance)}
MODELS = {
    "row_selection": (lambda: layer(lambda x, w, _: (x.tanh() @ w)[:, 0].exp(), 4, 6, 8), EXACT),
    "shifted_loss": (lambda: layer(loss_of_shifted, 4, 16, 8), EXACT),
    "label_sparsity": (lambda: layer(lambda x, w, y: F.cross_entropy(x.tanh() @ w, y), 400, 8, ignored=250), EXACT),
    "padding_removal": (padded, EXACT),
    "attention_lengths": (padded, EXACT),
    "linear_loss": (lambda: layer(lambda x, w, y: F.cross_entropy(x @ w, y), 1300, 12, columns=1024), EXACT),
    "loss_cast": (lambda: layer(lambda x, w, y: F.cross_entropy(bfloat16(x @ w).float(), y), 40, 8), NARROW),
    "loss_gradient": (lambda: layer(loss_of_rows, 1300, 12, columns=1024), EXACT),
    "gradient_marks": (lambda: layer(detached, 40, 8), EXACT),
    "product_cast": (lambda: layer(lambda x, w, _: (bfloat16(x) @ bfloat16(w)).float().sin(), 40, 8), NARROW),
    "wide_operands": (lambda: layer(lambda x, w, _: bfloat16(x) @ bfloat16(w), 40, 8), NARROW),
    "pointwise_fusion": (lambda: layer(lambda x, w, _: (x @ w).sin() * 2 + (x @ w).exp(), 40, 8), EXACT),
    "row_fusion": (
        lambda: layer(lambda x, w, _: x.sin() * w[:, 0] / x.sin().norm(dim=-1, keepdim=True), 1031, 64),
        EXACT,
    ),
}


def outputs_and_gradients(module, batch):
    module.zero_grad(set_to_none=True)
    leaves = {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in batch.items()}
    found = module(**leaves)
    y = found if isinstance(found, torch.Tensor) else found.loss
    weights = torch.linspace(0.5, 1.5, y.numel()).view(y.shape).to(y.dtype)
    y.backward(weights)
    gradients = [p.grad for p in (*module.parameters(), *leaves.values()) if p.requires_grad]
    return [t if t is None else t.detach().clone() for t in (y, *gradients)]


@pytest.mark.parametrize("name", MODELS)
def test_on_and_off(name):
    made, tolerance = MODELS[name]
    module, batch = made()
    expected = outputs_and_gradients(copy.deepcopy(module), batch)
    largest = max(g.abs().max().item() for g in expected[1:] if g is not None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = ORTModule(module)
        on = outputs_and_gradients(ours, batch)
    report = explain(ours)
    assert report.captured, report.fallback
    if name == "wide_operands" and name not in report.fused:
        pytest.skip("this CPU has no kernel that rounds")
    assert name in report.fused
    without(ours, (name,))
    off = outputs_and_gradients(ours, batch)
    assert name not in explain(ours).fused and len(graphs(ours)) == 1
    for found in (on, off):
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if b is not None:
                assert a.dtype == b.dtype and torch.isfinite(a).all()
                # What is nothing but rounding (the gradient of a key's bias) is compared with the largest gradient.
                assert (a.double() - b.double()).abs().max() <= tolerance * max(b.abs().max(), SHARE * largest)


def test_no_pass_is_left_out():
    cases = {case.name for case in test_passes.CASES}
    assert cases | set(MODELS) | set(ELSEWHERE) == set(_core.passes())
    assert not set(MODELS) & cases and not set(ELSEWHERE) & (set(MODELS) | cases)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "passes.md"
ROW = re.compile(r"^\| `(\w+)` \|.* \| ([^|]+) \| ([^|]+) \|$", re.M)
#: It is at work in every graph, so the tests of graphs do not name it.
UNNAMED = {("clean_up", "test_graph.c")}


def test_the_page_is_written():
    assert passes_page.page(PAGE.read_text()) == PAGE.read_text(), "run: python -m scripts.passes_page docs/passes.md"


def test_tests_that_the_page_names():
    """Each of them is there, and one of a row's is about its pass."""
    for name, *cells in ROW.findall(PAGE.read_text()):
        for cell in cells:
            files = re.findall(r"`([^`]+)`", cell)
            found = {file: list((PAGE.parents[1] / "tests").rglob(file.rpartition("/")[2])) for file in files}
            assert all(found.values()), (name, files)
            about = [file for file in files if any(name in path.read_text() for path in found[file])]
            assert about or any((name, file) in UNNAMED for file in files), (name, files)
