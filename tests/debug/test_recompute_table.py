"""Clusters of what backward can compute again: the table, and what a user chooses from it."""

import json
import logging
import re

import pytest
import torch
from torch import nn

from ortmodule import Config, ORTModule
from ortmodule.debug.memory.size_formulas import Formulas
from tests.engine.test_recomputation import IDS, same_bits, steps
from tests.selection import each

COUNT = 3  # layers


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.drop, self.head = nn.Embedding(50, 16), nn.Dropout(0.1), nn.Linear(16, 50)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(COUNT)
        )

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = x + self.drop(layer(x))
        return self.head(x).square().mean()


def rows_of(caplog):
    """{config: (state, frequency, bytes, formula)} of the last table, and its first line."""
    text = [record.getMessage() for record in caplog.records if "memory optimizer" in record.getMessage()][-1]
    head, _, _, *lines = text.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return head, {c[1]: (c[2], int(c[3]), int(c[4].replace(",", "")), c[5]) for c in cells}


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, "ortmodule")
    return lambda: rows_of(caplog)


def step(model, ids=IDS):
    torch.manual_seed(1)
    loss = model(ids)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.fixture(scope="module")
def stored():
    return steps(Layers)


def test_the_table(told, stored):
    model = ORTModule(Layers())
    step(model)
    head, rows = told()
    assert "memory optimizer OFF" in head and any(state == "OFF" for state, *_ in rows.values())
    sizes = [size for _, _, size, _ in rows.values()]
    assert sizes == sorted(sizes, reverse=True) and len(rows) > 3
    batch, length = IDS.shape
    repeated = [config for config, (_, count, _, _) in rows.items() if count >= COUNT]
    assert repeated and all(config.endswith(("+:1:-1", "+:2:-1")) for config in rows)
    for _, _, size, formula in rows.values():
        assert "dim0" in formula and eval(formula, {"ids_dim0": batch, "ids_dim1": length}) == size


def test_the_formulas_hold_at_other_sizes(told):
    model = ORTModule(Layers())
    step(model)
    first = told()[1]
    other = ORTModule(Layers())
    step(other, IDS[:5, :11])
    for config, (_, _, size, _) in told()[1].items():
        assert eval(first[config][3], {"ids_dim0": 5, "ids_dim1": 11}) == size


def test_a_choice_from_the_table_gives_the_same_bits(told, stored, tmp_path):
    kept, plan = stored
    step(ORTModule(Layers()))
    _, rows = told()
    config, (_, count, size, _) = max(rows.items(), key=lambda item: item[1][1])
    cluster = config.removesuffix("-1")
    path = tmp_path / "chosen.json"
    path.write_text(json.dumps([cluster + "2"]))
    again, smaller = steps(Layers, memory_opt_config=str(path))
    assert same_bits(kept, again)
    assert told()[1][config][0] == "ON 2" and smaller.recomputed[0] >= 2
    all_again, smallest = steps(Layers, memory_opt_config=config)
    assert same_bits(kept, all_again) and told()[1][config][0] == f"ON {count}"
    assert smallest.arena_bytes < plan.arena_bytes and "MEMORY_OPT_CONFIG=" in told()[0]
    none, none_again = steps(Layers, memory_opt_config=f"{config},{cluster.removesuffix('1:').removesuffix('2:')}0:-1")
    assert same_bits(kept, none) and none_again.arena_bytes >= plan.arena_bytes and none_again.recomputed[0] == 0


@pytest.mark.full
def test_all_clusters_together(told, stored):
    kept, _ = stored
    step(ORTModule(Layers()))
    chosen = [config for config in told()[1] if config.endswith(":1:-1")]
    again, _ = steps(Layers, memory_opt_config=",".join(chosen))  # (all of it at once may take more memory)
    assert same_bits(kept, again)
    assert all(told()[1][config][0].startswith("ON") for config in chosen)


