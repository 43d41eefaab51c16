"""Attention with masks that are data, and with biases, by torch's memory-efficient kernel on a GPU.

What is hidden, and what is added, is one bias for it (csrc/passes/attention_fusion.c). A library of ours stands for
torch's (tests/cuda/fake_torch.c).
"""

import pytest
import torch

from ortmodule import _core
from tests.cuda.test_emulated import driver  # noqa: F401  (a fixture)
from tests.cuda.test_torch_attention import ALL, BF16, EFFICIENT, F16, TOLERANCE, failures, fake, found_twice  # noqa: F401
from tests.passes.session import Function, export
from tests.selection import each

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

B, H, S, WIDTH = 4, 2, 40, 8
LENGTH = 256  # of 8 sequences with 16 heads: as many scores as are too many


def triangle(q, k):
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()


def hidden(scores, v, allowed):
    """A query that sees no key gets zeros, and gives none."""
    return torch.where(allowed, torch.where(allowed, scores, -torch.inf).softmax(-1), 0.0) @ v


def causal_and_padded(q, k, v, mask):
    return hidden(q @ k.transpose(-1, -2) / WIDTH**0.5, v, (mask != 0)[:, None, None, :] & triangle(q, k))


def any_mask(q, k, v, mask):
    return hidden(q @ k.transpose(-1, -2) / WIDTH**0.5, v, (mask != 0)[:, None])


def biased(q, k, v, bias):
    return (q @ k.transpose(-1, -2) / WIDTH**0.5 + bias).softmax(-1) @ v


def biased_and_masked(q, k, v, bias, mask):
    return hidden(q @ k.transpose(-1, -2) / WIDTH**0.5 + bias, v, (mask != 0)[:, None])


def shared(q, k, v, bias):
    """A bias of two layers."""
    return biased(biased(q, k, v, bias), k, v, bias)


def grouped(q, k, v, mask):
    k, v = (x[:, :, None].expand(-1, -1, H, -1, -1).flatten(1, 2) for x in (k, v))
    return causal_and_padded(q, k, v, mask)


def lengths(*of):
    return (torch.arange(S) < torch.tensor(of)[:, None]).long()


def some(keys):
    """Of a query in three every key is hidden."""
    mask = (torch.rand(B, S, keys) < 0.6).long()
    mask[:, ::3] = 0
    return mask


QKV = [(B, H, S, WIDTH)] * 3
ODD = [(B, H, S, WIDTH), *[(B, H, 37, WIDTH)] * 2]
#: (function, shapes of floats, how a mask is made)
CASES = {
    "right": (causal_and_padded, QKV, lambda: lengths(3, S, 17, 1)),
    "left": (causal_and_padded, QKV, lambda: lengths(3, S, 17, 1).flip(1)),
    "an empty sequence": (causal_and_padded, QKV, lambda: lengths(3, 0, 17, 1)),
    "any": (any_mask, QKV, lambda: some(S)),
    "odd": (any_mask, ODD, lambda: some(37)),
    "groups": (grouped, [QKV[0], *[(B, 1, S, WIDTH)] * 2], lambda: lengths(3, S, 17, 1)),
    "a bias": (biased, [*QKV, (1, H, S, S)], None),
    "a bias of all": (biased, [*QKV, (B, H, S, S)], None),
    "a bias of keys": (biased, [*QKV, (B, 1, 1, S)], None),
    "a bias of heads": (biased, [*QKV, (H, S, S)], None),
    "an odd bias": (biased, [*ODD, (1, H, S, 37)], None),
    "two layers": (shared, [*QKV, (1, H, S, S)], None),
    "a bias and a mask": (biased_and_masked, [*QKV, (H, S, S)], lambda: some(S)),
    "odd bias and mask": (biased_and_masked, [*ODD, (H, S, 37)], lambda: some(37)),
}


def made_of(case, dtype):
    function, shapes, mask = CASES[case]
    torch.manual_seed(0)
    tensors = [torch.randn(s).to(dtype) for s in shapes] + ([mask()] if mask else [])
    made = export(Function(function), tensors)
    q, _, v, *_ = shapes
    return made, tensors, torch.randn(*q[:3], v[-1]).to(dtype)


