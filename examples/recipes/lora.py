"""Adapts a small GPT-2, trained on half of Python's reference, to the other half, by PEFT's LoRA.

python -m examples.recipes.lora --backend ortmodule
"""

import torch
import transformers
from peft import LoraConfig, get_peft_model

from examples.recipes.shared import arguments, language_model, losses, paragraphs, parse, report, tokenizer, wrapped


def train(model, rows, words, settings):
    collate = transformers.DataCollatorForLanguageModeling(words, mlm=False)
    trainer = transformers.Trainer(model=model, args=arguments(settings), train_dataset=rows, data_collator=collate)
    trainer.train()
    return losses(trainer)


def main(argv=None):
    settings = parse(argv)
    words = tokenizer(paragraphs())
    rows = [{"input_ids": row} for row in words(paragraphs(), truncation=True)["input_ids"]]
    base, half = language_model(len(words)), len(rows) // 2
    before = train(wrapped(base, settings), rows[:half], words, settings)

    adapters = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"])
    adapted = get_peft_model(base, adapters)
    model = wrapped(adapted, settings)  # around the adapters, which are a part of the graph then
    found = train(model, rows[half:], words, settings)
    trained, everything = adapted.get_nb_trainable_parameters()
    figures = report(
        "lora", settings, model, found, pretrained_loss=sum(before[-10:]) / 10, trained_share=trained / everything
    )
    with torch.no_grad():
        adapted.merge_and_unload()  # gives the base model, which is not wrapped
    return figures


if __name__ == "__main__":
    main()
