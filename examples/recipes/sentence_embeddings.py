"""Teaches a model, by sentence-transformers, which two halves of a paragraph belong together.

python -m examples.recipes.sentence_embeddings --backend ortmodule
"""

import tempfile

import transformers
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from examples.recipes.shared import arguments, losses, paragraphs, parse, report, tokenizer, wrapped


def make():
    """An encoder with random weights."""
    words = tokenizer(paragraphs())
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        transformers.BertModel(config).save_pretrained(folder)
        words.save_pretrained(folder)
        return SentenceTransformer(modules=[Transformer(folder, max_seq_length=64), Pooling(64)], device="cpu")


def accuracy(model, pairs):
    """How often the second half of the same paragraph is the nearest of all."""
    first, second = (model.encode(list(texts), convert_to_tensor=True) for texts in zip(*pairs, strict=True))
    nearest = model.similarity(first, second).argmax(1).tolist()
    return sum(i == found for i, found in enumerate(nearest)) / len(pairs)


def main(argv=None):
    settings = parse(argv, lr=1e-3, batch_size=32)
    pairs = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in paragraphs()]
    model = make()
    # The encoder, and not the whole: that writes its results into the dictionary that it was given.
    model[0].model = encoder = wrapped(model[0].model, settings)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments(settings, SentenceTransformerTrainingArguments),
        train_dataset=Dataset.from_dict(dict(zip(("anchor", "positive"), zip(*pairs[64:], strict=True), strict=True))),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    found = accuracy(model, pairs[:64])
    return report("sentence_embeddings", settings, encoder, losses(trainer), accuracy=found)


if __name__ == "__main__":
    main()
