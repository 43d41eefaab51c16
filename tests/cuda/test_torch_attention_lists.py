"""Attention of padded sequences runs torch's kernels on a GPU: over the rows that the mask shows, or without one.

Where padding_removal keeps just the rows that attention's mask shows, nothing is left of the mask but that a query sees
no later key, and torch's flash attention or memory-efficient attention takes sequences of different lengths, whose
starts are counted on the GPU. Where the mask hides nothing it is gone (mask_removal). A library of ours stands for
torch's C shim.
"""

import copy
import ctypes

import pytest
import torch
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention

from ortmodule import ORTModule, _core, explain
from tests.cuda.test_emulated import driver  # noqa: F401  (a fixture)
from tests.cuda.test_graphs import aligned
from tests.cuda.test_torch_attention import ALL, CUDNN, EFFICIENT, FLASH, SAME_BITS, failures, fake  # noqa: F401
from tests.models.zoo import VOCABULARY
from tests.passes.session import Function, export
from tests.passes.test_rows import LANGUAGE, Loss, model
from tests.selection import each

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
B, S, WIDTH, HEADS, EACH = 8, 16, 32, 4, 8
#: Of the root mean square of the exact numbers: PyTorch, in the same type, is the measure.
BESIDE, FLOOR = 1.7, {BF16: 2e-3, F16: 3e-4, F32: 1e-6}


def lengths_to_mask(lengths):
    return torch.arange(S) < torch.tensor(lengths)[:, None]


MASKS = {
    "right": lengths_to_mask([3, 16, 5, 1, 9, 2, 7, 4]),
    "left": lengths_to_mask([3, 16, 5, 1, 9, 2, 7, 4]).flip(1),
    "holes": torch.rand(B, S, generator=torch.Generator().manual_seed(3)) < 0.4,
    "an empty sequence": lengths_to_mask([3, 16, 0, 1, 9, 2, 0, 0]),
    "little padding": lengths_to_mask([16, 16, 16, 14, 16, 16, 16, 15]),
    "no padding": lengths_to_mask([S] * B),
}


def heads(x, count=HEADS):
    return x.unflatten(-1, (count, EACH)).transpose(1, 2)


def allowed_of(mask, queries, causal):
    allowed = (mask != 0)[:, None, None, :].expand(-1, 1, queries, -1)
    return allowed & torch.ones(queries, S, dtype=torch.bool).tril() if causal else allowed


def attend(q, k, v, allowed):
    """PyTorch's function, which export would compute in float32; a query that may look at nothing gets zeros."""
    if not torch.onnx.is_in_onnx_export():
        return scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    scores = torch.where(allowed, q @ k.transpose(-1, -2) / EACH**0.5, -torch.inf)
    return torch.where(allowed, scores.softmax(-1), 0) @ v


