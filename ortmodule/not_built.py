"""Explains an ImportError of the compiled extension, ortmodule._core: it is not there or does not load."""

from pathlib import Path


def sentence(reason: ImportError) -> str:
    """Why the compiled part is not there, and how to build it."""
    folder = Path(__file__).resolve().parent
    others = sorted(file.name for file in folder.glob("_core.*"))
    if not others:
        found = f"ortmodule is not built: its compiled part, ortmodule._core, is missing from {folder}."
    elif isinstance(reason, ModuleNotFoundError):
        found = f"ortmodule is not built for this Python: {folder} has {', '.join(others)}, of another platform."
    else:
        found = f"ortmodule's compiled part does not load: {reason}."
    tree = folder.parent
    if not (tree / "setup.py").exists():
        return f"{found} Install ortmodule again from its source tree: `pip install .`"
    return (
        f"{found} In {tree} build it by `python setup.py build_ext --inplace`, or build and install it by "
        "`pip install -e . --no-build-isolation`. On Debian a build needs the packages gcc, python3-dev, "
        "protobuf-c-compiler and libprotobuf-c-dev. If ortmodule is installed already, start Python in another folder: "
        "this source tree comes before it."
    )
