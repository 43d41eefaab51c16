"""Rows that nothing depends on are not computed: losses and gradients stay what they are, with the same dropout masks.

One captured graph runs twice from one seed, once with all passes and once without those for rows; and in PyTorch, which
gets the same masks.
"""

import copy

import pytest
import torch
import transformers
from torch import nn

from ortmodule import ModuleWithLoss, ORTModule, explain
from tests.exact import drawn, record
from tests.models.compare import assert_same_step, step
from tests.models.zoo import SMALL, VOCABULARY
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = ("row_selection", "shifted_loss", "label_sparsity", "padding_removal")
BATCH, LENGTH = 8, 16
KV = {"num_key_value_heads": 2, "head_dim": 8}


# --- models and batches -----------------------------------------------------------------------------------------------


class Loss(nn.Module):
    """A model of which the caller sees only the loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        return self.model(**batch).loss


def model(model_type, head, **config):
    made = transformers.AutoConfig.for_model(model_type, **{**SMALL, **config})
    torch.manual_seed(0)
    return getattr(transformers, f"AutoModelFor{head}").from_config(made).train()


def mask_of(kind):
    """Which tokens are there: lengths from 1 to 16; and `holes` has gaps."""
    lengths = torch.tensor([[3], [16], [5], [1], [9], [2], [7], [4]])
    right = torch.arange(LENGTH) < lengths
    if kind == "holes":
        return torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.4
    return {"right": right, "left": right.flip(1), "full": torch.ones_like(right)}[kind]


def language(kind, labelled=0.4):
    generator = torch.Generator().manual_seed(0)
    mask = mask_of(kind)
    ids = torch.randint(3, VOCABULARY, mask.shape, generator=generator) * mask
    labels = ids.masked_fill(~mask | (torch.rand(mask.shape, generator=generator) > labelled), -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def sentence(kind):
    batch = language(kind)
    return batch | {"labels": torch.arange(BATCH) % 5}


# --- with and without -------------------------------------------------------------------------------------------------


def graphs(wrapped):
    return [graph for variants in wrapped._ortmodule.graphs.values() for graph in variants]


def seeded_step(wrapped, batch, seed=0):
    torch.manual_seed(seed)
    return step(wrapped, batch)


def without(wrapped, passes=ROWS):
    """The module goes on without these passes."""
    from ortmodule import _core

    for graph in graphs(wrapped):
        graph.session.disabled |= sum(_core.passes()[name] for name in passes)
        graph.session.plans.clear()
        graph.plans.clear()


def check(module, batches, fires):
    """`fires`: the passes that change something for the first of the batches."""
    wrapped, eager = ORTModule(module), copy.deepcopy(module)
    recorder, found = record(wrapped), []
    for batch in batches:
        loss, grads = seeded_step(wrapped, batch)
        found.append((loss, {name: None if g is None else g.clone() for name, g in grads.items()}))
        with drawn(recorder.draws):
            assert_same_step(found[-1], step(eager, batch), "beside PyTorch, with its masks")
    wrapped._ortmodule.observers = None
    seeded_step(wrapped, batches[0])
    report = explain(wrapped)
    assert report.captured, report.fallback
    assert set(report.fused) & set(ROWS) == set(fires), report.fused
    without(wrapped)
    for ours, batch in zip(found, batches, strict=True):
        assert_same_step(ours, seeded_step(wrapped, batch), "rows left out")
    assert not set(explain(wrapped).fused) & set(ROWS)


SEQ2SEQ = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SEQ2SEQ |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32, "decoder_start_token_id": 1}
LANGUAGE = {
    "gpt2": ("gpt2", "CausalLM", {}),
    "llama": ("llama", "CausalLM", KV),
    "opt": ("opt", "CausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "gptj": ("gptj", "CausalLM", {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}),
    "bert": ("bert", "MaskedLM", {}),
    "albert": ("albert", "MaskedLM", {"embedding_size": 16}),
    "bart": ("bart", "Seq2SeqLM", SEQ2SEQ),
}
SENTENCE = {
    "bert": ("bert", "SequenceClassification", {}),
    "roberta": ("roberta", "SequenceClassification", {}),
    "distilbert": ("distilbert", "SequenceClassification", {"hidden_dim": 64}),
    "gpt2": ("gpt2", "SequenceClassification", {"pad_token_id": 0}),
}


# --- ignored labels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LANGUAGE)
def test_ignored_labels(name):
    kind, head, config = LANGUAGE[name]
    batches = [language("right"), language("full", 0.2), language("full", 1.1), language("holes")]
    # BART's decoder looks at all tokens, and is as long as the encoder. GPT-J's mask is a number that is added.
    padding = set() if name == "bart" else {"padding_removal"}
    check(Loss(model(kind, head, **config)), batches, {"label_sparsity"} | padding)


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["right", "left", "holes"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_padding_alone(name, kind):
    """Labels on all tokens that are there."""
    model_type, head, config = LANGUAGE[name]
    check(
        Loss(model(model_type, head, **config)),
        [language(kind, 1.1), language("full", 1.1)],
        {"label_sparsity", "padding_removal"},
    )


T5 = {"num_decoder_layers": 2, "d_kv": 8, "d_ff": 64, "d_model": 32, "decoder_start_token_id": 1}


@pytest.mark.parametrize(
    ("kind", "config"),
    [("bart", SEQ2SEQ), ("bart", SEQ2SEQ | {"attention_dropout": 0.1}), ("t5", T5)],
    ids=["bart", "dropped weights", "t5"],
)
def test_padding_of_an_encoder(kind, config):
    """T5's mask is the lowest number of a type, which is added, and its weights are dropped."""
    batch = language("right", 1.1)
    check(
        Loss(model(kind, "Seq2SeqLM", **config)),
        [batch | {"labels": batch["input_ids"][:, :11].contiguous()}],  # PyTorch takes a view of them
        {"padding_removal"},
    )


