"""Says which tests the stages of scripts/test have run: one that none has run needs a known reason.

    python -m tests.stages [--full] FILE...    files of pytest's --ran and --resume; fails for tests that are missing

In a file of --ran a line is an outcome, a reason (of a test that has run its seconds) and a test; in one of --resume a
test that has passed. The tests that have taken longest are listed, too.
"""

import argparse
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

MOST = 20  # names that are shown of those that are missing for one reason
RAN, SKIPPED, COLLECTED = "ran", "skipped", "collected"
ONLY_FULL = "only with --full"

#: Why a test may be skipped in every stage: what it needs is not everywhere.
KNOWN = {
    r"a GPU is needed \(scripts/gpu\)": "run on a GPU only",
    r"deepspeed is not installed|could not import|it needs another library": "needs a package",
    r"there is no Chromium|there is no exact solver|the package triton": "needs a package",
    r"NVIDIA's NVRTC is not installed|: not on this machine": "needs a package",
    r"this CPU|no products of bfloat16|for AMX only|no kernel of ours is the best": "needs another CPU",
    r"no addresses for": "needs more addresses",
    r"PyTorch does not have it|PyTorch takes no|PyTorch itself does not|PyTorch has none": "needs another PyTorch",
    r"draws other numbers": "the pass does not keep the order of draws, so there is nothing to compare",
}


def known(full):
    reasons = dict(KNOWN)
    if not full:
        reasons[re.escape(ONLY_FULL)] = "run with --full"
    if shutil.which("nvcc") is None:
        reasons["a build with kernels"] = "needs nvcc"
    return reasons


class Ran:
    """Writes down what a run of pytest collects, runs and skips."""

    def __init__(self, path, left_out):
        self.path, self.left_out = Path(path), left_out  # those of a list of tests that this run does not take
        self.seconds = 0.0  # that the test has taken so far
        self.file = self.path.open("a", buffering=1)  # noqa: SIM115  (closed when the run ends)

    def pytest_unconfigure(self):
        self.file.close()

    def write(self, outcome, reason, test):
        self.file.write(f"{outcome}\t{' '.join(reason.split())}\t{test}\n")

    @pytest.hookimpl(tryfirst=True)  # before others leave any out
    def pytest_collection_modifyitems(self, items):
        left_out = self.left_out(items)
        for item in items:
            self.write(*((SKIPPED, ONLY_FULL) if item in left_out else (COLLECTED, "")), item.nodeid)

    def pytest_runtest_logreport(self, report):
        self.seconds = report.duration + (0 if report.when == "setup" else self.seconds)
        if not report.skipped or hasattr(report, "wasxfail"):
            if report.when == "call" or report.failed:
                self.write(RAN, f"{self.seconds:.2f}", report.nodeid)
        else:
            self.write(SKIPPED, str(report.longrepr[2]).removeprefix("Skipped: "), report.nodeid)


def missing(lines, full):
    """{reason: tests} of those that no stage has run, without a reason that is known; and how many have been run."""
    ran, reasons = set(), {}
    for line in lines:
        outcome, _, rest = line.rstrip("\n").partition("\t")
        reason, _, test = rest.partition("\t")
        if outcome == RAN or not rest:
            ran.add(test or outcome)
        else:
            reasons.setdefault(test, set()).update({reason} - {""})
    accepted = re.compile("|".join(known(full)))
    found = {}
    for test in sorted(reasons.keys() - ran):
        if not any(accepted.search(reason) for reason in reasons[test]):
            found.setdefault("; ".join(sorted(reasons[test])) or "no stage selects it", []).append(test)
    return found, len(ran)


def slowest(lines):
    """(seconds, test, cases) of the tests that took longest, all their cases together."""
    seconds, cases = Counter(), Counter()
    for line in lines:
        outcome, _, rest = line.rstrip("\n").partition("\t")
        if outcome == RAN and (took := rest.partition("\t")[0]):
            test = rest.partition("\t")[2].partition("[")[0]
            seconds[test] += float(took)
            cases[test] += 1
    return [(took, test, cases[test]) for test, took in seconds.most_common(MOST)]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args(arguments)
    lines = [line for file in options.files for line in file.read_text().splitlines()]
    found, ran = missing(lines, options.full)
    for reason, tests in found.items():
        print(f"{len(tests)} tests are run by no stage ({reason}):", *tests[:MOST], sep="\n  ")
    for took, test, cases in slowest(lines):
        print(f"{took:7.1f} s {test} ({cases} cases)")
    print(f"{ran} tests were run by a stage or more")
    return 1 if found or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
