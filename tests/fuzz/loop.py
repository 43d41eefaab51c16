"""Runs fuzz targets in Python in a loop: a case is a number, from which everything is drawn.

It raises what is wrong, and returns why it compares nothing, if so.

A folder holds what goes on: `next`, the number of the next case; `running`, the case that runs, which stays there when
the process dies; `crash-N`, what case N said.
"""

import argparse
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path


def numbers_in(path):
    """Of a corpus: a number a line, and behind it what it is about."""
    return [int(line.split()[0]) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def run_case(case, number):
    """(what was wrong, or None; why nothing was compared, or None)"""
    try:
        return None, case(random.Random(number))
    except Exception:
        return traceback.format_exc(), None


def run(case, corpus, folder, seconds, runs, only=()):
    folder.mkdir(parents=True, exist_ok=True)
    began, count, crashes, next_file = time.monotonic(), 0, 0, folder / "next"
    skipped = Counter()
    kept, at = list(only) or numbers_in(corpus), int(next_file.read_text()) if next_file.exists() else 1 << 20
    while kept or (not only and (runs and count < runs or seconds and time.monotonic() - began < seconds)):
        number = kept.pop(0) if kept else at
        (folder / "running").write_text(str(number))
        if number == at:
            at += 1
            next_file.write_text(str(at))
        said, why = run_case(case, number)
        if why is not None:
            skipped[why] += 1
        if said is not None:
            (folder / f"crash-{number}").write_text(said)
            print(f"case {number}:\n{said}", file=sys.stderr)
            crashes += 1
        count += 1
    (folder / "running").unlink(missing_ok=True)
    for why, times in skipped.most_common():
        print(f"{times} {why}")
    print(f"{count} executions in {time.monotonic() - began:.0f} seconds, {crashes} crashes")
    return 1 if crashes else 0


def main(case, name, description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="only these cases")
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--runs", type=int, default=0, help="beside the corpus")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz") / name)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    corpus = Path(__file__).parent / "corpus" / name
    return run(case, corpus, options.folder, options.seconds, options.runs, options.numbers)