def self_attention(causal=False, groups=HEADS):
    """Of tokens [B, S, WIDTH]; the mean of those that are there is seen."""

    def module(x, w, out, mask):
        q, k, v = (x @ w).split((HEADS * EACH, groups * EACH, groups * EACH), -1)
        k, v = (heads(t, groups) for t in (k, v))
        if groups != HEADS:
            k, v = (t[:, :, None].expand(-1, -1, HEADS // groups, -1, -1).flatten(1, 2) for t in (k, v))
        y = attend(heads(q), k, v, allowed_of(mask, S, causal))
        y = y.transpose(1, 2).flatten(2) @ out
        return (y * mask.unsqueeze(-1).to(y.dtype)).sum(1)

    return module


def cross_attention(x, w, out, mask, z):
    """Queries, all of which are seen, of other sequences [B, 11, WIDTH]."""
    q, k, v = z @ w[:, :WIDTH], x @ w[:, WIDTH : 2 * WIDTH], x @ w[:, 2 * WIDTH :]
    y = attend(heads(q), heads(k), heads(v), allowed_of(mask, z.shape[1], False))
    return y.transpose(1, 2).flatten(2) @ out


def operands(dtype, kind, groups=HEADS, queries=0):
    generator = torch.Generator().manual_seed(0)
    sizes = (B, S, WIDTH), (WIDTH, (HEADS + 2 * groups) * EACH), (WIDTH, WIDTH)
    more = [(B, queries, WIDTH)] if queries else []
    x, w, out, *rest = (torch.randn(s, generator=generator) * (1 if len(s) == 3 else 0.3) for s in (*sizes, *more))
    mask = MASKS[kind].long()
    return [*(t.to(dtype) for t in (x, w, out)), mask, *(t.to(dtype) for t in rest)]


def made_of(module, tensors):
    y = module(*tensors)
    return export(Function(module), tensors), torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(
        y.dtype
    )


def needs(tensors):
    return [t.is_floating_point() for t in tensors]


def step(made, tensors, dy, seed=1):
    run = made.run(tensors, needs(tensors), [True], seed=seed)
    return [run.outputs[0], *(g for g in run.backward([dy]) if g is not None)]


def exact_step(module, tensors, dy, dtype=torch.float64):
    of = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    leaves = [t.requires_grad_() for t in of if t.is_floating_point()]
    y = module(*of)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]


def check(module, tensors, dy, found):
    """As near to float64 as PyTorch in the same type."""
    dtype = tensors[0].dtype
    of_each = zip(found, exact_step(module, tensors, dy), exact_step(module, tensors, dy, dtype), strict=True)
    for ours, exact, theirs in of_each:
        assert ours.dtype == dtype and ours.shape == exact.shape and ours.isfinite().all()
        error, beside = ((t.double() - exact).square().mean().sqrt() for t in (ours, theirs))
        assert error <= BESIDE * beside + FLOOR[dtype] * exact.square().mean().sqrt()


def counts(fake):  # noqa: F811
    return [fake.fake_attentions_by(kernel) for kernel in (CUDNN, FLASH, EFFICIENT)]


def lengths(fake, side):  # noqa: F811
    """Of the sequences of the last call over lists; [] where it was of all rows."""
    room = (ctypes.c_int * 64)()
    return list(room[: fake.fake_lengths(side, room, 64)])


CASES = {
    "all keys": (self_attention(), HEADS, 0),
    "causal": (self_attention(causal=True), HEADS, 0),
    "grouped": (self_attention(causal=True, groups=2), 2, 0),
    "of other sequences": (cross_attention, HEADS, 11),
}
#: (type, the kernel that takes it)
KERNELS = [(BF16, FLASH), (F16, FLASH), (F32, EFFICIENT)]


def is_listed(case, dtype):
    """Of fewer heads of keys only flash attention takes lists: without it the mask is a bias, over all rows."""
    return case != "grouped" or dtype != F32


@pytest.mark.parametrize("kind", [kind for kind in MASKS if kind != "no padding"])
@pytest.mark.parametrize("case", CASES)
@each(("dtype", "kernel"), KERNELS, lambda k: k[0] != F16, pytest.mark.emulated_full)
def test_padding(driver, fake, case, kind, dtype, kernel):  # noqa: F811
    """The kernel is given sequences of the lengths that the mask says, and nothing else."""
    module, groups, queries = CASES[case]
    tensors = operands(dtype, kind, groups, queries)
    made, dy = made_of(module, tensors)
    before = counts(fake)
    check(module, tensors, dy, step(made, tensors, dy))
    held = driver.fake_held()
    step(made, tensors, dy)
    assert driver.fake_held() == held
    assert [b - a for a, b in zip(before, counts(fake), strict=True)] == [4 * (kernel == k) for k in range(3)]
    if is_listed(case, dtype):
        shown = MASKS[kind].sum(1).tolist()
        assert lengths(fake, 1) == shown
        assert lengths(fake, 0) == ([queries] * B if queries else shown)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "kernel"), [(BF16, CUDNN), (F32, EFFICIENT)])
def test_a_mask_that_hides_nothing(driver, fake, case, dtype, kernel):  # noqa: F811
    """It is gone, and with it all lists: the fastest kernel takes all rows."""
    module, groups, queries = CASES[case]
    tensors = operands(dtype, "no padding", groups, queries)
    made, dy = made_of(module, tensors)
    before = counts(fake)
    found = step(made, tensors, dy)
    check(module, tensors, dy, found)
    assert counts(fake)[kernel] == before[kernel] + 2
    last = next(reversed(made.plans.values()))
    assert last.fired["mask_removal"] == 1 and "padding_removal" not in last.fired
    made.plans.clear()
    made.disabled = _core.passes()["mask_removal"]
    check(module, tensors, dy, step(made, tensors, dy))


