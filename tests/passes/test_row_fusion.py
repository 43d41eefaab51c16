"""Chains that read totals of their own rows, as one kernel, have the bits of their nodes one by one.

And are as near to float64 as PyTorch.
"""

import pytest
import torch
from torch import nn

from ortmodule import _core
from ortmodule.engine.session import DTYPES
from tests.passes.session import Function, check_against_pytorch, export, run

DTYPE = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FORMS = {
    "length": lambda x, w: w * x / x.norm(dim=-1, keepdim=True),
    "mean-of-absolutes": lambda x, w: (x * w) / (x * w).abs().mean(-1, keepdim=True),
    "largest": lambda x, w: (x - x.amax(-1, keepdim=True)).exp() * w,
    "deviation": lambda x, w: (x - x.mean(-1, True)) * w / ((x - x.mean(-1, True)).abs().mean(-1, True) + 0.1).sqrt(),
    "gate": lambda x, w: x.tanh() * torch.sigmoid((x * w).sum(-1, keepdim=True)),
    "without-axis": lambda x, w: x * w / (1 + x.abs().sum(-1).unsqueeze(-1)),
    "two-axes": lambda x, w: (x * w) / (x * x).mean((-2, -1), keepdim=True).sqrt(),
    "dropout": lambda x, w: nn.functional.dropout(x * w, 0.3) / x.square().mean(-1, keepdim=True),
    "cast": lambda x, w: (x.double() / x.double().square().sum(-1, keepdim=True)).to(x.dtype) * w,
    "reused": lambda x, w: (x / (1 + x.sum(-1, keepdim=True).abs())).softmax(-1) + w * x.mean(-1, keepdim=True),
}
SHAPES = [(37, 23, 90), (1031, 64), (2, 300, 2, 130)]


