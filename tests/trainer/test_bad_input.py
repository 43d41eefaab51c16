"""ORTTrainer refuses options, descriptions and settings that are none, and names them."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, ORTTrainer, ORTTrainerOptions
from ortmodule.optim import AdamConfig, FusedAdam, LambConfig, lr_scheduler
from ortmodule.trainer.options import names
from tests.trainer import small

PAGE = Path(__file__).resolve().parents[2] / "docs" / "orttrainer.md"


@pytest.mark.parametrize(
    "given, error, text",
    [
        ({"batch": {"gradient_acumulation_steps": 2}}, ValueError,
         "no option batch.gradient_acumulation_steps; did you mean batch.gradient_accumulation_steps"),
        ({"flavour": 3}, ValueError, "no option flavour$"),
        ({"batch": {"gradient_accumulation_steps": 0}}, ValueError, "gradient_accumulation_steps must be 1 or more"),
        ({"batch": {"gradient_accumulation_steps": True}}, TypeError, "gradient_accumulation_steps is of type int"),
        ({"batch": 3}, TypeError, "the option batch is a dictionary, not 3"),
        ({"mixed_precision": {"dtype": "int8"}}, ValueError, "mixed_precision.dtype must be one of"),
        ({"mixed_precision": {"loss_scaler": 1024.0}}, TypeError, "mixed_precision.loss_scaler is of type StaticLoss"),
        ({"lr_scheduler": 0.1}, TypeError, "lr_scheduler has a method get_lr; 0.1 has none"),
        ({"distributed": {"pipeline_parallel_size": 2}}, ValueError, "world_size is 1: it is their product"),
        ({"distributed": {"world_size": 4, "pipeline_parallel_size": 2, "horizontal_parallel_size": 2}}, ValueError,
         "cannot both be above 1"),
        ({"distributed": {"world_size": 2, "pipeline_parallel_size": 2, "enable_adasum": True}}, ValueError,
         "enable_adasum is for processes that have the whole model"),
        ({"distributed": {"num_pipeline_micro_batches": 2}}, ValueError,
         "num_pipeline_micro_batches needs distributed.pipeline_parallel_size above 1"),
        ({"distributed": {"horizontal_parallel_plan": {"0": "colwise"}}}, ValueError,
         "horizontal_parallel_plan needs distributed.horizontal_parallel_size above 1"),
        ({"distributed": {"world_rank": 1}}, ValueError, "distributed.world_rank is 1, of a world of 1"),
        ({"distributed": {"world_size": 4, "data_parallel_size": 2}}, ValueError, "data_parallel_size is 2"),
        ({"distributed": {"deepspeed_zero_optimization": {"stage": 2}}}, ValueError, "stage must be 1 or less, not 2"),
        ({"graph_transformer": {"number_recompute_layers": -1}}, ValueError, "layers must be 0 or more, not -1"),
        (3, TypeError, "the option options is a dictionary"),
    ],
)  # fmt: skip
def test_options(given, error, text):
    with pytest.raises(error, match=text):
        ORTTrainerOptions(given)


def test_the_page_lists_all_options():
    assert set(re.findall(r"^\| `([\w.]+)` \|", PAGE.read_text(), re.M)) == set(names())


@pytest.mark.parametrize(
    "options, error, text",
    [
        (
            {"utils": {"frozen_weights": ["9.weight"]}},
            ValueError,
            "utils.frozen_weights names 9.weight, and the model has",
        ),
        (
            {"distributed": {"world_size": 2}},
            RuntimeError,
            "world_size is 2: call torch.distributed.init_process_group",
        ),
    ],
)
def test_options_that_do_not_fit(options, error, text):
    with pytest.raises(error, match=text):
        small.trainer(options)


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: AdamConfig([{"params": ["0.weight"], "lambda": 1}]), ValueError,
         "AdamConfig has no setting lambda; did you mean lambda_coef"),
        (lambda: AdamConfig([{"params": "0.weight"}]), TypeError, "list of names as 'params', not '0.weight'"),
        (lambda: AdamConfig(max_norm_clip=0), ValueError, "max_norm_clip must be above 0"),
        (lambda: LambConfig(ratio_max=10.0), ValueError, "LAMB's ratio has no bounds"),
        (lambda: lr_scheduler.LinearWarmupLRScheduler(0), ValueError, "total_steps must be 1 or more"),
        (lambda: lr_scheduler.LinearWarmupLRScheduler(5, 1.0), ValueError, "warmup is a part of all steps"),
        (lambda: lr_scheduler.CosineWarmupLRScheduler(5, 0), ValueError, "cycles must be above 0"),
        (lambda: lr_scheduler.PolyWarmupLRScheduler(5, -1.0), ValueError, "lr_end and power must not be below 0"),
        (lambda: AdamConfig(lr=-1.0).optimizer(AdamConfig(lr=-1.0).groups(small.model())), ValueError, "learning rate"),
    ],
)  # fmt: skip
def test_configurations(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    "groups, text",
    [
        ([{"params": ["0.weigth"]}], "no parameter 0.weigth; did you mean 0.weight"),
        ([{"params": ["0.weight"]}, {"params": ["0.weight"], "lr": 1.0}], "0.weight is in two groups"),
    ],
)
def test_groups(groups, text):
    with pytest.raises(ValueError, match=text):
        small.trainer(config=AdamConfig(groups))


X, LABEL, LOSS, LOGITS = *small.DESCRIPTION["inputs"], *small.DESCRIPTION["outputs"]


@pytest.mark.parametrize(
    "inputs, outputs, error, text",
    [
        ([X, LABEL], [LOGITS], ValueError, "one output of the model description is the loss.*none is"),
        ([X, LABEL], [LOSS, ("other", [], True)], ValueError, "loss, other is"),
        ([X, LABEL], [("loss", [3], True)], ValueError, r"the loss loss is a scalar: its axes are \[\], not \[3\]"),
        ([X, X], [LOSS], ValueError, "two tensors of the name x"),
        ([], [LOSS], TypeError, "has a list of inputs, not"),
        ([("x",), LABEL], [LOSS], TypeError, "input 0 of the model description is .name, axes., not"),
        ([("x", 6), LABEL], [LOSS], TypeError, "the input x has the axes 6"),
        ([("x", ["batch", -6]), LABEL], [LOSS], TypeError, "the input x has the axis -6"),
        ([("x", ["batch", True]), LABEL], [LOSS], TypeError, "the input x has the axis True"),
        ([X, LABEL], [("loss", [], "yes")], TypeError, "the output loss is the loss, True, or not"),
        (
            [X, ("other", []), LABEL],
            [LOSS],
            ValueError,
            "the input other is described, and the model's forward takes 1",
        ),
        ([LABEL], [LOSS], ValueError, "the model's forward needs input, which is not among the described inputs"),
    ],
)
def test_descriptions(inputs, outputs, error, text):
    with pytest.raises(error, match=text):
        small.trainer(description={"inputs": inputs, "outputs": outputs})


class Two(nn.Module):
    def forward(self, first, second):
        return first + second


def test_names_that_do_not_fit():
    for inputs, text in (
        ([("first", ["n"])], "forward needs second"),
        (
            [("second", ["n"]), ("other", ["n"])],
            "the input other is described, and the model's forward has no parameter",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            ORTTrainer(Two(), {"inputs": inputs, "outputs": [LOSS]}, AdamConfig())


def test_arguments():
    ours = (small.model(), small.DESCRIPTION, AdamConfig(), nn.CrossEntropyLoss(), ORTTrainerOptions())
    for place, given, text in (
        (0, ORTModule(small.model()), "not wrapped yet"),
        (0, nn.Linear, "not wrapped yet, not type"),
        (1, [], "a dictionary with 'inputs' and 'outputs'"),
        (2, FusedAdam(small.model().parameters()), "an AdamConfig, LambConfig or SGDConfig, not FusedAdam"),
        (3, 5, "loss_fn is called with .* 5 cannot be called"),
        (4, {}, "an ORTTrainerOptions, not dict"),
    ):
        with pytest.raises(TypeError, match=text):
            ORTTrainer(*ours[:place], given, *ours[place + 1 :])
    with pytest.raises(ValueError, match="the key 'input'"):
        ORTTrainer(ours[0], {"input": [X], **small.DESCRIPTION}, *ours[2:])
    with pytest.raises(ValueError, match="no parameters to train"):
        ORTTrainer(nn.ReLU(), *ours[1:])


@pytest.fixture(scope="module")
def trained():
    made = small.trainer()
    made.train_step(*small.batches(1)[0])
    return made


@pytest.mark.parametrize(
    "args, kwargs, error, text",
    [
        ((torch.ones(2, 6),), {}, TypeError, "the input label is missing; described are x, label"),
        ((torch.ones(2, 6),), {"y": 3}, TypeError, "there is no input y; described are x, label"),
        ((torch.ones(2, 6),), {"x": 3}, TypeError, "the input x is given twice"),
        ((1, 2, 3), {}, TypeError, "3 inputs are given"),
        ((torch.ones(2, 6), [0, 1]), {}, TypeError, "the input label is list, no tensor"),
        ((torch.ones(2, 5), torch.ones(2)), {}, ValueError,
         r"input x is described as \['batch', 6\], and has the shape \[2, 5\]"),
        ((torch.ones(6), torch.ones(2)), {}, ValueError, r"input x is described .* has the shape \[6\]"),
        ((torch.ones(2, 6), torch.ones(3)), {}, ValueError, r"input label .* has the shape \[3\]: batch is 2 in x"),
    ],
)  # fmt: skip
def test_inputs(args, kwargs, error, text, trained):
    before = trained.state_dict()["model"]["0.weight"].clone()
    with pytest.raises(error, match=text):
        trained.train_step(*args, **kwargs)
    assert torch.equal(trained.model[0].weight, before) and trained.train_step_info.step == 1


@pytest.mark.parametrize(
    "outputs, text",
    [
        ([LOSS, ("logits", ["batch", 4])], r"output logits is described as \['batch', 4\], and has the shape \[8, 3\]"),
        (
            [LOSS, LOGITS, ("more", [])],
            "beside the loss the outputs logits, more are described, and the model returns 1",
        ),
    ],
)
def test_outputs(outputs, text):
    ours = small.trainer(description={**small.DESCRIPTION, "outputs": outputs})
    with pytest.raises(ValueError, match=text):
        ours.train_step(*small.batches(1)[0])


def test_a_loss_that_is_no_scalar():
    ours = small.trainer(loss=nn.CrossEntropyLoss(reduction="none"), description=small.ONLY_LOSS)
    with pytest.raises(ValueError, match=r"output loss is described as \[\], and has the shape \[8\]"):
        ours.train_step(*small.batches(1)[0])
