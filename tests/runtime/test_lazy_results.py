"""Results beside the logits (caches of keys and values) are not computed where padding can be left out without them."""

import copy
import weakref

import pytest
import torch
import transformers

from ortmodule import ORTModule, explain
from ortmodule.core.lazy_tensor import Deferred
from ortmodule.runtime.lazy_logits import FORWARD, HEAD
from tests.models.zoo import SMALL, VOCABULARY

pytestmark = pytest.mark.filterwarnings("ignore")

BATCH, LENGTH = 8, 16
#: Of each kind its head, and settings.
KINDS = {
    "gpt2": ("CausalLM", {}),
    "llama": ("CausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
    "qwen2": ("CausalLM", {"num_key_value_heads": 2}),
    "gpt_neox": ("CausalLM", {}),
    "opt": ("CausalLM", {"ffn_dim": 32, "word_embed_proj_dim": 32}),
}


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setenv("ORTMODULE_DEFER_LOGITS", "1")


def build(kind, **config):
    head, own = KINDS[kind]
    settings = transformers.AutoConfig.for_model(kind, **{**SMALL, **own, "use_cache": True, **config})
    torch.manual_seed(0)
    return getattr(transformers, f"AutoModelFor{head}").from_config(settings)


def batch_of(seed=0):
    """More than half of it is padding, on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    used = torch.randint(1, LENGTH // 2, (BATCH, 1), generator=generator)
    used[0] = LENGTH
    mask = (torch.arange(LENGTH) < used).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def deferral(wrapped):
    return wrapped._ortmodule.latest._deferral


def cache_of(out):
    return [x for layer in out.past_key_values.layers for x in (layer.keys, layer.values)]


def grads(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [False, True])
def test_padding_is_left_out(kind, dropout, monkeypatch):
    """Losses and gradients are those of a run that has everything; so are caches and logits that are read later."""
    config = {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2} if dropout and kind == "gpt2" else {}
    model = build(kind, **config).train(dropout)
    wrapped = ORTModule(model)
    for seed in range(3):
        torch.manual_seed(seed)
        wrapped(**batch_of(seed)).loss.backward()
    assert "padding_removal" in explain(wrapped).fused
    grads(model)
    monkeypatch.setenv("ORTMODULE_DEFER_LOGITS", "0")
    plain, outs = ORTModule(copy.deepcopy(model)), []
    for each in (wrapped, plain):
        torch.manual_seed(7)
        outs.append(each(**batch_of()))
    assert all(type(x) is Deferred for x in cache_of(outs[0])) and len(cache_of(outs[0])) >= 4
    assert all(type(x) is torch.Tensor for x in cache_of(outs[1]))
    for one, other in zip(*map(cache_of, outs), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and one.requires_grad == other.requires_grad
    torch.testing.assert_close(outs[0].loss, outs[1].loss, rtol=1e-4, atol=1e-5)
    for out in outs:
        out.loss.backward()
    ours, theirs = grads(model), grads(plain._ortmodule.module)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)
    for one, other in zip(*map(cache_of, outs), strict=True):
        torch.testing.assert_close(one.detach() + 0, other.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outs[0].logits.detach() + 0, outs[1].logits.detach(), rtol=1e-4, atol=1e-5)


def test_gradients_of_caches_that_are_read():
    """As PyTorch's: of keys alone, and with the loss."""
    model = build("llama").eval()
    wrapped, expected = ORTModule(copy.deepcopy(model)), model
    for with_loss in (False, True):
        found = []
        for each in (wrapped, expected):
            out = each(**batch_of())
            value = cache_of(out)[1].square().mean() + cache_of(out)[2].sum() * 0.1
            (value + out.loss if with_loss else value).backward()
            found.append({n: p.grad.clone() for n, p in each.named_parameters() if p.grad is not None})
            each.zero_grad()
        for name, grad in found[1].items():
            torch.testing.assert_close(found[0][name.removeprefix("_")], grad, rtol=1e-3, atol=1e-5)


def test_caches_that_a_script_reads_are_computed_from_then_on():
    wrapped = ORTModule(build("gpt2").eval())
    assert deferral_level(wrapped) == FORWARD
    out = wrapped(**batch_of())
    assert type(cache_of(out)[0]) is Deferred
    cache_of(out)[0].sum()
    assert deferral(wrapped).most == HEAD
    again = wrapped(**batch_of())
    assert type(cache_of(again)[0]) is torch.Tensor and type(again.logits) is Deferred


def deferral_level(wrapped):
    wrapped(**batch_of()).loss.backward()
    return deferral(wrapped).most


def test_calls_are_watched_first(monkeypatch):
    """Where nothing is forced, a script that reads its caches gets them; logits may still wait."""
    monkeypatch.setenv("ORTMODULE_DEFER_LOGITS", "auto")
    monkeypatch.setattr("ortmodule.runtime.lazy_logits.LEAST_WEIGHTS", 1)
    for reads in (False, True):
        wrapped = ORTModule(build("gpt2").train())
        for seed in range(4):
            out = wrapped(**batch_of(seed))
            if reads:
                assert type(cache_of(out)[1].mean()) is torch.Tensor
            out.loss.backward()
            del out
        assert deferral(wrapped).most == (HEAD if reads else FORWARD)
        assert ("padding_removal" in explain(wrapped).fused) is not reads


def test_nothing_is_kept_for_results_that_are_gone():
    wrapped = ORTModule(build("gpt2").train())
    out = wrapped(**batch_of())
    cache, alive = cache_of(out)[3], weakref.ref(out.logits._source.waiting)
    out.loss.backward()
    del out
    assert alive() is not None, "a cache is still there"
    del cache
    assert alive() is None


def test_weights_that_change():
    """An optimizer's step computes what waits before it; what changes weights by itself is an exception."""
    model = build("llama").eval()
    wrapped, expected = ORTModule(model), copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    out = wrapped(**batch_of())
    out.loss.backward()
    optimizer.step()
    torch.testing.assert_close(cache_of(out)[0].detach() + 0, cache_of(expected(**batch_of()))[0], rtol=1e-4, atol=1e-5)
    wrapped = ORTModule(build("llama").eval())
    out = wrapped(**batch_of())
    with torch.no_grad():
        wrapped._ortmodule.module.model.layers[0].self_attn.k_proj.weight.data.mul_(2)
    with pytest.raises(RuntimeError, match="these results beside the logits were not computed"):
        cache_of(out)[0].sum()


def test_a_cache_of_the_callers_is_filled_at_once():
    from transformers import DynamicCache

    model = build("llama").eval()
    wrapped, found = ORTModule(copy.deepcopy(model)), []
    for each in (wrapped, model):
        cache = DynamicCache()
        each(**batch_of(), past_key_values=cache).loss.backward()
        found.append([x for layer in cache.layers for x in (layer.keys, layer.values)])
    assert all(type(x) is torch.Tensor for x in found[0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