def test_a_batch_with_padding_after_batches_without(driver, fake):  # noqa: F811
    """Each batch gets the plan for what its mask says."""
    module = self_attention(causal=True)
    made, dy = made_of(module, operands(BF16, "no padding"))
    for kind in ("no padding", "no padding", "right", "no padding", "an empty sequence", "little padding"):
        tensors = operands(BF16, kind)
        check(module, tensors, dy, step(made, tensors, dy))


class Labelled:
    """A language model's loss, with labels that may be where the mask shows nothing."""

    def __call__(self, x, w, out, mask, labels):
        q, k, v = (heads(t) for t in (x @ w).chunk(3, -1))
        y = attend(q, k, v, allowed_of(mask, S, True))
        return cross_entropy((y.transpose(1, 2).flatten(2) @ out).flatten(0, 1), labels.flatten())


def all_seen(x, w, out, mask):
    """Of attention whose mask hides keys alone, and whose results are all seen: no row may be left out."""
    q, k, v = (heads(t) for t in (x @ w).chunk(3, -1))
    return attend(q, k, v, allowed_of(mask, S, False)).transpose(1, 2).flatten(2) @ out


@pytest.mark.parametrize("kind", [kind for kind in MASKS if kind != "no padding"])
@pytest.mark.parametrize(("dtype", "kernel"), [(BF16, FLASH), (F32, EFFICIENT)])
def test_keys_are_packed_where_all_queries_are_seen(driver, fake, kind, dtype, kernel):  # noqa: F811
    tensors = operands(dtype, kind)
    made, dy = made_of(all_seen, tensors)
    before = counts(fake)[kernel]
    check(all_seen, tensors, dy, step(made, tensors, dy))
    assert counts(fake)[kernel] == before + 2
    assert lengths(fake, 0) == [S] * B and lengths(fake, 1) == MASKS[kind].sum(1).tolist()
    fake.fake_torch_lacks(ALL)
    check(all_seen, tensors, dy, step(made, tensors, dy))


def test_queries_that_lie_otherwise(driver, fake):  # noqa: F811
    """Sequences beside each other, [S, B, WIDTH]: their rows are not those of one list, and our kernels take them; the
    gradient of results that lie so is copied."""

    def beside(x, w, out, mask):
        y = all_seen(x.transpose(0, 1), w, torch.eye(WIDTH, dtype=x.dtype), mask)
        return y.transpose(0, 1) @ out

    tensors = operands(BF16, "right")
    tensors[0] = tensors[0].transpose(0, 1).contiguous()
    made, dy = made_of(beside, tensors)
    check(beside, tensors, dy, step(made, tensors, dy))


@pytest.mark.parametrize("stray", [False, True])
def test_labels_of_hidden_tokens(driver, fake, stray):  # noqa: F811
    """Their queries look at what there is before them: more rows are listed than the mask shows, which is a bias."""
    tensors = operands(F32, "holes")
    labels = torch.randint(0, WIDTH, (B, S), generator=torch.Generator().manual_seed(2))
    labels[~MASKS["holes"]] = -100
    if stray:
        labels[1, (~MASKS["holes"][1]).nonzero()[-1]] = 3
    made, dy = made_of(Labelled(), [*tensors, labels])
    before = fake.fake_attentions()
    check(Labelled(), [*tensors, labels], dy, step(made, [*tensors, labels], dy))
    assert fake.fake_attentions() == before + 2


def test_only_the_same_bits(driver, fake):  # noqa: F811
    module, tensors = self_attention(causal=True), operands(BF16, "right")
    made, dy = made_of(module, tensors)
    found = step(made, tensors, dy)
    plan = next(reversed(made.plans.values()))
    arena, y = aligned(plan.arena_bytes), torch.empty_like(found[0])
    grads = [torch.empty_like(t) if needed else None for t, needed in zip(tensors, needs(tensors), strict=True)]
    before = counts(fake)
    plan.forward(arena, tensors, [y], [], 1, None, 0, SAME_BITS, False)
    plan.backward(arena, tensors, [y], [dy], grads, 1, None, 0, SAME_BITS, False)
    assert [b - a for a, b in zip(before, counts(fake), strict=True)] == [0, 2, 0]
    for ours, again in zip(found, [y, *(g for g in grads if g is not None)], strict=True):
        assert torch.equal(ours, again)


