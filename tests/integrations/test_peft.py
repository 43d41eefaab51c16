"""PEFT's adapters around and inside of a wrapped model: PyTorch's numbers, and no work for weights that are frozen."""

import copy
import warnings

import pytest
import torch
import transformers

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("at_once")]
peft = pytest.importorskip("peft")

from ortmodule import ORTModule, explain  # noqa: E402
from tests.integrations.small import assert_in_engine, llama, sentences, tokenizer  # noqa: E402

STEPS = 5
LM = {"task_type": "CAUSAL_LM"}
KINDS = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **LM),
    "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "down_proj"], **LM),
    "a trained head": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens"], modules_to_save=["lm_head"], **LM),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **LM),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **LM),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **LM),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, **LM),
    "p-tuning, LSTM": lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=4, encoder_hidden_size=8, encoder_reparameterization_type="LSTM", **LM
    ),
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=["q_proj", "v_proj"], total_step=100, **LM),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "v_proj"], **LM),
    "adaption prompts": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, **LM),
}  # fmt: skip


def make(kind):
    torch.manual_seed(0)
    return peft.get_peft_model(llama(), KINDS[kind]()).train()


def batches(count=STEPS):
    rows = tokenizer()(sentences()[: 2 * count], padding=True, truncation=True, return_tensors="pt")
    for ids, mask in zip(rows["input_ids"].split(2), rows["attention_mask"].split(2), strict=True):
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(model, optimizer=None, data=None):
    """The loss of each step, and the optimizer."""
    if optimizer is None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for batch in batches() if data is None else data:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, optimizer


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_training_saving_and_resuming(kind, tmp_path):
    ours, theirs = ORTModule(make(kind)), make(kind)
    (found, optimizer), (expected, _) = train(ours), train(theirs)
    assert found == pytest.approx(expected, rel=1e-4)
    assert_in_engine(ours, STEPS)

    ours.save_pretrained(tmp_path)
    plain = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=not KINDS[kind]().is_prompt_learning)
    if KINDS[kind]().is_prompt_learning:  # what is saved is the prompt, without what it is made of
        batch, found = next(batches()), []
        for model in (ours, plain):
            with torch.no_grad():
                found.append(model.eval()(**batch).loss)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        torch.save(ours.state_dict(), tmp_path / "all.pt")
        plain = make(kind)
        plain.load_state_dict(torch.load(tmp_path / "all.pt"))
        ours.train()
    plain.train()
    for (name, a), (_, b) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    other = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    more = list(batches(2))
    resumed = train(ORTModule(plain), other, more)[0]
    assert resumed == pytest.approx(train(ours, optimizer, more)[0], rel=1e-4)


def nodes_of_a_step(model):
    model(**next(batches())).loss.backward()
    return explain(model).nodes_run


def test_no_work_for_the_gradients_of_frozen_weights():
    """Each frozen weight spares a step the product that its gradient is."""
    adapted, everything = ORTModule(make("LoRA")), ORTModule(make("LoRA"))
    everything.requires_grad_(True)
    fewer = nodes_of_a_step(everything) - nodes_of_a_step(adapted)
    frozen = [name for name, p in adapted.named_parameters() if p.dim() == 2 and not p.requires_grad]
    assert all((p.grad is None) is not p.requires_grad for p in adapted.parameters())
    assert fewer >= len(frozen) > 0


@pytest.mark.full
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_merging(inside):
    """The merged model is the base model: what is wrapped inside stays so; what is wrapped around is left, and the next
    training says so."""
    torch.manual_seed(0)
    base = ORTModule(llama()) if inside else llama()
    model = peft.get_peft_model(base, KINDS["LoRA"]()).train()
    model = model if inside else ORTModule(model)
    train(model)
    merged = model.merge_and_unload()
    assert isinstance(merged, transformers.LlamaForCausalLM) and isinstance(merged, ORTModule) is inside
    merged.requires_grad_(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(merged)
    told = [str(w.message) for w in caught if "ORTModule(" in str(w.message)]
    if inside:
        assert not told and explain(base).engine_calls == 2 * STEPS
    else:
        assert len(told) == 1 and "wrap the module that the script calls" in told[0]
