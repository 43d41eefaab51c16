"""What leaves memory on a GPU: activations that wait in pinned memory, logits that nothing reads, steps in less memory.

`scripts/gpu` runs them. Without a GPU they run on the emulated one, if the build has it.
"""

import contextlib
import copy

import pytest
import torch
import transformers

from ortmodule import Config, ORTModule, _core, explain
from ortmodule.core.lazy_tensor import Deferred
from tests.gpu.test_models import DEVICE

pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cpu" and not _core.emulated, reason="a GPU is needed (scripts/gpu)"),
    pytest.mark.filterwarnings("ignore"),  # of the exporter and of transformers
]

ON_GPU = DEVICE.type == "cuda"
BATCH, LENGTH = (8, 256) if ON_GPU else (8, 16)
WORDS = 4096 if ON_GPU else 61


def gpt2():
    width = 256 if ON_GPU else 16
    config = transformers.GPT2Config(
        n_embd=width, n_layer=3, n_head=4, vocab_size=WORDS, n_positions=LENGTH, use_cache=False
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).to(DEVICE).train()


def bert():
    width = 256 if ON_GPU else 16
    config = transformers.BertConfig(
        hidden_size=width, num_hidden_layers=3, num_attention_heads=4, intermediate_size=2 * width, vocab_size=WORDS
    )
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(config).to(DEVICE).train()


def batch_of(seed, padded=False):
    """Tokens, a mask that hides about half of them if ``padded``, and labels of a fifth."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (BATCH, LENGTH), generator=generator)
    used = torch.randint(1, LENGTH + 1, (BATCH, 1), generator=generator) if padded else torch.full((BATCH, 1), LENGTH)
    mask = (torch.arange(LENGTH) < used).long()
    chosen = (torch.rand(BATCH, LENGTH, generator=generator) < 0.2) & mask.bool()
    chosen[0, :2] = mask[0, :2] = True
    found = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~chosen, -100)}
    return {name: x.to(DEVICE) for name, x in found.items()}


def steps(model, kind, count=4, padded=False):
    """Of some steps, the losses and gradients; dropout draws the same for every model."""
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        model.zero_grad()
        on = torch.autocast(DEVICE.type, kind) if kind else contextlib.nullcontext()
        with on:
            outputs = model(**batch_of(seed, padded))
        outputs.loss.backward()
        found += [outputs.loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return found


def plan_of(model):
    plans = model._ortmodule.latest.session.plans.values()
    return next(plan for plan in reversed(plans) if plan.differentiates)


@pytest.mark.parametrize("kind", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_offloaded_activations_have_the_same_bits(kind):
    """Copies go on beside kernels: one that is late, or read too early, changes bits."""
    stored, moved = (ORTModule(gpt2(), config=Config(memory_offload=offload)) for offload in (False, True))
    for ours, theirs in zip(steps(moved, kind, 8), steps(stored, kind, 8), strict=True):
        assert torch.equal(ours, theirs)
    assert plan_of(moved).offloaded and plan_of(moved).arena_bytes < plan_of(stored).arena_bytes


@pytest.mark.parametrize("kind", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_steps_that_run_again_have_the_same_bits(kind):
    stored, again = (ORTModule(gpt2(), config=Config(memory_opt_level=level)) for level in (0, 1))
    for ours, theirs in zip(steps(again, kind), steps(stored, kind), strict=True):
        assert torch.equal(ours, theirs)
    assert plan_of(again).arena_bytes < plan_of(stored).arena_bytes


@pytest.mark.parametrize("padded", [False, True], ids=["labels", "padding"])
@pytest.mark.parametrize("make", [bert, gpt2])
def test_logits_that_wait(make, padded, monkeypatch):
    """Gradients are near those of a step with all logits; read late, logits are near them, at all tokens."""
    made = {}
    for setting in ("1", "0"):
        monkeypatch.setenv("ORTMODULE_DEFER_LOGITS", setting)
        made[setting] = ORTModule(make())
    found = {setting: steps(model, None, 6, padded) for setting, model in made.items()}
    for ours, theirs in zip(found["1"], found["0"], strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-6
    fused = explain(made["1"]).fused
    outs = []
    for model in made.values():
        torch.manual_seed(9)
        outs.append(model(**batch_of(9, padded)).logits)
    assert type(outs[0]) is Deferred and type(outs[1]) is not Deferred
    torch.testing.assert_close(outs[0].detach() + 0, outs[1].detach(), rtol=1e-4, atol=1e-4)
    assert "label_sparsity" in fused and (not padded or "padding_removal" in fused), fused


def test_weights_that_change_before_logits_are_read(monkeypatch):
    """A digest of the weights, which a kernel computes, tells that they are others."""
    monkeypatch.setenv("ORTMODULE_DEFER_LOGITS", "1")
    model = ORTModule(bert())
    steps(model, None, 6, True)
    logits = model(**batch_of(0, True)).logits
    assert type(logits) is Deferred
    with torch.no_grad():
        model._ortmodule.module.bert.encoder.layer[0].output.dense.weight.data.mul_(1.5)
    with pytest.raises(RuntimeError, match="weights that they depend on have changed"):
        logits.sum()


def test_copies_of_a_model_share_nothing():
    """Two of a model in turns: rooms and streams are each one's own."""
    found = []
    for offload in (False, True):
        first = ORTModule(gpt2(), config=Config(memory_offload=offload))
        second = ORTModule(copy.deepcopy(first._ortmodule.module), config=Config(memory_offload=offload))
        found.append([x for model in (first, second, first) for x in steps(model, None, 2)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