def step(made, tensors, dy):
    floats = [x.is_floating_point() for x in tensors]
    run = made.run(tensors, floats, [True], seed=1)
    return [run.outputs[0], *(d for d in run.backward([dy]) if d is not None)]


def check(case, tensors, dy, found):
    leaves = [x.double().requires_grad_() if x.is_floating_point() else x for x in tensors]
    y = CASES[case][0](*leaves)
    exact = [y, *torch.autograd.grad(y, [x for x in leaves if x.is_floating_point()], dy.double())]
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == dy.dtype
        assert (ours.double() - theirs).abs().max() <= 2 * TOLERANCE[ours.dtype] * max(1, theirs.abs().max())


@pytest.mark.parametrize("case", CASES)
@each("dtype", [BF16, F16, torch.float32], [BF16, torch.float32], pytest.mark.emulated_full, ids=str)
def test_beside_float64(driver, fake, case, dtype):  # noqa: F811
    made, tensors, dy = made_of(case, dtype)
    launches = 8 if case == "two layers" else 4
    check(case, tensors, dy, found_twice(driver, fake, EFFICIENT, launches, lambda: step(made, tensors, dy)))


def test_all_layers_have_one(driver, fake):  # noqa: F811
    """The bias that hides what the mask hides is made once."""

    def layers(q, k, v, mask):
        return causal_and_padded(causal_and_padded(causal_and_padded(q, k, v, mask), k, v, mask), k, v, mask)

    tensors = [*(torch.randn(s).to(BF16) for s in QKV), lengths(3, S, 17, 1)]
    made = export(Function(layers), tensors)
    step(made, tensors, torch.randn(QKV[0]).to(BF16))
    lines = [line for line in list(made.plans.values())[-1].text().splitlines() if line.startswith("%")]
    assert sum("= FusedAttention(" in line and "torch=3" in line for line in lines) == 3
    assert sum("-inf" in line for line in lines) == 1
    assert not any("MaskedSoftmax" in line for line in lines)


@pytest.mark.parametrize("missing", ["forward", "backward"])
@pytest.mark.parametrize("case", ["any", "odd bias and mask", "a bias of keys"])
def test_where_torch_fails_our_kernels_follow(driver, fake, case, missing):  # noqa: F811
    made, tensors, dy = made_of(case, BF16)
    step(made, tensors, dy)
    held, before = driver.fake_held(), fake.fake_attentions()
    fake.fake_torch_lacks(ALL if missing == "forward" else -1)
    run = made.run(tensors, [x.is_floating_point() for x in tensors], [True], seed=1)
    fake.fake_torch_lacks(ALL if missing == "backward" else -1)
    results = [run.outputs[0], *(d for d in run.backward([dy]) if d is not None)]
    del run
    assert fake.fake_attentions() == before + 1
    assert driver.fake_held() == held
    check(case, tensors, dy, results)


@each("call", range(1, 20), [1, 3, 9, 14], pytest.mark.emulated_full)
def test_a_failure_of_one_call(driver, fake, call):  # noqa: F811
    """Nothing is held, and our kernels do what is left."""
    made, tensors, dy = made_of("odd bias and mask", BF16)
    step(made, tensors, dy)
    held = driver.fake_held()
    fake.fake_torch_fails(call)
    found = step(made, tensors, dy)
    fake.fake_torch_fails(0)
    assert driver.fake_held() == held
    check("odd bias and mask", tensors, dy, found)


def dropped(case, dtype):
    """The same, with dropout of the weights, and so many scores that torch's kernel is asked for them."""
    queries, keys = LENGTH, LENGTH - (3 if case == "odd" else 0)

    def module(q, k, v, given):
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5
        if case == "a bias":
            return torch.nn.functional.dropout((scores + given).softmax(-1), 0.25) @ v
        allowed = (given != 0)[:, None]
        weights = torch.where(allowed, torch.where(allowed, scores, -torch.inf).softmax(-1), 0.0)
        return torch.nn.functional.dropout(weights, 0.25) @ v

    torch.manual_seed(0)
    tensors = [torch.randn(8, 16, length, WIDTH).to(dtype) for length in (queries, keys, keys)]
    mask = (torch.rand(8, queries, keys) < 0.6).long()
    mask[:, ::3] = 0
    given = torch.randn(1, 16, queries, keys).to(dtype) if case == "a bias" else mask
    return export(Function(module), [*tensors, given]), [*tensors, given], torch.randn(tensors[0].shape).to(dtype)


