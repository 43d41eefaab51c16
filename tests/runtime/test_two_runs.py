"""Two forwards wait for their backward at once, and differ in which parameters of an island get a gradient."""

import copy
import itertools

import pytest
import torch
from torch import nn

from ortmodule import DebugOptions, LogLevel, ORTModule, explain

COUNT = 3


class Chosen(nn.Module):
    """PyTorch runs it: one of its layers takes the rows, by their sign, or some of them do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(COUNT))

    def forward(self, x):
        ways = x.detach().numpy()[:, 0].astype(int) % (COUNT + 1)  # nothing that can be traced
        for number, layer in enumerate(self.layers):
            if (ways == number).any():
                x = x + layer(x)
        return x


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.chosen, self.last = nn.Linear(4, 4), Chosen(), nn.Linear(4, 2)

    def forward(self, x, ways):
        y = self.first(x)
        return self.last(self.chosen(torch.cat([ways[:, None] + 0.5 + 0 * y[:, :1], y[:, 1:]], 1)))


SETS = [(0, 0), (1, 1), (0, 1), (3, 3), (2, 0)]  # the layers that take something


def gradients(module, pairs, backward):
    found = []
    for number, pair in enumerate(pairs):
        module.zero_grad()
        results = []
        for ways in pair:
            torch.manual_seed(number)
            results.append(module(torch.randn(2, 4), torch.tensor(ways, dtype=torch.float32)).square().sum())
        if backward == "together":
            sum(results).backward()
        else:
            for result in reversed(results) if backward == "reversed" else results:
                result.backward(retain_graph=backward == "retained")
        found.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backward", ["together", "in order", "reversed", "retained"])
def test_gradients(backward):
    torch.manual_seed(0)
    eager = Whole()
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(log_level=LogLevel.FATAL))
    pairs = [*itertools.product(SETS, SETS)]
    for number, (found, expected) in enumerate(
        zip(*(gradients(m, pairs, backward) for m in (ours, eager)), strict=True)
    ):
        for (name, _), grad, theirs in zip(eager.named_parameters(), found, expected, strict=True):
            assert (grad is None) == (theirs is None), f"{pairs[number]}: {name}"
            if grad is not None:
                torch.testing.assert_close(grad, theirs, msg=lambda m, n=number, p=name: f"{pairs[n]}: {p}: {m}")
    assert explain(ours).engine_calls


class Centred(nn.Module):
    """Takes off a running mean, which each call moves."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x - self.mean).tanh()


class Around(Whole):
    """The buffer that the piece in front of the island has read is another one when backward comes."""

    def __init__(self):
        super().__init__()
        self.centred, self.kept = Centred(), []

    def forward(self, x, ways):
        y = self.centred(self.first(x))
        y = self.chosen(torch.cat([ways[:, None] + 0.5 + 0 * y[:, :1], y[:, 1:]], 1))
        self.kept.append(y)
        return self.last(self.centred(y))


@pytest.mark.filterwarnings("ignore")
def test_a_buffer_that_another_piece_changes():
    torch.manual_seed(0)
    eager = Around()
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(log_level=LogLevel.FATAL))
    for number, ways in enumerate(SETS * 2):
        torch.manual_seed(number)
        x, found = torch.randn(2, 4), []
        for module in (ours, eager):
            module.zero_grad()
            result = module(x, torch.tensor(ways, dtype=torch.float32))
            (result.square().sum() + module.kept.pop().square().mean()).backward()
            found.append((result, module.centred.mean, [p.grad for p in module.parameters()]))
        torch.testing.assert_close(*found, msg=lambda m, n=number: f"step {n}: {m}")
    assert explain(ours).engine_calls and len(ours._ortmodule.latest.pieces) > 1
