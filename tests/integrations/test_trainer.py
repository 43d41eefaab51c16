"""`Trainer(model=ORTModule(model), ...)` of transformers: all as without us."""

import json

import pytest
import torch
import transformers
from torch.utils.data import DataLoader, Dataset

from ortmodule import ORTModule, explain
from ortmodule.utils.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler
from tests.integrations.small import assert_in_engine, sentences
from tests.selection import each

pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter and of transformers
SAMPLES, LENGTH, VOCABULARY = 24, 10, 50


class Sentences(Dataset):
    """Beginnings of sentences by characters, a class by the first; with a column that forward does not take."""

    column = "input_ids"

    def __init__(self, part):
        texts = sentences()[part * SAMPLES : (part + 1) * SAMPLES]
        self.ids = torch.tensor([[3 + ord(c) % (VOCABULARY - 3) for c in text[:LENGTH]] for text in texts])
        self.labels = torch.tensor([ord(text[0]) % 3 for text in texts])

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "label": self.labels[index], "note": torch.tensor(index)}


def classifier():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def language_model():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


class Images(Dataset):
    """Handwritten digits."""

    column = "pixel_values"

    def __init__(self, part):
        digits = pytest.importorskip("sklearn.datasets").load_digits()
        rows = slice(part * SAMPLES, (part + 1) * SAMPLES)
        self.pixels, self.labels = torch.tensor(digits.images[rows]).float()[:, None] / 8 - 1, digits.target[rows]

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"pixel_values": self.pixels[index], "labels": int(self.labels[index])}


def vision_transformer():
    config = transformers.ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, num_labels=10,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def convolutional():
    """(Checkpoints of ViTs have other names of weights in transformers 5, and its Trainer goes on without them.)"""
    config = transformers.ConvNextConfig(
        num_channels=1, patch_size=2, num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], num_labels=10
    )
    return transformers.ConvNextForImageClassification(config)


class Text(Sentences):
    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def trainer(folder, model, data, **settings):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, per_device_eval_batch_size=5, max_steps=8,
        learning_rate=1e-2, logging_steps=1, eval_strategy="steps", eval_steps=4, save_steps=4, report_to=[],
        disable_tqdm=True, use_cpu=True, seed=7, **settings,
    )  # fmt: skip
    return transformers.Trainer(model=model, args=arguments, train_dataset=data(0), eval_dataset=data(1))


def pair(make, tmp_path, data, **settings):
    """The same training twice: ours, and PyTorch's."""
    made = []
    for name, wrap in (("ours", ORTModule), ("theirs", lambda model: model)):
        torch.manual_seed(0)
        made.append(trainer(tmp_path / name, wrap(make()), data, **settings))
        made[-1].train()
    return made


