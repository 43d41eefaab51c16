"""Provides the import names of ONNX Runtime's ORTModule, for scripts that use them.

``python -m ortmodule.compat enable`` makes ``onnxruntime.training``, ``torch_ort`` and the trainers of
``optimum.onnxruntime`` importable, whether an ``onnxruntime`` or an ``optimum`` is installed or not; ``disable`` undoes
it, ``status`` tells.

Two small files in site-packages do it, and nothing else is touched: a ``.pth`` file, which Python reads when it starts,
and a finder that looks for these names in the folder ``packages`` here, after every other place. An installed
``onnxruntime`` therefore stays what it is, and only gets the part that it lacks. An ``optimum.onnxruntime`` that is
installed and has no trainers gets these names.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

from ortmodule.core.errors import CompatError as CompatError
from ortmodule.core.settings.safe_files import write_whole

MARK = "# made by python -m ortmodule.compat; python -m ortmodule.compat disable removes it"
FINDER = f'''{MARK}
"""Finds the import names of ONNX Runtime's ORTModule and of Optimum's trainers in ortmodule, after all other places."""

import os
import sys
from importlib.machinery import PathFinder

OPTIMUM = "optimum.onnxruntime"
TRAINERS = ("ORTTrainer", "ORTTrainingArguments", "ORTSeq2SeqTrainer", "ORTSeq2SeqTrainingArguments")


def spec_of_ortmodule():
    from importlib.util import find_spec  # also one that is installed to be edited

    return find_spec("ortmodule")


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in ("onnxruntime", "onnxruntime.training", "torch_ort", "optimum", OPTIMUM):
            return None
        ours = spec_of_ortmodule()
        if ours is None or not ours.submodule_search_locations:
            return None
        folder = os.path.join(ours.submodule_search_locations[0], "compat", "packages")
        return PathFinder.find_spec(name, [os.path.join(folder, *name.split(".")[:-1])])


class TrainersFinder:
    """Of an Optimum that is installed: what it has, and the trainers where it has none."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != OPTIMUM:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None and spec_of_ortmodule() is not None:
            spec.loader = Loader(spec.loader)
        return spec


class Loader:
    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        found = sys.modules.get(module.__name__, module)
        original = found.__getattr__ if hasattr(found, "__getattr__") else None

        def attribute(name):
            if original is not None:
                try:
                    return original(name)
                except (AttributeError, ImportError, RuntimeError):
                    if name not in TRAINERS:
                        raise
            if name in TRAINERS:
                import ortmodule.hf

                return getattr(ortmodule.hf, name)
            raise AttributeError(f"module {{found.__name__!r}} has no attribute {{name!r}}")

        found.__class__ = type("Module", (type(found),), {{"__getattr__": lambda module, name: attribute(name)}})


if not any(getattr(finder, "__module__", "") == __name__ for finder in sys.meta_path):
    sys.meta_path.append(Finder)
    sys.meta_path.insert(0, TrainersFinder)
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


def compiled(folder: Path) -> list[Path]:
    """What Pythons that have started meanwhile have made of the finder."""
    stems = [Path(name).stem for name in FILES if name.endswith(".py")]
    return sorted(path for stem in stems for path in (folder / "__pycache__").glob(f"{stem}.*.pyc"))


def disable(folder: Path) -> list[str]:
    """Removes what `enable` wrote, and what Python has compiled of it; returns the names of the former.

    Raises CompatError for files that are not ours."""
    for name in FILES:
        if (folder / name).exists() and not _is_ours(folder / name):
            raise CompatError(f"{folder / name} was not made by this command, so it stays")
    removed = [name for name in FILES if (folder / name).exists()]
    for path in [*(folder / name for name in removed), *compiled(folder)]:
        path.unlink(missing_ok=True)
    with suppress(OSError):  # others have files there, or it is not there
        (folder / "__pycache__").rmdir()
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
