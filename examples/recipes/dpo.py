"""Teaches a small GPT-2, by TRL's DPOTrainer, to prefer paragraphs of Python's reference to shuffled ones.

python -m examples.recipes.dpo --backend ortmodule
"""

import copy
import random

import transformers
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from examples.recipes.shared import arguments, language_model, losses, paragraphs, parse, report, tokenizer, wrapped


def preferences():
    """The first words of a paragraph, how it goes on, and the same words in any order."""
    order, found = random.Random(0), []
    for text in paragraphs():
        words = text.split()
        behind = words[4:16]
        shuffled = order.sample(behind, len(behind))
        if shuffled != behind:
            found.append(
                {"prompt": " ".join(words[:4]), "chosen": f" {' '.join(behind)}", "rejected": f" {' '.join(shuffled)}"}
            )
    return Dataset.from_list(found)


def pretrained(words, settings):
    """A model that has read the reference, so that there is something to prefer by."""
    model = language_model(len(words), layers=6)
    rows = [{"input_ids": row} for row in words(paragraphs(), truncation=True)["input_ids"]]
    collate = transformers.DataCollatorForLanguageModeling(words, mlm=False)
    trainer = transformers.Trainer(
        model=wrapped(model, settings), args=arguments(settings), train_dataset=rows, data_collator=collate
    )
    trainer.train()
    return model, losses(trainer)


def main(argv=None):
    settings = parse(argv)
    words = tokenizer(paragraphs())
    base, before = pretrained(words, settings)
    reference, model = wrapped(copy.deepcopy(base), settings), wrapped(base, settings)
    rows = preferences()
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=arguments(settings, DPOConfig, max_length=64, bf16=False, learning_rate=settings.lr / 10),
        train_dataset=rows.select(range(128, len(rows))),
        eval_dataset=rows.select(range(128)),
        processing_class=words,
    )
    trainer.train()
    found = trainer.evaluate()
    return report(
        "dpo", settings, model, losses(trainer), pretrained_loss=sum(before[-10:]) / len(before[-10:]),
        accuracy=found["eval_rewards/accuracies"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
