"""Starts a module on several processes, with `torchrun`, and reads what they print.

A module that measures something on each of them is its own worker::

    processes.add_arguments(parser)
    args = parser.parse_args(given)
    if args.worker:
        processes.work(args, lambda rank: {"loss": ...})  # ends the process
    found = processes.rows("examples.mine.train", given, args.processes, args.limit)
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import torch
from torch import distributed


def add_arguments(parser, seconds=3600):
    """``seconds``: that the processes may take."""
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--limit", type=float, default=seconds, help="seconds for the processes")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def work(args, measure, gpus=False):
    """One of the processes: prints what ``measure(rank)`` returns, a dictionary, as :func:`rows` reads it, and ends.
    ``gpus``: each has one, where there are some, and they communicate by NCCL."""
    torch.set_num_threads(args.threads)
    on_gpus = gpus and torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if on_gpus else "gloo")
    rank = distributed.get_rank()
    print(json.dumps({"rank": rank, **measure(rank)}), flush=True)
    os._exit(0)  # gloo's threads may outlive their group


def run(module, given, processes, limit, options=(), **environment):
    """What `python -m <module> <given>` prints on so many ``processes`` of this machine; ``options``: of torchrun. The
    rest is as of :func:`printed`."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *options]
    return printed([*start, "-m", module, *given], limit, **environment)


def printed(command, limit, **environment):
    """What a command prints that starts processes. ``limit``: seconds. Raises RuntimeError with what was printed where
    it ends with an error, and TimeoutExpired; no process is left."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=os.environ | environment, start_new_session=True, **pipes) as started:
        try:
            text, _ = started.communicate(timeout=limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    if started.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {started.returncode}:\n{text[-3000:]}")
    return text


def rows(module, given, processes, limit, **environment):
    """What the ranks print as JSON, each with its "rank" first, in the order of these."""
    text, read = run(module, given, processes, limit, **environment), json.JSONDecoder()
    # Two ranks may print on one line.
    found = [read.raw_decode(text, match.start())[0] for match in re.finditer(r'\{"rank":', text)]
    return sorted(found, key=lambda row: row["rank"])
