"""What runs the steps of a trainer has its engine, its optimizer and its settings."""

import pytest

from ortmodule import ORTTrainerOptions, explain
from ortmodule.optim import LambConfig
from ortmodule.trainer.runners import engine_config
from tests.trainer import small


def test_a_whole_model():
    made = small.trainer()
    assert made.parallel_plan == () and (made.data_parallel_size, made.data_parallel_rank) == (1, 0)
    made.train_step(*small.batches(1)[0])
    assert explain(made.engine).captured and made.optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    "switch, level",
    [({}, 0), ({"gelu_recompute": True}, 2), ({"attn_dropout_recompute": True}, 2),
     ({"transformer_layer_recompute": True, "number_recompute_layers": 3}, 1)],
)  # fmt: skip
def test_recomputation(switch, level):
    options = ORTTrainerOptions({"graph_transformer": switch, "device": {"mem_limit": 3 << 20}})
    assert engine_config(options).memory_opt_level == level
    assert engine_config(options).memory_opt_layers == switch.get("number_recompute_layers", 0)
    assert engine_config(options).memory_budget == 3 << 20


def test_a_divided_model_needs_a_process_group():
    for how in ({"pipeline_parallel_size": 2}, {"horizontal_parallel_size": 2}):
        with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group before"):
            small.trainer({"distributed": {"world_size": 2, **how}})


def test_sizes(monkeypatch):
    """How eight processes are divided; groups are made at the first step."""
    monkeypatch.setattr("ortmodule.trainer.processes.check_group", lambda size, rank: None)
    for how, rank, found in (
        ({"pipeline_parallel_size": 2}, 5, (4, 1)),
        ({"horizontal_parallel_size": 2}, 5, (4, 2)),
        ({"horizontal_parallel_size": 4, "data_parallel_size": 2}, 3, (2, 0)),
        ({"pipeline_parallel_size": 8}, 7, (1, 0)),
    ):
        made = small.trainer({"distributed": {"world_size": 8, "world_rank": rank, **how}})
        assert (made.data_parallel_size, made.data_parallel_rank) == found, how
        assert made.optimizer is None and made.engine is None
    with pytest.raises(ValueError, match="LAMB needs whole weights"):
        how = {"world_size": 2, "horizontal_parallel_size": 2}
        small.trainer({"distributed": how}, config=LambConfig())
