"""Options have the defaults of the table, and what they cannot be is refused by name."""

import pytest

from ortmodule.trainer import ORTTrainerOptions, options


def test_defaults():
    made = ORTTrainerOptions()
    for name in options.names():
        value, default = made, options.SCHEMA
        for step in name.split("."):
            value, default = getattr(value, step), default[step]
        assert value == default.default, name


def test_given():
    made = ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 4}, "seed": 0})
    assert made.batch.gradient_accumulation_steps == 4 and made.seed == 0


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"bach": {}}, ValueError, "there is no option bach; did you mean batch"),
        ({"batch": {"gradient_accumulation_step": 1}}, ValueError, "did you mean batch.gradient_accumulation_steps"),
        ({"batch": 4}, TypeError, "the option batch is a dictionary, not 4"),
        ({"seed": "0"}, TypeError, "of type int or NoneType"),
        ({"batch": {"gradient_accumulation_steps": True}}, TypeError, "of type int, not True"),
        ({"batch": {"gradient_accumulation_steps": 0}}, ValueError, "must be 1 or more, not 0"),
        ({"mixed_precision": {"dtype": "float8"}}, ValueError, "must be one of None, float16, bfloat16"),
        ({"lr_scheduler": 3}, TypeError, "has a method get_lr; 3 has none"),
        (
            {"distributed": {"pipeline_parallel_size": 2}},
            ValueError,
            "pipeline_parallel_size 2, but distributed.world_s",
        ),
        ({"distributed": {"world_rank": 1}}, ValueError, "world_rank is 1, of a world of 1"),
        (
            {"distributed": {"world_size": 4, "data_parallel_size": 2}},
            ValueError,
            "data_parallel_size is 2.* their product",
        ),
        ({"distributed": {"deepspeed_zero_optimization": {"stage": 2}}}, ValueError, "must be 1 or less, not 2"),
    ],
)
def test_refused(given, error, message):
    with pytest.raises(error, match=message):
        ORTTrainerOptions(given)
