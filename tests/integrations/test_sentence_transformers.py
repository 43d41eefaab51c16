"""sentence-transformers with a wrapped encoder: its Trainer, `fit`, and a loss that computes embeddings again."""

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


def make(folder, wrap):
    """The model, and its encoder."""
    made = sentence_transformers.SentenceTransformer(
        modules=[Transformer(folder, max_seq_length=LENGTH), Pooling(16)], device="cpu"
    )
    made[0].model = wrap(made[0].model)
    return made


def pairs():
    return [(text[: len(text) // 2], text[len(text) // 2 :]) for text in sentences()[: STEPS * BATCH]]


ROADS = {
    "Trainer": kinds.MultipleNegativesRankingLoss,
    "CachedMNRL": lambda model: kinds.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4),
}


def train(folder, wrap, road, out):
    model = make(folder, wrap)
    args = sentence_transformers.SentenceTransformerTrainingArguments(
        output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-2, logging_steps=1,
        save_steps=STEPS, report_to=[], disable_tqdm=True, use_cpu=True, seed=3,
    )  # fmt: skip
    data = datasets.Dataset.from_dict(dict(zip(("anchor", "positive"), zip(*pairs(), strict=True), strict=True)))
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model=model, args=args, train_dataset=data, loss=ROADS[road](model)
    )
    trainer.train()
    return model, losses(trainer)


@pytest.mark.parametrize("road", ROADS)
def test_training_and_saving(road, folder, tmp_path):
    (ours, found), (_, expected) = (
        train(folder, wrap, road, tmp_path / name) for name, wrap in (("ours", ORTModule), ("theirs", lambda m: m))
    )
    assert found == pytest.approx(expected, rel=1e-3)
    calls = explain(ours[0].model)
    assert_in_engine(ours[0].model, calls.engine_calls + calls.pytorch_calls)
    assert calls.engine_calls >= 2 * STEPS
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "ours" / f"checkpoint-{STEPS}"), device="cpu")
    texts = sentences()[:3]
    torch.testing.assert_close(
        loaded.encode(texts, convert_to_tensor=True), ours.encode(texts, convert_to_tensor=True), rtol=1e-4, atol=1e-5
    )


def test_wrapped_as_a_whole(folder):
    """It writes its results into the dictionary that it was given: PyTorch runs it, with a warning."""
    whole = ORTModule(make(folder, lambda model: model)).train()
    given = whole.preprocess([text for pair in pairs()[:2] for text in pair])
    with pytest.warns(UserWarning, match="PyTorch runs this module, not the engine"):
        result = whole(given)
    assert result is given and explain(whole).pytorch_calls == 1
