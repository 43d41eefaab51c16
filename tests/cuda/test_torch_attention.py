"""Attention by torch's kernels on a GPU (csrc/cuda/kernels/torch_attention.cu), which a library of ours stands for.

On the emulated GPU, an sm_90, cuDNN's is the first that is asked, then flash attention, then the memory-efficient one.
"""

import ctypes

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks import roofline_plan
from ortmodule import _core
from tests.cuda.test_attention import causal, places, sizes
from tests.cuda.test_emulated import driver, library  # noqa: F401  (a fixture)
from tests.cuda.test_graphs import aligned
from tests.passes.session import Function, export
from tests.selection import each

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

BF16, F16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 2e-2, F16: 3e-3, torch.float32: 1e-5}
CUDNN, FLASH, EFFICIENT, ALL = range(4)
SAME_BITS = 4  # of a run's math mode (csrc/cuda/host/driver.h)
attend = torch.nn.functional.scaled_dot_product_attention
#: Of 8 sequences with 16 heads: as many scores as it takes, at least.
LENGTH = 256


@pytest.fixture
def fake():
    """Loaded as torch's library for GPUs is, by who uses it; it stays."""
    made = library("libtorch_cuda.so")
    made.fake_attentions.restype = ctypes.c_int
    yield made
    made.fake_torch_lacks(-1)


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


def found_twice(driver, fake, kernel, launches, run):  # noqa: F811
    """What ``run()`` returns: in two runs the same bits, of so many launches of the kernel, and nothing is left."""
    before, first = fake.fake_attentions_by(kernel), run()
    held, found = driver.fake_held(), run()
    assert fake.fake_attentions_by(kernel) == before + launches
    assert driver.fake_held() == held
    assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
    return found


CASES = {
    "all": (attend, shapes()),
    "causal": (causal, shapes()),
    "padded sums": (attend, shapes(queries=257)),
    "other widths": (attend, shapes(keys=264, value_width=24)),
    "grouped": (grouped, shapes(groups=4)),
}
#: (case, type, the kernel that takes it, those that are not there)
TAKEN = [
    *((case, BF16, CUDNN, -1) for case in CASES),
    ("causal", F16, CUDNN, -1),
    *((case, BF16, FLASH, CUDNN) for case in CASES if case != "other widths"),
    ("other widths", BF16, EFFICIENT, CUDNN),
    *((case, torch.float32, EFFICIENT, -1) for case in CASES),
]


@pytest.fixture(autouse=True)
def failures():
    """What has failed twice is not asked again in a process: these tests begin as a process does."""
    _core.tuning_clear()
    yield
    _core.tuning_clear()


@pytest.mark.parametrize(("case", "dtype", "kernel", "lacks"), TAKEN, ids=str)
def test_forward_and_backward(driver, fake, case, dtype, kernel, lacks):  # noqa: F811
    function, of = CASES[case]
    made, tensors, dy = made_of(function, of, dtype)
    fake.fake_torch_lacks(lacks)
    check(function, tensors, dy, found_twice(driver, fake, kernel, 4, lambda: step(made, tensors, dy)))


def test_sums_of_another_rank(driver, fake):  # noqa: F811
    """Of cuDNN's kernel some versions of torch return [B, H, S], others [B, H, S, 1], and want the same back."""
    made, tensors, dy = made_of(causal, shapes(), BF16)
    fake.fake_cudnn_rank(3)
    before = fake.fake_attentions_by(CUDNN)
    check(causal, tensors, dy, step(made, tensors, dy))
    fake.fake_cudnn_rank(4)
    check(causal, tensors, dy, step(made, tensors, dy))
    assert fake.fake_attentions_by(CUDNN) == before + 4


def test_only_the_same_bits(driver, fake):  # noqa: F811
    """Where torch is told to use deterministic algorithms cuDNN's is not asked, whose backward adds in any order."""
    made, tensors, dy = made_of(causal, shapes(), BF16)
    plan = made.plan([("bfloat16", tuple(x.shape)) for x in tensors], [True] * 3, [True], gpu=torch.device("cpu"))
    arena, y, grads = aligned(plan.arena_bytes), torch.empty_like(dy), [torch.empty_like(x) for x in tensors]
    before = [fake.fake_attentions_by(kernel) for kernel in (CUDNN, FLASH, EFFICIENT)]
    plan.forward(arena, tensors, [y], [], 1, None, 0, SAME_BITS, False)
    plan.backward(arena, tensors, [y], [dy], grads, 1, None, 0, SAME_BITS, False)
    after = [fake.fake_attentions_by(kernel) for kernel in (CUDNN, FLASH, EFFICIENT)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 2, 0]
    check(causal, tensors, dy, [y, *grads])


