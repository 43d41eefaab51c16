"""Runs imports of forward outside of a trace: what a module does as it is loaded is no part."""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ortmodule.capture.scalar_guards import active
from ortmodule.core.objects.interception import Replacement, replaced
from ortmodule.core.torch_private import untraced


def _outside(original: Callable) -> Callable:
    def load(*args: Any, **kwargs: Any) -> Any:
        if active() is None:
            return original(*args, **kwargs)
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            with untraced():
                return original(*args, **kwargs)
        finally:
            sys.setprofile(profile)

    return load


_REPLACEMENTS = [
    Replacement.around(builtins, "__import__", _outside),
    Replacement.around(importlib, "import_module", _outside),
]


def untraced_imports() -> AbstractContextManager[None]:
    """Inside, in this thread, modules are loaded outside of the trace."""
    return replaced(_REPLACEMENTS)
