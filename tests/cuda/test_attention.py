"""Attention as one operator on the emulated GPU: as near to float64 as the CPU's kernel, with its dropout masks."""

import pytest
import torch

from ortmodule import _core
from ortmodule.engine import session
from tests.cuda.test_emulated import driver  # noqa: F401  (a fixture)
from tests.passes.session import Function, export

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
TOLERANCE = {F32: 2e-6, F64: 1e-13, BF16: 2e-2, F16: 3e-3}
DROPPED = 0.3
attend = torch.nn.functional.scaled_dot_product_attention


def hidden(q, k, allowed):
    scores = torch.where(allowed, q @ k.transpose(-1, -2) * 0.3, torch.finfo(q.dtype).min)
    return torch.where(allowed, scores.softmax(-1), 0.0)


def places(q, k):
    return torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])


def causal(q, k, v):
    rows, keys = places(q, k)
    return hidden(q, k, rows >= keys) @ v


def masked(q, k, v):
    """A window, and rows in which nothing is allowed."""
    rows, keys = places(q, k)
    return hidden(q, k, (((rows - keys).abs() < 40) & (rows != 2))[None, None]) @ v


def dropped(q, k, v):
    return attend(q, k, v, dropout_p=DROPPED)


def biased(q, k, v, bias):
    return (bias + q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v


def grouped(q, k, v):
    k, v = (x[:, :, None].expand(-1, -1, 3, -1, -1).flatten(1, 2) for x in (k, v))
    rows, keys = places(q, k)
    return torch.nn.functional.dropout(hidden(q, k, rows >= keys), DROPPED) @ v


def sizes(queries, keys, width, value_width=None, heads=2, groups=None):
    groups = groups or heads
    return (2, heads, queries, width), (2, groups, keys, width), (2, groups, keys, value_width or width)


CASES = {
    "one": (attend, sizes(1, 1, 1)),
    "plain": (attend, sizes(5, 7, 8)),
    "tiles": (attend, sizes(130, 65, 8)),
    "causal": (causal, sizes(140, 140, 16)),
    "masked": (masked, sizes(70, 150, 5)),
    "dropped": (dropped, sizes(66, 131, 8)),
    "aligned": (dropped, sizes(64, 64, 8)),
    "wider": (dropped, sizes(10, 70, 90, 33)),
    "widest": (dropped, sizes(40, 66, 200, 256)),
    "grouped": (grouped, sizes(66, 66, 8, heads=6, groups=2)),
    "bias of all": (biased, (*sizes(66, 70, 8), (2, 2, 66, 70))),
    "bias of heads": (biased, (*sizes(66, 70, 8), (1, 2, 66, 70))),
    "bias of sequences": (biased, (*sizes(5, 70, 8), (2, 1, 5, 70))),
    "bias": (biased, (*sizes(66, 7, 8), (66, 7))),
}


def step(made, tensors, dy):
    """(the run's results, how often the operator ran), with masks that depend on the seed alone."""
    needs = [True] * len(tensors)
    run = made.run(tensors, needs, [True], seed=12345678901234567)
    text = next(reversed(made.plans.values())).text()
    assert " = FusedAttention(" in text and " = FusedAttentionGrad(" in text
    return [run.outputs[0], *run.backward([dy])]


def step_on_cpu(made, tensors, dy, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(session, "gpu_of", lambda tensors: None)
        return step(made, tensors, dy)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(driver, case, dtype, monkeypatch):  # noqa: F811
    function, shapes = CASES[case]
    torch.manual_seed(0)
    tensors = [torch.randn(s).to(dtype) for s in shapes]
    wide = [x.double() for x in tensors]
    dy = torch.randn(*shapes[0][:3], shapes[2][-1]).to(dtype)
    before = driver.fake_calls()
    found = step(export(Function(function), tensors), tensors, dy)
    assert driver.fake_calls() > before
    expected = step_on_cpu(export(Function(function), wide), wide, dy.double(), monkeypatch)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).abs().max() <= TOLERANCE[dtype] * max(1, theirs.abs().max())


def test_without_dropout_it_is_pytorchs(driver):  # noqa: F811
    tensors = [torch.randn(s) for s in sizes(70, 70, 8)]
    dy = torch.randn(tensors[0].shape)
    found = step(export(Function(causal), tensors), tensors, dy)
    leaves = [x.double().requires_grad_() for x in tensors]
    y = causal(*leaves)
    for ours, theirs in zip(found, [y, *torch.autograd.grad(y, leaves, dy.double())], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_the_same_bits_every_time(driver):  # noqa: F811
    tensors = [torch.randn(s) for s in sizes(70, 130, 8, heads=4, groups=1)]
    made, dy = (
        export(Function(lambda q, k, v: dropped(q, k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1))), tensors),
        (torch.randn(tensors[0].shape)),
    )
    first = step(made, tensors, dy)
    for ours, theirs in zip(step(made, tensors, dy), first, strict=True):
        assert torch.equal(ours, theirs)


def test_operands_that_are_views(driver, monkeypatch):  # noqa: F811
    """Queries, keys and values beside each other in one tensor, and a result that is read transposed."""

    def beside(x):
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in x.chunk(3, -1))
        return attend(q, k, v, dropout_p=DROPPED).transpose(1, 2).flatten(2)

    x, dy = torch.randn(3, 67, 48), torch.randn(3, 67, 16)
    found = step(export(Function(beside), [x]), [x], dy)
    wide = x.double()
    expected = step_on_cpu(export(Function(beside), [wide]), [wide], dy.double(), monkeypatch)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
