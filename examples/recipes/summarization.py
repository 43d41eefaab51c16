"""Teaches a T5 to say in a line what a function or class is for, from its docstring.

python -m examples.recipes.summarization --backend ortmodule
"""

import importlib
import inspect
import random
import sys

from examples.recipes.shared import parse, tokenizer, train_t5

LEFT_OUT = {"antigravity", "idlelib", "this", "tkinter", "turtle", "turtledemo"}  # they open windows, or print


def docstrings():
    """(the rest, the first line) of the docstrings of Python's library."""
    found = {}
    for name in sorted(sys.stdlib_module_names - LEFT_OUT):
        if name.startswith("_"):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:  # of another system
            continue
        for value in vars(module).values():
            own = getattr(value, "__module__", None) == name and (inspect.isclass(value) or inspect.isroutine(value))
            for each in (value, *vars(value).values()) if own and inspect.isclass(value) else (value,) * own:
                first, _, rest = (inspect.getdoc(each) or "").partition("\n\n")
                first, rest = " ".join(first.split()), " ".join(rest.split())
                if 15 < len(first) < 90 and len(rest) > 60:
                    found[rest[:400]] = first
    return sorted(found.items())


def main(argv=None):
    settings = parse(argv, steps=300)
    found = docstrings()
    random.Random(0).shuffle(found)
    words = tokenizer([text for pair in found for text in pair], size=1024, length=128)
    rows = [
        {"input_ids": words(text, truncation=True)["input_ids"], "labels": words(line + words.eos_token)["input_ids"]}
        for text, line in found
    ]
    return train_t5("summarization", settings, words, rows)


if __name__ == "__main__":
    main()
