"""Attention by torch's kernels on a GPU (csrc/cuda/kernels/torch_attention.cu), which a library of ours stands for."""

import ctypes

import pytest
import torch

from ortmodule import _core
from tests.cuda.test_attention import causal, places, sizes
from tests.cuda.test_emulated import driver, library  # noqa: F401  (a fixture)
from tests.cuda.test_graphs import aligned
from tests.passes.test_passes import Function, export
from tests.selection import each

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

BF16, F16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 2e-2, F16: 3e-3}
attend = torch.nn.functional.scaled_dot_product_attention
#: Of 8 sequences with 16 heads: as many scores as it takes, at least.
LENGTH = 256


@pytest.fixture
def fake():
    """Loaded as torch's library for GPUs is, by who uses it; it stays."""
    made = library("libtorch_cuda.so")
    made.fake_attentions.restype = ctypes.c_int
    return made


def shapes(queries=LENGTH, keys=LENGTH, width=8, value_width=None, groups=16):
    q, k, v = sizes(queries, keys, width, value_width, 16, groups)
    return (8, *q[1:]), (8, *k[1:]), (8, *v[1:])


def grouped(q, k, v):
    k, v = (x[:, :, None].expand(-1, -1, 4, -1, -1).flatten(1, 2) for x in (k, v))
    return causal(q, k, v)


def allowed_later(q, k, v):
    rows, keys = places(q, k)
    return torch.where(rows >= keys - 1, q @ k.transpose(-1, -2), -torch.inf).softmax(-1) @ v


def dropped(q, k, v):
    return torch.nn.functional.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1) @ v


def step(made, tensors, dy):
    run = made.run(tensors, [True] * len(tensors), [True], seed=1)
    return [run.outputs[0], *run.backward([dy])]


def check(function, tensors, dy, found):
    leaves = [x.double().requires_grad_() for x in tensors]
    y = function(*leaves)
    for ours, theirs in zip(found, [y, *torch.autograd.grad(y, leaves, dy.double())], strict=True):
        assert ours.dtype == tensors[0].dtype
        assert (ours.double() - theirs).abs().max() <= TOLERANCE[ours.dtype] * max(1, theirs.abs().max())


def made_of(function, of, dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(s).to(dtype) for s in of]
    return export(Function(function), tensors), tensors, torch.randn(*of[0][:3], of[2][-1]).to(dtype)


CASES = {
    "all": (attend, shapes()),
    "causal": (causal, shapes()),
    "padded sums": (attend, shapes(queries=257)),
    "other widths": (attend, shapes(keys=264, value_width=24)),
    "grouped": (grouped, shapes(groups=4)),
}


@pytest.mark.parametrize(("case", "dtype"), [*((case, BF16) for case in CASES), ("causal", F16)], ids=str)
def test_forward_and_backward(driver, fake, case, dtype):  # noqa: F811
    function, of = CASES[case]
    made, tensors, dy = made_of(function, of, dtype)
    before, first = fake.fake_attentions(), step(made, tensors, dy)
    held, found = driver.fake_held(), step(made, tensors, dy)
    assert fake.fake_attentions() == before + 4
    assert driver.fake_held() == held
    assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
    check(function, tensors, dy, found)


REFUSED = {
    "dropout": (dropped, shapes(), BF16),
    "another mask": (allowed_later, shapes(), BF16),
    "float32": (attend, shapes(), torch.float32),
    "widths": (attend, shapes(width=9), BF16),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_does_not_take(driver, fake, case):  # noqa: F811
    function, of, dtype = REFUSED[case]
    made, tensors, _ = made_of(function, of, dtype)
    specs = [(str(dtype).removeprefix("torch."), tuple(x.shape)) for x in tensors]
    text = made.plan(specs, [True] * 3, [True], gpu=torch.device("cpu")).text()
    assert "torch=1" not in text and "torch=2" not in text


def test_few_scores_are_taken_where_the_setting_asks_for_it(driver, fake):  # noqa: F811
    made, tensors, dy = made_of(attend, sizes(70, 24, 8), BF16)
    before = fake.fake_attentions()
    check(attend, tensors, dy, step(made, tensors, dy))
    assert fake.fake_attentions() == before + 2
    made.plans.clear()
    made.disabled = _core.passes()["efficient_attention"]
    check(attend, tensors, dy, step(made, tensors, dy))
    assert fake.fake_attentions() == before + 2


def test_the_benchmark_asks_for_it(driver, fake):  # noqa: F811
    """At any number of scores, beside a plan without it (benchmarks/choices.py)."""
    from benchmarks import choices

    for masked in (False, True):
        ways = choices.attention({"dtype": "bfloat16", "batch": 1, "length": 8, "heads": 1, "causal": masked}, "cpu")
        before = fake.fake_attentions()
        ways["products"].step()
        assert fake.fake_attentions() == before
        ways["one operator"].step()
        assert fake.fake_attentions() == before + 2
        assert ways["one operator"].notes == {"kernels": "torch"}


def test_it_ends_a_recording(driver, fake):  # noqa: F811
    """A CUDA graph has none of its work: what comes before it is recorded."""

    def behind(q, k, v, w):
        for axis in (0, 1, 0, 1):
            w = w.softmax(axis)
        return attend(q * w[0, 0], k, v)

    made, tensors, dy = made_of(behind, (*shapes(), (5, 5)), BF16)
    plan = made.plan([("bfloat16", tuple(x.shape)) for x in tensors], [True] * 4, [True], gpu=torch.device("cpu"))
    names = [row[0] for row in plan.code()]
    assert names.count("FusedAttention") == names.count("FusedAttentionGrad") == 1
    arena = aligned(plan.arena_bytes)
    y, grads = torch.empty_like(dy), [torch.empty_like(x) for x in tensors]
    steps, before = [], fake.fake_attentions()
    for _ in range(3):
        plan.forward(arena, tensors, [y], [], 1, None, 0, False, True)
        plan.backward(arena, tensors, [y], [dy], grads, 1, None, 0, False, True)
        steps.append([x.clone() for x in (y, *grads)])
    assert plan.graphs[2] >= 2
    assert fake.fake_attentions() == before + 6
    check(behind, tensors, dy, steps[0])
    for found in steps[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, steps[0], strict=True))


@each("call", [1, 4, 11], [1, 4])
def test_where_torch_fails_our_kernels_follow(driver, fake, call):  # noqa: F811
    """Of forward or of backward alone: a tensor cannot be made, or nothing computed. Nothing is held."""
    made, tensors, dy = made_of(causal, shapes(), BF16)
    found = step(made, tensors, dy)
    held, before = driver.fake_held(), fake.fake_attentions()
    fake.fake_torch_fails(call)
    results = step(made, tensors, dy)
    fake.fake_torch_fails(0)
    assert fake.fake_attentions() == before + 1
    assert driver.fake_held() == held
    for ours, theirs in zip(results, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
