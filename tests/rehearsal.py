"""Makes a machine for `scripts/gpu` that has no GPU.

A fresh clone, what travels beside it, and a Python without the packages of the project.

The interpreter is that of `torch-2.11.0-python3.12` in WITH_ENVIRONMENTS or .venv-with (scripts/test-with makes it), as
on the machine with the GPU; where it is not there, the one that runs the tests.
"""

import fnmatch
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

from ortmodule import _core

ROOT = Path(__file__).resolve().parents[1]
AS_THERE = "torch-2.11.0-python3.12"
#: What that machine may lack: names at the top of site-packages.
HIDDEN = ["ortmodule*", "__editable__*", "*.pth", "onnx*", "ml_dtypes*", "google", "protobuf*", "pytest*", "_pytest"]
HIDDEN += ["pluggy*", "iniconfig*", "pygments*", "hypothesis*", "_hypothesis*", "sortedcontainers*", "expecttest*"]

SITES = """
import json, sys
print(json.dumps([sys._base_executable, [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]]))
"""
FILES = """
import json, sys
from importlib.metadata import files
print(json.dumps([[str(f), str(f.locate())] for f in files(sys.argv[1])]))
"""


def script(root):
    """scripts/gpu of that tree as a module."""
    loader = SourceFileLoader("scripts_gpu", str(root / "scripts" / "gpu"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("scripts_gpu", loader))
    loader.exec_module(module)
    return module


def interpreter():
    """That of the machine, or None."""
    roots = [os.environ.get("WITH_ENVIRONMENTS"), ROOT / ".venv-with"]
    found = [Path(root) / AS_THERE / "bin" / "python" for root in roots if root]
    return next((str(python) for python in found if python.exists()), None)


def said(python, code, *arguments):
    command = [python, "-c", code, *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


class Rehearsal:
    """``clone``: of this tree as it is, with build/gpu. ``there``: what has travelled, and nothing else. ``python``:
    the interpreter there, which has torch and transformers; ``source``: the one whose they are."""

    def __init__(self, folder, source=None):
        self.source = source or interpreter() or sys.executable
        self.clone, self.there, self.out = folder / "clone", folder / "there", folder / "out"
        self._make_clone()
        self.script = script(self.clone)
        self._make_build()
        self.travelled = self.script.travels()
        for file in self.travelled:
            target = self.there / file.relative_to(self.clone)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
        self.python = self._make_python(folder / "python")

    def _make_clone(self):
        """With what is not committed yet."""
        subprocess.run(["git", "clone", "-q", ROOT, self.clone], check=True)
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        for name in names:
            target = self.clone / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy2(ROOT / name, target)
            else:
                target.unlink(missing_ok=True)

    def _make_build(self):
        """With the extension that is tested, in place of the one that nvcc makes."""
        package = self.script.BUILD / "ortmodule"
        package.mkdir(parents=True)
        for file in Path(_core.__file__).parent.glob("*.so*"):
            shutil.copy2(file, package)
        shutil.copytree(self.clone / "ortmodule", package, dirs_exist_ok=True)
        shutil.copytree(self.clone / "optim", package / "optim")
        (self.script.BUILD / "commit").write_text("a rehearsal\n")
        self.script.gather(self._fetch)

    def _fetch(self, name, folder):
        for relative, path in said(self.source, FILES, name):
            if not relative.startswith("..") and "backend/test/" not in relative:
                target = folder / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)

    def _make_python(self, folder):
        base, sites = said(self.source, SITES)
        subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        for entry in (entry for each in sites for entry in Path(each).iterdir()):
            if not any(fnmatch.fnmatch(entry.name, pattern) for pattern in HIDDEN) and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
        return str(folder / "bin" / "python")

    def run(self, *arguments, timeout=1000):
        """`scripts/gpu ARGUMENTS` there, on the CPU: the finished process."""
        away = ("ORTMODULE_", "PYTHON", "PYTEST_", "LD_PRELOAD")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(away)}
        command = [self.python, "scripts/gpu", *arguments, "--device", "cpu", "--results", str(self.out)]
        return subprocess.run(command, cwd=self.there, env=kept, capture_output=True, text=True, timeout=timeout)

    def lines(self, kind):
        return [r for r in map(json.loads, (self.out / "results.jsonl").read_text().splitlines()) if r["kind"] == kind]

    def said_in_log(self):
        log = self.out / "log"
        return log.read_text()[-6000:] if log.exists() else ""
