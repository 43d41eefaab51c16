"""Runs the probe: `python -m tests.probe [--dtype float32] [--few] [--write] [--page] [NAME...]`.

Without names: every entry. A name may have wildcards. ``--write`` puts what was found into docs/ops_torch.md;
``--page`` runs nothing and writes the text around the cells anew.
"""

import argparse
import fnmatch
import sys

import torch

from tests.probe import table, workers
from tests.probe.trial import FEW, names_of


def show(outcome):
    print(f"{outcome.state:9}{outcome.name:50}{outcome.native}/{outcome.samples}", flush=True)
    for text in outcome.wrong[:3]:
        print(f"         !! {text}")
    for reason, times in outcome.reasons.most_common(3):
        print(f"         {times} x {reason}")


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.probe", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--few", action="store_true", help=f"at most {FEW} samples of each entry")
    parser.add_argument("--write", action="store_true", help="put them into docs/ops_torch.md")
    parser.add_argument("--processes", type=int, default=2, help="entries at a time")
    parser.add_argument("--page", action="store_true", help="only write docs/ops_torch.md anew")
    options = parser.parse_args()
    if options.page:
        table.write({}, options.dtype)
        return
    names = [
        n
        for n in names_of(getattr(torch, options.dtype))
        if not options.names or any(fnmatch.fnmatch(n, p) for p in options.names)
    ]
    most = FEW if options.few else None
    outcomes = workers.probe_all(names, options.dtype, most, options.processes, report=show)
    states = [outcome.state for outcome in outcomes.values()]
    print(", ".join(f"{states.count(state)} {state}" for state in sorted(set(states))), f"of {len(states)}")
    if options.write:
        table.write(outcomes, options.dtype)
    sys.exit("wrong" in states)


if __name__ == "__main__":
    main()