@each(
    ("case", "dtype"),
    [(case, dtype) for case in ("any", "odd", "a bias") for dtype in (BF16, torch.float32)],
    [("odd", BF16), ("a bias", torch.float32)],
    pytest.mark.emulated_full,
    ids=str,
)
def test_dropout(driver, fake, case, dtype):  # noqa: F811
    """Others are dropped in each run; backward drops what forward dropped: results are linear in v."""
    made, tensors, dy = dropped(case, dtype)
    before = fake.fake_attentions_by(EFFICIENT)
    y, _, _, dv, *_ = step(made, tensors, dy)
    other, *_ = step(made, tensors, dy)
    assert fake.fake_attentions_by(EFFICIENT) == before + 4
    assert not torch.equal(y, other)
    sums = [(a.double() * b.double()).sum() for a, b in ((dv, tensors[2]), (y, dy))]
    assert abs(sums[0] - sums[1]) <= 2e-2 * (y.double() * dy.double()).abs().sum()


def test_backward_of_dropout_waits_for_nothing(driver, fake):  # noqa: F811
    """What forward drew by is known on the host, of each of several runs that are under way."""
    made, tensors, dy = dropped("odd", BF16)
    floats = [x.is_floating_point() for x in tensors]
    step(made, tensors, dy)
    runs, before = [made.run(tensors, floats, [True], seed=seed) for seed in (1, 2, 1)], driver.fake_waits()
    for run in reversed(runs):
        _, _, dv, *_ = run.backward([dy])
        a, b = ((x.double() * y.double()).sum() for x, y in ((dv, tensors[2]), (run.outputs[0], dy)))
        assert abs(a - b) <= 2e-2 * (run.outputs[0].double() * dy.double()).abs().sum()
    assert driver.fake_waits() == before


@each("call", range(2, 16), [2, 9], pytest.mark.emulated_full)
def test_dropout_that_fails_is_an_error(driver, fake, call):  # noqa: F811
    """No other kernel drops the same elements."""
    made, tensors, dy = dropped("odd", BF16)
    step(made, tensors, dy)
    held = driver.fake_held()
    fake.fake_torch_fails(call)
    with pytest.raises((RuntimeError, _core.Error), match=r"attention with dropout failed in torch's kernel"):
        step(made, tensors, dy)
    fake.fake_torch_fails(0)
    assert driver.fake_held() == held


def far(q, k, v, mask):
    return biased(q, k, v, torch.where((mask != 0)[:, None], 0.0, torch.finfo(q.dtype).min).to(q.dtype))


def lowered(q, k, v, bias, mask):
    """As T5 does it: where every query sees a key, what is hidden has no weight."""
    return biased(q, k, v, torch.where((mask != 0)[:, None, None, :], bias, torch.finfo(bias.dtype).min).to(q.dtype))


@each("dtype", [BF16, torch.float32], [BF16], pytest.mark.emulated_full, ids=str)
def test_a_mask_of_lowest_numbers(driver, fake, dtype):  # noqa: F811
    torch.manual_seed(0)
    tensors = [*(torch.randn(s).to(dtype) for s in [*QKV, (1, H, S, S)]), lengths(3, S, 17, 1)]
    made, dy = export(Function(lowered), tensors), torch.randn(QKV[0]).to(dtype)
    before = fake.fake_attentions_by(EFFICIENT)
    found = step(made, tensors, dy)
    assert fake.fake_attentions_by(EFFICIENT) == before + 2
    assert list(made.plans.values())[-1].fired["score_mask"] == 1
    leaves = [x.double().requires_grad_() for x in tensors[:4]]
    y = lowered(*leaves, tensors[4])
    for ours, theirs in zip(found, [y, *torch.autograd.grad(y, leaves, dy.double())], strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).abs().max() <= 2 * TOLERANCE[dtype] * max(1, theirs.abs().max())


