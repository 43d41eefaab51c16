"""Annotations: _core.pyi has what the extension has, and what the type checker leaves out is listed with a reason."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from ortmodule import _core

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "ortmodule" / "_core.pyi"
TREE = ast.parse(STUB.read_text())
CLASSES = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}
FUNCTIONS = {node.name: node for node in TREE.body if isinstance(node, ast.FunctionDef)}


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_names_are_those_of_the_extension():
    constants = {node.target.id for node in TREE.body if isinstance(node, ast.AnnAssign)}
    assert public({*CLASSES, *FUNCTIONS, *constants}) == public(dir(_core))


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_members_are_those_of_the_extension(name):
    members = {node.name: node for node in CLASSES[name].body if isinstance(node, ast.FunctionDef)}
    assert public(members) == public(vars(getattr(_core, name)))
    for member in public(members):
        is_property = any(getattr(d, "id", "") == "property" for d in members[member].decorator_list)
        assert is_property != callable(vars(getattr(_core, name))[member]), member


def parameters(function, owner=False):
    """Names, without self."""
    return [a.arg for a in (*function.args.posonlyargs, *function.args.args)][int(owner) :]


def documented(doc):
    """The names of the parameters in "f(x, y=1) -> z"."""
    return [word.partition("=")[0].strip() for word in re.match(r"\w+\((.*?)\)", doc, re.S)[1].split(",")]


@pytest.mark.parametrize("owner, name", [("Model", "plan"), ("Plan", "forward"), ("Plan", "backward")])
def test_parameters_are_those_of_the_docstring(owner, name):
    (function,) = [node for node in CLASSES[owner].body if isinstance(node, ast.FunctionDef) and node.name == name]
    doc = getattr(getattr(_core, owner), name).__doc__.replace("sizes=()", "sizes")
    assert parameters(function, owner=True) == documented(doc)


def test_everything_has_types_and_a_line():
    functions = [(node, False) for node in FUNCTIONS.values()]
    functions += [(n, True) for c in CLASSES.values() for n in c.body if isinstance(n, ast.FunctionDef)]
    for function, owned in functions:
        doc = ast.get_docstring(function)
        assert doc and "\n" not in doc, function.name
        assert function.returns is not None, function.name
        arguments = (*function.args.posonlyargs, *function.args.args)[int(owned) :]
        assert all(argument.annotation is not None for argument in arguments), function.name


# --- the type checker -------------------------------------------------------------------------------------------------

SOURCES = sorted(path for folder in ("ortmodule", "optim") for path in (ROOT / folder).rglob("*.py*"))


@pytest.mark.parametrize("path", [p for p in SOURCES if p.suffix in (".py", ".pyi")], ids=lambda p: p.name)
def test_what_is_ignored_has_a_kind_and_a_reason(path):
    for line in path.read_text().splitlines():
        if "type: ignore" in line:
            assert re.search(r"# type: ignore\[[a-z, -]+\]  # \w", line), line


def test_settings_are_of_modules_that_exist():
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    for override in overrides:
        assert "ignore_errors" not in override
        for module in override["module"]:
            path = ROOT / module.removesuffix(".*").replace(".", "/").replace("ortmodule/optim", "optim")
            ours = module.startswith("ortmodule")
            assert not ours or path.is_dir() or path.with_suffix(".py").exists(), module


#: What mypy leaves out of ours, and why. It may only get shorter.
LEFT_OUT = {
    "ortmodule.triton_kernels.attention_kernels": "Triton reads the annotations of functions that it compiles",
    "ortmodule.triton_kernels.device_functions": "Triton reads the annotations of functions that it compiles",
}
#: Of all of ours: functions of torch have no annotations, and `tuple`, `dict`, `Callable` may be one of any kind.
LOOSE = {"allow_untyped_calls": True, "disallow_any_generics": False, "warn_return_any": False}


def test_what_the_type_checker_leaves_out():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    ours = [m for override in settings["overrides"] for m in override["module"] if m.startswith("ortmodule")]
    assert sorted(ours) == sorted(LEFT_OUT)
    assert settings["strict"] and {name: settings[name] for name in settings if isinstance(settings[name], bool)} == {
        "strict": True, **LOOSE,
    }  # fmt: skip


def test_the_package_is_typed():
    assert (ROOT / "ortmodule" / "py.typed").exists()
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["ortmodule"]
    assert {"py.typed", "*.pyi"} <= set(data)
