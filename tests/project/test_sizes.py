"""Checks how long files and functions are, and that near-twins which became one stay one."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["csrc", "ortmodule", "optim", "tests", "benchmarks", "scripts", "examples"]
MOST_LINES, MOST_OF_A_FUNCTION, MOST_EXCEPTIONS = 600, 60, 10

PYTHON, C = {".py", ".pyi"}, {".c", ".h", ".cu", ".cuh"}
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {*PYTHON, *C, ".sh", ""} and path.is_file() and "corpus" not in path.parts
]
#: Functions that may be longer: each is one table.
LONG = {
    "tests/ops/test_size_limits.py:cases": "one row for each operator whose sizes may be too large",
    "tests/probe/common.py:_losses": "one row for each loss of torch's",
    "tests/probe/common.py:_products": "one row for each product of torch's",
    "tests/probe/common.py:_reductions": "one row for each reduction of torch's",
    "tests/probe/common.py:_shapes": "one row for each operator of torch's that changes a shape",
    "tests/probe/layers.py:layers": "one row for each layer of torch.nn",
}


def functions_of_python(text):
    """(name, lines) of each function, decorators aside."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.end_lineno - node.lineno + 1


#: The first line of a definition: a name at the begin of a line that is no statement of a file's own.
HEAD = re.compile(r"(?!typedef|else|return|extern \"C\")[A-Za-z_]")
HEAD_ENDS = re.compile(r"[{};]\s*(/\*.*\*/)?$")
#: The name of the function: a macro like KERNEL, which begins one, takes it.
NAME = re.compile(r"(?:KERNEL\w*\(|\b)(\w+)\s*[(,)]")


def functions_of_c(text):
    """(name, lines) of each function that stands at the begin of a line and ends with `}` there: macros aside, whose
    lines end with a backslash."""
    lines, skipped_to = text.splitlines(), 0
    for first, line in enumerate(lines):
        if first < skipped_to or not HEAD.match(line) or line.endswith("\\"):
            continue
        last = first  # of the head
        while not HEAD_ENDS.search(lines[last]) and "".join(lines[last + 1 : last + 2]).startswith(" "):
            last += 1
        head = " ".join(lines[first : last + 1])
        if not re.search(r"\)[^=()]*\{\s*(/\*.*\*/)?$", head) or "=" in head.partition("(")[0]:
            continue
        end = next((i for i in range(last, len(lines)) if lines[i].startswith("}")), len(lines) - 1)
        skipped_to = end + 1
        yield NAME.search(head)[1], end - first + 1


def functions_of(path):
    if path.suffix in PYTHON:
        return functions_of_python(path.read_text())
    return functions_of_c(path.read_text()) if path.suffix in C else ()


def test_no_file_is_too_long():
    found = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {name: lines for name, lines in found.items() if lines > MOST_LINES}


def test_no_function_is_too_long():
    found = {
        f"{path.relative_to(ROOT)}:{name}": lines
        for path in SOURCES
        for name, lines in functions_of(path)
        if lines > MOST_OF_A_FUNCTION
    }
    assert not found.keys() - LONG.keys(), found
    assert found.keys() == LONG.keys(), "an exception for a function that is not long"
    assert len(LONG) <= MOST_EXCEPTIONS and all(LONG.values())


LONG_C = """/* a.c -- a file. */
static const row TABLE[] = {
    {f(1)},
};
#define STEP(T) \\
    T step_##T(T x) { \\
        return x; \\
    }
STEP(float)
static bool short_one(int a) { return a; }
static void long_one(int a,
                     int b) {
    if (a) {
        b++;
    }
}
KERNEL(of_a_gpu, args) {
    FOR_EACH(i, a.n) {
    }
}
"""


def test_functions_of_c_are_found():
    assert dict(functions_of_c(LONG_C)) == {"long_one": 6, "of_a_gpu": 4}


def test_functions_of_python_are_found():
    assert dict(functions_of_python("def f():\n    def g():\n        return 1\n    return g\n")) == {"f": 4, "g": 2}


@pytest.mark.parametrize("suffix", sorted({*PYTHON, *C} - {".cuh", ".pyi"}))
def test_there_are_functions(suffix):
    """A pattern that finds none would let all pass."""
    assert sum(len(list(functions_of(path))) for path in SOURCES if path.suffix == suffix) > 50


# --- twins ------------------------------------------------------------------------------------------------------------

LEAST_OF_A_TWIN = 4  # lines


def bodies_of(text):
    """(name, parameters and statements without names of the function's own and docstring) of each longer function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 >= LEAST_OF_A_TWIN:
            statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield node.name, "\n".join(map(ast.unparse, [node.args, *statements]))


def test_no_function_stands_twice():
    found = {}
    for path in SOURCES:
        if path.suffix == ".py":
            for name, body in bodies_of(path.read_text()):
                found.setdefault(body, []).append(f"{path.relative_to(ROOT)}:{name}")
    assert not [twins for twins in found.values() if len(twins) > 1]


def test_twins_are_found():
    first = "def f(x):\n    y = x\n    y += 1\n    return y\n"
    second = 'def g(x):\n    """Other."""\n    y = x  # and a comment\n    y += 1\n    return y\n'
    assert {body for _, body in bodies_of(first)} == {body for _, body in bodies_of(second)} != set()
