"""Keeps what was found with the present sources in build/models, where a stopped run goes on."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import torch
import transformers

from tests.models.trial import Outcome

ROOT = Path(__file__).parents[2]


@functools.cache
def _folder():
    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for part in ("csrc", "ortmodule", "tests/models"):
        for path in sorted((ROOT / part).rglob("*.*")):
            if path.suffix in (".py", ".c", ".h"):
                digest.update(path.read_bytes())
    return ROOT / "build" / "models" / digest.hexdigest()[:16]


def known(names):
    """{name: outcome} of those that are known."""
    paths = {name: _folder() / f"{name}.json" for name in names}
    return {name: Outcome(**json.loads(path.read_text())) for name, path in paths.items() if path.exists()}


def keep(outcome):
    _folder().mkdir(parents=True, exist_ok=True)
    (_folder() / f"{outcome.name}.json").write_text(json.dumps(dataclasses.asdict(outcome)))
