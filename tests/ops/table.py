"""What the cases cover: docs/ops.md, from the case list and the operator records.

    python -m tests.ops.table        writes docs/ops.md

A case belongs to the newest record of its operator that is not newer than its opset. Operators of our own domain
have no cases: they are reached through gradients and passes, so they are looked for in the plans of all cases.
"""

from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.ops.cases import ALL, CASES
from tests.ops.harness import gradient_plan

PATH = Path(__file__).parents[2] / "docs" / "ops.md"


@cache
def registry():
    from ortmodule import _core

    return _core.operators()


@cache
def reached():
    """(name, since) of a record -> the cases that reach it, and the types they run it with."""
    newest = defaultdict(dict)
    for record in registry():
        newest[record["name"]][record["since"]] = record
    cases, dtypes = defaultdict(int), defaultdict(set)
    for case in CASES:
        plans = set(gradient_plan(case, case.dtypes[0]).operators)
        own = [since for since, r in newest[case.op].items() if not r["domain"] and since <= case.opset]
        keys = {(case.op, max(own))} if own else set()
        keys |= {(name, since) for name in plans for since, r in newest[name].items() if r["domain"]}
        for key in keys:
            cases[key] += 1
            dtypes[key] |= set(case.dtypes)
    return cases, dtypes


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