def history(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def assert_alike(ours, theirs):
    for key in ("loss", "eval_loss", "grad_norm", "learning_rate", "step"):
        found, expected = history(ours, key), history(theirs, key)
        assert len(found) == len(expected) > 0
        assert found == pytest.approx(expected, rel=2e-3), key
    for (name, a), b in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize(
    "make, data, settings",
    [
        (classifier, Sentences, {}),
        (language_model, Text, {"gradient_accumulation_steps": 2}),
        (vision_transformer, Images, {}),
        pytest.param(convolutional, Images, {}, marks=pytest.mark.full),
        pytest.param(classifier, Sentences, {"bf16": True}, marks=pytest.mark.full),
        pytest.param(language_model, Text, {"bf16": True}, marks=pytest.mark.full),
    ],
)
def test_training(make, data, settings, tmp_path):
    ours, theirs = pair(make, tmp_path, data, **settings)
    report = explain(ours.model)
    assert_in_engine(ours.model, report.engine_calls + report.pytorch_calls)
    assert report.engine_calls >= 8 * settings.get("gradient_accumulation_steps", 1)
    if settings.get("bf16"):
        assert history(ours, "loss") == pytest.approx(history(theirs, "loss"), rel=5e-2)
        assert history(ours, "eval_loss") == pytest.approx(history(theirs, "eval_loss"), rel=5e-2)
    else:
        assert_alike(ours, theirs)
    columns = [t.get_train_dataloader().collate_fn for t in (ours, theirs)]
    assert type(columns[0]) is type(columns[1])
    assert ours.label_names == theirs.label_names
    assert ours._signature_columns == theirs._signature_columns
    assert data.column in ours._signature_columns
    found, expected = ours.evaluate()["eval_loss"], theirs.evaluate()["eval_loss"]
    assert found == pytest.approx(expected, rel=5e-2 if settings.get("bf16") else 2e-3)


#: Of a text and of an image.
ROADS = (classifier, Sentences), (convolutional, Images)


def test_prediction(tmp_path):
    ours, theirs = pair(classifier, tmp_path, Sentences)
    found, expected = ours.predict(Sentences(2)), theirs.predict(Sentences(2))
    assert (found.label_ids == expected.label_ids).all()
    assert found.predictions == pytest.approx(expected.predictions, abs=5e-2)


@each("make, data", ROADS, [ROADS[0]])
def test_checkpoints(make, data, tmp_path):
    """What is saved is what would be without us, and either side reads it."""
    ours, theirs = pair(make, tmp_path, data)
    files = [sorted(p.name for p in (tmp_path / who / "checkpoint-4").iterdir()) for who in ("ours", "theirs")]
    assert files[0] == files[1] and "config.json" in files[0] and "model.safetensors" in files[0]
    configs = [json.loads((tmp_path / who / "checkpoint-4" / "config.json").read_text()) for who in ("ours", "theirs")]
    assert configs[0] == configs[1] and configs[0]["architectures"] == [type(theirs.model).__name__]
    auto = getattr(transformers, "AutoModelFor" + configs[0]["architectures"][0].partition("For")[2])
    loaded = auto.from_pretrained(tmp_path / "ours" / "checkpoint-8")
    assert type(loaded) is type(theirs.model)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, ours.model.state_dict()[name]), name


@each("make, data", ROADS, [ROADS[0]])
def test_resume(make, data, tmp_path):
    """From the middle, ours goes on as it went on, from its own checkpoint and from PyTorch's."""
    ours, theirs = pair(make, tmp_path, data)
    for source in ("ours", "theirs"):
        torch.manual_seed(1)
        resumed = trainer(tmp_path / f"again-{source}", ORTModule(make()), data)
        resumed.train(resume_from_checkpoint=str(tmp_path / source / "checkpoint-4"))
        assert resumed.state.global_step == 8
        assert_alike(resumed, ours if source == "ours" else theirs)


class Balanced(transformers.Trainer):
    """As docs/how-to-balanced-batches.md has it, for the first of two processes. Keeps the indices that were loaded."""

    def get_train_dataloader(self):
        self.loaded = []

        def collate(rows):
            self.loaded.append([int(row.pop("note")) for row in rows])
            return self.data_collator(rows)

        sampler = LoadBalancingDistributedSampler(self.train_dataset, lambda row: int(row["label"]), 2, 0)
        batches = LoadBalancingDistributedBatchSampler(sampler, lambda ids: [ids[i : i + 3] for i in range(0, 12, 3)])
        loader = DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=collate)
        loader.set_epoch = batches.set_epoch
        return loader


def test_balanced_batches(tmp_path, monkeypatch):
    """Each epoch has its own order, and a run that is resumed in the second goes on with the right batches."""
    monkeypatch.setattr(transformers, "Trainer", Balanced)
    whole = trainer(tmp_path / "whole", ORTModule(classifier()), Sentences, remove_unused_columns=False)
    whole.train()
    assert len(whole.loaded) == 8 and sorted(sum(whole.loaded[:4], [])) != sorted(sum(whole.loaded[4:], []))
    sampler = LoadBalancingDistributedSampler(Sentences(0), lambda row: int(row["label"]), 2, 0)
    sampler.set_epoch(1)
    assert sum(whole.loaded[4:], []) == list(sampler)
    resumed = trainer(tmp_path / "resumed", ORTModule(classifier()), Sentences, remove_unused_columns=False)
    saved = tmp_path / "whole" / "checkpoint-4"
    state = json.loads((saved / "trainer_state.json").read_text())
    (saved / "trainer_state.json").write_text(json.dumps({**state, "global_step": 6}))
    resumed.train(resume_from_checkpoint=str(saved))
    assert resumed.loaded[-2:] == whole.loaded[6:]
