"""An extension with kernels inside is imported without a GPU, says what is missing, and trains on the CPU.

`scripts/test kernels-inside` runs this where there is nvcc.
"""

import copy
import os
from pathlib import Path

import pytest
import torch

from ortmodule import ORTModule, _core, explain
from ortmodule.core import devices
from tests.cuda.test_emulated import DRY, gpt2

#: The builds that have them, by scripts/test and scripts/gpu.
INSIDE = Path(os.environ.get("ORTMODULE_BUILD", "")).name in ("cuda", "gpu")

pytestmark = [
    pytest.mark.skipif(not INSIDE or torch.cuda.is_available(), reason="a build with kernels, and no GPU"),
    pytest.mark.filterwarnings("error:.*PyTorch runs:UserWarning"),
]


def test_what_is_missing_is_the_driver():
    with pytest.raises(_core.Error, match=r"there is no NVIDIA driver: libcuda\.so\.1 was not found"):
        _core.cuda_devices()
    assert devices.refusal([("x", torch.empty(0))]) is None, "the CPU needs no driver"


def test_training_on_the_cpu():
    model, tokens = gpt2(**DRY), torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    expected, wrapped = copy.deepcopy(model), ORTModule(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, expected))
    losses = []
    for _ in range(4):
        for each, optimizer in ((wrapped, ours), (expected, theirs)):
            loss = each(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert explain(wrapped).captured
    assert losses[0] > losses[-1] + 0.1
    torch.testing.assert_close(losses[::2], losses[1::2], rtol=1e-3, atol=1e-3)
