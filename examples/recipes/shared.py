"""Holds what the recipes share: settings from the command line, text from Python's documentation, and the report."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples import common
from examples.common import BACKENDS, setting, with_backend

SPECIAL = {
    "pad_token": "<pad>",
    "eos_token": "<end>",
    "mask_token": "<mask>",
    "cls_token": "<cls>",
    "unk_token": "<unk>",
}


@dataclass
class Settings:
    """Of a training; each recipe has defaults of its own."""

    backend: str = setting("ortmodule", "who runs the model", choices=list(BACKENDS))
    steps: int = setting(100, "optimizer steps")
    batch_size: int = setting(16, "rows of a step")
    lr: float = setting(3e-3, "learning rate")
    seed: int = setting(0, "of weights, order and dropout")
    out: str = setting("results/recipes", "folder for checkpoints and figures")


def parse(argv, **defaults):
    """Settings from a command line (None: this process's), where a recipe's ``defaults`` are not overruled."""
    settings = common.parse(Settings, argv, **defaults)
    transformers.set_seed(settings.seed)
    return settings


def wrapped(model, settings):
    return with_backend(model.train(), settings.backend)  # model = ORTModule(model)


@functools.cache
def paragraphs():
    """Those of the reference of Python's language, each on one line, in a fixed order."""
    found = [" ".join(part.split()) for text in topics.topics.values() for part in text.split("\n\n")]
    return [each for each in dict.fromkeys(found) if 60 < len(each) < 400]


def tokenizer(texts, size=512, length=64):
    """A byte-level BPE tokenizer, trained on these texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=length, **SPECIAL)


def language_model(vocabulary, length=64, width=64, layers=2):
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=4, use_cache=False,
        bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def train_t5(name, settings, words, rows):
    """A small T5 on ``rows``, all but the first 128, with Seq2SeqTrainer; the report, with the loss of these."""
    config = transformers.T5Config(
        vocab_size=len(words), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        decoder_start_token_id=words.pad_token_id, pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id,
    )  # fmt: skip
    model = wrapped(transformers.T5ForConditionalGeneration(config), settings)
    trainer = transformers.Seq2SeqTrainer(
        model=model,
        args=arguments(settings, transformers.Seq2SeqTrainingArguments),
        train_dataset=rows[128:],
        eval_dataset=rows[:128],
        data_collator=transformers.DataCollatorForSeq2Seq(words, model=model),
    )
    trainer.train()
    return report(name, settings, model, losses(trainer), eval_loss=trainer.evaluate()["eval_loss"])


def arguments(settings, cls=transformers.TrainingArguments, **more):
    """Those of a Trainer: nothing is evaluated, saved or reported on the way."""
    given = {
        "output_dir": settings.out, "max_steps": settings.steps, "learning_rate": settings.lr, "seed": settings.seed,
        "per_device_train_batch_size": settings.batch_size, "per_device_eval_batch_size": settings.batch_size,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(), "logging_strategy": "steps", "log_level": "error",
    }  # fmt: skip
    return cls(**given | more)


def batches(words, settings):
    """Python's reference in batches for a language model."""
    rows = [{"input_ids": row} for row in words(paragraphs(), truncation=True)["input_ids"]]
    collate = transformers.DataCollatorForLanguageModeling(words, mlm=False)
    return torch.utils.data.DataLoader(rows, settings.batch_size, shuffle=True, drop_last=True, collate_fn=collate)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def report(name, settings, model, losses, **metrics):
    """Prints the figures, writes them to <out>/<name>.<backend>.json, and returns them."""
    last = losses[-10:]
    figures = {"first_loss": losses[0], "last_loss": sum(last) / len(last), **metrics}
    folder = Path(settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.{settings.backend}.json").write_text(json.dumps(figures, indent=1))
    if settings.backend == "ortmodule":
        from ortmodule import explain

        found = explain(model)
        figures |= {"engine_calls": found.engine_calls, "pytorch_calls": found.pytorch_calls}
        figures["weights_in_engine"] = found.weights_in_engine
    print(f"{name}, {settings.backend}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    return figures