class MeanPool(nn.Module):
    """As sentence embeddings are made."""

    def __init__(self, factor=lambda mask, like: mask.unsqueeze(-1).expand(like.shape).float()):
        super().__init__()
        self.model, self.factor = model("bert", "PreTraining").bert, factor
        self.head = nn.Linear(32, 5)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.model(input_ids, attention_mask).last_hidden_state
        factor = self.factor(attention_mask, hidden)
        pooled = (hidden * factor).sum(1) / factor.sum(1).clamp(min=1e-9)
        return nn.functional.cross_entropy(self.head(pooled), labels)


@pytest.mark.parametrize("kind", ["right", "left", "holes"])
def test_mean_of_the_tokens_that_are_there(kind):
    check(MeanPool(), [sentence(kind)], {"padding_removal"})
    check(MeanPool(lambda mask, like: mask[:, :, None]), [sentence(kind)], {"padding_removal"})


class TokensFirst(MeanPool):
    """Pools in the layout [tokens, sequences, features], and not what attention looks at."""

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.model(input_ids, attention_mask).last_hidden_state.transpose(0, 1)
        pooled = (hidden * (1 - attention_mask).t().unsqueeze(-1)).sum(0)
        return nn.functional.cross_entropy(self.head(pooled), labels)


def test_sums_of_tokens_that_come_before_sequences():
    for kind in ("right", "holes"):
        check(TokensFirst(), [sentence(kind)], set())


def test_mean_of_all_tokens_stays():
    check(MeanPool(lambda mask, like: torch.ones_like(like)), [sentence("right")], set())


def test_a_statistic_of_all_tokens_stays():
    class Scaled(MeanPool):
        def forward(self, input_ids, attention_mask, labels):
            loss = super().forward(input_ids, attention_mask, labels)
            return loss + self.model.embeddings(input_ids).square().mean()

    check(Scaled(), [sentence("right")], set())


def test_hidden_states_that_are_seen_are_all_computed():
    bert = model("bert", "PreTraining").bert.eval()
    wrapped, batch = ORTModule(bert), {k: v for k, v in sentence("right").items() if k != "labels"}
    found, expected = wrapped(**batch).last_hidden_state, bert(**batch).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert "padding_removal" not in explain(wrapped).fused


@pytest.mark.parametrize("kind", ["right", "left", "holes"])
def test_where_the_user_says_that_padding_is_unseen(kind, monkeypatch):
    monkeypatch.setenv("ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER", "1")
    bert = model("bert", "MaskedLM").eval()
    wrapped, batch = ORTModule(bert), language(kind)
    there = batch["attention_mask"].bool()
    found, expected = wrapped(**batch), bert(**batch)
    assert "padding_removal" in explain(wrapped).fused
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.logits[there], expected.logits[there], atol=1e-5, rtol=1e-4)
    assert (found.logits[~there & (batch["labels"] == -100)] == 0).all()


