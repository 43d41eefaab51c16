"""Teaches a BERT to find the answer to a question in a text of facts, with transformers' Trainer.

python -m examples.recipes.question_answering --backend ortmodule

The facts say what countries, languages and others are called in German (the package babel knows that); a question asks
for one of three.
"""

import random

import transformers
from babel import Locale

from examples.recipes.shared import arguments, losses, parse, report, tokenizer, wrapped

KINDS = {"languages": "language", "territories": "country", "currencies": "currency", "scripts": "script"}
FACTS = 3  # in a text


def questions(count=2400):
    """(question, text, begin and end of the answer in it): texts say how some names are in German."""
    order, english, german = random.Random(0), Locale("en"), Locale("de")
    names = {}
    for kind, word in KINDS.items():
        theirs = getattr(german, kind)
        known = [(name, theirs[key]) for key, name in getattr(english, kind).items() if key in theirs]
        names[word] = [pair for pair in known if max(map(len, pair)) < 16]
    found = []
    for _ in range(count):
        words = order.sample(sorted(names), FACTS)
        asked, text, answer = order.choice(words), "", (0, 0)
        for word in words:
            name, value = order.choice(names[word])
            begin = len(text) + len(f"{word} {name}: ")
            text += f"{word} {name}: {value}. "
            if word == asked:
                answer = begin, begin + len(value)
        found.append((f"which {asked}?", text, answer))
    return found


def encoded(question, text, answer, words):
    """The answer as numbers of tokens."""
    row = words(question, text, truncation="only_second", return_offsets_mapping=True)
    inside = [
        i for i, (begin, end) in enumerate(row.pop("offset_mapping"))
        if row.sequence_ids()[i] == 1 and begin < answer[1] and end > answer[0]
    ]  # fmt: skip
    return {**row, "start_positions": inside[0], "end_positions": inside[-1]}


def exact(outputs):
    """How often both ends are found."""
    starts, ends = (each.argmax(-1) for each in outputs.predictions)
    begins, stops = outputs.label_ids
    return {"exact": float(((starts == begins) & (ends == stops)).mean())}


def main(argv=None):
    settings = parse(argv, steps=300)
    found = questions()
    words = tokenizer([text for question, text, _ in found for text in (question, text)], length=128)
    rows = [encoded(*each, words) for each in found]
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=128,
    )  # fmt: skip
    model = wrapped(transformers.BertForQuestionAnswering(config), settings)
    trainer = transformers.Trainer(
        model=model,
        args=arguments(settings),
        train_dataset=rows[256:],
        eval_dataset=rows[:256],
        data_collator=transformers.DataCollatorWithPadding(words),
        compute_metrics=exact,
    )
    trainer.train()
    found = trainer.evaluate()
    return report("question_answering", settings, model, losses(trainer), exact=found["eval_exact"])


if __name__ == "__main__":
    main()
