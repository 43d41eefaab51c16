"""Compiles kernels for GPUs that need not be there: run by test_compiled.py without the interpreter."""

import json
import sys

from ortmodule.triton_kernels import maker


def main():
    """Reads [program, how, width, architecture] from each line, and writes what the kernel is."""
    for line in sys.stdin:
        program, how, width, architecture = json.loads(line)
        kernel = maker.Maker().compile(program, how, 8, width, architecture)
        job = maker.job_of(program, how, width)
        found = {"bytes": len(kernel.cubin), "magic": kernel.cubin[:4].hex(), "threads": kernel.threads}
        print(json.dumps(found | {"arguments": len(job.arguments), "scratch": kernel.scratch, "shared": kernel.shared}))


if __name__ == "__main__":
    main()