@each("kind", ["right", "left", "holes"], ["right"])
def test_gradients_without_padding_are_no_farther_from_float64(kind):
    """Than PyTorch's, with padding. (Adam makes steps of what is left of gradients that are zero, as a key's bias has:
    trainings in float32 drift apart by that.)"""
    settings = {"hidden_size": 96, "num_hidden_layers": 8, "num_labels": 5}
    settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    plain = model("bert", "SequenceClassification", **settings)
    wrapped, exact, batch = ORTModule(copy.deepcopy(plain)), copy.deepcopy(plain).double(), sentence(kind)
    off = {"ours": 0.0, "theirs": 0.0}
    for _ in range(4):
        (_, ours), (_, theirs), (_, truth) = (step(each, batch) for each in (wrapped, plain, exact))
        for name, expected in truth.items():
            off["ours"] += (ours[name].double() - expected).square().sum().item()
            off["theirs"] += (theirs[name].double() - expected).square().sum().item()
        with torch.no_grad():
            for name, weight in exact.named_parameters():
                for each in (weight, wrapped.get_parameter(name), plain.get_parameter(name)):
                    each.copy_(plain.get_parameter(name) - 0.1 * theirs[name])
    assert "padding_removal" in explain(wrapped).fused
    assert 0 < off["ours"] <= 1.2 * off["theirs"], off


class Cross(nn.Module):
    """Tokens of one stream look at those of another, which alone has padding."""

    def __init__(self):
        super().__init__()
        self.table, self.q, self.k, self.v = nn.Embedding(VOCABULARY, 32), *(nn.Linear(32, 32) for _ in range(3))

    def forward(self, ids, context, mask):
        x, y = self.table(ids), self.table(context)
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in (self.q(x), self.k(y), self.v(y)))
        scores = (q @ k.mT).masked_fill(~mask[:, None, None, :], torch.finfo(q.dtype).min).softmax(-1)
        return x + (scores @ v).transpose(1, 2).flatten(2)


def test_tokens_of_another_stream_are_no_padding(monkeypatch):
    monkeypatch.setenv("ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER", "1")
    module = Cross()
    ids = [torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    found, expected = ORTModule(module)(*ids, mask_of("right")), module(*ids, mask_of("right"))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_no_label_counts():
    module = Loss(model("bert", "MaskedLM"))
    wrapped, batch = ORTModule(module), language("right", -1)
    loss, grads = seeded_step(wrapped, batch)
    assert loss.isnan() and module(**batch).isnan()
    assert "label_sparsity" in explain(wrapped).fused
    _, expected = step(module, batch)
    for name, grad in grads.items():
        torch.testing.assert_close(grad.isfinite(), expected[name].isfinite(), msg=name)


def test_visible_scores_are_all_computed():
    wrapped = ORTModule(model("bert", "MaskedLM").eval())
    batch = language("right")
    assert wrapped(**batch).logits.shape == (BATCH, LENGTH, VOCABULARY)
    assert "label_sparsity" not in explain(wrapped).fused


class Tagger(nn.Module):
    def __init__(self, reduction="mean", weight=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 5))
        self.loss = nn.CrossEntropyLoss(weight, ignore_index=7, reduction=reduction)

    def forward(self, x, labels):
        return self.loss(self.body(x).flatten(0, -2), labels.flatten()).square().sum()


def tagged(*shape, kept):
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 5, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) > kept] = 7
    return {"x": torch.randn(*shape, 6, generator=generator), "labels": labels}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, 1, 2, 3, 0])])
def test_reductions_and_weights(reduction, weight):
    batches = [tagged(*shape, kept=kept) for shape in ((9, 11), (140,), (5, 5, 7)) for kept in (0.2, 0.6)]
    for shape in {batch["labels"].dim(): batch for batch in batches}:
        check(Tagger(reduction, weight), [b for b in batches if b["labels"].dim() == shape], {"label_sparsity"})


