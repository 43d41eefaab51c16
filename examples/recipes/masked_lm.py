"""Teaches a BERT to fill masked words of Python's reference in, with transformers' Trainer.

python -m examples.recipes.masked_lm --backend ortmodule
"""

import transformers

from examples.recipes.shared import arguments, losses, paragraphs, parse, report, tokenizer, wrapped


def main(argv=None):
    settings = parse(argv)
    words = tokenizer(paragraphs())
    rows = words(paragraphs(), truncation=True)["input_ids"]
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64,
    )  # fmt: skip
    model = wrapped(transformers.BertForMaskedLM(config), settings)
    trainer = transformers.Trainer(
        model=model,
        args=arguments(settings),
        train_dataset=[{"input_ids": row} for row in rows[128:]],
        eval_dataset=[{"input_ids": row} for row in rows[:128]],
        data_collator=transformers.DataCollatorForLanguageModeling(words, seed=settings.seed),
    )
    trainer.train()
    return report("masked_lm", settings, model, losses(trainer), eval_loss=trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    main()