def compare(module, operands):
    """Bits with the pass and without it, and where it has fired."""
    session = export(module, operands)
    dy = torch.randn_like(module(*operands), memory_format=torch.contiguous_format)
    bit = _core.passes()["row_fusion"]
    apart, together = run(session, operands, dy, bit), run(session, operands, dy, 0)
    assert "row_fusion" not in apart[0]
    for a, b in zip(apart[1], together[1], strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.isfinite(b).all()
        assert torch.equal(a, b)
    check_against_pytorch(module, session, operands, dy, together[1])
    return together[0].get("row_fusion", 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPE, ids=DTYPES.get)
@pytest.mark.parametrize("form", FORMS)
def test_same_bits(form, dtype, shape):
    torch.manual_seed(0)
    operands = [torch.randn(shape, dtype=dtype) + 0.01, torch.randn(shape[-1], dtype=dtype)]
    fired = compare(Function(FORMS[form]), operands)
    assert bool(fired) == (form != "two-axes" or len(shape) > 2)  # else there is one row only


def random_graph(seed):
    """Twenty operators on whatever there is; a third of them fold rows, with or without their axis."""
    pick = torch.Generator().manual_seed(seed)
    unary = [torch.tanh, torch.sigmoid, torch.sin, torch.abs, torch.neg, lambda x: nn.functional.dropout(x, 0.2)]
    folds = [torch.mean, torch.sum, torch.amax, lambda x, d, keepdim: x.abs().sum(d, keepdim=keepdim) + 1]
    recipe = torch.rand(20, 4, generator=pick).tolist()

    # What nothing comes of is left out: the exported graph would not draw its dropout, PyTorch would.
    picked = [(int(a * (3 + i)), int(b * (3 + i))) for i, (_, a, b, _) in enumerate(recipe)]
    kinds, column = [], [False] * 3  # of each step; is a value one column?
    for (first, second), (*_, how) in zip(picked, recipe, strict=True):
        kinds.append("unary" if how < 0.3 else "binary" if how < 0.65 or column[first] else "fold")
        column.append(kinds[-1] == "fold" or column[first] and (kinds[-1] == "unary" or column[second]))
    needed = {0, 1, *range(len(recipe) - 2, len(recipe) + 3)}
    for i in reversed(range(len(recipe))):
        if 3 + i in needed:
            needed |= set(picked[i]) if kinds[i] == "binary" else {picked[i][0]}

    def forward(x, y, w):
        values = [x, y, x * w]
        for i, (what, _, b, _) in enumerate(recipe):
            if 3 + i not in needed:
                values.append(None)
                continue
            first, second = (values[place] for place in picked[i])
            if kinds[i] == "unary":
                new = unary[int(what * len(unary))](first)
            elif kinds[i] == "binary":
                new = first * second if what < 0.5 else first - second
            else:
                new = folds[int(what * len(folds))](first, -1, keepdim=True)
                new = new.squeeze(-1).sigmoid().unsqueeze(-1) if b < 0.3 else new * 0.005
            values.append(new)
        return sum(values[-5:], x + y * w)

    return Function(forward)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", DTYPE[::2], ids=DTYPES.get)
def test_random_graphs(seed, dtype):
    torch.manual_seed(seed)
    operands = [torch.randn(350, 190).to(dtype), torch.randn(350, 190).to(dtype), torch.randn(190).to(dtype)]
    assert compare(random_graph(seed), operands)


@pytest.mark.parametrize("form", FORMS)
def test_against_pytorch(form):
    if form == "dropout":
        pytest.skip("draws other numbers")
    torch.manual_seed(1)
    module = Function(FORMS[form])
    operands = [torch.randn(203, 401, dtype=torch.float64), torch.randn(401, dtype=torch.float64)]
    leaves = [x.clone().requires_grad_() for x in operands]
    if form == "two-axes":
        leaves[0] = operands[0][:200].reshape(25, 8, 401).clone().requires_grad_()
        operands[0] = leaves[0].detach()
    y = module(*leaves)
    dy = torch.randn_like(y)
    expected = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    fired, ours = run(export(module, operands), operands, dy, 0)
    assert fired.get("row_fusion")
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_totals_read_along_the_other_axis():
    """Of a square: what is a total of rows there is a number for each column here."""
    module = Function(lambda x, z: x / x.abs().sum(-1, keepdim=True) * z * z.amax(-1))
    operands = [torch.randn(300, 300), torch.randn(300, 300)]
    assert compare(module, operands)
    ours = run(export(module, operands), operands, torch.ones(300, 300), 0)[1]
    torch.testing.assert_close(ours[0], module(*operands))


def test_infinities_and_nans():
    x = torch.randn(600, 128)
    x[3, 5], x[9, 7], x[11] = torch.inf, torch.nan, 0.0
    session = export(Function(FORMS["length"]), [x, torch.randn(128)])
    operands = [x, torch.randn(128)]
    fired, ours = run(session, operands, torch.ones(600, 128), 0)
    leaves = [v.clone().requires_grad_() for v in operands]
    y = FORMS["length"](*leaves)
    assert fired["row_fusion"]
    torch.testing.assert_close(ours[0], y.detach(), equal_nan=True)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(threads):
    before = torch.get_num_threads()
    operands = [torch.randn(900, 200), torch.randn(200)]
    session, dy = export(Function(FORMS["deviation"]), operands), torch.randn(900, 200)
    expected = run(session, operands, dy, 0)[1]
    try:
        torch.set_num_threads(threads)
        ours = run(session, operands, dy, 0)[1]
    finally:
        torch.set_num_threads(before)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


def test_what_is_between_is_not_in_memory():
    """x goes in, y comes out: the exponentials and their sum are of a block."""
    x = torch.randn(1024, 512)
    module = Function(lambda x: (x.sin() / x.sin().abs().sum(-1, keepdim=True)).exp())
    model = export(module, [x]).model
    plan = model.plan((("float32", tuple(x.shape)),), (False,), (True,), 0)
    text = plan.text()
    assert text.count("FusedRows(") == 1 and "gives=[" in text and "Reduce(" not in text
    assert plan.arena_bytes < x.nbytes