def test_plans_serve_many_counts():
    wrapped = ORTModule(Tagger())
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.full((16, 16), 7).masked_fill(torch.rand(16, 16, generator=generator) < 0.15, 3)
        wrapped(x=torch.randn(16, 16, 6, generator=generator), labels=labels).backward()
    assert explain(wrapped).plans <= 6


def test_a_module_whose_loss_is_outside():
    body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 5))
    loss = nn.CrossEntropyLoss(ignore_index=7)
    module = ModuleWithLoss(body, lambda y, labels: loss(y.flatten(0, 1), labels.flatten()), labels="target")
    generator = torch.Generator().manual_seed(0)
    target = torch.full((12, 10), 7).masked_fill(torch.rand(12, 10, generator=generator) < 0.3, 2)
    check(module, [{"input": torch.randn(12, 10, 6, generator=generator), "target": target}], {"label_sparsity"})
    assert module.module is body and list(module.state_dict()) == [f"module.{name}" for name in body.state_dict()]
    with pytest.raises(TypeError, match="target="):
        module(torch.randn(2, 3, 6))


class Shifted(nn.Module):
    """The loss of a language model as its authors write it."""

    def __init__(self, language_model):
        super().__init__()
        self.model = language_model

    def forward(self, input_ids, attention_mask, labels):
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        scores = logits[..., :-1, :].contiguous().view(-1, VOCABULARY)
        return nn.functional.cross_entropy(scores, labels[..., 1:].reshape(-1))


def instructions():
    """Right padding; of what is there, the first part is a prompt, whose labels are ignored."""
    batch = language("right", 1.1)
    return batch | {"labels": batch["labels"].masked_fill(torch.arange(LENGTH) < 4, -100)}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_labels_of_scores_that_are_shifted(name):
    kind, head, config = LANGUAGE[name]
    module = Shifted(model(kind, head, **config))
    batches = [instructions(), language("full", 1.1)]
    check(module, batches, {"label_sparsity", "padding_removal", "shifted_loss"})


# --- selected rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SENTENCE)
def test_first_or_last_token(name):
    kind, head, config = SENTENCE[name]
    check(
        Loss(model(kind, head, **config)),
        [sentence(kind) for kind in ("right", "left", "full", "holes")],
        {"row_selection", "padding_removal"},
    )


class Selected(nn.Module):
    def __init__(self, select):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 5))
        self.select = select

    def forward(self, x, i):
        return self.select(self.body(x), i).square().sum()


SELECTIONS = {
    "first": lambda x, i: x[:, 0],
    "last": lambda x, i: x[:, -1],
    "some": lambda x, i: x[1:, 2:9:3],
    "batch": lambda x, i: x[1:2],
    "pairs": lambda x, i: x[torch.arange(len(x)), i],
    "rows": lambda x, i: x.flatten(0, 1)[i],
    "twice": lambda x, i: x[:, i],
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections(name):
    batches = [{"x": torch.randn(4, 9, 6), "i": torch.tensor([3, 1, 0, 3])}]
    check(Selected(SELECTIONS[name]), batches, {"row_selection"})


def test_selection_out_of_range():
    wrapped = ORTModule(Selected(SELECTIONS["rows"]))
    x = torch.randn(4, 9, 6)
    wrapped(x=x, i=torch.tensor([0, 1, 2, 3]))
    with pytest.raises((RuntimeError, IndexError), match="out of range|out of bounds"):
        wrapped(x=x, i=torch.tensor([0, 1, 36, 3]))


class LookUps(nn.Module):
    """Look-ups of which some rows are left out: by a selection, or as padding."""

    def __init__(self, look_up, selects):
        super().__init__()
        self.table, self.look_up, self.selects = nn.Embedding(9, 16, padding_idx=2), look_up, selects
        self.query, self.head = nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, i, mask):
        x = self.query(self.look_up(self.table.weight, i))
        if self.selects:
            return self.head(x)[:, 0].square().sum()
        seen = (x @ x.mT).masked_fill(~mask[:, None], float("-inf")).softmax(-1) @ x
        return (self.head(seen) * mask[..., None]).sum()


