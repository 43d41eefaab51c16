"""A script's own loop, and the first ORTTrainer, under our names and ONNX Runtime's: saved, reloaded, resumed."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from ortmodule import compat
from tests.integrations.small import assert_in_engine, assert_same_weights, llama, sentences, tokenizer
from tests.selection import each

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("at_once")]
STEPS, BATCH = 6, 4
#: The modules that have ORTModule and FusedAdam, by the names that scripts import.
NAMES = {
    "ortmodule": ("ortmodule", "ortmodule.optim"),
    "onnxruntime.training": ("onnxruntime.training", "onnxruntime.training.optim"),
    "onnxruntime.training.ortmodule": ("onnxruntime.training.ortmodule", "onnxruntime.training.optim.fused_adam"),
    "torch_ort": ("torch_ort", "torch_ort.optim"),
}


@pytest.fixture
def packages(monkeypatch):
    """The import names of ONNX Runtime are there."""
    monkeypatch.syspath_prepend(str(Path(compat.__file__).parent / "packages"))
    before = {name: each for name, each in sys.modules.items() if name.partition(".")[0] == "onnxruntime"}
    for name in before:  # the official one
        del sys.modules[name]
    yield
    for name in [one for one in sys.modules if one.partition(".")[0] in ("onnxruntime", "torch_ort")]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture(params=NAMES)
def names(request, packages):
    """(ORTModule, FusedAdam)"""
    wrapper, optimizer = map(importlib.import_module, NAMES[request.param])
    return wrapper.ORTModule, optimizer.FusedAdam


def batches():
    rows = tokenizer()(sentences()[: STEPS * BATCH], padding=True, truncation=True, return_tensors="pt")
    for ids, mask in zip(rows["input_ids"].split(BATCH), rows["attention_mask"].split(BATCH), strict=True):
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(model, optimizer, data, path=None):
    """The losses; in the middle, a checkpoint is written to ``path``."""
    found = []
    for step, batch in enumerate(data):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        if path is not None and step + 1 == STEPS // 2:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return found


def test_training_saving_and_resuming(names, tmp_path):
    wrap, fused_adam = names
    ours, theirs, path = wrap(llama()), llama(), tmp_path / "half.pt"
    settings = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-8}
    found = train(ours, fused_adam(ours.parameters(), adam_w_mode=2, **settings), batches(), path)
    expected = train(theirs, torch.optim.AdamW(theirs.parameters(), **settings), batches())
    assert found == pytest.approx(expected, rel=1e-4) and found[-1] < found[0]
    assert_in_engine(ours, STEPS)

    ours.save_pretrained(tmp_path / "saved")
    assert_same_weights(type(theirs).from_pretrained(tmp_path / "saved"), ours)
    saved = torch.load(path)
    plain = llama()
    plain.load_state_dict(saved["model"])  # names without a prefix
    again = wrap(plain)
    optimizer = fused_adam(again.parameters(), adam_w_mode=2, **settings)
    optimizer.load_state_dict(saved["optimizer"])
    rest = list(batches())[STEPS // 2 :]
    assert train(again, optimizer, rest) == pytest.approx(found[STEPS // 2 :], rel=1e-5)
    assert_in_engine(again, len(rest))


DESCRIPTION = {
    "inputs": [(name, ["batch", "length"]) for name in ("input_ids", "attention_mask", "labels")],
    "outputs": [("loss", [], True)],
}


@each("module", ["ortmodule", "onnxruntime.training"], ["ortmodule"])
def test_the_first_trainer(module, packages, tmp_path):
    """Its own loop: forward, backward, a clipped norm and the step in one call."""
    training = importlib.import_module(module)

    def made():
        return training.ORTTrainer(llama(), DESCRIPTION, training.optim.AdamConfig(lr=1e-2, lambda_coef=0.01))

    ours, theirs, path = made(), llama(), tmp_path / "half.pt"
    found = []
    for step, batch in enumerate(batches()):
        found.append(ours.train_step(**batch).item())
        if step + 1 == STEPS // 2:
            ours.save_checkpoint(path)
            saved = {name: tensor.clone() for name, tensor in ours.model.state_dict().items()}
    optimizer, expected = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.01), []
    for batch in batches():
        loss = theirs(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-4) and found[-1] < found[0]
    assert_in_engine(ours.engine, STEPS)
    plain = llama()
    plain.load_state_dict(torch.load(path)["model"])
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    again = made()
    again.load_checkpoint(path)
    assert [again.train_step(**batch).item() for batch in list(batches())[STEPS // 2 :]] == found[STEPS // 2 :]
