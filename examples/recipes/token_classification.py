"""Teaches a BERT the kind of each token of Python's own sources: keyword, name, operator, number, text, comment.

python -m examples.recipes.token_classification --backend ortmodule
"""

import argparse
import inspect
import io
import keyword
import random
import tokenize

import transformers

from examples.recipes.shared import arguments, losses, parse, report, tokenizer, wrapped

KINDS = ["keyword", "name", "operator", "number", "text", "comment"]
_OF_TOKENS = {tokenize.OP: 2, tokenize.NUMBER: 3, tokenize.STRING: 4, tokenize.COMMENT: 5}
IGNORED = -100


def lines():
    """(words, kinds) of the lines of some modules."""
    found = []
    for module in (argparse, inspect, random, tokenize):
        line = []
        for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(module)).readline):
            if token.type == tokenize.NAME:
                line.append((token.string, int(not keyword.iskeyword(token.string))))
            elif token.type in _OF_TOKENS and "\n" not in token.string:
                line.append((token.string, _OF_TOKENS[token.type]))
            elif token.type in (tokenize.NEWLINE, tokenize.NL) and len(line) > 2:
                found.append(tuple(zip(*line, strict=True)))
                line = []
    return found


def encoded(words, kinds, encode):
    """Only the first piece of a word has a label."""
    row = encode(list(words), is_split_into_words=True, truncation=True)
    places, before, labels = row.word_ids(), None, []
    for place in places:
        labels.append(IGNORED if place is None or place == before else kinds[place])
        before = place
    return {"input_ids": row["input_ids"], "labels": labels}


def accuracy(outputs):
    right, counted = outputs.predictions.argmax(-1) == outputs.label_ids, outputs.label_ids != IGNORED
    return {"accuracy": float(right[counted].mean())}


def main(argv=None):
    settings = parse(argv)
    found = lines()
    random.Random(0).shuffle(found)
    encode = tokenizer([" ".join(words) for words, _ in found])
    rows = [encoded(*line, encode) for line in found]
    config = transformers.BertConfig(
        vocab_size=len(encode), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, num_labels=len(KINDS),
    )  # fmt: skip
    model = wrapped(transformers.BertForTokenClassification(config), settings)
    trainer = transformers.Trainer(
        model=model,
        args=arguments(settings),
        train_dataset=rows[256:],
        eval_dataset=rows[:256],
        data_collator=transformers.DataCollatorForTokenClassification(encode),
        compute_metrics=accuracy,
    )
    trainer.train()
    found = trainer.evaluate()["eval_accuracy"]
    return report("token_classification", settings, model, losses(trainer), accuracy=found)


if __name__ == "__main__":
    main()
