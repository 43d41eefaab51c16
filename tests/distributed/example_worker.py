"""Runs an example's module as one of several ranks, as torchrun would start it.

python -m tests.distributed.example_worker <rank> <file, not used> <port> <module> <argument> ...
"""

import os
import runpy
import sys

_, rank, _, port, module, *arguments = sys.argv
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
