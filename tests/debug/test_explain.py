"""What explain() says is what happened."""

import pytest
import torch
from torch import nn

from ortmodule import Config, LayerReport, ORTModule, explain
from ortmodule.debug.layers import layer_lines


def step(model, *inputs):
    model(*inputs).square().sum().backward()


def test_before_and_after_a_call():
    model = ORTModule(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    report = explain(model)
    assert not report.captured and report.fallback is None and "no call yet" in str(report)
    step(model, torch.randn(5, 4))
    step(model, torch.randn(6, 4))
    report = explain(model)
    assert report.captured and report.fallback is None
    assert report.aten_ops == [] and report.python_ops == [] and "runs nothing" in str(report)
    assert (report.exports, report.plans) == (1, 2)
    assert report.nodes_exported == 3 and report.nodes_run > 3
    assert report.peak_bytes >= 6 * 3 * 4  # what the ReLU gave is kept for backward
    assert set(report.seconds) >= {"capture", "read", "plan"} and all(t >= 0 for t in report.seconds.values())


def test_what_torch_runs_inside_the_graph_is_named():
    """Convolutions of some size go through torch's own, from C."""
    model = ORTModule(nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3)))
    step(model, torch.randn(4, 16, 20, 20))
    report = explain(model)
    assert report.aten_ops == ["aten::convolution", "aten::convolution_backward"]
    assert "aten::convolution" in str(report)


def test_a_fallback_gives_its_reason():
    class Odd(nn.Module):
        def forward(self, x):
            return x * max(map(max, x.tolist()))

    model = ORTModule(Odd())
    with pytest.warns(UserWarning):
        model(torch.randn(5, 5))
        model(torch.randn(5, 5))
    report = explain(model)
    assert not report.captured and report.fallback and report.fallback in str(report)


def test_not_an_ortmodule():
    with pytest.raises(TypeError, match="not Linear"):
        explain(nn.Linear(1, 1))


def test_a_notebook_shows_a_table():
    model = ORTModule(nn.Linear(4, 3))
    step(model, torch.randn(5, 4))
    found = explain(model)._repr_html_()
    assert found.startswith("<table>") and "<b>Linear: the engine runs it</b>" in found
    assert found.count("<tr>") == len(str(explain(model)).splitlines()) - 1
    assert '<th style="text-align:left">calls</th>' in found and "1 in the engine" in found


class Tagger(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(20, 8), nn.Linear(8, 5), loss

    def forward(self, ids, labels):
        logits = self.head(torch.relu(self.embed(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) if self.loss else logits


@pytest.mark.parametrize(
    "loss, ignored, off, text",
    [
        (True, True, False, "rows with ignored labels are not computed"),
        (True, False, False, "none has an ignored label"),
        (False, True, False, "the loss is not in the graph"),
        (True, True, True, "ENABLE_LABEL_SPARSE_OPTIMIZER is 0"),
    ],
)
def test_why_a_sparsity_setting_changes_nothing(loss, ignored, off, text):
    model = ORTModule(Tagger(loss), config=Config(enable_label_sparse_optimizer=not off))
    ids = torch.arange(16 * 8).reshape(16, 8) % 20
    labels = torch.where(ids > 4, -100, ids) if ignored else ids % 5
    step(model, ids, labels)
    report = explain(model)
    assert text in report.sparsity[0] and f"sparsity   {report.sparsity[0]}" in str(report)
    assert "no attention whose mask" in report.sparsity[1]


def test_few_rows_are_not_counted():
    model = ORTModule(Tagger(True))
    step(model, torch.arange(8).reshape(2, 4), torch.full((2, 4), -100).fill_diagonal_(1))
    assert explain(model).sparsity[0].endswith("there are too few of them to pay, or more than the loss looks at them")


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(8, 3)))

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.inner(x)


def test_the_graph_by_layers():
    model = ORTModule(Layered(), config=Config(memory_opt_level=2))
    step(model, torch.arange(12).reshape(2, 6))
    report = explain(model)
    layers = {layer.path: layer for layer in report.layers}
    numbered = [path for path in layers if path.startswith("layers")]
    assert numbered == ["layers.0", "layers.1", "layers.2"] and {"words", "inner.0", ""} <= layers.keys()
    constants = sum(node.op_type == "Constant" for node in model._ortmodule.latest.capture.model.graph.node)
    assert sum(layer.exported for layer in report.layers) == report.nodes_exported - constants
    assert sum(layer.forward + layer.backward for layer in report.layers) == report.nodes_run
    assert layers["layers.1"].fused and layers["words"].forward == 1
    (plan,) = model._ortmodule.latest.session.plans.values()
    assert sum(layer.recomputed for layer in report.layers) == sum(row[8] and row[6] >= 0 for row in plan.graph())
    assert f"  layer      {layers['words']}" in str(report)


def test_layers_that_are_alike_are_one_line():
    same = [LayerReport(f"h.{i}", 5, 2, 3, 1, 0, 0) for i in range(12)]
    other = LayerReport("", 1, 0, 0, 0, 2, 1)
    assert layer_lines([*same, other]) == [
        "h.0 to 11, each: 5 nodes exported, 2 + 3 run, 1 of them fused",
        "(the module itself): 1 nodes exported, 0 + 0 run, 0 of them fused, 2 compute again, 1 by PyTorch",
    ]
    assert len(layer_lines([same[0], other, same[1]])) == 3


class Times(torch.autograd.Function):
    """A product that PyTorch runs."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).T @ x.flatten(0, 1)


class Tied(nn.Module):
    """A look-up and a head of the same weight."""

    def __init__(self, multiply):
        super().__init__()
        self.rows, self.inner, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight, self.multiply = self.rows.weight, multiply

    def forward(self, ids):
        return self.multiply(self.inner(self.rows(ids)), self.head.weight)


@pytest.mark.parametrize(
    "multiply, share", [(Times.apply, 72 / (72 + 96)), (nn.functional.linear, 1.0)], ids=["there", "here"]
)
def test_a_weight_that_is_looked_up_here_and_multiplied_in_pytorch_is_in_pytorch(multiply, share):
    model = ORTModule(Tied(multiply))
    step(model, torch.randint(12, (2, 5)))
    report = explain(model)
    assert report.captured and report.weights_in_engine == pytest.approx(share)
