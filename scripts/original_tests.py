"""Runs ONNX Runtime's own tests of its ORTModule against the compatible names, and counts what came of each file.

    python -m scripts.original_tests ~/onnxruntime/orttraining/orttraining/test/python

The folder is that of a checkout (git clone --depth 1 https://github.com/microsoft/onnxruntime); nothing of it is in
this repository. Its tests are copied, and "cuda" in them becomes "cpu". What is private to the original, needs a GPU or
another library is told apart by rule (scripts/original_plugin.py). Figures go to <out>/original.json.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("passed", "failed", "private", "CUDA", "library", "time", "skipped")
#: Those of the names that scripts import, and of what these promise.
FILES = (
    "orttraining_test_ortmodule_api", "orttraining_test_ortmodule_autograd", "orttraining_test_ortmodule_onnx_ops",
    "orttraining_test_ortmodule_fallback", "orttraining_test_ortmodule_hooks",
    "orttraining_test_ortmodule_experimental_json_config", "orttraining_test_hierarchical_ortmodule",
    "orttraining_test_experimental_gradient_graph", "orttraining_test_sampler",
)  # fmt: skip


def copied(source, target):
    """The tests, for a machine without a GPU."""
    for path in source.iterdir():
        if path.suffix == ".py" and path.name != "conftest.py":
            text = re.sub(r"""(["'])cuda(:\d+)?\1""", '"cpu"', path.read_text(encoding="utf-8"))
            (target / path.name).write_text(text.replace(".cuda()", ".cpu()"), encoding="utf-8")
        elif path.suffix == ".json":
            (target / path.name).write_bytes(path.read_bytes())


def run(folder, name, chosen, limit):
    """{test: (kind, what was said)} of one file; if it was stopped, the file itself is one that failed."""
    results = folder / f"{name}.results.json"
    environment = os.environ | {"ORIGINAL_RESULTS": str(results)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    line = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "scripts.original_plugin", "-p"]
    line += ["no:cacheprovider", f"{name}.py", *(["-k", chosen] if chosen else [])]
    try:
        done = subprocess.run(line, cwd=folder, env=environment, timeout=limit, capture_output=True, text=True)
        stopped = "" if done.returncode in (0, 1) else f"pytest ended with {done.returncode}: {done.stdout[-600:]}"
    except subprocess.TimeoutExpired:
        stopped = f"stopped after {limit} s"
    tests = json.loads(results.read_text()) if results.exists() else {}
    return tests | ({f"{name}.py": ("failed", stopped)} if stopped else {})


def table(found):
    """Rows of Markdown: a file and how many tests of each kind, then all of them."""
    rows = [f"| file | {' | '.join(KINDS)} |", f"| --- | {' | '.join(['---:'] * len(KINDS))} |"]
    together = Counter()
    for name, tests in found.items():
        counts = Counter(kind for kind, _ in tests.values())
        together += counts
        rows.append(f"| `{name}.py` | {' | '.join(str(counts[kind]) for kind in KINDS)} |")
    return "\n".join([*rows, f"| all | {' | '.join(str(together[kind]) for kind in KINDS)} |"])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the original's tests")
    parser.add_argument("files", nargs="*", help="of these alone, without .py")
    parser.add_argument("-k", dest="chosen", help="as of pytest")
    parser.add_argument("--limit", type=int, default=3600, help="seconds for a file")
    parser.add_argument("--out", type=Path, default=Path("results"))
    given = parser.parse_args(arguments)
    found = {}
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copied(given.folder, Path(folder))
        for name in given.files or FILES:
            found[name] = run(Path(folder), name, given.chosen, given.limit)
            (given.out / "original.json").write_text(json.dumps(found, indent=1))
            for test, (kind, said) in found[name].items():
                if kind == "failed":
                    print(f"{test}: {said}", flush=True)
    print(table(found))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
