"""Checks the types of `ortmodule/` and `optim/` with mypy: ``python -m scripts.check_types [mypy's options]``.

mypy sees the tree as it is installed: `optim/` is `ortmodule.optim`. Its settings are in pyproject.toml.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VIEW = ROOT / "build" / "types"


def view() -> None:
    """A folder with the package as links, which mypy is run in."""
    package = VIEW / "ortmodule"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {path.name: path for path in (ROOT / "ortmodule").iterdir() if path.suffix != ".so"}
    wanted["optim"] = ROOT / "optim"
    for link in package.iterdir():
        if link.name not in wanted:
            link.unlink()
    for name, path in wanted.items():
        if not (package / name).is_symlink():
            (package / name).symlink_to(os.path.relpath(path, package))


def main(*options: str) -> int:
    """mypy's exit status."""
    view()
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "ortmodule"]
    return subprocess.run([*command, *options], cwd=VIEW).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