LOOK_UPS = {
    "an embedding": lambda w, i: nn.functional.embedding(i, w),
    "with padding": lambda w, i: nn.functional.embedding(i, w, padding_idx=2),
    "index_select": lambda w, i: w.index_select(0, i.flatten()).unflatten(0, i.shape),
    "an index": lambda w, i: w[i],
    "gather": lambda w, i: w.gather(0, i.flatten()[:, None].expand(-1, 16)).unflatten(0, i.shape),
    "two tables": lambda w, i: nn.functional.embedding(i, w) + nn.functional.embedding(i, w[:7]),
}


@each("selects", [True, False], [True])
@pytest.mark.parametrize("name", LOOK_UPS)
def test_bad_indices_of_rows_that_are_left_out(name, selects):
    """PyTorch refuses an index wherever it stands, and takes those from the end where it says so."""
    module, mask = LookUps(LOOK_UPS[name], selects), mask_of("right")
    wrapped, ids = ORTModule(copy.deepcopy(module)), torch.randint(0, 7, (BATCH, LENGTH))
    wrapped(ids, mask).backward()
    assert explain(wrapped).captured
    for bad in (9, -1, -9, -10, 2**40):
        given = ids.clone()
        given[0, -1] = bad  # it is padding, and not selected
        try:
            expected = module(given, mask)
        except (RuntimeError, IndexError):
            with pytest.raises((RuntimeError, IndexError), match="out of range|out of bounds"):
                wrapped(given, mask)
        else:
            torch.testing.assert_close(wrapped(given, mask), expected)
    assert explain(wrapped).captured


class Reversed(nn.Module):
    """What is cut into rows has been turned round."""

    def __init__(self, turned):
        super().__init__()
        self.first, self.head, self.turned = nn.Linear(6, 16), nn.Linear(16, 5), turned

    def forward(self, x, labels):
        return self.turned(self, x, labels)


def ignoring(scores, labels):
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=7)


REVERSED = {
    "rows, a loss": (lambda m, x, y: ignoring(m.head(m.first(x).flip(1)), y), {"label_sparsity"}),
    "scores, a loss": (lambda m, x, y: ignoring(m.head(m.first(x)).flip(-1), y), {"label_sparsity"}),
    "scores that are shifted": (lambda m, x, y: ignoring(m.head(m.first(x)).flip(-1)[:, 1:], y[:, 1:]), set()),
    "rows, a selection": (lambda m, x, y: m.head(m.first(x).flip(1))[:, 0].square().sum(), {"row_selection"}),
    "features, a selection": (lambda m, x, y: m.head(m.first(x)).flip(-1)[:, 0].square().sum(), set()),
}


@pytest.mark.parametrize("name", REVERSED)
def test_steps_of_minus_one(name):
    function, fires = REVERSED[name]
    check(Reversed(function), [tagged(9, 16, kept=0.2), tagged(9, 16, kept=0.5)], fires)


def test_what_others_see_is_computed_whole():
    class Both(Selected):
        def forward(self, x, i):
            y = self.body(x)
            return y[:, 0].square().sum() + y.abs().sum()

    wrapped = ORTModule(Both(None))
    wrapped(x=torch.randn(4, 9, 6), i=torch.tensor([0])).backward()
    assert not explain(wrapped).fused.get("row_selection")


# --- switches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        ("ENABLE_COMPUTE_OPTIMIZER", {"label_sparsity", "padding_removal"}),
        ("ENABLE_SPARSE_OPTIMIZER", {"row_selection"}),
        ("ENABLE_LABEL_SPARSE_OPTIMIZER", {"row_selection", "padding_removal"}),
        ("ENABLE_EMBEDDING_SPARSE_OPTIMIZER", {"row_selection", "label_sparsity"}),
        ("VERIFY", {"row_selection", "label_sparsity", "padding_removal"}),  # no switch of these: all are on
    ],
)
def test_settings(setting, left, monkeypatch):
    monkeypatch.setenv(f"ORTMODULE_{setting}", "0")
    fused = set()
    selection = {"x": torch.randn(4, 9, 6), "i": torch.tensor([0])}
    pooled = MeanPool(), sentence("right")
    for module, batch in [(Tagger(), tagged(12, 9, kept=0.3)), (Selected(SELECTIONS["first"]), selection), pooled]:
        wrapped = ORTModule(module)
        wrapped(**batch)
        fused |= set(explain(wrapped).fused)
    assert fused & set(ROWS) == left
