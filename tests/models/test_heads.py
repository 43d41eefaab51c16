"""Every head that transformers has for some families: the engine runs it as a whole, and is right.

(`test_models.py` takes one head of each family.)
"""

import functools

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

from tests.models import tiny
from tests.models.subjects import _build
from tests.models.trial import UNBUILT, WRONG, Subject, attempt
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter and of transformers

FAMILIES = (
    "albert", "bart", "bert", "camembert", "convbert", "deberta-v2", "distilbert", "electra", "ernie", "funnel", "gpt2",
    "gpt_neo", "gptj", "llama", "mistral", "mpnet", "opt", "qwen2", "roberta", "roformer", "squeezebert",
    "t5", "xlm-roberta",
)  # fmt: skip
SHAPES = ((2, 12), (3, 16))  # rows and length of the batches that are compared
CHOICES = 3


def tokens(generator, *shape):
    return torch.randint(8, tiny.VOCABULARY - 8, shape, generator=generator)


def classes(count, generator, rows):
    return torch.randint(count, (rows,), generator=generator)


#: What each head takes beside `input_ids`: functions of (generator, rows, length, config).
LABELS = {
    "CAUSAL_LM": lambda g, rows, length, config: {"labels": tokens(g, rows, length)},
    "MASKED_LM": lambda g, rows, length, config: {"labels": tokens(g, rows, length)},
    "SEQ_TO_SEQ_CAUSAL_LM": lambda g, rows, length, config: {"labels": tokens(g, rows, length)},
    "MULTIPLE_CHOICE": lambda g, rows, length, config: {"labels": classes(CHOICES, g, rows)},
    "NEXT_SENTENCE_PREDICTION": lambda g, rows, length, config: {"labels": classes(2, g, rows)},
    "QUESTION_ANSWERING": lambda g, rows, length, config: {
        "start_positions": classes(length, g, rows),
        "end_positions": classes(length, g, rows),
    },
    "SEQUENCE_CLASSIFICATION": lambda g, rows, length, config: {"labels": classes(config.num_labels, g, rows)},
    "TOKEN_CLASSIFICATION": lambda g, rows, length, config: {
        "labels": torch.randint(config.num_labels, (rows, length), generator=g)
    },
}
CASES = {
    f"{family}, {head}": (family, head)
    for family in FAMILIES
    for head in LABELS
    if family in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")
}
SHORT = ("bert, QUESTION_ANSWERING", "gpt2, SEQUENCE_CLASSIFICATION", "roberta, MULTIPLE_CHOICE")


def batch(head, model, size, generator):
    rows, length = SHAPES[size]
    ids = tokens(generator, *(rows, CHOICES, length) if head == "MULTIPLE_CHOICE" else (rows, length))
    if isinstance(end := getattr(model.config, "eos_token_id", None), int):
        ids[..., -1] = end  # where some heads look
    labels = LABELS[head](generator, rows, length, model.config)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **labels}


def build(family, head):
    cls = getattr(transformers, getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")[family])
    config = tiny.tiny_config(family, tiny.WAYS[0])
    config.pad_token_id = 0
    if family == "t5":
        config.decoder_start_token_id = 0
    model = _build(cls, config)
    if head == "MULTIPLE_CHOICE":
        for parameter in model.parameters():  # a bias that all choices share: its gradient is rounding alone
            parameter.requires_grad_(parameter.shape != (1,))
    return model


@each("name", CASES, SHORT)
def test_a_head(name):
    family, head = CASES[name]
    subject = Subject(functools.partial(build, family, head), functools.partial(batch, head), "transformers")
    outcome = attempt(name, subject)
    assert outcome.state not in (WRONG, UNBUILT), outcome.reason
    assert outcome.captured and not outcome.reason, outcome.reason
