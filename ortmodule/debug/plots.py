"""Describes the plots of a report for plotly: the memory plan, the time of operators, the price of budgets.

A colour is a number of the page's palette (report.html), which has one for light and one for dark pages.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortmodule import _core
from ortmodule.debug.memory.peak import in_units, module_path
from ortmodule.debug.profile import Profile

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
#: Kinds of blocks of the arena, in the order of the legend and of the palette's colours.
_KINDS = (
    "activation kept for backward", "activation of forward", "value of backward", "workspace of a kernel",
    "input of a CUDA graph", "gradient",
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A plot: plotly's traces and layout."""

    id: str  #: of its place in the page
    data: list[dict[str, Any]]
    layout: dict[str, Any]

    def for_page(self) -> dict[str, Any]:
        return {"id": self.id, "data": self.data, "layout": self.layout}


def _unit(most: int) -> tuple[int, str]:
    return next(pair for pair in _UNITS if most >= pair[0] or pair[0] == 1)


def _kind(plan: _core.Plan, first: int, last: int, what: str) -> int:
    if what != "value":
        return {"workspace": 3, "gradient": 5}.get(what, 4)
    forward = plan.nodes[0]
    return 2 if first >= forward else 0 if last >= forward else 1


def plan_figure(plan: _core.Plan, name: str) -> Figure:
    """The memory plan: the order of execution, addresses, what lives there, and the peak with what is alive then."""
    joint = plan.joint_bytes > 0
    arena = plan.joint_bytes or plan.arena_bytes
    peak, most = plan.peak(joint)
    scale, unit = _unit(arena)
    rows: list[list[Any]] = [[] for _ in _KINDS]
    change = [0] * (sum(plan.nodes) + 1)
    for offset, count, first, last, (what, operator, node, _, spec) in plan.blocks(joint):
        change[first] += count
        change[last + 1] -= count
        kind = _kind(plan, first, last, what)
        shape = "" if spec is None else f"<br>{spec[0]}{list(spec[1])}"
        text = (
            f"<b>{operator or 'fixed'}</b> {html.escape(module_path(node))}{shape}<br>{in_units(count)} at {offset}, "
            f"instructions {first} to {last}<br>{_KINDS[kind]}"
        )
        rows[kind].append((first, last, offset, count, text, first <= peak <= last))
    data = [_bars(kind, found, scale) for kind, found in enumerate(rows) if found]
    alive, live = [], 0
    for step in change[:-1]:
        live += step
        alive.append(round(live / scale, 4))
    data.append(
        {"type": "scatter", "x": list(range(len(alive))), "y": alive, "yaxis": "y2", "mode": "lines", "name": "alive",
         "line": {"shape": "hvh", "width": 1.5}, "fill": "tozeroy", "palette": 6, "showlegend": False,
         "hovertemplate": f"instruction %{{x}}: %{{y:.2f}} {unit} alive<extra></extra>"}
    )  # fmt: skip
    forward, backward = plan.nodes
    lines = [_vertical(peak, "dash")] + ([_vertical(forward - 0.5, "dot")] if backward else [])
    notes = [_note(peak, f"peak: {in_units(most)}", 1.0, "bottom")]
    if backward:
        notes.append(_note(forward - 0.5, "backward begins", 0.235, "bottom"))
    layout = {
        "barmode": "overlay", "bargap": 0, "height": 640, "shapes": lines, "annotations": notes,
        "xaxis": {"title": {"text": "instruction, in the order of execution"}, "anchor": "y2",
                  "range": [-0.5, forward + backward - 0.5]},
        "yaxis": {"title": {"text": f"address ({unit})"}, "domain": [0.27, 1],
                  "range": [0, arena / scale or 1]},
        "yaxis2": {"title": {"text": f"alive ({unit})"}, "domain": [0, 0.2], "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.06, "yanchor": "bottom", "x": 0},
    }  # fmt: skip
    return Figure(name, data, layout)


def _bars(kind: int, rows: list[Any], scale: int) -> dict[str, Any]:
    """Rectangles of one kind; those that are alive at the peak have an edge."""
    return {
        "type": "bar", "name": _KINDS[kind], "palette": kind,
        "x": [(first + last) / 2 for first, last, *_ in rows],
        "width": [last + 1 - first for first, last, *_ in rows],
        "base": [row[2] / scale for row in rows],
        "y": [row[3] / scale for row in rows],
        "marker": {"line": {"width": [1.2 if row[5] else 0 for row in rows]}},
        "hovertext": [row[4] for row in rows], "hoverinfo": "text",
    }  # fmt: skip


def _vertical(x: float, dash: str) -> dict[str, Any]:
    return {"type": "line", "x0": x, "x1": x, "xref": "x", "y0": 0, "y1": 1, "yref": "paper",
            "line": {"dash": dash, "width": 1.5}}  # fmt: skip


def _note(x: float, text: str, y: float, anchor: str) -> dict[str, Any]:
    return {"x": x, "y": y, "xref": "x", "yref": "paper", "text": text, "showarrow": False, "yanchor": anchor,
            "xanchor": "left" if x < 3 else "center"}  # fmt: skip


def time_figure(profile: Profile) -> Figure:
    """The time of a step by submodules, down to operators."""
    found: dict[tuple[str, ...], int] = {}  # nanoseconds: sums of integers are exact, as plotly wants them
    for time in profile.times:
        path = (profile.name, *filter(None, time.module.split(".")), f"{time.operator} ({time.part})")
        spent = round(1e9 * time.seconds / max(profile.steps, 1))
        for depth in range(1, len(path) + 1):
            found[path[:depth]] = found.get(path[:depth], 0) + spent
    found = {path: spent for path, spent in found.items() if spent}
    data = {
        "type": "icicle", "branchvalues": "total", "tiling": {"orientation": "v"}, "palette": "scale",
        "ids": ["/".join(path) for path in found], "labels": [path[-1] for path in found],
        "parents": ["/".join(path[:-1]) for path in found], "values": list(found.values()),
        "text": [f"{spent / 1e6:.3f} ms" for spent in found.values()], "texttemplate": "%{label}<br>%{text}",
        "hovertemplate": "<b>%{id}</b><br>%{text} a step, %{percentRoot:.1%} of all<extra></extra>",
    }  # fmt: skip
    return Figure("time", [data], {"height": 560, "margin": {"l": 8, "r": 8, "t": 30, "b": 8}})


def pareto_figure(prices: Sequence[Any], profile: Profile | None) -> Figure:
    """What smaller budgets cost. With a profile: as the time of its operators in a step."""
    scale, unit = _unit(max(price.peak for price in prices))
    step = 0.0 if profile is None or not profile.steps else 1e3 * profile.seconds / profile.steps
    work = [step * (1 + price.extra_work) if step else 100 * price.extra_work for price in prices]
    y, of = ("predicted time of a step (ms)", "ms a step") if step else ("more work (%)", "% more work")
    data = {
        "type": "scatter", "mode": "lines+markers", "palette": 0, "marker": {"size": 9}, "showlegend": False,
        "x": [price.peak / scale for price in prices], "y": work, "line": {"width": 2},
        "hovertemplate": f"peak %{{x:.2f}} {unit}<br>%{{y:.2f}} {of}<extra></extra>",
    }  # fmt: skip
    layout = {"height": 420, "xaxis": {"title": {"text": f"peak of a step ({unit})"}}, "yaxis": {"title": {"text": y}}}
    return Figure("pareto", [data], layout)
