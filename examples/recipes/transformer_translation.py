"""Teaches an nn.Transformer to translate names from English to German, in a plain loop.

python -m examples.recipes.transformer_translation --backend ortmodule
"""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from examples.recipes.shared import parse, report, tokenizer, wrapped
from examples.recipes.translation import pairs


class Translator(nn.Module):
    """Gives the loss of a batch: ids of the source and of the target, (rows, tokens), 0 where there is none."""

    def __init__(self, vocabulary, width=64, length=64):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 2 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def embedded(self, ids):
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, source, target):
        given, wanted = target[:, :-1], target[:, 1:]
        later = torch.ones(given.shape[1], given.shape[1], dtype=torch.bool, device=given.device).triu(1)
        hidden = self.transformer(
            self.embedded(source), self.embedded(given), tgt_mask=later,
            src_key_padding_mask=source == 0, memory_key_padding_mask=source == 0,
        )  # fmt: skip
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), wanted.flatten(), ignore_index=0)


def batch(rows):
    return [pad_sequence([row[side] for row in rows], batch_first=True) for side in (0, 1)]


def main(argv=None):
    settings = parse(argv, steps=300)
    found = pairs()
    random.Random(0).shuffle(found)
    words = tokenizer([text for pair in found for text in pair])
    rows = [
        (torch.tensor(words(a)["input_ids"]), torch.tensor(words(words.cls_token + b + words.eos_token)["input_ids"]))
        for a, b in found
    ]
    module = Translator(len(words))
    model = wrapped(module, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    order, losses = random.Random(settings.seed), []
    for _ in range(settings.steps):
        loss = model(*batch(order.sample(rows[128:], settings.batch_size)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        eval_loss = model(*batch(rows[:128])).item()
    return report("transformer_translation", settings, model, losses, eval_loss=eval_loss)


if __name__ == "__main__":
    main()
