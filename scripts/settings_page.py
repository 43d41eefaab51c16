"""Writes the page about settings from their table: ``python -m scripts.settings_page docs/configuration.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from ortmodule.core.config import PREFIX, VARIABLES, Variable
from ortmodule.core.logger import LogLevel

_PAGE = """# Settings

Written by `python -m scripts.settings_page docs/configuration.md`.

Settings are read when a module is wrapped. A JSON file (`ORTMODULE_JSON_CONFIG_PATH`) beats the environment, which
beats `Config`, which beats `DebugOptions`. A value that cannot be understood is an error, a name that does not exist a
warning; both come with the nearest valid one.

```python
from ortmodule import Config, DebugOptions, LogLevel, ORTModule

model = ORTModule(model, config=Config(verify=1, enable_tuning=True))
model = ORTModule(model, DebugOptions(save_onnx=True, onnx_prefix="mine", log_level=LogLevel.INFO))
```

A field of `Config` is the name of a variable in lower case, without `ORTMODULE_`. Flags are `True` or `False`; where
names are joined by `|` it takes a list of them, too.

| variable | value | default | meaning |
| --- | --- | --- | --- |
{rows}

Accepted, with one warning, for what does not exist yet:

| variable | value | default | meaning |
| --- | --- | --- | --- |
{later}

## Log levels

All messages go through `logging.getLogger("ortmodule")`.

| level | our logger | its child `ortmodule.engine` | which ranks | the exporter's remarks | the captured graph |
| --- | --- | --- | --- | --- | --- |
| `FATAL`, `ERROR`, `WARNING` | the same | the same | rank 0 | no | no |
| `INFO` | `INFO` | `WARNING` | rank 0 | no | yes |
| `DEVINFO` | `INFO` | `INFO` | all | yes | yes |
| `VERBOSE` | `DEBUG` | `DEBUG` | all | yes | yes |
"""


def page() -> str:
    """The text of `docs/configuration.md`."""
    rows = [_row(variable) for variable in VARIABLES.values() if variable.exists]
    return _PAGE.format(rows="\n".join(rows), later="\n".join(_row(v) for v in VARIABLES.values() if not v.exists))


def _row(variable: Variable) -> str:
    default = variable.default
    if isinstance(default, frozenset):
        default = " \\| ".join(sorted(default))
    elif isinstance(default, LogLevel):
        default = default.name
    elif isinstance(default, bool):
        default = int(default)
    shown = f"`{default}`" if default != "" else ""
    return f"| `{PREFIX}{variable.name}` | {variable.kind.name} | {shown} | {variable.doc} |"


if __name__ == "__main__":
    if len(sys.argv) == 2:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
