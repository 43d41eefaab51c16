"""Provides the import names of ONNX Runtime's ORTModule, for scripts that use them.

``python -m ortmodule.compat enable`` makes ``onnxruntime.training.ortmodule``, ``onnxruntime.training.optim`` and
``torch_ort`` importable, whether an ``onnxruntime`` is installed or not; ``disable`` undoes it, ``status`` tells.

Two small files in site-packages do it, and nothing else is touched: a ``.pth`` file, which Python reads when it starts,
and a finder that looks for these names in the folder ``packages`` here, after every other place. An installed
``onnxruntime`` therefore stays what it is, and only gets the part that it lacks.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

from ortmodule.core.errors import CompatError
from ortmodule.core.safe_files import write_whole

MARK = "# made by python -m ortmodule.compat; python -m ortmodule.compat disable removes it"
FINDER = f'''{MARK}
"""Finds the import names of ONNX Runtime's ORTModule in ortmodule, after all other places."""

import os
import sys
from importlib.machinery import PathFinder


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in ("onnxruntime", "onnxruntime.training", "torch_ort"):
            return None
        ours = PathFinder.find_spec("ortmodule")
        if ours is None or not ours.submodule_search_locations:
            return None
        folder = os.path.join(ours.submodule_search_locations[0], "compat", "packages")
        return PathFinder.find_spec(name, [os.path.join(folder, *name.split(".")[:-1])])


if not any(getattr(finder, "__module__", "") == __name__ for finder in sys.meta_path):
    sys.meta_path.append(Finder)
'''
FILES = {
    "ortmodule_compat_finder.py": FINDER,
    "ortmodule_compat.pth": f"{MARK}\nimport ortmodule_compat_finder\n",
}


def site() -> Path:
    """The folder that Python reads `.pth` files from."""
    return Path(sysconfig.get_path("purelib"))


def _is_ours(file: Path) -> bool:
    try:
        return file.read_text(encoding="utf-8").startswith(MARK)
    except UnicodeDecodeError:
        return False


def enable(folder: Path) -> None:
    """Writes the two files. Raises CompatError when that cannot be, with nothing changed."""
    for name in FILES:
        if (folder / name).exists() and not _is_ours(folder / name):
            raise CompatError(f"{folder / name} is there already, and was not made by this command")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CompatError(f"the folder {folder} cannot be written")
    found = official()
    if found is not None and (found.parent / "training").exists():
        raise CompatError(f"the onnxruntime in {found.parent} has a training package of its own: uninstall it first")
    for name, text in FILES.items():
        write_whole(folder / name, text.encode())


def disable(folder: Path) -> list[str]:
    """Removes what `enable` wrote; returns the names. Raises CompatError for files that are not ours."""
    for name in FILES:
        if (folder / name).exists() and not _is_ours(folder / name):
            raise CompatError(f"{folder / name} was not made by this command, so it stays")
    removed = [name for name in FILES if (folder / name).exists()]
    for name in removed:
        (folder / name).unlink()
    return removed


def enabled(folder: Path) -> bool:
    """Are both files there, and current?"""
    files = [(folder / name, text) for name, text in FILES.items()]
    return all(file.exists() and file.read_text(encoding="utf-8") == text for file, text in files)


def official() -> Path | None:
    """The `__init__.py` of an installed onnxruntime, or None."""
    spec = PathFinder.find_spec("onnxruntime")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def describe(folder: Path) -> str:
    """What is so, in a few lines."""
    found = official()
    uses = None
    if enabled(folder) and found is None:
        with suppress(ModuleNotFoundError):  # this process may have started before
            uses = importlib.util.find_spec("onnxruntime.training")
    lines = [
        f"{'enabled' if enabled(folder) else 'disabled'} in {folder}",
        f"onnxruntime: {'not installed' if found is None else f'installed in {found.parent}'}",
    ]
    if uses is not None:
        lines.append(f"onnxruntime.training comes from {uses.origin}")
    return "\n".join(lines)