def test_it_ends_a_recording(driver, fake):  # noqa: F811
    """What lies around it becomes CUDA graphs."""
    module, tensors = self_attention(causal=True), operands(BF16, "right")
    made, dy = made_of(module, tensors)
    found = step(made, tensors, dy)
    plan = next(reversed(made.plans.values()))
    arena = aligned(plan.arena_bytes)
    for _ in range(3):
        y = torch.empty_like(found[0])
        grads = [torch.empty_like(t) if needed else None for t, needed in zip(tensors, needs(tensors), strict=True)]
        plan.forward(arena, tensors, [y], [], 1, None, 0, False, True)
        plan.backward(arena, tensors, [y], [dy], grads, 1, None, 0, False, True)
        for ours, again in zip(found, [y, *(g for g in grads if g is not None)], strict=True):
            assert torch.equal(ours, again)
    assert plan.graphs[2] >= 2


@pytest.mark.parametrize("missing", ["forward", "backward"])
def test_where_torch_fails_our_kernels_follow(driver, fake, missing):  # noqa: F811
    module, tensors = self_attention(causal=True), operands(BF16, "an empty sequence")
    made, dy = made_of(module, tensors)
    step(made, tensors, dy)
    held, before = driver.fake_held(), fake.fake_attentions()
    fake.fake_torch_lacks(ALL if missing == "forward" else -1)
    run = made.run(tensors, needs(tensors), [True], seed=1)
    fake.fake_torch_lacks(ALL if missing == "backward" else -1)
    results = [run.outputs[0], *(g for g in run.backward([dy]) if g is not None)]
    del run
    assert fake.fake_attentions() == before + 1
    assert driver.fake_held() == held
    check(module, tensors, dy, results)


@each("call", range(1, 20), [1, 5, 8, 14])
def test_a_failure_of_one_call(driver, fake, call):  # noqa: F811
    """A tensor cannot be made, or nothing computed: the next kernel does it. Nothing is held."""
    module, tensors = self_attention(causal=True), operands(BF16, "right")
    made, dy = made_of(module, tensors)
    step(made, tensors, dy)
    held, before = driver.fake_held(), fake.fake_attentions()
    fake.fake_torch_fails(call)
    results = step(made, tensors, dy)
    fake.fake_torch_fails(0)
    assert fake.fake_attentions() >= before + 1
    assert driver.fake_held() == held
    check(module, tensors, dy, results)


def test_what_fails_twice_is_not_asked_again(driver, fake):  # noqa: F811
    """Of lists alone: calls over all rows are another form."""
    module, tensors = self_attention(causal=True), operands(BF16, "right")
    made, dy = made_of(module, tensors)
    fake.fake_torch_lacks(FLASH)
    before, refused = counts(fake), (_core.cuda_refusals(-1) or (0,))[0]
    for _ in range(2):
        check(module, tensors, dy, step(made, tensors, dy))
    assert counts(fake)[EFFICIENT] == before[EFFICIENT] + 4
    _, kept = _core.cuda_refusals(refused)
    told = [what for what in map(str, kept) if "attention" in what]
    assert len(told) == 1 and "flash attention failed for 16 queries of 4 x 4 heads of width 8" in told[0]


# --- dropout ----------------------------------------------------------------------------------------------------------

#: As many scores as flash attention is taken for: dropout by its numbers is not what the setting asks for.
LONG = 512


