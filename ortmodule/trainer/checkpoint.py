"""Writes and reads checkpoints: one file, which is whole or not there."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ortmodule.core.errors import ArgumentError, ArgumentTypeError, MissingFileError
from ortmodule.core.settings.safe_files import replacing

FORMAT = "ortmodule trainer 1"


def write(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Puts ``state`` into the file at ``path`` at once: until then what was there stays. Raises OSError.

    A process that is killed leaves a file beside it, which the next call removes.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise MissingFileError(f"the checkpoint {path} cannot be written: {path.parent} is no folder")
    with replacing(path, durable=True) as file:
        torch.save({"format": FORMAT, **state}, file)
    for left in path.parent.glob(f".{path.name}.????????.part"):
        left.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What :func:`write` wrote. Raises FileNotFoundError, and ValueError for a file that is another or cut short."""
    if not Path(path).exists():
        raise MissingFileError(f"there is no checkpoint {path}")
    if not zipfile.is_zipfile(path):  # what `torch.save` writes; its directory comes last
        raise ArgumentError(f"{path} is no checkpoint, or it is cut short")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ArgumentError(f"{path} is no checkpoint, or it is cut short: {why}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ArgumentError(f"{path} is no checkpoint of an ORTTrainer")
    return state


def check_user(user: Mapping[str, Any]) -> None:
    """Raises TypeError, which names the entry, unless :func:`read` reads what a script adds."""
    for name, value in user.items():
        written = io.BytesIO()
        try:
            torch.save(value, written)
            written.seek(0)
            torch.load(written, weights_only=True)
        except Exception as error:
            what = f"user_dict[{name!r}] is a {type(value).__name__}"
            raise ArgumentTypeError(f"{what}, which a checkpoint does not hold") from error


def check_weights(path: str | os.PathLike[str], saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the tensor, unless the weights of a checkpoint are those of the model."""
    for name in own:
        if name not in saved:
            raise ArgumentError(f"the checkpoint {path} has no {name}, which the model has")
    for name, value in saved.items():
        if name not in own:
            raise ArgumentError(f"the checkpoint {path} has {name}, which the model has not")
        if isinstance(value, torch.Tensor) and value.shape != own[name].shape:
            raise ArgumentError(
                f"the checkpoint {path} has {name} of shape {list(value.shape)}, the model of {list(own[name].shape)}"
            )
