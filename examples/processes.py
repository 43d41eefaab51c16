"""Starts a module of the examples on several processes with `torchrun`, and reads what they print."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys


def run(module, given, processes, limit, options=(), **environment):
    """What `python -m <module> <given>` prints on so many ``processes`` of this machine, all together. ``limit``:
    seconds; ``options``: of torchrun. Raises RuntimeError with what they printed where one of them ends with an error,
    and TimeoutExpired; no process is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen([*command, "-m", module, *given], env=os.environ | environment, **pipes) as started:
        try:
            text, _ = started.communicate(timeout=limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    if started.returncode:
        raise RuntimeError(f"{module} on {processes} processes ended with {started.returncode}:\n{text[-3000:]}")
    return text


def rows(module, given, processes, limit, **environment):
    """What the ranks print as JSON, each with its "rank" first, in the order of these."""
    text, read = run(module, given, processes, limit, **environment), json.JSONDecoder()
    # Two ranks may print on one line.
    found = [read.raw_decode(text, match.start())[0] for match in re.finditer(r'\{"rank":', text)]
    return sorted(found, key=lambda row: row["rank"])
