"""Teaches a small GPT-2, by TRL's SFTTrainer, to go on with paragraphs of Python's reference.

python -m examples.recipes.sft --backend ortmodule
"""

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from examples.recipes.shared import arguments, language_model, losses, paragraphs, parse, report, tokenizer, wrapped


def main(argv=None):
    settings = parse(argv)
    words = tokenizer(paragraphs())
    model = wrapped(language_model(len(words), layers=6), settings)
    rows = Dataset.from_dict({"text": paragraphs()})
    trainer = SFTTrainer(
        model=model,
        args=arguments(settings, SFTConfig, max_length=64, bf16=False),
        train_dataset=rows.select(range(128, len(rows))),
        eval_dataset=rows.select(range(128)),
        processing_class=words,
    )
    trainer.train()
    return report("sft", settings, model, losses(trainer), eval_loss=trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    main()
