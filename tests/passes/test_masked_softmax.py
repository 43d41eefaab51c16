"""Rows of softmaxes in which everything is hidden, -inf or +inf: PyTorch's zeros and NaN, forward and backward."""

import copy
import math

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, ROWS, WIDTH = 3, 8, 8
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def no_nan(y, fill=lambda y, nan, number: torch.where(nan, number, y)):
    return fill(y, y.isnan(), 0.0)


def lowest(x):
    return torch.finfo(x.dtype).min


FORMS = {
    "where": lambda x, m: torch.where(m, torch.where(m, x, -math.inf).softmax(-1), 0),
    "where, lowest": lambda x, m: torch.where(m, torch.where(m, x, lowest(x)).softmax(-1), 0),
    "fill": lambda x, m: x.masked_fill(~m, -math.inf).softmax(-1).masked_fill(~m, 0),
    "fill, lowest": lambda x, m: x.masked_fill(~m, lowest(x)).softmax(-1).masked_fill(~m, 0),
    "rows": lambda x, m: torch.where(m[:, :1], torch.where(m[:, :1], x, -math.inf).softmax(-1), 0),
    "once": lambda x, m: x.masked_fill(~m, -math.inf).softmax(-1),
    "added": lambda x, m: (x + torch.zeros_like(x).masked_fill(~m, -math.inf)).softmax(-1),
    "causal": lambda x, m: x.masked_fill(torch.ones(ROWS, WIDTH, dtype=torch.bool).triu(1), -math.inf).softmax(-1),
    "log": lambda x, m: x.masked_fill(~m, -math.inf).logsumexp(-1),
    "number for NaN": lambda x, m: x.masked_fill(~m, -math.inf).softmax(-1).nan_to_num(0),
    "zero for NaN": lambda x, m: no_nan(x.masked_fill(~m, -math.inf).softmax(-1)),
    "zero for NaN, filled": lambda x, m: no_nan(torch.where(m, x, -math.inf).softmax(-1), torch.Tensor.masked_fill),
    "zero for NaN, no mask": lambda x, m: no_nan(x.softmax(-1)),
    "dropout": lambda x, m: nn.functional.dropout(FORMS["where"](x, m), 0.5, False),
}
LOGITS = {
    "scaled": lambda x, w: x * w,
    "as they are": lambda x, w: x,
    "biased": lambda x, w: x + w,
    "of a function": lambda x, w: x * 2 + w.sigmoid(),
    "of a product": lambda x, w: torch.eye(ROWS, dtype=x.dtype) @ (w * torch.ones_like(x)) + x,
}


class Masked(nn.Module):
    def __init__(self, form, logits, dtype):
        super().__init__()
        self.weight, self.form, self.logits = nn.Parameter(torch.ones(WIDTH, dtype=dtype)), form, logits

    def forward(self, x, m):
        return self.form(self.logits(x, self.weight), m) + 0 * self.weight.sum()


def rows_of_every_kind(dtype):
    x, m = torch.randn(BATCH, ROWS, WIDTH).to(dtype), torch.rand(BATCH, ROWS, WIDTH) > 0.4
    m[0, 0] = m[1, 2] = False
    m[2, 3] = True
    x[0, 1][m[0, 1]] = x[2, 3] = x[0, 0] = x[1, 4, :4] = -math.inf
    x[0, 5] = torch.finfo(dtype).min
    return x, m


def results(module, x, m, needs_grad):
    x = x.clone().requires_grad_(needs_grad)
    y = module(x, m)
    torch.where(y.isfinite(), y, 0).square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@each(
    "form, logits, dtype, needs_grad",
    [(f, k, d, g) for f in FORMS for k in LOGITS for d in DTYPES for g in (True, False)],
    lambda case: case[2:] == (torch.float32, case[1] == "as they are") and case[1] in ("as they are", "scaled"),
)
def test_rows_without_finite_logits(form, logits, dtype, needs_grad):
    torch.manual_seed(0)
    eager = Masked(FORMS[form], LOGITS[logits], dtype)
    ours = ORTModule(copy.deepcopy(eager))
    x, m = rows_of_every_kind(dtype)
    if "NaN" in form:
        x[1, 5, 2], m[1, 5, 2] = math.inf, True
    expected, found = (results(module, x, m, needs_grad) for module in (eager, ours))
    rough = dtype in (torch.bfloat16, torch.float16)
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
            continue
        torch.testing.assert_close(
            one.double(), other.double(), rtol=2e-2 if rough else 1e-5, atol=2e-2 if rough else 1e-5, equal_nan=True
        )
    assert explain(ours).captured
