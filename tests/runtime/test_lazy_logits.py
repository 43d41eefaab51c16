"""Logits that the script does not read are not computed; read later they are those of their own forward."""

import copy
import gc
import io
import pickle
import weakref

import numpy
import pytest
import torch
import transformers
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.core.lazy_tensor import Deferred
from ortmodule.runtime.lazy_logits import WATCHED, _Computed
from tests.models.compare import assert_same_step, step
from tests.models.zoo import SMALL, VOCABULARY
from tests.selection import each, half

pytestmark = pytest.mark.filterwarnings("ignore")

BATCH, LENGTH = 8, 16
KINDS = {
    "gpt2": ("CausalLM", {}),
    "llama": ("CausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
    "bert": ("MaskedLM", {}),
}


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setenv("ORTMODULE_DEFER_LOGITS", "1")


def language_model(kind="gpt2", **config):
    head, own = KINDS[kind]
    settings = transformers.AutoConfig.for_model(kind, **{**SMALL, **own, **config})
    torch.manual_seed(0)
    return getattr(transformers, f"AutoModelFor{head}").from_config(settings)


def batch_of(kept=0.4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) > kept, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def pair(kind="gpt2", **config):
    """A model in the engine, and the same one in PyTorch. Without dropout."""
    model = language_model(kind, **config).eval()
    return ORTModule(model), copy.deepcopy(model)


def close(found, expected, **tolerance):
    torch.testing.assert_close(found, expected, **({"atol": 1e-5, "rtol": 1e-4} | tolerance))


# --- what is looked at ------------------------------------------------------------------------------------------------

LOOKS = {
    "argmax": lambda x: x.argmax(-1),
    "detach": lambda x: x.detach().clone(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.detach().numpy(),
    "array": lambda x: numpy.asarray(x.detach()),
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "to": lambda x: x.to(torch.bfloat16),
    "index": lambda x: x[:, -1, :3],
    "list": lambda x: x[0, 0].tolist(),
    "text": lambda x: repr(x) + str(x.detach()) + f"{x}",
    "operators": lambda x: -x * 2 + x,
    "stack": lambda x: torch.stack([x, x]),
    "softmax": lambda x: torch.softmax(x, -1),
    "functional": lambda x: nn.functional.cross_entropy(x.view(-1, VOCABULARY), torch.zeros(BATCH * LENGTH).long()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "save": lambda x: saved(x),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "iterate": lambda x: [row.sum() for row in x],
    "in_place": lambda x: x.mul_(2).add_(x),
    "data": lambda x: x.data,
    "transposed": lambda x: x.mT,
    "equal": lambda x: bool((x == x).all()),
    "linear": lambda x: nn.Linear(VOCABULARY, 2, bias=False).requires_grad_(False)(x) * 0,
    "storage": lambda x: x.detach().untyped_storage().nbytes(),
    "like": lambda x: torch.zeros_like(x),
}


def saved(x):
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    return torch.load(file)


@each("look", LOOKS, half(LOOKS))
def test_a_look_finds_what_pytorch_has(look, always):
    wrapped, model = pair()
    ours, expected = wrapped(**batch_of()).logits, model(**batch_of()).logits
    assert isinstance(ours, Deferred) and isinstance(ours, torch.Tensor)
    found, wanted = LOOKS[look](ours), LOOKS[look](expected)
    if look == "text":
        assert "Deferred" not in found and found.splitlines()[0][:12] == wanted.splitlines()[0][:12]
    elif look == "to":  # numbers that differ in their last bits may be rounded to neighbours
        close(found, wanted, rtol=torch.finfo(torch.bfloat16).eps)
    else:
        close(found, wanted)
    assert type(wrapped(**batch_of()).logits) is torch.Tensor  # from then on


def test_questions_that_are_answered_without_values(always):
    wrapped, model = pair()
    x, expected = wrapped(**batch_of()).logits, model(**batch_of()).logits
    for ask in (
        lambda t: (t.shape, t.dtype, t.device, t.layout, t.ndim, t.requires_grad, t.is_leaf, len(t)),
        lambda t: (t.size(), t.size(-1), t.dim(), t.numel(), t.stride(), t.is_contiguous(), t.nbytes, t.itemsize),
        lambda t: (t.is_floating_point(), torch.is_tensor(t), torch.is_floating_point(t), t.grad_fn is None),
    ):
        assert ask(x) == ask(expected)
    assert len({x, x}) == 1
    assert isinstance(x.float(), Deferred) and isinstance(x.detach(), Deferred)
    assert not x.detach().requires_grad
    assert isinstance(wrapped(**batch_of()).logits, Deferred)


def test_it_is_the_same_tensor_at_every_look(always):
    wrapped, model = pair()
    x, expected = wrapped(**batch_of()).logits, model(**batch_of()).logits
    x[0, 0] = 7.0
    expected[0, 0] = 7.0
    x.detach()[0, 1] = 8.0
    expected.detach()[0, 1] = 8.0
    close(x.detach(), expected.detach())
    close(x + 0, expected + 0)


def test_another_engine_takes_it_as_input(always):
    wrapped, model = pair()
    layer = nn.Linear(VOCABULARY, 3)
    close(ORTModule(layer)(wrapped(**batch_of()).logits), layer(model(**batch_of()).logits))


def test_c_code_that_knows_nothing_of_it(always):
    wrapped, model = pair()
    x, expected = wrapped(**batch_of()).logits, model(**batch_of()).logits
    with torch._C.DisableTorchFunctionSubclass():
        close(torch.relu(x), torch.relu(expected))
        with pytest.raises(RuntimeError, match="in place"):
            torch.relu_(x)


# --- gradients --------------------------------------------------------------------------------------------------------


def gradients(model, of):
    model.zero_grad(set_to_none=True)
    of(model(**batch_of())).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


LOSSES = {
    "loss": lambda out: out.loss,
    "scores": lambda out: out.logits.square().mean(),
    "both": lambda out: out.loss + out.logits.float().square().mean(),
    "own": lambda out: nn.functional.cross_entropy(out.logits.flatten(0, 1), batch_of()["input_ids"].flatten()),
    "twice": lambda out: (out.logits * out.logits).mean() + out.logits.exp().mean(),
    "smoothed": lambda out: transformers.trainer_pt_utils.LabelSmoother(0.1)(out, batch_of()["labels"]),
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind, loss, always):
    wrapped, model = pair(kind)
    for _ in range(2):  # deferred, then computed with the rest
        ours, expected = (gradients(m, LOSSES[loss]) for m in (wrapped, model))
        assert ours.keys() == expected.keys()
        for name, grad in expected.items():
            close(ours[name], grad, atol=2e-6)
    assert ("label_sparsity" in explain(wrapped).fused) == (loss == "loss")


def test_dropout_is_that_of_the_forward(always):
    """The loss and the scores of one forward have the same masks, though the scores are seen later."""
    model = language_model("gpt2").train()
    wrapped = ORTModule(model)

    def run(forward, look_early):
        torch.manual_seed(5)
        out = forward()
        if look_early:
            out.logits.sum().item()
        (out.loss + out.logits.square().mean()).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return out.loss.detach(), grads, out.logits.detach().clone()

    deferred = run(lambda: wrapped(**batch_of()), True)
    plain = run(lambda: wrapped(**batch_of()), False)  # nothing is deferred any more
    close(deferred[2], plain[2])
    assert_same_step(deferred[:2], plain[:2], "looked at later")


def test_a_second_backward_and_a_second_derivative(always):
    wrapped, model = pair()
    for m in (wrapped, model):
        out = m(**batch_of())
        (out.logits.square().mean() + out.loss).backward(retain_graph=True)
        (out.logits.square().mean() + out.loss).backward()
    for (name, p), q in zip(model.named_parameters(), wrapped.parameters(), strict=True):
        close(q.grad, p.grad, msg=name)
    wrapped, model = pair(attn_implementation="eager")
    found = []
    for m in (wrapped, model):
        weight = m.get_input_embeddings().weight
        (first,) = torch.autograd.grad(m(**batch_of()).logits.square().mean(), weight, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), weight)[0])
    close(*found)


# --- weights that change ----------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.5),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_after_a_step_are_those_before_it(kind, optimizer, always):
    wrapped, model = pair(kind)
    steps = [(m, OPTIMIZERS[optimizer](m.parameters())) for m in (wrapped, model)]
    kept = []
    for m, opt in steps:
        out = m(**batch_of())
        out.loss.backward()
        opt.step()
        kept.append(out.logits)
    assert isinstance(kept[0], Deferred)
    close(kept[0].detach(), kept[1].detach())
    close(wrapped(**batch_of()).logits.detach(), model(**batch_of()).logits.detach(), atol=1e-3)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.LBFGS])
