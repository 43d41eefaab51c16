"""Masks and biases that are known to hide nothing, and to add nothing, are in no plan.

Also where they are too large to be constants, as for many samples.
"""

import pytest
import torch

from tests.passes.session import Function, export

attend = torch.nn.functional.scaled_dot_product_attention
SAMPLES, HEADS, LENGTH, WIDTH = 64, 2, 197, 8


def ones(q, k, dtype=torch.bool):
    return torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=dtype)


def scores(q, k):
    return q @ k.transpose(-1, -2)


def of_keys(q, k, v):
    return attend(q, k, v, attn_mask=torch.ones(q.shape[0], k.shape[2], dtype=torch.bool)[:, None, None, :])


def expanded(q, k, v):
    allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(q.shape[0], 1, q.shape[2], k.shape[2])
    return attend(q, k, v, attn_mask=allowed & ones(q, k))


def bidirectional(q, k, v):
    """As transformers makes it: of places that are compared with nothing."""
    rows, keys = torch.arange(q.shape[2])[None, None, :, None], torch.arange(k.shape[2])[None, None, None, :]
    return attend(q, k, v, attn_mask=((rows >= 0) & (keys >= 0)).expand(q.shape[0], -1, -1, -1))


CASES = {
    "a mask": lambda q, k, v: attend(q, k, v, attn_mask=ones(q, k)),
    "a mask of keys": of_keys,
    "an expanded mask": expanded,
    "places": bidirectional,
    "not hidden": lambda q, k, v: attend(q, k, v, attn_mask=~torch.zeros_like(ones(q, k))),
    "zeros": lambda q, k, v: attend(q, k, v, attn_mask=torch.zeros_like(ones(q, k, q.dtype))),
    "1 - mask": lambda q, k, v: attend(q, k, v, attn_mask=(1 - ones(q, k, torch.int64).to(q.dtype)) * -1e9),
    "chosen": lambda q, k, v: torch.where(ones(q, k), scores(q, k), -torch.inf).softmax(-1) @ v,
    "filled": lambda q, k, v: scores(q, k).masked_fill(~ones(q, k), torch.finfo(q.dtype).min).softmax(-1) @ v,
    "added": lambda q, k, v: (scores(q, k) + torch.where(ones(q, k), 0.0, -torch.inf)).softmax(-1) @ v,
}


@pytest.mark.parametrize("samples", [2, SAMPLES])
@pytest.mark.parametrize("case", CASES)
def test_a_mask_that_hides_nothing_is_gone(case, samples):
    tensors = [torch.randn(samples, HEADS, LENGTH, WIDTH) for _ in range(3)]
    made = export(Function(CASES[case]), tensors)
    text = made.plan([("float32", tuple(x.shape)) for x in tensors], [True] * 3, [True]).text()
    forward = [line for line in text.splitlines() if line.startswith("%") and "Grad" not in line]
    names = [line.split(" = ")[1].split("(")[0] for line in forward if " = " in line]
    assert "bool[" not in text
    assert not {"Add", "Sub", "Mul", "Where", "Fused", "Expand", "Cast"} & set(names), text