def test_where_a_query_sees_nothing_lowest_numbers_stay(driver, fake):  # noqa: F811
    """Of a row of such numbers alone PyTorch makes equal weights, torch's kernel zeros."""
    made = export(Function(far), [torch.randn(s) for s in QKV] + [some(S)])
    tensors = [*(torch.randn(s) for s in QKV), some(S)]
    before = fake.fake_attentions()
    dy = torch.randn(QKV[0])
    found = step(made, tensors, dy)
    assert fake.fake_attentions() == before
    leaves = [x.double().requires_grad_() for x in tensors[:3]]
    mask = torch.where((tensors[3] != 0)[:, None], 0.0, torch.finfo(torch.float32).min).double()
    y = biased(*(x.float() for x in leaves), mask.float())
    for ours, theirs in zip(found, [y, *torch.autograd.grad(y, leaves, dy)], strict=True):
        torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-4, atol=1e-4)


LOWEST = torch.finfo(torch.float32).min


def given_mask(kind, dtype):
    """What a script may add to scores, without a gradient."""
    mask = torch.zeros(B, 1, S, S)
    mask[:, :, :, 30:] = {"infinite": -torch.inf, "far": -1e9}.get(kind, LOWEST)
    if kind == "keys":
        mask = mask[:, :, :1]
    if kind == "moderate":
        mask = torch.randn(1, H, S, S)
    if kind == "both":
        mask = mask + torch.randn(B, H, S, S)
    if kind == "nothing seen":
        mask[1, 0, 7] = LOWEST
    if kind in ("large", "no number"):
        mask[2, 0, 3, 4] = 2e4 if kind == "large" else torch.nan
    return mask.to(dtype)


#: Whether torch's kernel may take it: nothing else hides, or is added, in it.
GIVEN = {"infinite": 1, "lowest": 1, "keys": 1, "moderate": 1, "both": 1, "nothing seen": 0, "far": 0, "large": 0,
         "no number": 0}  # fmt: skip


def two_layers(q, k, v, mask):
    return biased(biased(q, k, v, mask[:, :, :, :S]), k, v, mask[:, :, :, :S])


@pytest.mark.parametrize("kind", GIVEN)
@each("dtype", [BF16, torch.float32], [BF16], pytest.mark.emulated_full, ids=str)
def test_a_mask_of_floats_that_is_given(driver, fake, kind, dtype):  # noqa: F811
    """Data is asked what is in it, once for all layers; whatever that is, results are PyTorch's."""
    torch.manual_seed(0)
    tensors = [*(torch.randn(s).to(dtype) for s in QKV), given_mask(kind, dtype)]
    made, dy = export(Function(two_layers), tensors), torch.randn(QKV[0]).to(dtype)
    before = fake.fake_attentions_by(EFFICIENT)
    run = made.run(tensors, [True] * 3 + [False], [True], seed=1)
    found = [run.outputs[0], *(d for d in run.backward([dy]) if d is not None)]
    assert fake.fake_attentions_by(EFFICIENT) == before + 4 * GIVEN[kind]
    lines = [line for line in list(made.plans.values())[-1].text().splitlines() if "= FusedAttention(" in line]
    biases = {line.split("(")[1].split(", ")[4] for line in lines if "torch=3" in line}
    assert len(lines) == 2 and len(biases) == GIVEN[kind], "all layers have one"
    leaves = [x.double().requires_grad_() for x in tensors[:3]]
    y = two_layers(*leaves, tensors[3].double())
    for ours, theirs in zip(found, [y, *torch.autograd.grad(y, leaves, dy.double())], strict=True):
        scale = max(1, theirs.abs().nan_to_num().max())
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert ((ours.double() - theirs).abs().nan_to_num() <= 3 * TOLERANCE[dtype] * scale).all()
