"""All errors that a user sees derive from `ortmodule.Error`, and from Python's class for such an error."""

import ast
import builtins
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import ortmodule
from ortmodule import Config, DebugOptions, Error, ORTModule, _core, explain, memory, patterns
from ortmodule.compat import hooks
from ortmodule.core.settings import setting_types
from ortmodule.optim import AdamConfig, FusedAdam, FusedSGD
from ortmodule.trainer import ORTTrainerOptions, checkpoint
from ortmodule.utils.data import LoadBalancingDistributedSampler

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "ortmodule", ROOT / ("optim" if (ROOT / "optim").exists() else "ortmodule/optim")]

#: Python's own classes that a file raises, and why.
PYTHONS = {
    "ortmodule/__init__.py": ({"ImportError", "AttributeError"}, "the engine, which has Error, cannot be imported"),
    "ortmodule/capture/export_cache.py": ({"ValueError"}, "found where a file of the cache is read"),
    "ortmodule/capture/randomness/drawn_values.py": ({"AttributeError"}, "as NumPy"),
    "ortmodule/capture/randomness/held_iterators.py": ({"AttributeError"}, "asked for by Python"),
    "ortmodule/capture/scalar_guards.py": ({"TypeError"}, "as PyTorch"),
    "ortmodule/capture/numbers/size_types.py": ({"AttributeError"}, "as PyTorch"),
    "ortmodule/capture/numbers/symbolic_numbers.py": ({"TypeError"}, "as Python"),
    "ortmodule/capture/effects/traced_tables.py": ({"AttributeError", "KeyError"}, "a dictionary"),
    "ortmodule/compat/packages/onnxruntime/__init__.py": ({"AttributeError"}, "a module"),
    "ortmodule/compat/packages/onnxruntime/training/__init__.py": ({"AttributeError"}, "a module"),
    "ortmodule/core/onnx_utils.py": ({"ValueError"}, "a graph of our own"),
    "ortmodule/core/settings/safe_files.py": (
        {"OSError", "PermissionError", "TimeoutError", "ValueError"},
        "as the system and json, and found where files of settings and caches are read",
    ),
    "ortmodule/core/size_expr.py": ({"LookupError"}, "found there"),
    "ortmodule/engine/autotune.py": ({"ValueError"}, "found where the file is read"),
    "ortmodule/engine/session.py": ({"RuntimeError"}, "as PyTorch"),
    "ortmodule/guards/sharding/local_parameters.py": ({"TypeError"}, "a dictionary that torch.func writes to"),
    "ortmodule/guards/reads/held_tensors.py": ({"KeyError"}, "a dictionary"),
    "ortmodule/guards/reads/size_tables.py": ({"LookupError"}, "found there"),
    "ortmodule/host/opaque_regions.py": ({"AssertionError"}, "cannot be"),
    "ortmodule/lowering/export.py": ({"ValueError"}, "as PyTorch"),
    "ortmodule/lowering/functionalize.py": ({"TypeError"}, "of a trace, found by the exporter"),
    "ortmodule/lowering/traced_tensors.py": ({"TypeError"}, "of a trace, found by the exporter"),
    "ortmodule/runtime/autograd_bridge.py": ({"RuntimeError"}, "as PyTorch"),
    "ortmodule/runtime/lazy_logits.py": ({"NotImplementedError"}, "a method of subclasses"),
    "ortmodule/triton_kernels/program.py": ({"ValueError"}, "a program of our own"),
}


def raised(path):
    """Python's classes of exceptions that the file raises."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and node.exc is not None:
            for name in ast.walk(node.exc):
                found = getattr(builtins, name.id, None) if isinstance(name, ast.Name) else None
                if isinstance(found, type) and issubclass(found, BaseException):
                    yield found.__name__


def test_what_is_raised():
    files = sorted({path.resolve() for folder in FOLDERS for path in folder.rglob("*.py")})
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): set(raised(path)) for path in files}
    assert {name: names for name, names in found.items() if names} == {
        name: names for name, (names, _) in PYTHONS.items()
    }


ERRORS = ROOT / "ortmodule" / "core" / "errors.py"


def defined_errors(text, known):
    """Classes of exceptions that a file defines: those that derive from Python's, from ``known`` or from each other."""
    found = set()
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    while True:
        own = {c.name for c in classes if any(is_error(base, known | found) for base in c.bases)}
        if own == found:
            return found
        found = own


