"""`nn.TransformerEncoder` without gradients and with a padding mask: PyTorch runs it, and the message says why."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = encoder(), nn.Linear(8, 3)

    def forward(self, x, padding):
        return self.head(self.encoder(x, src_key_padding_mask=padding).sum(1)).relu()


def batch(rows, length):
    padding = torch.zeros(rows, length, dtype=torch.bool)
    padding[0, 3:] = padding[1, 2:] = True
    return torch.randn(rows, length, 8), padding


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_encoder_alone_is_left_to_pytorch():
    eager = Classifier().eval()
    ours = ORTModule(copy.deepcopy(eager))
    with torch.no_grad():
        for rows, length in ((2, 6), (3, 5), (4, 7)):
            args = batch(rows, length)
            torch.testing.assert_close(ours(*args), eager(*args))
    report = explain(ours)
    assert report.captured, report.fallback
    assert report.python_ops == ["encoder"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_reason_names_it():
    eager = encoder().eval()
    ours = ORTModule(copy.deepcopy(eager))
    x, padding = batch(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, None, padding), eager(x, None, padding))
    assert "enable_nested_tensor=False" in explain(ours).fallback