@each("level", [1, 2], [1])
def test_levels_are_in_the_table(told, level):
    _, plan = steps(Layers, memory_opt_level=level)
    head, rows = told()
    assert f"memory optimizer ON: ORTMODULE_MEMORY_OPT_LEVEL={level}" in head
    places = sum(int(state.removeprefix("ON ")) for state, *_ in rows.values() if state != "OFF")
    assert 0 < places <= plan.recomputed[0]  # some places have several values


@pytest.mark.full
def test_a_budget_goes_on_where_a_choice_ends(told, stored):
    kept, plan = stored
    step(ORTModule(Layers()))
    config = max(told()[1].items(), key=lambda item: item[1][1])[0]
    held = sum(p.nbytes for p in Layers().parameters()) * 2 + IDS.nbytes
    _, chosen = steps(Layers, memory_opt_config=config)
    most = plan.arena_bytes * 3 // 5
    again, smaller = steps(Layers, memory_opt_config=config, memory_budget=held + most)
    assert same_bits(kept, again) and smaller.arena_bytes <= most < chosen.arena_bytes
    assert told()[1][config][0].startswith("ON")


def test_a_cluster_that_there_is_not():
    model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), config=Config(
        memory_opt_config="NoSuch+:1:-1"
    ))  # fmt: skip
    with pytest.warns(UserWarning, match=r"MEMORY_OPT_CONFIG: there is no cluster for NoSuch\+:1:-1 in this graph"):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    "content, reason",
    [
        ("[1]", "a JSON file with a list of texts"),
        ("{", "is a JSON file, but"),
        ('["Gelu:1:-1"]', "not Gelu:1:-1"),
        ('["Gelu+:3:-1"]', "a strategy from 0 to 2"),
        ('["Gelu+:1:-2"]', "a count of at least -1"),
    ],
)
def test_a_file_that_cannot_be_understood(content, reason, tmp_path, monkeypatch):
    path = tmp_path / "clusters.json"
    path.write_text(content)
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", str(path))
    with pytest.raises(ValueError, match=f"ORTMODULE_MEMORY_OPT_CONFIG={re.escape(str(path))}.*{re.escape(reason)}"):
        ORTModule(nn.Linear(2, 2))


def test_a_level_decides_alone():
    with pytest.warns(UserWarning, match="MEMORY_OPT_CONFIG .* has no effect: ORTMODULE_MEMORY_OPT_LEVEL=1 decides"):
        ORTModule(nn.Linear(2, 2), config=Config(memory_opt_config="Tanh+:1:-1", memory_opt_level=1))


def test_formulas():
    def bytes_at(shapes):
        (a, b), (c,) = shapes
        return [4 * a * b * b, 2 * a * (b - 1), 8 * c, 16, a**3]

    found = Formulas(((6, 10), (7,)), ["ids", "weights"], frozenset(), bytes_at).find()
    assert [found.text(i, i + 1) for i in range(4)] == [
        "4*ids_dim0*ids_dim1**2", "2*ids_dim0*ids_dim1 - 2*ids_dim0", "8*weights_dim0", "16",
    ]  # fmt: skip
    assert found.text(0, 2) == "4*ids_dim0*ids_dim1**2 + 2*ids_dim0*ids_dim1 - 2*ids_dim0"

    assert found.text(4, 5) == found.text(3, 5) == ""  # not found
    assert Formulas(((6, 10),), ["ids"], frozenset(), lambda shapes: None).find() is None


def test_a_smaller_value_in_place_of_a_larger(told):
    """Backward reads a cosine's operand in float32: it can be cast again from bfloat16, which nothing else reads."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 256, dtype=torch.bfloat16)

        def forward(self, x):
            return self.linear(x).float().cos().sum()

    def gradients(**config):
        torch.manual_seed(0)
        model = ORTModule(Mixed(), config=Config(**config))
        torch.manual_seed(1)
        model(torch.randn(64, 32, dtype=torch.bfloat16)).backward()
        return [p.grad for p in model.parameters()]

    stored = gradients()
    _, rows = told()
    (config,) = (config for config in rows if config.endswith(":2:-1"))
    assert rows[config][2] == 64 * 256 * (4 - 2)
    assert same_bits(stored, gradients(memory_opt_config=config))
    assert told()[1][config][0] == "ON 1"
