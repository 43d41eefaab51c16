"""Teaches a T5 to translate names of languages, countries and currencies from English to German (package babel).

python -m examples.recipes.translation --backend ortmodule
"""

import random

from babel import Locale

from examples.recipes.shared import parse, tokenizer, train_t5


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
    return train_t5("translation", settings, words, rows)


if __name__ == "__main__":
    main()
