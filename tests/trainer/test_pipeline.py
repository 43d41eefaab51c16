"""Batches become micro-batches, and their results one (tests/distributed runs the stages)."""

import pytest
import torch

from ortmodule import ORTTrainerOptions
from ortmodule.trainer.model_desc import ModelDescription
from ortmodule.trainer.pipeline import Slices

DESCRIPTION = ModelDescription({
    "inputs": [("x", ["length", "batch"]), ("scale", ["features"])],
    "outputs": [("loss", [], True), ("y", ["length", "batch"]), ("norm", ["features"])],
})  # fmt: skip


def slices(count=2, **options):
    sizes = {"world_size": 2, "pipeline_parallel_size": 2, "num_pipeline_micro_batches": count, **options}
    return Slices([*DESCRIPTION.inputs, *DESCRIPTION.outputs], ORTTrainerOptions({"distributed": sizes}))


def test_there_and_back():
    x, scale = torch.arange(12.0).view(3, 4), torch.ones(5)
    made = slices()
    assert made.axes == {"x": 1, "y": 1}
    parts = made.cut(DESCRIPTION.inputs, (x, scale))
    assert [p.tolist() for p, _ in parts] == [x[:, :2].tolist(), x[:, 2:].tolist()] and parts[0][1] is scale
    results = [(p.mean(), p * 2, scale) for p, _ in parts]
    loss, y, norm = made.join(DESCRIPTION.outputs, results)
    assert loss == x.mean() and torch.equal(y, x * 2) and torch.equal(norm, scale)


def test_one_micro_batch_needs_no_axis():
    x, scale = torch.ones(3, 4), torch.ones(5)
    made = slices(1, sliced_tensor_names=["scale"])
    assert made.cut(DESCRIPTION.inputs, (x, scale))[0][0] is x


@pytest.mark.parametrize(
    "options, axes",
    [
        ({"sliced_axes": {"scale": 0}}, {"x": 1, "scale": 0, "y": 1}),
        ({"sliced_axes": {"x": 0, "y": 0}}, {"x": 0, "y": 0}),
        ({"sliced_tensor_names": ["x"]}, {"x": 1}),
        ({"sliced_schema": {"x": [3, 2]}}, {"x": 1, "y": 1}),
    ],
)
def test_options(options, axes):
    assert slices(**options).axes == axes


@pytest.mark.parametrize(
    "options, text",
    [
        ({"sliced_axes": {"x": 2}}, "sliced_axes has axis 2 of x, described with 2"),
        ({"sliced_axes": {"x": "batch"}}, "sliced_axes has axis 'batch' of x"),
        ({"sliced_axes": {"z": 0}}, "sliced_axes names z; described are x, scale, loss, y, norm"),
        ({"sliced_tensor_names": ["scale"]}, "no described axis is called batch"),
        ({"count": 3}, r"the input x has the shape \[3, 4\]: axis 1 cannot be cut into 3 equal parts"),
        ({"sliced_schema": {"x": [3, 4]}}, r"sliced_schema has x as \[3, 4\], and a micro-batch has \[3, 2\]"),
    ],
)
def test_refusals(options, text):
    with pytest.raises(ValueError, match=text):
        slices(**options).cut(DESCRIPTION.inputs, (torch.ones(3, 4), torch.ones(5)))
