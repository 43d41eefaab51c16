"""What the cases cover: docs/ops.md, from the case list and the operator records.

    python -m tests.ops.table        writes docs/ops.md

A case belongs to the newest record of its operator that is not newer than its opset. Operators of our own domain
have no cases: they are reached through gradients and passes, so they are looked for in the plans of all cases.
"""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.ops.cases import ALL, CASES
from tests.ops.harness import Trial

PATH = Path(__file__).parents[2] / "docs" / "ops.md"


@cache
def registry():
    from ortmodule import _core

    return _core.operators()


def records_of(case):
    """The records a case belongs to."""
    domain, _, name = case.op.rpartition("::")
    known = [r for r in registry() if r["name"] == name and r["domain"] == domain and r["since"] <= case.opset]
    trial = Trial(case, case.dtypes[0])
    trial.plan(training=bool(trial.wrt))
    text = "".join(plan.text() for plan in [*trial.session.plans.values(), *trial.probes])
    names = set(re.findall(r"= (\w+)\(", text))
    names |= {step for steps in re.findall(r'steps="([^"]*)"', text) for step in steps.split()}
    ours = [r for r in registry() if r["domain"] and r["name"] in names]
    if case.nodes and case.op not in [op for op, *_ in case.nodes]:  # the case of a pass that makes it
        return ours
    known = [r for r in known if r not in ours]
    return ours + sorted(known, key=lambda r: r["since"])[-1:]


@cache
def reached():
    """(name, since) of a record -> how many cases reach it; and the types they run it with."""
    counts, types = defaultdict(int), defaultdict(set)
    for case in CASES:
        for record in records_of(case):
            key = record["name"], record["since"]
            counts[key] += 1
            types[key] |= set(case.dtypes)
    return counts, types


def untested():
    cases, _ = reached()
    return sorted(f"{r['name']} (since {r['since']})" for r in registry() if not cases[r["name"], r["since"]])


def render():
    cases, dtypes = reached()
    lines = [
        "# Operators",
        "",
        "Made by `python -m tests.ops.table` from the operator records and the case list. *Native* operators have a",
        "kernel; *composed* ones are written in terms of others when a graph is specialised. The types are those that",
        "the tests run.",
        "",
        "| operator | domain | since | types | gradient | runs as | cases |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in sorted(registry(), key=lambda r: (r["domain"], r["name"], r["since"])):
        key = r["name"], r["since"]
        columns = [
            r["name"],
            r["domain"] or "onnx",
            r["since"],
            ", ".join(d for d in ALL if d in dtypes[key]),
            "yes" if r["has_grad"] else "–",
            "native" if r["has_kernel"] else "composed",
            cases[key],
        ]
        lines.append("| " + " | ".join(map(str, columns)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(render())
    print(f"{PATH}: {len(registry())} operators, {len(CASES)} cases")
