"""Finds NVIDIA's headers, libraries and tools on this machine; a test skips where what it needs is missing.

No test needs them all; what is missing skips one.

They are looked for, in this order, in the folders of NVIDIA_PACKAGES (like PATH; each holds `nvidia` or `triton`), in
the environments of scripts/test-with (WITH_ENVIRONMENTS, `.venv-with`), among the installed packages, in a CUDA toolkit
(CUDA_HOME, /usr/local/cuda, or where `nvcc` is), and in the PATH. The packages are nvidia-cuda-nvrtc,
nvidia-cuda-runtime, nvidia-cuda-crt, nvidia-cublas, nvidia-cudnn-cu13, nvidia-nccl-cu13 and triton, which has the tools
that read machine code.
"""

import os
import shutil
import site
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@cache
def packages():
    """Folders of Python packages."""
    said = [Path(p) for p in os.environ.get("NVIDIA_PACKAGES", "").split(os.pathsep) if p]
    environments = ROOT / os.environ.get("WITH_ENVIRONMENTS", ".venv-with")
    made = sorted(environments.glob("*/lib/python3*/site-packages"), reverse=True)
    return [*said, *made, *map(Path, dict.fromkeys([*site.getsitepackages(), *sys.path]))]


def toolkit():
    """The folder of a CUDA toolkit, or None."""
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), *([Path(nvcc).resolve().parents[1]] if nvcc else [])]
    return next((Path(place) for place in places if Path(place, "include", "cuda.h").exists()), None)


def _first(patterns, more=()):
    for folder in packages():
        for pattern in patterns:
            if found := sorted(folder.glob(pattern)):
                return found[0]
    return next((path for path in more if path.exists()), None)


@cache
def include_folder(header):
    """The folder that has `header`, or None."""
    kit = toolkit()
    found = _first([f"nvidia/*/include/{header}"], [kit / "include" / header] if kit else [])
    return found.parents[header.count("/")] if found else None


@cache
def library(name):
    """The path of a shared library, or None."""
    return _first([f"nvidia/*/lib/{name}"])


@cache
def tool(name):
    """The path of a program, or None."""
    kit = toolkit()
    found = _first([f"triton/backends/nvidia/bin/{name}", f"nvidia/*/bin/{name}"], [kit / "bin" / name] if kit else [])
    return found or (Path(there) if (there := shutil.which(name)) else None)


def needed(find, *names):
    """What `find` finds of `names`; a test that calls this is skipped where one is missing."""
    found = [find(name) for name in names]
    missing = [name for name, path in zip(names, found, strict=True) if path is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)}: not on this machine (tests/cuda/nvidia.py says where it may be)")
    return found
