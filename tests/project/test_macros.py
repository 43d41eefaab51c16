"""Checks how long macros are: neither a debugger nor a sanitizer sees into one."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["csrc/cuda"]
MOST_LINES, MOST_EXCEPTIONS = 20, 10
#: Macros that may be longer.
LONG = {
    "csrc/cuda/host/driver.c:DRIVER_FUNCTIONS": "one row for each function of the driver",
    "csrc/cuda/kernels/steps.h:FLOAT_OPERATORS": "one row for each pointwise operator",
    "csrc/cuda/libraries/dnn_conv.c:CONV_FUNCTIONS": "one row for each function of cuDNN's",
}


def macros_of(text):
    """(name, lines) of each macro of more than one line."""
    lines = text.splitlines()
    for first, line in enumerate(lines):
        if line.startswith("#define ") and line.endswith("\\"):
            last = next(i for i in range(first, len(lines)) if not lines[i].endswith("\\"))
            yield line.split()[1].partition("(")[0], last - first + 1


def test_no_macro_is_too_long():
    found = {
        f"{path.relative_to(ROOT)}:{name}": lines
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.[ch]*"))
        for name, lines in macros_of(path.read_text())
        if lines > MOST_LINES
    }
    assert not found.keys() - LONG.keys(), found
    assert found.keys() == LONG.keys(), "an exception for a macro that is not long"
    assert len(LONG) <= MOST_EXCEPTIONS and all(LONG.values())


def test_macros_are_found():
    text = "#define ONE 1\n#define TWO(x) \\\n    do { \\\n    } while (x)\nint a;\n#define THREE \\\n    3\n"
    assert dict(macros_of(text)) == {"TWO": 3, "THREE": 2}
