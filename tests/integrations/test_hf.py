"""Optimum's trainers: a training on real text, saved, read by plain transformers, and gone on with."""

import pytest
import torch
import transformers

pytest.importorskip("accelerate")

from ortmodule import ORTModule, explain  # noqa: E402
from ortmodule.hf import (  # noqa: E402
    ORTSeq2SeqTrainer,
    ORTSeq2SeqTrainingArguments,
    ORTTrainer,
    ORTTrainingArguments,
)
from ortmodule.optim import FusedAdam  # noqa: E402
from tests.integrations.small import assert_in_engine, assert_same_weights  # noqa: E402
from tests.selection import each  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter and of transformers
LENGTH, STEPS = 24, 6


def text():
    """Sentences of a module's own documentation, as bytes."""
    words = " ".join((torch.nn.Module.__doc__ + torch.optim.Optimizer.__doc__ + torch.Tensor.view.__doc__).split())
    codes = torch.tensor(list(words.encode()))
    return [codes[i : i + LENGTH] for i in range(0, len(codes) - LENGTH, LENGTH)]


def rows():
    return [{"input_ids": row, "labels": row} for row in text()]


def language_model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def arguments(cls, folder, **settings):
    return cls(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=STEPS, save_steps=3, logging_steps=1,
        learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True, seed=7, **settings,
    )  # fmt: skip


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def make(folder, trainer=ORTTrainer, **settings):
    cls = transformers.TrainingArguments if trainer is transformers.Trainer else ORTTrainingArguments
    return trainer(model=language_model(), args=arguments(cls, folder, **settings), train_dataset=rows())


def test_training_saving_and_resuming(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    ours = make(tmp_path / "ours", optim="adamw_ort_fused", save_onnx=True, onnx_prefix="gpt")
    ours.train()
    report = explain(ours.model)
    assert type(ours.optimizer.optimizer) is FusedAdam and isinstance(ours.model, ORTModule)
    assert_in_engine(ours.model, STEPS)
    assert report.exports == 1  # a checkpoint changes fields of the configuration that forward does not read
    assert losses(ours)[-1] < losses(ours)[0]

    assert (tmp_path / "gpt_execution_model_training.onnx").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / f"checkpoint-{STEPS}")
    assert type(loaded) is transformers.GPT2LMHeadModel
    assert_same_weights(loaded, ours.model)

    resumed = make(tmp_path / "again", optim="adamw_ort_fused")
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert losses(resumed) == pytest.approx(losses(ours), rel=1e-5)


def test_gradient_checkpointing_that_is_switched():
    """As eager mode in every step; without it, the engine runs all of the model again."""
    found = []
    for wrap in (ORTModule, lambda model: model):
        model = wrap(language_model().train())
        optimizer, values, left = torch.optim.SGD(model.parameters(), lr=0.1), [], []
        batch = torch.stack(text()[:4])
        for on in (False, True, False):
            model.gradient_checkpointing_enable() if on else model.gradient_checkpointing_disable()
            assert model.is_gradient_checkpointing == on
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss
                loss.backward()
                optimizer.step()
                values.append(loss.detach())
            left.append(explain(model).python_ops if wrap is ORTModule else None)
        found.append((model, torch.stack(values), left))
    (ours, values, left), (_, expected, _) = found
    torch.testing.assert_close(values, expected)
    report = explain(ours)
    assert (report.engine_calls, report.pytorch_calls, report.unreached_steps) == (len(values), 0, 0)
    assert left[0] == left[2] == []


@each("smoothing", [0.0, 0.1], [0.1])
def test_the_same_numbers_as_trainer(smoothing, tmp_path):
    """With the loss in the graph, too."""
    given = {"optim": "adamw_torch", "label_smoothing_factor": smoothing}
    ours = make(tmp_path / "ours", use_module_with_loss=True, **given)
    theirs = make(tmp_path / "theirs", transformers.Trainer, **given)
    for trainer in (ours, theirs):
        trainer.train()
    assert losses(ours) == pytest.approx(losses(theirs), rel=2e-3)
    assert ours._signature_columns == theirs._signature_columns
    assert explain(ours.model).engine_calls == STEPS
    assert ours.evaluate(rows())["eval_loss"] == pytest.approx(theirs.evaluate(rows())["eval_loss"], rel=2e-3)


@pytest.mark.full
def test_sequence_to_sequence(tmp_path):
    config = transformers.T5Config(
        vocab_size=256, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip

    def trained(folder, start=None):
        torch.manual_seed(0)
        args = arguments(
            ORTSeq2SeqTrainingArguments, folder, optim="adamw_ort_fused", predict_with_generate=True
        )  # fmt: skip
        made = ORTSeq2SeqTrainer(
            model_init=lambda: transformers.T5ForConditionalGeneration(config), args=args, train_dataset=rows()
        )
        made.train(resume_from_checkpoint=start)
        return made

    trainer = trained(tmp_path / "ours")
    assert_in_engine(trainer.model, STEPS)
    assert losses(trainer)[-1] < losses(trainer)[0]
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours" / f"checkpoint-{STEPS}")
    assert_same_weights(loaded, trainer.model)
    resumed = trained(tmp_path / "again", str(tmp_path / "ours" / "checkpoint-3"))
    assert losses(resumed) == pytest.approx(losses(trainer), rel=1e-5)
    assert len(trainer.predict(rows()[:2], max_length=4).predictions) == 2


def test_arguments(tmp_path):
    parser = transformers.HfArgumentParser(ORTTrainingArguments)
    line = ["--output_dir", str(tmp_path), "--optim", "adamw_ort_fused", "--onnx_log_level", "info", "--save_onnx"]
    (found,) = parser.parse_args_into_dataclasses(line)
    assert (found.optim, found.save_onnx, found.use_module_with_loss) == ("adamw_ort_fused", True, False)
    assert found.to_dict()["optim"] == "adamw_ort_fused"
    with pytest.raises(ValueError, match="it is one of VERBOSE"):
        ORTTrainingArguments(str(tmp_path), onnx_log_level="LOUD")
    with pytest.raises(ValueError, match="adamw_ort_fusd"):
        ORTTrainingArguments(str(tmp_path), optim="adamw_ort_fusd")
