"""Gives an ORTModule the settings of a JSON file, under the original's name."""

from __future__ import annotations

import os
from typing import Any

from ortmodule.core.config import PREFIX, Config
from ortmodule.core.errors import ArgumentTypeError, CompatError
from ortmodule.core.objects.dispatchers import dispatcher_of
from ortmodule.module import ORTModule, rewrap

VARIABLE = f"{PREFIX}JSON_CONFIG_PATH"


def load_from_json(model: Any, path: str | None = None) -> None:
    """``model``, an ORTModule, has the settings of the file from now on, and graphs are made anew.

    ``path``: of the file, by default what ORTMODULE_JSON_CONFIG_PATH names. Raises TypeError for another model,
    CompatError without a file, ValueError for what is in it.
    """
    if not isinstance(model, ORTModule):
        raise ArgumentTypeError(f"load_from_json() wants an ORTModule, not {type(model).__name__}")
    path = path or os.environ.get(VARIABLE)
    if not path:
        raise CompatError(f"load_from_json() wants a path, or one in {VARIABLE}")
    given = dispatcher_of(model).given or Config()
    kept = {name: getattr(given, name) for name in given.given}
    rewrap(model, Config(**kept | {"json_config_path": path}))
