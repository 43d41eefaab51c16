"""Indices that PyTorch refuses, the engine refuses: every operator with an index, beside PyTorch.

Which negative indices count from the end is the operator's: x[i] and what is made of it take them, embeddings, gathers
and scatters do not. Where PyTorch takes an index, results and gradients are compared.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, explain

pytestmark = [pytest.mark.emulated, pytest.mark.filterwarnings("ignore")]

SIZE, LONG = 5, torch.int64
BOTH = (torch.int64, torch.int32)


def column(i):
    """(The gradients of PyTorch 2.13 are wrong for an expanded int32 index of a scatter.)"""
    return i[:, None].expand(-1, 2) if i.dtype == torch.int64 else i[:, None].repeat(1, 2)


def logits(w):
    return w[:2] @ w.new_ones(2, SIZE) / 10


def classes_of(i):
    """Labels of a sample, the first being given: all others count to the first that is negative."""
    return torch.stack([i[0], i[1], i[0] * 0 - 1, i[0] * 0, i[0] * 0])[None].expand(2, SIZE)


#: A function of a matrix of SIZE rows and two indices; the types that PyTorch takes for indices.
OPERATORS = {
    "embedding": (lambda w, i: F.embedding(i, w), BOTH),
    "embedding padding": (lambda w, i: F.embedding(i, w, padding_idx=1), BOTH),
    "embedding and norm": (lambda w, i: F.layer_norm(F.embedding(i, w) + F.embedding(i * 0 + 1, w), [2]), BOTH),
    "embedding_bag sum": (lambda w, i: F.embedding_bag(i[None], w, mode="sum"), BOTH),
    "embedding_bag mean": (lambda w, i: F.embedding_bag(i[None], w, mode="mean"), BOTH),
    "embedding_bag max": (lambda w, i: F.embedding_bag(i[None], w, mode="max"), BOTH),
    "index_select": (lambda w, i: w.index_select(0, i), BOTH),
    "index_select behind": (lambda w, i: w.t().index_select(1, i), BOTH),
    "index_select of a vector": (lambda w, i: w[:, 0].index_select(0, i), BOTH),
    "gather": (lambda w, i: w.gather(0, column(i)), (LONG,)),
    "gather some": (lambda w, i: w.gather(0, torch.stack([i, i * 0], 1)), (LONG,)),
    "take_along_dim": (lambda w, i: w.take_along_dim(column(i), 0), (LONG,)),
    "take": (lambda w, i: w[:, 0].take(i), (LONG,)),
    "put": (lambda w, i: w[:, 0].put(i, torch.ones(2)), (LONG,)),
    "scatter": (lambda w, i: w.scatter(0, column(i), w[:2] * 2), BOTH),
    "scatter a number": (lambda w, i: w.scatter(0, column(i), 2.0), BOTH),
    "scatter_add": (lambda w, i: w.scatter_add(0, column(i), w[:2] * 2), BOTH),
    "scatter_add some": (lambda w, i: w.scatter_add(0, torch.stack([i, i * 0], 1), w[:2] * 2), BOTH),
    **{
        f"scatter_reduce {how}": (
            lambda w, i, how=how: w.scatter_reduce(0, column(i), w[:2] * 2, how, include_self=how != "amin"),
            BOTH,
        )
        for how in ("sum", "prod", "mean", "amax", "amin")
    },
    "index_add": (lambda w, i: w.index_add(0, i, w[:2]), BOTH),
    "index_copy": (lambda w, i: w.index_copy(0, i, w[:2]), (LONG,)),
    "index_fill": (lambda w, i: w.index_fill(0, i, 3.0), (LONG,)),
    "index_reduce": (lambda w, i: w.index_reduce(0, i, w[:2].detach(), "amax"), BOTH),
    "x[i]": (lambda w, i: w[i], BOTH),
    "x[:, i]": (lambda w, i: w.t()[:, i], BOTH),
    "x[i, j]": (lambda w, i: w[i, i.clamp(0, 1)], BOTH),
    "x[:, i, j]": (lambda w, i: torch.stack([w, w])[:, i, i.clamp(0, 1)], BOTH),
    "x[i] = y": (lambda w, i: w.index_put((i,), w[:2] * 2), BOTH),
    "x[i] += y": (lambda w, i: w.index_put((i,), w[:2], accumulate=True), BOTH),
    "x[i, j] += y": (lambda w, i: w.index_put((i, i.clamp(0, 1)), w[:2, 0], accumulate=True), BOTH),
    "one_hot": (lambda w, i: F.one_hot(i, SIZE).float() @ w, (LONG,)),
    "nll_loss": (lambda w, i: F.nll_loss(logits(w), i), (LONG,)),
    "nll_loss of pixels": (lambda w, i: F.nll_loss(logits(w)[:, :, None].expand(2, SIZE, 2), i.expand(2, 2)), (LONG,)),
    "cross_entropy": (lambda w, i: F.cross_entropy(logits(w), i), (LONG,)),
    "cross_entropy smooth": (lambda w, i: F.cross_entropy(logits(w), i, label_smoothing=0.1), (LONG,)),
    "cross_entropy weight": (lambda w, i: F.cross_entropy(logits(w), i, weight=torch.ones(SIZE)), (LONG,)),
    "multi_margin_loss": (lambda w, i: F.multi_margin_loss(logits(w), i), (LONG,)),
    "multilabel_margin_loss": (lambda w, i: F.multilabel_margin_loss(logits(w), classes_of(i)), (LONG,)),
}
EACH = [pytest.param(name, dtype, id=f"{name}-{dtype}") for name, (_, dtypes) in OPERATORS.items() for dtype in dtypes]
BAD = (-1, -SIZE, SIZE, -SIZE - 1, -100)
HUGE = {torch.int64: (2**40, -(2**40), 2**63 - 1), torch.int32: (2**30, 2**31 - 1, -(2**31))}


class Indexes(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(2.0 * SIZE).view(SIZE, 2))
        self.function = function

    def forward(self, index):
        return self.function(self.weight, index)


def step(module, index):
    """The result and the gradient, or the kind of error."""
    module.weight.grad = None
    try:
        result = module(index)
    except (IndexError, RuntimeError) as error:
        return type(error)
    result.square().sum().backward()
    return result.detach(), module.weight.grad


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_what_pytorch_refuses_is_refused(name, dtype):
    function, _ = OPERATORS[name]
    ours, theirs = ORTModule(Indexes(function)), Indexes(function)
    good = torch.tensor([1, 2], dtype=dtype)
    torch.testing.assert_close(step(ours, good), step(theirs, good))
    assert explain(ours).captured
    for value in (*BAD, *HUGE[dtype]):
        for place in range(2):
            index = torch.tensor([1, 2], dtype=dtype)
            index[place] = value
            found, expected = step(ours, index), step(theirs, index)
            if isinstance(expected, type):
                assert found is expected, (index, found)
            else:
                torch.testing.assert_close(found, expected, msg=f"{index}: {found}, not {expected}")
    torch.testing.assert_close(step(ours, good), step(theirs, good))


SENTENCES = {
    "embedding": r"index -1 is out of range for an axis of size 5\n  while running Gather \(/",
    "gather some": r"index -1 is out of range for an axis of size 5\n  while running GatherElements \(/",
    "scatter_add some": r"index -1 is out of range for an axis of size 5\n  while running ScatterElements \(/",
    "index_add": r"index -1 is out of range for an axis of size 5\n  while running",
    "one_hot": r"index -1 is out of range for an axis of size 5\n  while running Gather \(/",
    "cross_entropy": r"label -1( of sample 1)? is out of range: there are 5 classes\n  while running",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_engine_says_which_index_and_where(name, monkeypatch):
    """Without PyTorch, which would raise its own error."""
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    ours = ORTModule(Indexes(OPERATORS[name][0]))
    ours(torch.tensor([1, 2]))
    with pytest.raises(Exception, match=SENTENCES[name]):
        ours(torch.tensor([1, -1]))


def test_classes_out_of_range_in_a_language_model():
    """GPT-2 that is fed the labels' -100 as tokens raises."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = ORTModule(GPT2LMHeadModel(config))
        tokens = torch.randint(0, 11, (2, 6))
        ours(input_ids=tokens, labels=tokens).loss.backward()
        tokens[1, 4] = -100
        with pytest.raises(IndexError):
            ours(input_ids=tokens, labels=tokens)
