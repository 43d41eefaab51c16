"""The examples with a loop of their own run for some steps, in the engine, and their losses are PyTorch's."""

import importlib
from pathlib import Path

import pytest
import transformers

from ortmodule import explain
from tests.integrations.small import LENGTH, VOCABULARY, WORK, sentences, tokenizer

pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("at_once")]
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
STEPS = 3


def classifier(folder):
    """A small encoder, and glosses of four categories in WordNet's format."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    transformers.set_seed(0)
    transformers.BertModel(config).save_pretrained(folder / "weights")
    tokenizer().save_pretrained(folder / "weights")
    for number, part in enumerate(("noun", "verb", "adj", "adv")):
        lines = [f"0 {number + 3:02} n | {text}" for text in sentences()[90 * number :][:90]]
        (folder / f"data.{part}").write_text("\n".join(["  a licence", *lines]), encoding="utf-8")
    return ["--weights", str(folder / "weights"), "--wordnet", str(folder), "--eval-size", "16"]


def language_model(folder):
    small = {"length": 16, "width": 32, "layers": 1, "vocabulary": 300}
    return ["--text", str(TEXT), *(word for name, value in small.items() for word in (f"--{name}", str(value)))]


EXAMPLES = {"finetune_text_classifier": classifier, "pretrain_gpt": language_model}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path, capsys):
    train = importlib.import_module(f"examples.{name}.train")
    line = EXAMPLES[name](tmp_path)
    line += ["--steps", str(STEPS), "--batch-size", "4", "--eval-every", str(STEPS), "--out", str(tmp_path / "out")]
    found = {backend: train.main([*line, "--backend", backend]) for backend in ("eager", "ortmodule")}
    model, ours = found["ortmodule"]
    # (Masks of dropout are the engine's own.)
    assert len(ours.losses) == STEPS and ours.losses == pytest.approx(found["eager"][1].losses, rel=0.05)
    report = explain(model)
    assert report.engine_calls > STEPS and report.pytorch_calls == 0 and report.weights_in_engine >= WORK, str(report)
    told = capsys.readouterr().out
    assert "| eager |" in told and "| ortmodule |" in told and (tmp_path / "out" / "training.png").exists()