def test_scores_of_a_closure_are_those_before_its_step(optimizer, always):
    kept = []
    for m in pair():
        opt, seen = optimizer(m.parameters(), 0.01), {}

        def closure(m=m, opt=opt, seen=seen):
            opt.zero_grad()
            seen["out"] = m(**batch_of())
            seen["out"].loss.backward()
            return seen["out"].loss

        opt.step(closure)
        kept.append(seen["out"].logits)
    assert isinstance(kept[0], Deferred)
    close(kept[0].detach(), kept[1].detach(), atol=1e-4)


def test_a_list_of_scores_is_noticed(always):
    wrapped, model = pair()
    all_of = []
    for m in (wrapped, model):
        opt = torch.optim.SGD(m.parameters(), 0.5)
        kept = []
        for i in range(6):
            opt.zero_grad()
            out = m(**batch_of(seed=i))
            out.loss.backward()
            opt.step()
            kept.append(out.logits)
        all_of.append(kept)
    kinds = [type(x) is Deferred for x in all_of[0]]
    assert kinds == [True] * 3 + [False] * 3
    close(torch.cat([x.detach() for x in all_of[0]]), torch.cat([x.detach() for x in all_of[1]]), atol=1e-4)


CHANGES = {
    "in place": lambda w: w.mul_(1.5),
    "data": lambda w: w.data.add_(0.25),
    "one element": lambda w: w.view(-1)[-1].neg_(),
    "numpy": lambda w: w.detach().numpy().__setitem__((0, 0), 3.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_never_scores_of_other_weights(change, always):
    wrapped, _ = pair()
    out = wrapped(**batch_of())
    with torch.no_grad():
        CHANGES[change](wrapped.lm_head.weight)
    with pytest.raises(RuntimeError, match="weights that they depend on have changed"):
        out.logits.argmax()
    again = wrapped(**batch_of())
    assert type(again.logits) is torch.Tensor
    close(again.logits.detach(), wrapped._ortmodule.module(**batch_of()).logits.detach(), atol=1e-4)


def test_weights_that_are_replaced_stay_with_the_scores(always):
    wrapped, model = pair()
    ours, expected = wrapped(**batch_of()).logits, model(**batch_of()).logits
    wrapped.lm_head.weight.data = torch.zeros_like(wrapped.lm_head.weight)
    close(ours.detach(), expected.detach())


def test_nothing_is_kept_for_scores_that_are_gone(always):
    wrapped, _ = pair()
    out = wrapped(**batch_of())
    alive = weakref.ref(out.logits._source.waiting)
    out.loss.backward()
    del out
    gc.collect()
    assert alive() is None


# --- when -------------------------------------------------------------------------------------------------------------


def test_calls_are_watched_first(monkeypatch):
    monkeypatch.setattr("ortmodule.runtime.lazy_logits.LEAST_WEIGHTS", 1)
    wrapped = ORTModule(language_model().train())
    fused = []
    for i in range(WATCHED + 2):
        wrapped(**batch_of(seed=i)).loss.backward()
        fused.append("label_sparsity" in explain(wrapped).fused)
    assert fused == [False] * WATCHED + [True] * 2
    wrapped(**batch_of()).logits.sum()
    wrapped(**batch_of()).loss.backward()
    assert "label_sparsity" not in explain(wrapped).fused


def test_a_site_that_looks_is_never_deferred(monkeypatch):
    monkeypatch.setattr("ortmodule.runtime.lazy_logits.LEAST_WEIGHTS", 1)
    wrapped = ORTModule(language_model().train())
    for i in range(WATCHED + 3):
        out = wrapped(**batch_of(seed=i))
        assert (type(out.logits) is torch.Tensor) == (i > 0)
        out.logits.argmax(-1)
        assert "label_sparsity" not in explain(wrapped).fused


def test_nothing_to_gain(monkeypatch):
    monkeypatch.setattr("ortmodule.runtime.lazy_logits.LEAST_WEIGHTS", 1)
    monkeypatch.setattr("ortmodule.runtime.lazy_logits.WORTH_IT", 0)
    wrapped = ORTModule(language_model().train())
    for i in range(WATCHED + 2):
        out = wrapped(**batch_of(kept=1.1, seed=i))
    assert isinstance(out.logits._source, _Computed) and "label_sparsity" not in explain(wrapped).fused


def wait(out):
    """Are the logits yet to be computed?"""
    return isinstance(out.logits, Deferred) and not isinstance(out.logits._source, _Computed)


def test_memory_is_a_gain(monkeypatch):
    """Where the head saves no work the logits wait for the sake of their memory."""
    monkeypatch.setattr("ortmodule.runtime.lazy_logits.LEAST_WEIGHTS", 1)
    wrapped, model = pair()
    outs = [wrapped(**batch_of(kept=1.1, seed=i)) for i in range(WATCHED + 2)]
    assert [wait(out) for out in outs] == [False] * WATCHED + [True] * 2
    assert not explain(wrapped).fused.keys() & {"label_sparsity", "linear_loss"}
    close(outs[-1].logits, model(**batch_of(kept=1.1, seed=WATCHED + 1)).logits)


def test_memory_is_no_gain_where_logits_wait_at_a_step(monkeypatch):
    """A copy of the head's weights at every optimizer's step takes longer than to write the logits."""
    monkeypatch.setattr("ortmodule.runtime.lazy_logits.LEAST_WEIGHTS", 1)
    wrapped, model = pair()
    steps = [(m, torch.optim.SGD(m.parameters(), 0.1)) for m in (wrapped, model)]
    waits = []
    for i in range(WATCHED + 3):
        ours, eager = outs = [m(**batch_of(kept=1.1, seed=i)) for m, _ in steps]
        waits.append(wait(ours))
        for out, (_, optimizer) in zip(outs, steps, strict=True):
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if i == WATCHED + 2:
            close(ours.logits, eager.logits)
    assert waits == [False] * WATCHED + [True] + [False] * 2


@pytest.mark.parametrize("setting", ["0", "auto"])
def test_settings(setting, monkeypatch):
    monkeypatch.setenv("ORTMODULE_DEFER_LOGITS", setting)
    wrapped = ORTModule(language_model().train())
    for i in range(WATCHED + 2):
        assert type(wrapped(**batch_of(seed=i)).logits) is torch.Tensor  # `auto`: the head is small


def test_without_gradients_scores_are_there(always):
    wrapped, model = pair()
    with torch.no_grad():
        found = wrapped(**batch_of()).logits
        assert type(found) is torch.Tensor
        close(found, model(**batch_of()).logits)


def test_hidden_states_that_are_given_back(always):
    wrapped, model = pair("llama", output_hidden_states=True)
    ours, expected = wrapped(**batch_of()), model(**batch_of())
    close(ours.logits.detach(), expected.logits.detach())
    close(ours.hidden_states[-1], expected.hidden_states[-1])


# --- neighbours -------------------------------------------------------------------------------------------------------


def test_autocast_and_what_accelerate_does_with_results(always):
    from accelerate.utils import convert_outputs_to_fp32

    model = language_model("llama").train()
    wrapped = ORTModule(model)
    forward = convert_outputs_to_fp32(lambda **batch: wrapped(**batch))
    found = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            out = forward(**batch_of())
        assert isinstance(out.logits, Deferred) and out.logits.dtype is torch.float32
        found.append(step(wrapped, batch_of()))
    assert "label_sparsity" in explain(wrapped).fused
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch_of())
    close(out.logits.detach(), expected.logits.detach().float(), atol=2e-2, rtol=2e-2)
    model.zero_grad()
    out.logits.square().mean().backward()
    ours = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    expected.logits.float().square().mean().backward()
    close(ours, model.get_input_embeddings().weight.grad, atol=2e-2, rtol=5e-2)


def test_hooks_and_modules_around_it(always):
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, **batch):
            out = self.inner(**batch)
            return out.loss, out.logits

    wrapped, model = pair()
    seen = []
    outer = Outer(wrapped)
    outer.register_full_backward_pre_hook(lambda module, got: seen.append([g is None for g in got]))
    outer(**batch_of())[0].backward()
    model(**batch_of()).loss.backward()
    for (name, p), q in zip(model.named_parameters(), wrapped.parameters(), strict=True):
        close(q.grad, p.grad, msg=name)
    assert seen


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_trainer(smoothing, tmp_path, always):
    def run(make):
        model = language_model("gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
        rows = [{k: v[0] for k, v in batch_of(seed=i).items()} for i in range(16)]
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=4, per_device_train_batch_size=4, report_to=[], save_strategy="no", seed=1,
            learning_rate=1e-2, use_cpu=True, disable_tqdm=True, label_smoothing_factor=smoothing,
        )  # fmt: skip
        trainer = transformers.Trainer(
            make(model), arguments, train_dataset=rows, eval_dataset=rows,
            compute_metrics=lambda p: {"mean": float(p.predictions.mean())},
        )  # fmt: skip
        loss, found = trainer.train().training_loss, trainer.evaluate()
        return torch.tensor([loss, found["eval_loss"], found["eval_mean"]])

    close(run(ORTModule), run(lambda model: model), atol=1e-3, rtol=1e-3)
