"""Switches the compatible import names: ``python -m ortmodule.compat enable|disable|status``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ortmodule import compat


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m ortmodule.compat", description="import names of ONNX Runtime's ORTModule"
    )
    parser.add_argument("action", choices=["enable", "disable", "status"])
    parser.add_argument("--folder", type=Path, default=compat.site(), help="site-packages, if not that of this Python")
    given = parser.parse_args(arguments)
    try:
        if given.action == "enable":
            compat.enable(given.folder)
        elif given.action == "disable":
            compat.disable(given.folder)
    except compat.CompatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(compat.describe(given.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
