"""Reads the machine code of kernels (SASS), by NVIDIA's nvdisasm, and says what in it is slow."""

import re
import subprocess
from collections import Counter
from pathlib import Path

from tests.cuda.nvidia import needed, tool

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*(\S[^;]*?)\s*;")
ACCESS = re.compile(r"^(LD|ST)(G|L|)\b((?:\.\w+)*)")
DIVISION = re.compile(r"__cuda_sm\w+?_(?:div|rem)_[su]64")
#: In the name of a function where a division of 64 bits may be: it runs only where numbers have more than 32.
RARE = "wide_"


def functions(listing):
    """{kernel: [(label, instruction)]} of what nvdisasm says; the label is that of the function inside the kernel."""
    found, now, label = {}, None, ""
    for line in listing.splitlines():
        if line.startswith(".text."):
            now, label = found.setdefault(line[6:].rstrip(":"), []), ""
        elif now is not None and (match := re.match(r"^(\$?[\w$]+):", line)):
            label = match[1]
        elif now is not None and (match := INSTRUCTION.match(line)):
            now.append((label, match[1]))
    return found


def read(cubin):
    """As ``functions``, of a file."""
    (nvdisasm,) = needed(tool, "nvdisasm")
    done = subprocess.run([nvdisasm, cubin], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return functions(done.stdout)


def architectures(fatbin):
    """Those that a file has images for: [80, 90]."""
    (cuobjdump,) = needed(tool, "cuobjdump")
    done = subprocess.run([cuobjdump, "-lelf", Path(fatbin).resolve()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return sorted({int(number) for number in re.findall(r"\.sm_(\d+)\.cubin", done.stdout)})


def read_all(fatbin, folder, architecture):
    """As ``read``, of the image for this architecture in a file that has some."""
    (cuobjdump,) = needed(tool, "cuobjdump")
    done = subprocess.run(
        [cuobjdump, "-arch", f"sm_{architecture}", "-xelf", "all", Path(fatbin).resolve()],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (cubin,) = Path(folder).glob(f"*.sm_{architecture}.cubin")
    return read(cubin)


def pieces(code):
    """How many pieces of 16 bytes are read from global memory, and written to it: {"LD": n, "ST": n}."""
    counted = Counter()
    for _, text in code:
        if (match := ACCESS.match(text)) and match[2] != "L":
            widths = [int(n) for n in re.findall(r"\.(\d+)\b", match[3])]
            counted[match[1]] += max(widths, default=32) // 128
    return counted


def faults(code):
    """Sentences on what a kernel that streams through memory must not have."""
    found = Counter()
    for label, text in code:
        if re.match(r"(LDL|STL)\b", text):
            found["local memory is used"] += 1
        elif text.startswith("CALL") and DIVISION.search(text) and RARE not in label:
            found["a division of 64 bits"] += 1
        elif re.search(r"\b0x7fff\b", text) and re.match(r"(IADD3|VIADD|UIADD3)\b", text):
            found["16-bit floats are rounded by integer instructions"] += 1
    return sorted(found)
