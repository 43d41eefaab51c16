"""Makes small models with random weights, a tokenizer, and real text: the documentation of Python's language."""

import functools
from pydoc_data import topics

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ortmodule import explain

VOCABULARY, LENGTH = 384, 48


@functools.cache
def sentences():
    """Paragraphs, on one line each."""
    paragraphs = [" ".join(part.split()) for text in topics.topics.values() for part in text.split("\n\n")]
    return [each for each in paragraphs if 60 < len(each) < 300]


def tokenizer():
    found = Tokenizer(models.BPE())
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "mask_token": "<mask>", "cls_token": "<cls>"}
    found.train_from_iterator(
        sentences()[:200],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(special.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, model_max_length=LENGTH, **special)


def llama(head=None, use_cache=False, **settings):
    """``head``: the class; None: a language model. (Its module is imported here: it needs a torchvision that loads.)"""
    torch.manual_seed(0)
    head = head or transformers.LlamaForCausalLM
    given = dict(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return head(transformers.LlamaConfig(**given | settings, use_cache=use_cache))


def losses(trainer, key="loss"):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


WORK = 0.9  #: the share of a training's work that the engine does at least, of calls and of weights


def assert_in_engine(model, calls):
    """The engine ran at least nine tenths of the calls and of the work, and no submodule is left to PyTorch."""
    report = explain(model)
    assert report.captured, report.fallback
    assert report.engine_calls >= WORK * calls and report.unreached_steps == 0, str(report)
    assert report.pytorch_calls <= (1 - WORK) * calls, str(report)
    assert report.weights_in_engine >= WORK, str(report)
    paths = {path for path, _ in model._ortmodule.module.named_modules()}
    assert not paths.intersection(report.python_ops), report.python_ops


def assert_same_weights(found, expected):
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
