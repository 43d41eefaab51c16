"""Runs cases by name as one of several processes.

python -m tests.distributed.worker <rank> <file to meet in> <folder> <case> ...

Prints a line of JSON for each: its name, and what it returns or the error; before it a line that it begins.
"""

import datetime
import importlib
import json
import os
import sys
import traceback
import warnings

import torch
from torch import distributed

RANK, FILE, FOLDER, CASES = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
RANKS = int(os.environ["WORLD_SIZE"])


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    limit = datetime.timedelta(seconds=60)
    distributed.init_process_group("gloo", init_method=f"file://{FILE}", rank=RANK, world_size=RANKS, timeout=limit)
    for name in CASES:
        module, _, function = name.partition(":")
        error = None
        print("begins", name, flush=True)  # the last such line is of the case in which a process has died
        try:
            found = getattr(importlib.import_module(f"tests.distributed.{module}"), function)(RANK, FOLDER)
        except Exception as raised:
            found, error = traceback.format_exc(), raised
        print(json.dumps([name, found]), flush=True)
        if error is not None and not isinstance(error, AssertionError):
            break  # the other process may wait for this one
    os._exit(0)  # gloo's threads may outlive the group


main()
