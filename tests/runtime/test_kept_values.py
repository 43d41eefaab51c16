"""Forward puts tensors into the caller's dictionaries and lists, and goes on with them: gradients are PyTorch's."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each


class Net(nn.Module):
    """Two layers, with dropout that draws nothing; ``put`` keeps what the first has computed."""

    def __init__(self, put):
        super().__init__()
        self.first, self.middle, self.last, self.put = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2), put

    def forward(self, x, kept):
        h = self.put(kept, self.first(x).tanh())
        h = self.put(kept, self.middle(h).tanh() + h)
        return self.last(h)


def append(kept, h):
    kept.append(h)
    return h


def item(kept, h):
    kept[f"h{len(kept)}"] = h
    return h


def nested(kept, h):
    kept[0].setdefault("all", []).append(h)
    return kept[0]["all"][-1]


def twice(kept, h):
    kept.extend([h, h])
    return h


def beside(kept, h):
    """What is put there is not what forward goes on with, and then it is."""
    kept.append(h * 2)
    kept.append(kept[0] + h)
    return kept[-1]


WAYS = {
    "append": (append, list),
    "item": (item, dict),
    "nested": (nested, lambda: [{}]),
    "twice": (twice, list),
    "beside": (beside, list),
}


def tensors(kept):
    if isinstance(kept, torch.Tensor):
        return [kept]
    return [t for each in (kept.values() if isinstance(kept, dict) else kept) for t in tensors(each)]


def asked(module, loss, kept):
    return torch.autograd.grad(loss, kept, allow_unused=True)


def retained(module, loss, kept):
    for t in kept:
        t.retain_grad()
    loss.backward()
    return [t.grad for t in kept]


def hooked(module, loss, kept):
    kept[0].register_hook(lambda grad: grad * 3)
    loss.backward()


def in_a_loss(module, loss, kept):
    (loss + sum(t.square().sum() for t in kept)).backward()


def penalty(module, loss, kept):
    (grad,) = torch.autograd.grad(loss, kept[:1], create_graph=True)
    (loss + grad.square().sum()).backward()


USES = {use.__name__: use for use in (asked, retained, hooked, in_a_loss, penalty)}
ALL = [(way, use) for way in WAYS for use in USES]


@each("way, use", ALL, [("item", "retained"), ("append", "asked"), ("nested", "hooked"), ("beside", "penalty")])
def test_gradients_of_what_forward_puts_into_a_container(way, use):
    put, container = WAYS[way]
    found = []
    for wrap in (lambda module: module, ORTModule):
        torch.manual_seed(0)
        module = wrap(Net(put).double())
        each = []
        for n in (5, 6):
            x = torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
            kept = container()
            y = module(x, kept)
            each.append([y.detach(), [t.detach() for t in tensors(kept)]])
            each.append(USES[use](module, y.sin().sum(), tensors(kept)))
        found.append([each, [p.grad for p in module.parameters()]])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
    report = explain(module)
    assert report.captured and report.exports == 1 and report.pytorch_calls == 0 and not report.breaks, report


@pytest.mark.parametrize("training", [True, False])
def test_with_dropout_and_buffers(training):
    """The pieces draw what they draw, and change what they change, each by itself."""

    class Normed(Net):
        def __init__(self):
            super().__init__(append)
            self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)

        def forward(self, x, kept):
            h = append(kept, self.norm(self.first(x)))
            h = append(kept, self.dropout(self.middle(h)))
            return self.last(h)

    torch.manual_seed(0)
    eager = Normed().train(training)
    torch.manual_seed(0)
    ours = ORTModule(Normed().train(training))
    x, kept, expected = torch.randn(64, 4), [], []
    y = ours(x, kept)
    eager(x, expected)
    torch.testing.assert_close(kept[0], expected[0])
    torch.testing.assert_close(ours.norm.running_var, eager.norm.running_var)
    zeros = (kept[1] == 0).float().mean()
    assert 0.3 < zeros < 0.7 if training else zeros == 0
    torch.testing.assert_close(y, ours.last(kept[1]))
    (grad,) = torch.autograd.grad(y.sum(), kept[1])
    torch.testing.assert_close(grad, ours.last.weight.sum(0).expand(64, 4))
    assert explain(ours).captured


def test_without_gradients_the_graph_is_whole():
    ours = ORTModule(Net(append))
    with torch.no_grad():
        ours(torch.ones(3, 4), [])
    assert explain(ours).captured and explain(ours).engine_calls == 1
