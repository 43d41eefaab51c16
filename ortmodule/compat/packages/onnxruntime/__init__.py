"""Stands for ONNX Runtime where it is not installed: only `onnxruntime.training` is here, and it is ortmodule."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("ortmodule")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name == "set_seed":
        from ortmodule.compat.seed import set_seed  # imports torch, which `import onnxruntime` is not to

        return set_seed
    raise AttributeError(f"onnxruntime.{name} is not here: this is ortmodule's stand-in, install onnxruntime for it")