def is_error(base, known):
    name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
    python = getattr(builtins, name, None)
    return name in known or (isinstance(python, type) and issubclass(python, BaseException))


def test_errors_stand_in_one_module():
    known = defined_errors(ERRORS.read_text(), set(dir(_core)))
    assert len(known) > 30
    files = sorted({path.resolve() for folder in FOLDERS for path in folder.rglob("*.py")} - {ERRORS})
    found = {str(path.relative_to(ROOT)): defined_errors(path.read_text(), known) for path in files}
    assert not {name: errors for name, errors in found.items() if errors}


def test_a_class_of_errors_is_found():
    assert defined_errors("class A(errors.Waits[int]): ...\nclass B(A, C): ...\nclass D(list): ...", {"Waits"}) == {
        "A",
        "B",
    }
    assert defined_errors("def f():\n    class A(KeyError): ...", set()) == {"A"}


def test_public_errors():
    errors = [value for name in ortmodule.__all__ if isinstance(value := getattr(ortmodule, name), type)]
    errors = [error for error in errors if issubclass(error, BaseException)]
    assert len(errors) > 10 and all(issubclass(error, Error) for error in errors)
    listed = re.findall(r"autoexception:: ortmodule\.(\w+)", (ROOT / "docs" / "api.md").read_text())
    assert sorted(listed) == sorted(error.__name__ for error in errors)


def test_a_status_of_the_engine_is_one_of_its_errors():
    text = (ROOT / "csrc" / "py" / "state.c").read_text()
    body = text[text.index("PyObject *raise_status(") :]
    assert "PyExc_" not in body
    used = set(re.findall(r"m->(\w+)", body))
    assert len(used) > 4 and all(issubclass(getattr(_core, name), Error) for name in used)


def fed(*shapes):
    model = ORTModule(nn.Linear(3, 2), config=Config(memory_budget=1, capture_share=float("inf")))
    return lambda: model(torch.ones(shapes))


class Sized:
    def __len__(self):
        return 4


#: What users do wrong: how, and Python's class for it.
MISTAKES = {
    "a setting": (lambda: Config(memory_opt_level="x"), ValueError),
    "debug options": (lambda: DebugOptions(log_level=7), TypeError),
    "a folder": (lambda: setting_types.check_folder("/no/such/folder"), NotADirectoryError),
    "wrapped twice": (lambda: ORTModule(ORTModule(nn.Linear(2, 2))), TypeError),
    "no module": (lambda: ORTModule(nn.Linear), TypeError),
    "not wrapped": (lambda: explain(nn.Linear(2, 2)), TypeError),
    "a budget": (fed(5, 3), MemoryError),
    "a sample without a batch": (lambda: memory.largest_batch(nn.Linear(2, 2), torch.ones(2, 2), dim=5), ValueError),
    "an unknown pattern": (lambda: patterns.unregister("no such"), KeyError),
    "a file": (lambda: checkpoint.read(Path("/no/such/file")), FileNotFoundError),
    "a folder that exists": (lambda: hooks.StatisticsSubscriber("/"), FileExistsError),
    "a learning rate": (lambda: FusedAdam(nn.Linear(2, 2).parameters(), lr=-1), ValueError),
    "betas": (lambda: FusedAdam(nn.Linear(2, 2).parameters(), betas=1), TypeError),
    "a momentum": (lambda: FusedSGD(nn.Linear(2, 2).parameters(), nesterov=True), ValueError),
    "a trainer's optimizer": (lambda: AdamConfig(params=[{"params": "weight"}]), TypeError),
    "a trainer's option": (lambda: ORTTrainerOptions({"no such": 1}), ValueError),
    "a sampler": (
        lambda: LoadBalancingDistributedSampler(Sized(), complexity_fn=3, world_size=1, rank=0), TypeError,
    ),
    "bytes that are no model": (lambda: _core.Model(b"nonsense"), ValueError),
    "a type of elements": (lambda: _core.empty(torch.Tensor, "float32", (2**62, 4)), (ValueError, MemoryError)),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    do, kinds = MISTAKES[name]
    with pytest.raises(kinds) as caught:
        do()
    assert isinstance(caught.value, Error), type(caught.value).__mro__