def dropped(causal):
    def module(x, w, out, mask):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (x @ w).chunk(3, -1))
        allowed = (mask != 0)[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        if causal:
            allowed = allowed & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = torch.where(allowed, q @ k.transpose(-1, -2) / 8**0.5, -torch.inf)
        weights = torch.where(allowed, scores.softmax(-1), 0)
        y = (dropout(weights, 0.25) @ v).transpose(1, 2).flatten(2) @ out
        return (y * mask.unsqueeze(-1).to(y.dtype)).sum(1)

    return module


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_over_lists(driver, fake, causal):  # noqa: F811
    """Elements are dropped, others in each run; backward drops the same as forward: results are linear in what follows
    attention, so that the gradient of `out` times `out` is y times dy, added up."""
    generator = torch.Generator().manual_seed(0)
    x, w, out = (torch.randn(s, generator=generator).to(BF16) for s in ((B, LONG, 16), (16, 48), (16, 16)))
    mask = (torch.arange(LONG) < torch.tensor([40, 512, 3, 0, 100, 64, 33, 20])[:, None]).long()
    tensors, module = [x, w * 0.3, out * 0.3, mask], dropped(causal)
    made = export(Function(module), tensors)
    made.disabled = _core.passes()["efficient_attention"]
    dy = torch.randn(B, 16, generator=generator).to(BF16)
    before = counts(fake)
    y, _, _, dout = step(made, tensors, dy)
    other, *_ = step(made, tensors, dy, seed=2)
    assert [b - a for a, b in zip(before, counts(fake), strict=True)] == [0, 4, 0]
    assert lengths(fake, 0) == lengths(fake, 1) == mask.sum(1).tolist()
    assert not torch.equal(y, other)
    assert y.isfinite().all() and dout.isfinite().all()
    sums = [(a.double() * b.double()).sum() for a, b in ((dout, tensors[2]), (y, dy))]
    assert abs(sums[0] - sums[1]) <= 2e-2 * (y.double() * dy.double()).abs().sum()
    fake.fake_torch_fails(1)
    with pytest.raises((RuntimeError, _core.Error), match=r"attention with dropout failed in torch's kernel"):
        step(made, tensors, dy)
    fake.fake_torch_fails(0)


# --- models -----------------------------------------------------------------------------------------------------------

OFF = ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout")
#: (name in tests/passes/test_rows.py, calls of attention over lists of rows in a step)
MODELS = {"bert": 4, "gpt2": 4, "llama": 4, "bart": 8}


def model_of(name):
    model_type, head, config = LANGUAGE[name]
    return Loss(model(model_type, head, **config, **dict.fromkeys(OFF, 0.0)))


def batch_of(name, kind):
    """Labels at all tokens that are there."""
    mask = MASKS[kind]
    ids = torch.randint(3, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    labels = ids.masked_fill(~mask, -100)
    if name == "bart":
        labels = ids[:, :11].clamp(min=3).contiguous()
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def gradients(wrapped, batch):
    wrapped.zero_grad()
    loss = wrapped(**batch)
    loss.backward()
    found = [p.grad.double().flatten().clone() for p in wrapped.parameters() if p.grad is not None]
    return loss.double().detach(), torch.cat(found)


@pytest.mark.filterwarnings("ignore")
@each("kind", MASKS, ["right", "holes", "an empty sequence"], pytest.mark.emulated_full)
@each("dtype", [BF16, F32], [BF16], pytest.mark.emulated_full, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models(driver, fake, monkeypatch, name, dtype, kind):  # noqa: F811
    """Losses and gradients are as near to float64 as PyTorch's, with batches of other padding behind each other."""
    monkeypatch.setenv("ORTMODULE_USE_EFFICIENT_ATTENTION", "1")
    plain = model_of(name).to(dtype)
    wrapped, batches = ORTModule(copy.deepcopy(plain)), [batch_of(name, kind), batch_of(name, "right")]
    before, listed = fake.fake_attentions(), []
    for batch in batches:
        ours, theirs = gradients(wrapped, batch), gradients(plain, batch)
        exact = gradients(copy.deepcopy(plain).double(), batch)
        listed.append(lengths(fake, 1))
        for found, beside, right in zip(ours, theirs, exact, strict=True):
            assert (found - right).norm() <= BESIDE * (beside - right).norm() + 3 * FLOOR[dtype] * right.norm()
    report = explain(wrapped)
    assert report.captured and not report.aten_ops, report.fallback
    if name != "llama" or dtype != F32:
        # A causal model's loss looks at hidden tokens before one that is there: its list is longer than the mask.
        steps = 1 if kind in ("holes", "left") and name in ("gpt2", "llama") else 2
        assert fake.fake_attentions() >= before + steps * MODELS[name]
        assert listed[1] == MASKS["right"].sum(1).tolist() or name == "bart"
