"""Runs the subjects: `python -m tests.models [NAME...] [--write] [--again] [--page]`.

Without names: everything. A name may have wildcards; `--list` shows them. What was found with these very sources is
not run again unless `--again` says so. ``--write`` puts what was found into docs/models.md. Named ones are told about
in full: what was built, what it was given, and what PyTorch runs of it. ``--page`` runs nothing and writes the text
around the rows anew.
"""

import argparse
import difflib
import fnmatch
import os
import sys
from collections import Counter

from tests.models import processes, results, subjects, table
from tests.models.trial import UNBUILT, WRONG


def show(outcome, full=False):
    ran = "-" if outcome.state == UNBUILT else "engine" if outcome.captured else "PyTorch"
    print(f"{outcome.state:17}{ran:8}{outcome.name:34}{outcome.loss_off:8.0e}{outcome.grad_off:8.0e}"
          f"{outcome.seconds:7.1f} s  {outcome.reason}", flush=True)  # fmt: skip
    if full and outcome.tried and outcome.state not in (UNBUILT, WRONG):
        print("".join(f"    {line}\n" for line in details(outcome)), end="", flush=True)


def details(outcome):
    """Lines on what was tried and what ran it."""
    yield outcome.tried
    yield {
        "train": "compared in training: results, loss, all gradients and buffers, over three steps of two sizes",
        "eval": "it draws random numbers in training: compared in eval mode, with gradients",
        "verified": "it always draws random numbers: ORTMODULE_VERIFY compared it",
    }[outcome.mode]
    yield f"deviates by {outcome.loss_off:.0e} of the loss, and by at most {outcome.grad_off:.0e} of a gradient"
    if outcome.captured:
        yield f"the engine runs it: {outcome.exports} exported, {outcome.nodes} instructions in the last step"
        yield f"through PyTorch inside the graph: {', '.join(outcome.outside) or 'nothing'}"
    else:
        yield f"PyTorch runs it: {outcome.reason}"


def chosen(every, patterns, refuse):
    """The names that match; ``refuse(sentence)`` is told of a pattern that matches none."""
    for pattern in patterns:
        if not any(fnmatch.fnmatch(name, pattern) for name in every):
            near = difflib.get_close_matches(pattern.replace("-", "_").lower(), every, 3, 0.5)
            refuse(f"no model is called {pattern}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    return [name for name in every if not patterns or any(fnmatch.fnmatch(name, p) for p in patterns)]


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true", help="put them into docs/models.md")
    parser.add_argument("--again", action="store_true", help="run what is known, too")
    parser.add_argument("--list", action="store_true", help="only show the names")
    parser.add_argument("--page", action="store_true", help="only write docs/models.md anew")
    parser.add_argument("--workers", type=int, default=2, help="models at a time")
    parser.add_argument("--seconds", type=int, default=processes.SECONDS, help="limit for each")
    options = parser.parse_args()
    os.environ.setdefault("ORTMODULE_CAPTURE_SHARE", "inf")  # three steps pay for no second graph, as in tests
    every = subjects.names()
    names, full = chosen(every, options.names, parser.error), bool(options.names)
    if options.list:
        print("\n".join(names))
        return
    if options.page:
        table.write({}, every)
        return
    known = {} if options.again else results.known(names)
    for outcome in known.values():
        show(outcome, full)

    def report(outcome):
        show(outcome, full)
        results.keep(outcome)

    left = [name for name in names if name not in known]
    found = known | processes.run_all(left, options.workers, report, options.seconds)
    counts = Counter((outcome.state, outcome.captured) for outcome in found.values())
    print(
        ", ".join(f"{n} {state}{'' if captured else ' (PyTorch)'}" for (state, captured), n in sorted(counts.items()))
    )
    if options.write:
        table.write(found, every)
    sys.exit(any(outcome.state == "wrong" for outcome in found.values()))


if __name__ == "__main__":
    main()
