"""Makes what BERT is pre-trained on: pairs of sentences with masked tokens, of which the second follows or does not."""

import re

import torch
from tokenizers import BertWordPieceTokenizer

IGNORED = -100
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MASKED, BY_MASK, BY_OTHER = 0.15, 0.8, 0.1  # of the tokens; of those that are masked


def sentences_of(text):
    found = (part.strip() for part in re.split(r"(?<=[.:;?!])\s+|\n+", text))
    return [part for part in found if len(part) > 20]


def load(text, vocabulary):
    """The tokens of each sentence, and the tokenizer."""
    sentences = sentences_of(text)
    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(sentences, vocab_size=vocabulary, show_progress=False, special_tokens=list(SPECIAL))
    return [row.ids for row in tokenizer.encode_batch(sentences, add_special_tokens=False)], tokenizer


class Pairs(torch.utils.data.Dataset):
    """Sample i begins with sentence i; the same sample each time, by its number and ``seed``. int64, [length]."""

    def __init__(self, sentences, tokenizer, length, seed=0):
        self.sentences, self.length, self.seed = sentences, length, seed
        self.vocabulary = tokenizer.get_vocab_size()
        self.pad, self.cls, self.sep, self.mask = (
            tokenizer.token_to_id(token) for token in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
        )

    def __len__(self):
        return len(self.sentences) - 1

    def _from(self, start, most):
        """Sentences from this one on, as many tokens as there is room for."""
        tokens = []
        for sentence in self.sentences[start:]:
            tokens += sentence
            if len(tokens) >= most:
                break
        return tokens[:most]

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed * len(self.sentences) + index)
        follows = bool(torch.rand((), generator=generator) < 0.5)
        other = int(torch.randint(len(self.sentences), (), generator=generator))
        room = self.length - 3
        first = self.sentences[index][: room // 2]
        second = self._from(index + 1 if follows else other, room - len(first))
        tokens = [self.cls, *first, self.sep, *second, self.sep]
        ids = torch.full((self.length,), self.pad)
        ids[: len(tokens)] = torch.tensor(tokens)
        segments = torch.zeros_like(ids)
        segments[len(first) + 2 : len(tokens)] = 1
        ids, labels = self._masked(ids, generator)
        return {
            "input_ids": ids, "attention_mask": (torch.arange(self.length) < len(tokens)).long(),
            "token_type_ids": segments, "labels": labels, "next_sentence_label": torch.tensor(0 if follows else 1),
        }  # fmt: skip

    def _masked(self, ids, generator):
        """Tokens, some of them replaced, and what they were."""
        special = (ids == self.pad) | (ids == self.cls) | (ids == self.sep)
        chosen = (torch.rand(ids.shape, generator=generator) < MASKED) & ~special
        how = torch.rand(ids.shape, generator=generator)
        other = torch.randint(len(SPECIAL), self.vocabulary, ids.shape, generator=generator)
        labels = ids.where(chosen, IGNORED)
        ids = ids.where(~(chosen & (how < BY_MASK)), self.mask)
        return other.where(chosen & (how >= BY_MASK) & (how < BY_MASK + BY_OTHER), ids), labels
