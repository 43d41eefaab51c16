"""Keeps exported graphs on disk (``ORTMODULE_CACHE_DIR``).

What forward does is found out by tracing it, in every run anew: its code may depend on anything, so nothing less says
what it does now. What is kept is the work that follows, the export. Its key is all that goes in: the trace itself, with
every constant, type, shape, name and scope (the model's code and configuration, its parameters' types and shapes, and
what Python decided are in there), the opset, which sizes vary, torch's modes, the versions, and the source of what
exports. A graph with a Python function in it, and one with translations that user code registered, is not kept.

A file appears whole or not at all, and carries the checksum of its content; one that is damaged, or that another user
may have written (``safe_files``), is made again. A folder that others can write is refused where the setting is read.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import onnx
import torch

from ortmodule import _core
from ortmodule.capture.trace_record import Trace
from ortmodule.core import devices
from ortmodule.core.errors import Uncacheable
from ortmodule.core.logger import warn_once
from ortmodule.core.names import PACKAGE
from ortmodule.core.settings import safe_files
from ortmodule.core.torch_private import symbolic_registry
from ortmodule.lowering import export

MAGIC = b"ortmodule graph 1\n"
#: Kinds of nodes whose meaning is an object of this process.
_OBJECTS = {"ortmodule::call", "prim::PythonOp", "prim::CallFunction", "prim::CallMethod"}


class _Current(threading.local):
    cache: Cache | None = None


_current = _Current()


@contextmanager
def using(cache: Cache | None) -> Iterator[None]:
    """Inside, in this thread, exports go through ``cache``."""
    before, _current.cache = _current.cache, cache
    try:
        yield
    finally:
        _current.cache = before


def exported(trace: Trace, varied: frozenset, opset: int) -> onnx.ModelProto:
    """``trace`` as ONNX, from the cache if there is one that has it. Raises ExportError. Consumes the trace's graph."""

    def make() -> onnx.ModelProto:
        return export.export(trace.graph, trace.outputs, trace.module, trace.tensors, varied, opset)

    if _current.cache is None:
        return make()
    try:
        key = _key(trace, varied, opset)
    except Uncacheable as reason:
        warn_once(f"a graph is not kept in {_current.cache.folder}, so the next process exports it again: {reason}")
        return make()
    model = _current.cache.get(key)
    if model is None:
        model = make()
        _current.cache.put(key, model)
    return model


def _content(data: bytes) -> bytes:
    """What a file holds. Raises ValueError unless it is whole."""
    head = len(MAGIC) + hashlib.sha256().digest_size
    content = data[head:]
    if data[:head] != MAGIC + hashlib.sha256(content).digest():
        raise ValueError("it is damaged")
    return content


class Cache:
    """The graphs in one folder."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.hits = self.misses = 0
        _core.cuda_chains(str(self.folder))

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.graph"

    def get(self, key: str) -> onnx.ModelProto | None:
        """The graph with this key, or None."""
        file = self._file(key)
        try:
            content = _content(safe_files.read_private(file))
        except FileNotFoundError:
            content = None
        except (OSError, ValueError) as error:
            warn_once(f"{file} cannot be used, so the graph is exported again: {error}")
            content = None
        if content is None:
            self.misses += 1
            return None
        self.hits += 1
        return onnx.load_model_from_string(content)

    def put(self, key: str, model: onnx.ModelProto) -> None:
        content = model.SerializeToString()
        try:
            safe_files.write_whole(self._file(key), MAGIC + hashlib.sha256(content).digest() + content, private=True)
        except OSError as error:  # a full disk is no reason to stop a training
            warn_once(f"the graph cannot be kept in {self.folder}, so the next process exports it again: {error}")


# --- the key ----------------------------------------------------------------------------------------------------------


class _Hash:
    """A digest of values, each with its type and length, so that no two sequences of them are alike."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def add(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.add((str(value.dtype), tuple(value.shape), str(value.device)))
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if isinstance(value, (tuple, list)):
            self.digest.update(f"{len(value)} values\n".encode())
            for part in value:
                self.add(part)
            return
        data = value if isinstance(value, bytes) else repr(value).encode()
        if b" at 0x" in data and not isinstance(value, (bytes, str)):
            raise Uncacheable(f"it holds an object of Python ({type(value).__name__})")
        self.digest.update(f"{type(value).__name__} {len(data)}\n".encode() + data)


def _key(trace: Trace, varied: frozenset, opset: int) -> str:
    if any(group._functions._overrides for group in symbolic_registry._registry.values()):
        raise Uncacheable("translations of operators are registered in this process that are not torch's own")
    digest = _Hash()
    digest.add(_versions())
    digest.add((opset, sorted(varied), trace.module.training, *_modes()))
    for name, tensor in trace.module.state_dict(keep_vars=True).items():
        digest.add((name, str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad))
    for tensors in (trace.tensors, trace.outputs):
        digest.add([(str(t.dtype), tuple(t.shape), t.requires_grad) for t in tensors])
    digest.add(str(trace.graph))
    _add_nodes(digest, trace.graph)
    return digest.digest.hexdigest()


def _add_nodes(digest: _Hash, block: Any) -> None:
    """What the printed graph shortens or leaves out."""
    for node in block.nodes():
        if node.kind() in _OBJECTS:
            raise Uncacheable(f"it calls a function of Python ({node.kind()})")
        digest.add((node.kind(), node.scopeName()))
        for name in node.attributeNames():
            kind = node.kindOf(name)
            if kind in ("g", "gs"):
                raise Uncacheable(f"its {node.kind()} has a graph inside")
            value = node.output().toIValue() if kind == "ival" else getattr(node, kind)(name)
            digest.add((name, kind, str(value) if kind in ("ty", "tys") else value))
        for inner in node.blocks():
            _add_nodes(digest, inner)


def _modes() -> tuple:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        devices.autocast(),
        torch.get_deterministic_debug_mode(),
    )


@functools.cache
def _versions() -> tuple:
    """What exports: the versions of others, and our own source."""
    own = [file.read_bytes() for file in sorted(Path(PACKAGE).rglob("*.py"))]
    return (
        sys.version_info[:3],
        torch.__version__,
        torch.version.git_version,
        onnx.__version__,
        numpy.__version__,
        own,
    )
