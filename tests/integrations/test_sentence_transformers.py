"""sentence-transformers, wrapped whole or its encoder: Trainer, `fit`, and a loss that computes embeddings again."""

import contextlib

import pytest
import torch
import transformers

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("at_once")]
sentence_transformers = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")

from sentence_transformers.sentence_transformer import losses as kinds  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402

from ortmodule import ORTModule, explain  # noqa: E402
from tests.integrations.small import LENGTH, VOCABULARY, assert_in_engine, losses, sentences, tokenizer  # noqa: E402

STEPS, BATCH = 4, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def make(folder, wrap, whole=False):
    made = sentence_transformers.SentenceTransformer(
        modules=[Transformer(folder, max_seq_length=LENGTH), Pooling(16)], device="cpu"
    )
    if whole:
        return wrap(made)
    made[0].model = wrap(made[0].model)
    return made


def pairs():
    return [(text[: len(text) // 2], text[len(text) // 2 :]) for text in sentences()[: STEPS * BATCH]]


ROADS = {
    "Trainer": kinds.MultipleNegativesRankingLoss,
    "CachedMNRL": lambda model: kinds.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4),
}


class Noted(kinds.MultipleNegativesRankingLoss):
    """Notes each loss: `fit` tells of none."""

    found: list

    def forward(self, *args, **kwargs):
        loss = super().forward(*args, **kwargs)
        self.found.append(loss.item())
        return loss


def fit(model, out):
    """The older way, with a loop that the library writes. Returns the losses."""
    loss = Noted(model)
    loss.found = []
    rows = [sentence_transformers.InputExample(texts=list(pair)) for pair in pairs()]
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH)
    with contextlib.chdir(out):  # it writes there
        model.fit([(loader, loss)], epochs=1, show_progress_bar=False, optimizer_params={"lr": 1e-2}, warmup_steps=0)
    return loss.found


def train(folder, wrap, whole, road, out, resumed=None):
    model = make(folder, wrap, whole)
    args = sentence_transformers.SentenceTransformerTrainingArguments(
        output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-2, logging_steps=1,
        save_steps=STEPS // 2, report_to=[], disable_tqdm=True, use_cpu=True, seed=3,
    )  # fmt: skip
    data = datasets.Dataset.from_dict(dict(zip(("anchor", "positive"), zip(*pairs(), strict=True), strict=True)))
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model=model, args=args, train_dataset=data, loss=ROADS[road](model)
    )
    trainer.train(resume_from_checkpoint=resumed)
    return model, losses(trainer)


@pytest.mark.parametrize("whole", [False, True], ids=["encoder", "whole"])
@pytest.mark.parametrize("road", ROADS)
def test_training_and_saving(road, whole, folder, tmp_path):
    (ours, found), (_, expected) = (
        train(folder, wrap, whole, road, tmp_path / name)
        for name, wrap in (("ours", ORTModule), ("theirs", lambda m: m))
    )
    assert found == pytest.approx(expected, rel=1e-3)
    wrapped = ours if whole else ours[0].model
    calls = explain(wrapped)
    assert_in_engine(wrapped, calls.engine_calls + calls.pytorch_calls)
    assert calls.engine_calls >= 2 * STEPS
    assert_reads_alike(loaded(tmp_path / "ours" / f"checkpoint-{STEPS}"), ours)
    half = str(tmp_path / "ours" / f"checkpoint-{STEPS // 2}")
    _, resumed = train(folder, ORTModule, whole, road, tmp_path / "again", half)
    assert resumed[-STEPS // 2 :] == pytest.approx(found[-STEPS // 2 :], rel=1e-4)


def loaded(path):
    """By the plain library."""
    return sentence_transformers.SentenceTransformer(str(path), device="cpu")


def assert_reads_alike(one, other):
    texts = sentences()[:3]
    found, expected = (model.eval().encode(texts, convert_to_tensor=True) for model in (one, other))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("whole", [False, True], ids=["encoder", "whole"])
def test_fit(whole, folder, tmp_path):
    ours, theirs = make(folder, ORTModule, whole), make(folder, lambda model: model, whole)
    found, expected = fit(ours, tmp_path), fit(theirs, tmp_path)
    assert len(found) == STEPS and found == pytest.approx(expected, rel=1e-3)
    assert_in_engine(ours if whole else ours[0].model, STEPS)
    ours.save(str(tmp_path / "saved"))
    again = loaded(tmp_path / "saved")
    assert_reads_alike(again, ours)
    again = ORTModule(again) if whole else again
    assert fit(again.train(), tmp_path) == pytest.approx(fit(ours.train(), tmp_path), rel=1e-4)


@pytest.mark.parametrize("kind", ["BatchEncoding", "dictionary"])
def test_what_it_is_given(kind, folder):
    """It writes its results into that, and returns it; gradients of what is in a dictionary are PyTorch's."""
    found = []
    for wrap in (ORTModule, lambda m: m):
        model = make(folder, wrap, True).train()
        given = model.preprocess([text for pair in pairs()[:2] for text in pair])
        given = dict(given) if kind == "dictionary" else given
        result = model(given)
        assert result is given
        if kind == "dictionary":
            result["token_embeddings"].retain_grad()
        result["sentence_embedding"].sin().sum().backward()
        assert list(result)[-2:] == ["token_embeddings", "sentence_embedding"]
        tensors = list(result.values())[-2:]
        found.append([*tensors, tensors[0].grad, *[p.grad for p in model.parameters()]])
        if wrap is ORTModule:
            assert explain(model).captured and explain(model).engine_calls == 1
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)
