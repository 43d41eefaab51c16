"""Chains of pointwise nodes as one kernel have the bits that they have node by node.

Whatever the graph and the type, and as near to float64 as PyTorch.
"""

import pytest
import torch
from torch import nn

from ortmodule import _core
from ortmodule.engine.session import DTYPES
from tests.passes.session import NO_PASSES, Function, check_against_pytorch, export, run

DTYPE = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
UNARY = [torch.tanh, torch.sigmoid, torch.exp, torch.sin, torch.relu, torch.abs, torch.neg, torch.erf]
UNARY += [lambda x: nn.functional.dropout(x, 0.3), lambda x: x.float().to(x.dtype), lambda x: x * 0.37 + 1]
BINARY = [torch.add, torch.sub, torch.mul, torch.maximum, lambda x, y: torch.where(x < y, x, y * 0.5)]


BIT = _core.passes()["pointwise_fusion"]


def check(module, operands):
    torch.manual_seed(0)
    session = export(module, operands)
    dy = torch.randn_like(module(*operands), memory_format=torch.contiguous_format)
    assert run(session, operands, dy, NO_PASSES ^ BIT)[0].keys() == {"pointwise_fusion"}
    apart, together = run(session, operands, dy, BIT), run(session, operands, dy, 0)
    assert "pointwise_fusion" not in apart[0]
    for a, b in zip(apart[1], together[1], strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if any(x.numel() for x in operands):
        # Of twenty operators in a row, among them kinks, whose sides a rounding decides.
        check_against_pytorch(module, session, operands, dy, together[1], times=4, measured=False)


def random_graph(seed):
    """Twenty operators on whatever there is; some values are broadcast, transposed or normalised in between."""
    pick = torch.Generator().manual_seed(seed)

    def choice(options):
        return options[int(torch.randint(len(options), (), generator=pick))]

    recipe = [(choice(UNARY), choice(BINARY), torch.rand(3, generator=pick).tolist()) for _ in range(20)]

    # What nothing comes of is left out: the exported graph would not draw its dropout, PyTorch would.
    picked = [(int(a * (3 + i)), int(b * (3 + i))) for i, (_, _, (a, b, _)) in enumerate(recipe)]
    needed = {0, 1, *range(len(recipe) - 3, len(recipe) + 3)}
    for i in reversed(range(len(recipe))):
        if 3 + i in needed:
            needed |= set(picked[i]) if 0.5 <= recipe[i][2][2] < 0.85 else {picked[i][0]}

    def forward(x, y, row):
        values = [x, y, x * row]
        for i, (unary, binary, (_, _, how)) in enumerate(recipe):
            if 3 + i not in needed:
                values.append(None)
                continue
            first, second = (values[place] for place in picked[i])
            new = unary(first) if how < 0.5 else binary(first, second) if how < 0.85 else binary(first, row)
            if how > 0.97:
                new = new.softmax(-1)
            elif how > 0.94:
                new = new.transpose(0, 1).contiguous().sin().transpose(0, 1)
            values.append(new)
        return sum(values[-6:], values[0] + values[1] * row)

    return Function(forward)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", DTYPE, ids=DTYPES.get)
def test_random_graphs(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    sizes = [(3, 5, 7), (2, 9, 130), (40, 1, 33), (1, 1, 1)][seed % 4]
    operands = [torch.randn(s, generator=generator).to(dtype) for s in (sizes, sizes, sizes[-1:])]
    check(random_graph(seed), operands)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_tiles(threads):
    """More than one thread's share; tiles that do not fill."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(random_graph(3), [torch.randn(37, 3, 1001), torch.randn(37, 3, 1001), torch.randn(1001)])
    finally:
        torch.set_num_threads(before)


class Gated(nn.Module):
    def forward(self, gate, up):
        return nn.functional.silu(gate) * up


def test_backward_computes_again_what_forward_need_not_keep():
    """silu(gate) is neither a result of forward nor kept: backward has gate anyway."""
    operands = [torch.randn(8, 64), torch.randn(8, 64)]
    session = export(Gated(), operands)
    dy = torch.randn(8, 64)
    specs = tuple(("float32", tuple(x.shape)) for x in operands)
    plan = session.model.plan(specs, (True, True), (True,), 0)
    forward, backward = plan.text().split("backward\n")
    assert forward.count(" = ") == 1 and 'steps="Swish Mul"' in forward
    assert backward.count("Fused(") == 1 and "Swish Mul Mul SwishGrad" in backward
    assert plan.arena_bytes == 0
    leaves = [x.clone().requires_grad_() for x in operands]
    expected = torch.autograd.grad(Gated()(*leaves), leaves, dy)
    for ours, theirs in zip(run(session, operands, dy, 0)[1][1:], expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_sixteen_bits_are_loaded_rather_than_computed_again():
    """A sigmoid takes longer than two bytes; what is only moved or added up is computed again."""
    operands = [torch.randn(8, 64).bfloat16(), torch.randn(8, 64).bfloat16()]
    specs = tuple(("bfloat16", tuple(x.shape)) for x in operands)
    plan = export(Gated(), operands).model.plan(specs, (True, True), (True,), 0)
    forward, backward = plan.text().split("backward\n")
    assert 'steps="Swish Mul"' in forward and "Mul Mul SwishGrad" in backward and "Swish Mul" not in backward
    check(Gated(), operands)
    product = Function(lambda x, y: (x * y) * y)
    assert plan.arena_bytes > 0
    assert export(product, operands).model.plan(specs, (True, True), (True,), 0).arena_bytes == 0
    check(product, operands)


# --- reductions of what a chain computes ------------------------------------------------------------------------------

LOSSES = {
    "mse": nn.functional.mse_loss,
    "huber": nn.functional.huber_loss,
    "smooth_l1": nn.functional.smooth_l1_loss,
    "l1": lambda x, y: (x - y).abs().mean(),
    "chain": lambda x, y: ((x - y).tanh() * x).sum(),
    "rows": lambda x, y: (x * y).sum(-1) + (x - y).exp().amax(-1),
    "columns": lambda x, y: (x * y).mean(0) + (x.sin() * y).sum(0),
    "dropped": lambda x, y: nn.functional.dropout(x * y, 0.3).sum(-1),
}
SHAPES = [(3, 5), (40, 300), (9, 37, 64), (3, 1, 1100), (1, 1, 70000), (5000, 2), (37, 2500)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPE, ids=DTYPES.get)
@pytest.mark.parametrize("name", LOSSES)
def test_reductions(name, dtype, shape):
    """The same bits as node by node."""
    torch.manual_seed(0)
    check(Function(LOSSES[name]), [torch.randn(shape).to(dtype) for _ in range(2)])


@pytest.mark.parametrize("shape", [(0, 5), (0, 300), (300, 0), (4, 0, 300)], ids=str)
@pytest.mark.parametrize("name", ["mse", "chain", "columns", "dropped"])
def test_reductions_of_nothing(name, shape):
    check(Function(LOSSES[name]), [torch.randn(shape) for _ in range(2)])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_reductions_do_not_depend_on_threads(threads):
    """Rows, columns, lines longer than a tile, and a sum of all, in parts."""
    before = torch.get_num_threads()
    module = Function(lambda x, y: (torch.tanh(x + y) * x).mean(0))
    operands = [torch.randn(300, 2500), torch.randn(2500)]
    session, dy = export(module, operands), torch.randn(2500)
    try:
        torch.set_num_threads(1)
        alone = run(session, operands, dy, 0)[1]
        torch.set_num_threads(threads)
        together = run(session, operands, dy, 0)[1]
    finally:
        torch.set_num_threads(before)
    leaves = [x.clone().requires_grad_() for x in operands]
    y = module(*leaves)
    expected = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    for a, b, truth in zip(alone, together, expected, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, truth)


def test_a_loss_and_the_gradient_of_a_bias_need_no_memory():
    """What is only folded is nowhere; a bias takes what its sum is made of along with the gradient of the rest."""
    operands = [torch.randn(64, 128), torch.randn(128)]
    specs = tuple(("float32", tuple(x.shape)) for x in operands)
    loss = export(Function(nn.functional.huber_loss), [operands[0]] * 2)
    plan = loss.model.plan((specs[0],) * 2, (True, True), (True,), 0)
    forward = plan.text().split("backward\n")[0]
    assert forward.count("FusedReduce(") == 1 and 'results=[], folds="ReduceMean"' in forward
    assert plan.arena_bytes < operands[0].nbytes
    bias = export(Function(lambda x, b: nn.functional.gelu(x + b)), operands)
    plan = bias.model.plan(specs, (True, True), (True,), 0)
    backward = plan.text().split("backward\n")[1]
    assert backward.count(" = FusedReduce(") == 1 and 'folds="ReduceSum"' in backward and "ReduceSum(" not in backward
    leaves = [x.clone().requires_grad_() for x in operands]
    dy = torch.randn(64, 128)
    expected = torch.autograd.grad(nn.functional.gelu(leaves[0] + leaves[1]), leaves, dy)
    for ours, theirs in zip(run(bias, operands, dy, 0)[1][1:], expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_dropout_is_drawn_once():
    """The mask of forward is the mask of backward, and the same with and without the pass."""
    operands = [torch.randn(5, 2000), torch.randn(5, 2000)]
    module = Function(lambda x, y: nn.functional.dropout(x * 2, 0.4) + y)
    session = export(module, operands)
    y, dx, _ = run(session, operands, torch.ones(5, 2000), 0)[1]
    kept = (y - operands[1]).abs() > 1e-6
    assert 0.5 < kept.float().mean() < 0.7
    torch.testing.assert_close(dx, kept * (2 / 0.6))
    check(module, operands)
