"""A T5 translates names of languages, countries and currencies from English to German (the package babel has them).

python -m examples.recipes.translation --backend ortmodule
"""

import random

import transformers
from babel import Locale

from examples.recipes.shared import arguments, losses, parse, report, tokenizer, wrapped


def pairs():
    english, german = Locale("en"), Locale("de")
    found = {}
    for kind in ("languages", "territories", "scripts", "currencies"):
        theirs = getattr(german, kind)
        found |= {name: theirs[key] for key, name in getattr(english, kind).items() if key in theirs}
    return [pair for pair in found.items() if max(map(len, pair)) < 40]


def main(argv=None):
    settings = parse(argv, steps=300)
    found = pairs()
    random.Random(0).shuffle(found)
    words = tokenizer([text for pair in found for text in pair])
    rows = [{"input_ids": words(a)["input_ids"], "labels": words(b + words.eos_token)["input_ids"]} for a, b in found]
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
    return report("translation", settings, model, losses(trainer), eval_loss=trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    main()
