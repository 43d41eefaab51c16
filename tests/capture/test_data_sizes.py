"""Sizes that data decides: what Python reads of them is compared in every run, also at sizes that were seen."""

import pytest
import torch

from ortmodule import ORTModule, explain
from tests.selection import each
from tests.twins import made

#: What forward reads of how many elements of `x` are above 0.
READS = {
    "where": lambda x: torch.where(x > 0)[0].numel(),
    "where, size": lambda x: torch.where(x > 0)[1].shape[0],
    "where, unsqueezed": lambda x: torch.where(x > 0)[0].unsqueeze(0).shape[1],
    "nonzero": lambda x: (x > 0).nonzero().shape[0],
    "nonzero, tuple": lambda x: (x > 0).nonzero(as_tuple=True)[0].shape[0],
    "argwhere": lambda x: torch.argwhere(x > 0).size(0),
    "mask": lambda x: x[x > 0].numel(),
    "masked_select": lambda x: torch.masked_select(x, x > 0).shape[0],
    "indices": lambda x: x.flatten()[torch.where(x.flatten() > 0)[0]].numel(),
    "index_select": lambda x: x.flatten().index_select(0, torch.where(x.flatten() > 0)[0]).numel(),
    "rows": lambda x: x.flatten()[:, None][torch.where(x.flatten() > 0)[0]].shape[0],
    "unique": lambda x: (x * torch.arange(8).reshape(2, 4)).clamp(min=0).unique().numel(),
    "cat": lambda x: torch.cat([x[x > 0], x[x < -5]]).shape[0],
    "repeat_interleave": lambda x: x.flatten().repeat_interleave((x > 0).long().flatten()).numel(),
    "arange": lambda x: torch.arange(int((x > 0).sum())).numel(),
    "zeros": lambda x: torch.zeros(x[x > 0].shape[0], 3).shape[0],
    "len": lambda x: len(x[x > 0]),
    "iteration": lambda x: sum(1 for _ in x[x > 0]),
    "starred": lambda x: len([*x[x > 0]]),
    "tolist": lambda x: len(x[x > 0].tolist()),
    "unbind": lambda x: len(x[x > 0].unbind()),
    "split": lambda x: len(x[x > 0].split(1)),
    "torch.split": lambda x: len(torch.split(x[x > 0], 1, dim=0)),
    "chunk": lambda x: len(x[x > 0].chunk(8)),
    "broadcast": lambda x: (torch.zeros(1, 4) + torch.zeros(x[x > 0].numel(), 1)).shape[0],
}


def above(count):
    return torch.tensor([1.0] * count + [-1.0] * (8 - count)).reshape(2, 4)


@pytest.mark.parametrize("decides", ["a comparison", "a number"])
@each("read", list(READS), ["where", "where, unsqueezed", "indices", "tolist", "split", "mask"])
def test_a_size_that_decides(read, decides):
    count = READS[read]

    def forward(self, x):
        n = count(x)
        if decides == "a comparison":
            return self.linear(x) * (2.0 if n > 2 else 3.0)
        return self.linear(x) * {1: 2.0, 2: 3.0, 3: 5.0}.get(n, 7.0)

    eager = made(forward)
    ours = ORTModule(eager)
    for n in (3, 2, 3, 4, 1, 2):
        torch.testing.assert_close(ours(above(n)), eager(above(n)))
    assert explain(ours).captured or "takes another way" in explain(ours).fallback
