"""Which of a kernel's clones is chosen: by the CPU, or by a cap in a test build (ORTMODULE_CPU, tests/cap.c).

Read from the process's memory: what the loader wrote where calls of cloned functions find them.
"""

import ctypes
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ortmodule import _core
from tests.cpu import BUILD, CLONES, IS_CAPPED

FILE = Path(_core.__file__)

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="this CPU has no clones"),
    pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer's build has no clones"),
    pytest.mark.skipif(shutil.which("readelf") is None, reason="it needs another library: binutils"),
]


def base():
    """Where the extension lies in memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, *_, path = line.split(maxsplit=5)
        if int(offset, 16) == 0 and path == str(FILE.resolve()):
            return int(span.partition("-")[0], 16)
    raise AssertionError(f"{FILE} is not in memory")


def readelf(option):
    return subprocess.run(["readelf", option, FILE], capture_output=True, text=True, check=True).stdout.splitlines()


def symbols():
    rows = [line.split() for line in readelf("-sW")]
    return [(int(row[1], 16), row[7].partition("@")[0]) for row in rows if len(row) == 8 and row[0][:-1].isdigit()]


def chosen():
    """The names of all clones that are called."""
    names = {}
    for address, name in symbols():
        names.setdefault(address, set()).add(name)
    start = base()
    slots = [int(line.split()[0], 16) for line in readelf("-rW") if "R_X86_64_IRELATIV" in line]
    assert slots
    found = [ctypes.c_uint64.from_address(start + slot).value - start for slot in slots]
    return [sorted(names[address])[0] for address in found]


def expected():
    if IS_CAPPED:
        return CLONES[BUILD]
    flags = set(re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)[1].split())
    wide = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags
    return "arch_x86_64_v4" if wide else "arch_x86_64_v3" if {"avx2", "fma", "bmi2", "movbe"} <= flags else "default"


def test_clones():
    """Every kernel that has clones runs as the one of this CPU, or of the cap."""
    wrong = [name for name in chosen() if expected() not in name]
    assert not wrong


def test_features():
    """What __builtin_cpu_supports reads: bits 10 and 15 are AVX2 and AVX-512F."""
    (address,) = (address for address, name in symbols() if name == "__cpu_model")
    features = ctypes.c_uint32.from_address(base() + address + 12).value
    has = {"avx2": bool(features >> 10 & 1), "avx512f": bool(features >> 15 & 1)}
    best = expected()
    assert has == {"avx2": best != "default", "avx512f": best == "arch_x86_64_v4"}
