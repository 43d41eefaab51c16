"""The examples of ORTTrainer run, on a small text, and what they train gets better."""

import importlib
from pathlib import Path

import onnx
import pytest
import torch

from ortmodule import explain
from ortmodule.debug.verify import Verifier

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_transformer_lm(tmp_path, capsys):
    from examples.transformer_lm import train

    small = ["--text", str(TEXT), "--length", "16", "--width", "16", "--heads", "2", "--batch-size", "4"]
    small += ["--layers", "1", "--lr", "0.02", "--evaluate", "1", "--checkpoint", str(tmp_path / "model.pt")]
    losses = train.main([*small, "--steps", "16", "--onnx", str(tmp_path / "model.onnx")])
    assert "perplexity of a character" in capsys.readouterr().out
    assert len(losses) == 16 and sum(losses[-4:]) < sum(losses[:4]) - 0.5
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"))
    assert len(train.main([*small, "--steps", "18"])) == 2  # goes on from the checkpoint


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_pretrain_bert(tmp_path, capsys, monkeypatch):
    pytest.importorskip("tokenizers")
    from examples.pretrain_bert import data, train

    made, original = [], train.make_trainer
    monkeypatch.setattr(train, "make_trainer", lambda *a: made.append(original(*a)) or made[-1])
    small = ["--text", str(TEXT), "--length", "24", "--batch-size", "8", "--vocabulary", "300", "--steps", "12"]
    small += ["--accumulate", "1", "--lr", "0.06", "--checkpoint", str(tmp_path / "bert.pt")]
    first, second = train.main(small)
    assert len(first) == 11 and len(second) == 1 and "phase 2: loss" in capsys.readouterr().out
    assert sum(first[-3:]) < sum(first[:3]) and (tmp_path / "bert.pt").exists()
    assert all(explain(trainer.engine).captured for trainer in made)
    pairs = data.Pairs(*data.load(TEXT.read_text(), 300), 24)
    samples = [pairs[i] for i in range(60)]
    masked = torch.stack([(s["labels"] != data.IGNORED).sum() for s in samples]).sum()
    tokens = torch.stack([s["attention_mask"].sum() for s in samples]).sum()
    assert 0.09 < masked / tokens < 0.18
    assert 15 < sum(int(s["next_sentence_label"]) for s in samples) < 45
    for sample in samples:
        shown = (sample["labels"] != data.IGNORED) & (sample["input_ids"] != pairs.mask)
        assert (sample["attention_mask"][sample["labels"] != data.IGNORED] == 1).all() and shown.sum() < 8


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_benchmark(tmp_path, capsys):
    """`train_step` and the loop that it is measured against learn the same."""
    from benchmarks import trainer

    small = ["--width", "16", "--heads", "2", "--layers", "1", "--rows", "2", "--length", "8", "--steps", "3"]
    report = trainer.main([*small, "--warmup", "1", "--out", str(tmp_path / "trainer")])
    ours, theirs = (row["losses"] for row in report["rows"].values())
    assert ours == pytest.approx(theirs, rel=1e-5) and len(ours) == 4
    assert "| train_step |" in capsys.readouterr().out and (tmp_path / "trainer.json").exists()


SMALL = {
    "transformer_lm": ["--length", "16", "--width", "16", "--heads", "2", "--layers", "1", "--batch-size", "4"],
    "pretrain_bert": ["--length", "24", "--batch-size", "8", "--vocabulary", "300", "--accumulate", "1"],
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of the exporter
@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_found_in_the_examples(name, tmp_path, monkeypatch):
    """Each step beside PyTorch's (ORTMODULE_VERIFY)."""
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    compared, found, compare = [], [], Verifier._compare
    monkeypatch.setattr(Verifier, "_compare", lambda self, *given: compared.append(1) or compare(self, *given))
    monkeypatch.setattr(Verifier, "_report", lambda self, *what: found.append(what))
    train = importlib.import_module(f"examples.{name}.train")
    train.main([*SMALL[name], "--text", str(TEXT), "--steps", "4", "--checkpoint", str(tmp_path / "model.pt")])
    assert len(compared) >= 3 and not found


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_finetune_gpt(tmp_path, capsys):
    """A base that is trained here, and one from a folder with its tokenizer, know more of the text afterwards."""
    pytest.importorskip("tokenizers")
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    from examples.finetune_gpt import train
    from examples.pretrain_gpt.data import load

    small = ["--text", str(TEXT), "--length", "16", "--width", "32", "--layers", "1", "--batch-size", "4"]
    small += ["--evaluate", "2", "--steps", "12", "--vocabulary", "300", "--lr", "0.01"]
    found = train.main([*small, "--base-steps", "4", "--checkpoint", str(tmp_path / "gpt.pt")])
    assert "perplexity of the unseen text" in capsys.readouterr().out and (tmp_path / "gpt.pt").exists()
    assert len(found["losses"]) == 12 and found["after"] < 0.9 * found["before"]

    folder, (_, _, tokenizer) = tmp_path / "base", load(300, text=str(TEXT))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(folder)
    config = GPT2Config(vocab_size=300, n_positions=16, n_embd=32, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    found = train.main([*small, "--weights", str(folder)])
    assert found["after"] < 0.9 * found["before"]
