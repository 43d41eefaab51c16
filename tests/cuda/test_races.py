"""The emulated GPU's own checks find kernels that are wrong: threads that race, results that depend on an order.

The kernels are compiled with the emulator into a program, so this needs no build but a C compiler. The engine's kernels
are looked at in a build with RACES=1 (`scripts/test races`).
"""

import os
import re
import subprocess

import pytest

from tests.cuda.nvidia import ROOT

PROGRAM = """
#include "cuda/kernels/kernel.h"
#include <stdio.h>

typedef struct wrong_args {
    int *x;
    int64_t count;
} wrong_args;

KERNEL(wrong, wrong_args) {
    SHARED(volatile int, kept, 64);
    const int t = threadIdx.x, block = blockIdx.x;
    (void)kept, (void)t, (void)block;
    %s
}

int main(void) {
    static int x[1024];
    const wrong_args a = {x, 1024};
    const char *why = "nothing";
    const int done = emulate(&wrong, 2, THREADS, &a, &why);
    printf("%%s\\n", done ? "done" : why);
    for (int i = 0; i < 130; i++) printf("%%d ", x[i]);
    return 0;
}
"""

RIGHT = {
    "neighbours, with a barrier": "kept[t] = t; __syncthreads(); a.x[64 * block + t] = kept[63 - t];",
    "a warp, with its barrier": """
        if (t < 32) kept[t] = t;
        __syncwarp();
        if (t < 32) a.x[32 * block + t] = kept[31 - t];""",
    "all read": "a.x[64 * block + t] = a.x[1000];",
    "bytes of one word": "((char *)a.x)[64 * block + t] = (char)t;",
    "shared memory of two blocks": "kept[t] = block; a.x[64 * block + t] = kept[t];",
    "one after the other": "for (int i = 0; i < 64; i++) { if (t == i) kept[0] = i; __syncthreads(); }",
    "an atomic": "atomicMax(&a.x[0], t);",
    "its own local memory": "volatile int own[4]; own[t % 4] = t; a.x[64 * block + t] = own[t % 4];",
}
#: With what is said of them. Which of two threads comes first is chance.
SHARED, GLOBAL = r"\w+ byte .* of shared memory, which ", r"\w+ byte .* of global memory, which "
WRITES_SHARED, WRITES = SHARED.replace(r"\w+", "writes"), GLOBAL.replace(r"\w+", "writes")
WRONG = {
    "a shuffle between": (
        "kept[t] = t; __shfl_sync(0, t, 0); a.x[64 * block + t] = kept[t ^ 1];",
        SHARED + r"thread \d+ has (written|read)",
    ),
    "a write and a read": (
        "kept[t] = t; a.x[64 * block + t] = kept[63 - t];",
        SHARED + r"thread \d+ has (written|read)",
    ),
    "two writes": ("kept[t / 2] = t;", WRITES_SHARED + r"thread \d+ has written"),
    "a read of all": (
        "int sum = kept[5]; __shfl_sync(0, t, 0); if (t == 5) kept[5] = sum;",
        WRITES_SHARED + "some threads has read",
    ),
    "two writes to global memory": ("a.x[64 * block + t / 2] = t;", WRITES + r"thread \d+ has written"),
    "two blocks": ("a.x[t] = block;", WRITES + "another block has written"),
    "what another block writes": (
        "a.x[64 * block + t] = 1; __syncthreads(); kept[t] = a.x[64 * (1 - block) + t];",
        GLOBAL + "another block has (written|read)",
    ),
    "what another block reads": (
        "kept[t] = a.x[64 * (1 - block) + t]; __syncthreads(); a.x[64 * block + t] = 1;",
        GLOBAL + "another block has (written|read)",
    ),
}


def run(tmp_path, body, looked_at=True, order=None):
    """What the emulator says of a kernel, and the numbers that it leaves."""
    (tmp_path / "kernel.c").write_text(PROGRAM % body)
    threads = 32 if "__syncwarp" in body else 64
    flags = [
        "gcc",
        f"-DTHREADS={threads}",
        "-std=gnu11",
        "-O1",
        "-w",
        "-DORT_DEVICE",
        f"-I{ROOT / 'csrc'}",
        f"-I{ROOT / 'tests/cuda'}",
    ]
    kernel = tmp_path / "kernel.o"
    watch = ["-fsanitize=thread"] if looked_at else []
    subprocess.run([*flags, *watch, "-c", tmp_path / "kernel.c", "-o", kernel], check=True)
    program = tmp_path / "program"
    emulator = [ROOT / "tests/cuda" / name for name in ("emulate.c", "races.c", "traffic.c")]
    subprocess.run([*flags, *emulator, kernel, "-o", program, "-lm"], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "EMULATED_ORDER"}
    if order is not None:
        environment["EMULATED_ORDER"] = str(order)
    said, numbers = subprocess.run([program], env=environment, capture_output=True, text=True, check=True).stdout.split(
        "\n", 1
    )
    return said, numbers


@pytest.mark.parametrize("name", RIGHT)
def test_what_does_not_race(tmp_path, name):
    assert run(tmp_path, RIGHT[name])[0] == "done"


@pytest.mark.parametrize("name", WRONG)
def test_what_races(tmp_path, name):
    """The kernel is named, the thread, the memory, and the other."""
    body, said = WRONG[name]
    found, _ = run(tmp_path, body)
    assert re.fullmatch(rf"a race in wrong: thread \d+ of block \d {said} \(at 0x[0-9a-f]+\)", found), found


def test_nothing_is_looked_at_otherwise(tmp_path):
    assert run(tmp_path, "kept[t / 2] = t;", looked_at=False)[0] == "done"


#: What is left depends on the thread that came last, and on the block.
LAST = {"thread": "a.x[block] = t;", "block": "a.x[t] = block;"}


@pytest.mark.parametrize("which", LAST)
def test_order_is_by_chance(tmp_path, which):
    """And the same whenever the number is; 0 is the order in which they are counted."""
    found = {order: run(tmp_path, LAST[which], False, order)[1] for order in range(8)}
    assert run(tmp_path, LAST[which], False, 3)[1] == found[3]
    assert run(tmp_path, LAST[which], False)[1] == found[1]
    counted = {"thread": "63 63", "block": "1 1"}
    assert found[0].startswith(counted[which])
    assert len(set(found.values())) > 1