def test_what_fails_twice_is_not_asked_again(driver, fake):  # noqa: F811
    made, tensors, dy = made_of(causal, shapes(), BF16)
    fake.fake_torch_lacks(CUDNN)
    before = fake.fake_attentions_by(FLASH)
    refused = (_core.cuda_refusals(-1) or (0,))[0]
    for _ in range(2):
        check(causal, tensors, dy, step(made, tensors, dy))
    assert fake.fake_attentions_by(FLASH) == before + 4
    count, kept = _core.cuda_refusals(refused)
    assert count == refused + 1
    assert "cuDNN's attention failed for 256 queries of 16 x 16 heads of width 8" in str(kept[-1])
    fake.fake_torch_lacks(-1)
    step(made, tensors, dy)
    assert fake.fake_attentions_by(FLASH) == before + 6


@each("groups", [16, 4], [4], pytest.mark.emulated_full)
def test_dropout_by_flash_attention(driver, fake, groups):  # noqa: F811
    """Elements are dropped, others in each run; backward drops the same as forward: results are linear in v, so
    v.grad * v summed up is y * dy summed up."""

    def some(q, k, v):
        if groups != 16:
            k, v = (x[:, :, None].expand(-1, -1, 4, -1, -1).flatten(1, 2) for x in (k, v))
        return torch.nn.functional.dropout((q @ k.transpose(-1, -2) / 8**0.5).softmax(-1), 0.25) @ v

    made, tensors, dy = made_of(some, shapes(groups=groups), BF16)
    before = fake.fake_attentions_by(FLASH)
    y, _, _, dv = step(made, tensors, dy)
    other, *_ = step(made, tensors, dy)
    assert fake.fake_attentions_by(FLASH) == before + 4
    assert not torch.equal(y, other)
    sums = [(a.double() * b.double()).sum() for a, b in ((dv, tensors[2]), (y, dy))]
    assert abs(sums[0] - sums[1]) <= 2e-2 * (y.double() * dy.double()).abs().sum()
    exact, _, _ = (x.double() for x in tensors)
    leaves = [x.double() for x in tensors]
    k, v = (x.repeat_interleave(16 // groups, 1) for x in leaves[1:])
    weights = (leaves[0] @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
    # Of the mean over many runs, and all rows, dropout leaves nothing.
    assert abs((y.double() - weights @ v).mean()) < 0.01
    assert (y.double() - weights @ v).abs().mean() > 0.01
    made.plans.clear()
    made.disabled = _core.passes()["flash_dropout"]
    step(made, tensors, dy)
    assert fake.fake_attentions_by(FLASH) == before + 4


#: What flash attention does not take is the memory-efficient kernel's: (shapes, causal, type).
BESIDE_FLASH = {
    "float32": (shapes(), False, torch.float32),
    "float32, causal": (shapes(), True, torch.float32),
    "float32, grouped": (shapes(groups=4), False, torch.float32),
    "other widths": (shapes(value_width=16), False, BF16),
    "other widths, causal": (shapes(value_width=24), True, BF16),
}


@each("case", BESIDE_FLASH, ["float32", "float32, grouped", "other widths, causal"], pytest.mark.emulated_full)
def test_dropout_by_the_memory_efficient_kernel(driver, fake, case):  # noqa: F811
    """Without a bias: others are dropped in each run, backward drops what forward dropped, and waits for nothing."""
    of, later_hidden, dtype = BESIDE_FLASH[case]
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

    def some(q, k, v):
        if k.shape[1] != 16:
            k, v = (x[:, :, None].expand(-1, -1, 4, -1, -1).flatten(1, 2) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / 8**0.5
        weights = (torch.where(allowed, scores, -torch.inf) if later_hidden else scores).softmax(-1)
        return torch.nn.functional.dropout(weights, 0.25) @ v

    made, tensors, dy = made_of(some, of, dtype)
    step(made, tensors, dy)
    plan = list(made.plans.values())[-1]
    assert f"torch={2 if later_hidden else 1}" in plan.text() and "MaskedSoftmax" not in plan.text()
    before, waits, held = fake.fake_attentions_by(EFFICIENT), driver.fake_waits(), driver.fake_held()
    y, _, _, dv = step(made, tensors, dy)
    other, *_ = step(made, tensors, dy)
    assert fake.fake_attentions_by(EFFICIENT) == before + 4
    assert driver.fake_waits() == waits and driver.fake_held() == held
    assert not torch.equal(y, other)
    sums = [(a.double() * b.double()).sum() for a, b in ((dv, tensors[2]), (y, dy))]
    assert abs(sums[0] - sums[1]) <= 2e-2 * (y.double() * dy.double()).abs().sum()
    k, v = (x.double().repeat_interleave(16 // x.shape[1], 1) for x in tensors[1:])
    scores = tensors[0].double() @ k.transpose(-1, -2) / 8**0.5
    weights = (torch.where(allowed, scores, -torch.inf) if later_hidden else scores).softmax(-1)
    # Of the mean over all rows dropout leaves nothing.
    assert abs((y.double() - weights @ v).mean()) < 0.01 < (y.double() - weights @ v).abs().mean()


@each("call", [1, 2, 3, 9], [1, 9])
def test_dropout_that_fails_is_an_error(driver, fake, call):  # noqa: F811
    """No other kernel drops the same elements."""
    made, tensors, dy = made_of(dropped, shapes(), BF16)
    step(made, tensors, dy)
    held = driver.fake_held()
    fake.fake_torch_fails(call)
    with pytest.raises((RuntimeError, _core.Error), match=r"attention with dropout failed in torch's kernel"):
        step(made, tensors, dy)
    fake.fake_torch_fails(0)
    assert driver.fake_held() == held


REFUSED = {
    "another mask": (allowed_later, shapes(), BF16),
    "float64": (attend, shapes(), torch.float64),
    "dropout of float64": (dropped, shapes(), torch.float64),
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


@pytest.mark.parametrize("missing", ["forward", "backward"])
def test_where_torch_fails_our_kernels_follow(driver, fake, missing):  # noqa: F811
    """Of forward or of backward alone: each kernel fails. Nothing is held."""
    made, tensors, dy = made_of(causal, shapes(), BF16)
    found = step(made, tensors, dy)
    held, before = driver.fake_held(), fake.fake_attentions()
    fake.fake_torch_lacks(ALL if missing == "forward" else -1)
    run = made.run(tensors, [True] * 3, [True], seed=1)
    fake.fake_torch_lacks(ALL if missing == "backward" else -1)
    results = [run.outputs[0], *run.backward([dy])]
    del run
    assert fake.fake_attentions() == before + 1
    assert driver.fake_held() == held
    for ours, theirs in zip(results, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@each("call", [1, 4, 11], [1, 4])
def test_a_failure_of_one_call(driver, fake, call):  # noqa: F811
    """A tensor cannot be made, or nothing computed: the next kernel of torch's does it. Nothing is held."""
    made, tensors, dy = made_of(causal, shapes(), BF16)
    found = step(made, tensors, dy)
    held, before = driver.fake_held(), fake.fake_attentions()
    fake.fake_torch_fails(call)
    results = step(made, tensors, dy)
    fake.fake_torch_fails(0)
    assert fake.fake_attentions() == before + 2
    assert driver.fake_held() == held
    for ours, theirs in zip(results, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_causal_masks_of_many_layers(driver, fake):  # noqa: F811
    """Each layer makes its own, of a megabyte: all of them are known as causal, so none is read."""
    sizes = {"n_layer": 24, "n_embd": 16, "n_head": 2, "n_positions": 1024, "vocab_size": 61}
    dry = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    ids = torch.zeros(2, 1024, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    plan, _ = roofline_plan.plan_of(lambda: GPT2LMHeadModel(GPT2Config(**sizes, **dry)), batch, BF16)
    text = plan.text()
    assert "MaskedSoftmax" not in text
    assert sum(" = FusedAttention(" in line and "torch=2" in line for line in text.splitlines()) == 24
