"""Says which operators become Triton kernels: all that there is a kernel for, or those of a JSON file.

The file is that of ``ORTMODULE_TRITON_CONFIG_FILE``. Operators have the names of ONNX or of the engine; a gradient of
ONNX Runtime's, as ``SoftmaxGrad_13`` of ``com.microsoft``, is the engine's of that name.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import onnx

from ortmodule import _core
from ortmodule.core.errors import SettingError
from ortmodule.core.logger import warn_once
from ortmodule.core.settings.safe_files import parse_json
from ortmodule.triton_kernels.formulas import CLASSES, pointwise_operators
from ortmodule.triton_kernels.row_steps import ROW_OPERATORS

#: The longest row that is held in registers.
WIDEST = 16384
#: Nodes of the least kernel.
MIN_NODES = 2
#: As the engine counts them (csrc/ops/pointwise/pointwise.h), and conditions (csrc/graph/triton.h).
_BITS = {kind: 1 << i for i, kind in enumerate(("float32", "float64", "int64", "int32", "bool"))}
_NUMBERS, _SINGLE, _CONSTANT = range(3)
_INITIALIZERS = ("none", "scalar", "all")
#: Domains, and what of them is the engine's own.
_DOMAINS = ("", "ai.onnx", "com.microsoft", "ortmodule", "org.pytorch.aten")
#: Names in files -> the engine's.
_OTHER_NAMES = {"SoftmaxGrad_13": "SoftmaxGrad", "LogSoftmaxGrad_13": "LogSoftmaxGrad",
                "LayerNormalizationGrad": "LayerNormGrad",
                "SimplifiedLayerNormalization": "RMSNormalization", "SimplifiedLayerNormalizationGrad": "RMSNormGrad",
                "Dropout": "DropoutTrain", "BitmaskDropout": "DropoutTrain", "QuickGelu": "Swish",
                "Max": "Maximum", "Min": "Minimum", "Clip": "Clamp"}  # fmt: skip
#: What leaves elements where they are is part of every kernel.
_NO_OPS = frozenset(("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand"))

Condition = tuple[str, int, tuple[int, ...]]
Operator = tuple[str, int, bool, tuple[Condition, ...]]


class Rules(NamedTuple):
    """As ``Model.plan`` takes them. ``inlines``: constants of one element are part of a kernel's text; ``flash``:
    attention is a kernel, too."""

    min_nodes: int
    inlines: bool
    flash: bool
    widest: int
    operators: tuple[Operator, ...]


@functools.cache
def supported() -> dict[str, int]:
    """{operator: the classes of elements that there is a kernel for}."""
    found = {name: sum(_BITS[kind] for kind in kinds) for name, kinds in pointwise_operators().items()}
    return found | dict.fromkeys(ROW_OPERATORS, _BITS["float32"] | _BITS["float64"])


def all_rules() -> Rules:
    """Every operator that there is a kernel for."""
    return Rules(
        MIN_NODES, True, False, WIDEST, tuple((name, classes, False, ()) for name, classes in supported().items())
    )


def read_rules(path: str, opset: int) -> Rules:
    """The rules of a file, for a model of this opset: all of them where ``path`` is empty.

    Raises ValueError for a file that cannot be read or understood, with the name that is at fault.
    """
    if not path:
        return all_rules()
    where = f"ORTMODULE_TRITON_CONFIG_FILE={path}"
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
        return _rules_of(content, opset)
    except (OSError, ValueError) as error:
        raise SettingError(f"{where}: {error}") from None


def _rules_of(content: Any, opset: int) -> Rules:
    if not isinstance(content, dict):
        raise SettingError("the file holds an object with ops, initializer and min_nodes")
    for name in content:
        _check_name("", name, ("ops", "initializer", "min_nodes"))
    initializer = content.get("initializer", "scalar")
    if initializer not in _INITIALIZERS:
        raise SettingError(f"initializer is {', '.join(_INITIALIZERS)}, not {json.dumps(initializer)}")
    least = content.get("min_nodes", MIN_NODES)
    if type(least) is not int or least < 1:
        raise SettingError(f"min_nodes is a whole number, at least 1, not {json.dumps(least)}")
    ops = content.get("ops")
    if not isinstance(ops, dict):
        raise SettingError('ops is an object with an operator for each name, as {"Add": {"versions": [13, 14]}}')
    found: dict[str, Operator] = {}
    for name, described in ops.items():
        for operator in _operators_of(name, described, opset):
            found[operator[0]] = operator
    return Rules(least, initializer != "none", False, WIDEST, tuple(found.values()))


def _check_name(of: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0.6)
        raise SettingError(
            f"{of}there is no {name}" + (f"; did you mean {near[0]}?" if near else f": only {', '.join(known)}")
        )


def _operators_of(name: str, described: Any, opset: int) -> list[Operator]:
    """Of one entry: its operator, and the operator of its gradient where the engine has one by its name."""
    if not isinstance(described, dict):
        raise SettingError(f"{name} is described by an object with versions, not by {json.dumps(described)}")
    for key in described:
        _check_name(f"{name}: ", key, ("versions", "conditions", "domain", "is_no_op"))
    domain, versions = described.get("domain", ""), described.get("versions")
    if domain not in _DOMAINS:
        raise SettingError(f"{name}: there is no domain {json.dumps(domain)}")
    if not isinstance(versions, list) or not versions or not all(type(v) is int and v > 0 for v in versions):
        raise SettingError(f"{name}: versions is a list of opset versions, as [13, 14], not {json.dumps(versions)}")
    no_op = described.get("is_no_op", False)
    if not isinstance(no_op, bool):
        raise SettingError(f"{name}: is_no_op is true or false, not {json.dumps(no_op)}")
    conditions = _conditions_of(name, described.get("conditions", {}))
    if domain in ("", "ai.onnx") and not _has_version(name, versions, opset):
        return []
    ours = _OTHER_NAMES.get(name, name)
    classes = supported().get(ours)
    if classes is None:
        _refuse(name, domain)
        return []
    return [(ours, classes, no_op, conditions), *((f"{ours}Grad", supported()[f"{ours}Grad"], no_op, ())
                                                   for _ in range(f"{ours}Grad" in supported()))]  # fmt: skip


def _conditions_of(name: str, described: Any) -> tuple[Condition, ...]:
    if not isinstance(described, Mapping):
        raise SettingError(
            f"{name}: conditions is an object with an attribute for each name, not {json.dumps(described)}"
        )
    return tuple(_condition_of(name, attribute, wanted) for attribute, wanted in described.items())


def _condition_of(name: str, attribute: str, wanted: Any) -> Condition:
    if wanted == "single":
        return attribute, _SINGLE, ()
    if wanted == "constant":
        return attribute, _CONSTANT, ()
    try:
        value = json.loads(wanted) if isinstance(wanted, str) else wanted
    except ValueError:
        value = None
    numbers = value if isinstance(value, list) else [value]
    if not all(type(number) is int for number in numbers) or len(numbers) > 8:
        raise SettingError(
            f"{name}: the condition on {attribute} is single, constant, or numbers as [-1], not {json.dumps(wanted)}"
        )
    return attribute, _NUMBERS, tuple(numbers)


@functools.cache
def _versions_of(name: str) -> tuple[int, ...]:
    """The opsets in which ONNX's operator got a new form."""
    schemas = onnx.defs.get_all_schemas_with_history()
    return tuple(sorted(s.since_version for s in schemas if s.name == name and s.domain == ""))


def _has_version(name: str, versions: list[int], opset: int) -> bool:
    """Whether the form that the operator has in this opset is one of them. True for names that are not ONNX's."""
    known = [version for version in _versions_of(name) if version <= opset]
    return not known or known[-1] in versions


def _refuse(name: str, domain: str) -> None:
    """A warning for an operator that there is no kernel for; ValueError for a name that there is not."""
    if name in _NO_OPS:
        return
    ours = {operator["name"] for operator in _core.operators()}
    if domain not in ("", "ai.onnx", "ortmodule") or _versions_of(name) or name in ours:
        warn_once(
            f"ORTMODULE_TRITON_CONFIG_FILE: there is no Triton kernel for {name}, which the engine's own computes"
        )
        return
    near = difflib.get_close_matches(name, supported(), 1, 0.6)
    raise SettingError(f"there is no operator {name}" + (f"; did you mean {near[0]}?" if near else ""))


assert set(_BITS) == set(CLASSES)
