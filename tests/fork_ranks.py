"""Imports PyTorch and what else is named once, then forks the ranks that run one script or module.

python -m tests.fork_ranks <ranks> <folder for what each prints> <module,module> <script.py or module> <argument> ...

The rank is each one's first argument, before those that are given. Importing takes a rank of a small test longer than
the test. Nothing that is imported may start a thread or a process: it would not be there behind the fork.
"""

import faulthandler
import importlib
import os
import runpy
import sys
import traceback
from pathlib import Path


def run(rank, folder, what, arguments):
    """Becomes this rank, and ends the process."""
    file = os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()  # a signal that ends this rank leaves the stacks of its threads there
    sys.argv = [what, str(rank), *arguments]
    code = 1
    try:
        if what.endswith(".py"):
            sys.path[0] = str(Path(what).parent)
            runpy.run_path(what, run_name="__main__")
        else:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what the parent registered to be done at its end is the parent's


def main():
    ranks, folder, modules, what, *arguments = sys.argv[1:]
    for module in filter(None, modules.split(",")):
        importlib.import_module(module)
    children = []
    for rank in range(int(ranks)):
        child = os.fork()
        if child == 0:
            run(rank, Path(folder), what, arguments)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(codes)
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
