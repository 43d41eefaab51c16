"""Plots show the numbers that they are given: times by submodules, prices of budgets."""

from types import SimpleNamespace

import pytest

from ortmodule.debug.plots import pareto_figure, time_figure


def profile(*times, steps=2):
    times = [SimpleNamespace(module=m, operator=o, part=p, seconds=s) for m, o, p, s in times]
    return SimpleNamespace(name="Net", steps=steps, times=times, seconds=sum(t.seconds for t in times))


def test_times_add_up():
    figure = time_figure(profile(("layer.0", "Gelu", "forward", 4e-3), ("layer.1", "Gelu", "backward", 2e-3)))
    (data,) = figure.data
    values = dict(zip(data["ids"], data["values"], strict=True))
    assert values["Net"] == values["Net/layer"] == 3_000_000 and values["Net/layer/0"] == 2_000_000
    assert values["Net/layer/1/Gelu (backward)"] == 1_000_000
    parents = dict(zip(data["ids"], data["parents"], strict=True))
    assert parents["Net"] == "" and all(parent in values for parent in parents.values() if parent)


def test_what_takes_no_time_is_not_shown():
    (data,) = time_figure(profile(("", "Add", "forward", 1e-3), ("a", "Shape", "forward", 0.0))).data
    assert data["ids"] == ["Net", "Net/Add (forward)"]


PRICES = [SimpleNamespace(peak=4 << 20, extra_work=0.0), SimpleNamespace(peak=2 << 20, extra_work=0.25)]


def test_prices_as_work():
    figure = pareto_figure(PRICES, None)
    assert figure.data[0]["x"] == [4.0, 2.0] and figure.data[0]["y"] == [0.0, 25.0]
    assert "MiB" in figure.layout["xaxis"]["title"]["text"] and figure.for_page()["id"] == "pareto"


def test_prices_as_time():
    figure = pareto_figure(PRICES, profile(("", "Add", "forward", 8e-3)))
    assert figure.data[0]["y"] == pytest.approx([4.0, 5.0])
