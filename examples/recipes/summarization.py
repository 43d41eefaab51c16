"""A T5 learns to say in a line what a function or a class of Python's library is for, from the rest of its docstring.

python -m examples.recipes.summarization --backend ortmodule
"""

import importlib
import inspect
import random
import sys

import transformers

from examples.recipes.shared import arguments, losses, parse, report, tokenizer, wrapped

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
    return report("summarization", settings, model, losses(trainer), eval_loss=trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    main()
