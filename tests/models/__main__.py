"""python -m tests.models [NAME...] [--write] [--again]

Without names: everything. A name may have wildcards; `--list` shows them. What was found with these very sources is
not run again unless `--again` says so. ``--write`` puts what was found into docs/models.md.
"""

import argparse
import fnmatch
import sys
from collections import Counter

from tests.models import processes, results, subjects, table


def show(outcome):
    ran = "engine" if outcome.captured else "PyTorch"
    print(f"{outcome.state:17}{ran:8}{outcome.name:34}{outcome.loss_off:8.0e}{outcome.grad_off:8.0e}"
          f"{outcome.seconds:7.1f} s  {outcome.reason}", flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true", help="put them into docs/models.md")
    parser.add_argument("--again", action="store_true", help="run what is known, too")
    parser.add_argument("--list", action="store_true", help="only show the names")
    parser.add_argument("--seconds", type=int, default=processes.SECONDS, help="limit for each")
    options = parser.parse_args()
    every = subjects.names()
    names = [n for n in every if not options.names or any(fnmatch.fnmatch(n, p) for p in options.names)]
    if options.list:
        print("\n".join(names))
        return
    known = {} if options.again else results.known(names)
    for outcome in known.values():
        show(outcome)

    def report(outcome):
        show(outcome)
        results.keep(outcome)

    found = known | processes.run_all([n for n in names if n not in known], report=report, seconds=options.seconds)
    counts = Counter((outcome.state, outcome.captured) for outcome in found.values())
    print(
        ", ".join(f"{n} {state}{'' if captured else ' (PyTorch)'}" for (state, captured), n in sorted(counts.items()))
    )
    if options.write:
        table.write(found, every)
    sys.exit(any(outcome.state == "wrong" for outcome in found.values()))


if __name__ == "__main__":
    main()
