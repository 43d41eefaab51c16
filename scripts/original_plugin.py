"""Stands in for what ONNX Runtime's own tests need, and sorts what comes of each.

A plugin of pytest, for ``python -m scripts.original_tests``. Some things keep a test of the original's from telling
anything about the names that scripts use, and each is found by a rule where it happens:

private   it reads a name of the original's modules that begins with an underscore, or that no script imports: modules
          and names that `ortmodule.compat` has not are stand-ins, which raise PrivateName when they are used
CUDA      what it asks of a GPU the CPU cannot do (its tensors are on the CPU here), or it has tensors on two devices
library   transformers, or a hub that is not reached, lacks what the test was written for
time      it takes more than SECONDS (1000 steps of a large model)
"""

import enum
import importlib.abc
import importlib.machinery
import inspect
import json
import math
import os
import signal
import site
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch

import ortmodule
from ortmodule import compat

SECONDS = 150  # of a processor, that one test may take
LARGEST = 1 << 25  # numbers in a tensor that a test draws; those of some tests of transposes are for a GPU's memory
TRAINING = "onnxruntime.training"
#: Names of the original's that tests look for in ways which raise no error of ours.
PRIVATE = ("_torch_module", "_ORTModule")
#: Of the messages that a test expects for tensors on two devices.
TWO_DEVICES = ("cuda:0", "tensors to be on the same device", "a single device per model", "data in different device")


class PrivateName(AssertionError):
    """A name that is the original's own."""


class NeedsCuda(AssertionError):
    """Something that a GPU has, and the CPU has not."""


class TookLong(Exception):
    """More than SECONDS."""


STANDS_FOR = "the name of the original's "  # in what others say of a stand-in that they are given


class StandIn(types.ModuleType):
    """A module, or anything else, of the original's that scripts do not use. Importing it says nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = StandIn(f"{self.__name__}.{name}")
        found.__path__ = []
        return found

    def __call__(self, *args, **kwargs):
        raise PrivateName(f"the name {self.__name__}")

    def __repr__(self):
        return STANDS_FOR + self.__name__


def flags(name, *members):
    return enum.IntFlag(name, {member: 1 << i for i, member in enumerate(members)})


#: Of private modules: names of settings, which are public as texts, and the base of errors.
POLICY = flags(
    "_FallbackPolicy", "FALLBACK_DISABLE", "FALLBACK_FORCE_TORCH_FORWARD", "FALLBACK_FORCE_TORCH_BACKWARD",
    "FALLBACK_UNSUPPORTED_DEVICE", "FALLBACK_UNSUPPORTED_DATA", "FALLBACK_UNSUPPORTED_TORCH_MODEL",
    "FALLBACK_UNSUPPORTED_ONNX_MODEL", "FALLBACK_BAD_INITIALIZATION",
)  # fmt: skip
CHECKS = flags(
    "_SkipCheck", "SKIP_CHECK_DISABLED", "SKIP_CHECK_DEVICE", "SKIP_CHECK_BUILD_GRADIENT", "SKIP_CHECK_EXECUTION_AGENT"
)
ERRORS = (
    "ORTModuleFallbackException", "ORTModuleDeviceException", "ORTModuleIOError", "ORTModuleTorchModelException",
    "ORTModuleONNXModelException", "ORTModuleInitException",
)  # fmt: skip
GIVEN = {
    f"{TRAINING}.ortmodule._fallback": {"_FallbackPolicy": POLICY, **dict.fromkeys(ERRORS, ortmodule.Error)},
    f"{TRAINING}.ortmodule.options": {"_SkipCheck": CHECKS},
}
DEFAULT = POLICY(sum(p for p in POLICY if "UNSUPPORTED" in p.name))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """After all others: whatever is below `onnxruntime`."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("onnxruntime."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        vars(module).update(GIVEN.get(module.__name__, {}))


class Stream:
    def __getattr__(self, name):
        return lambda *args, **kwargs: None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def without_gpu():
    """torch.cuda's functions that tests call around what they test do nothing."""

    def memory(*args, **kwargs):
        raise NeedsCuda("memory of a GPU")

    nothing = ("synchronize", "empty_cache", "manual_seed", "manual_seed_all", "_sleep", "set_device")
    for name in nothing:
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.get_device_capability = lambda *args: (8, 0)
    torch.cuda.Stream, torch.cuda.stream = Stream, lambda stream: stream
    torch.cuda.current_stream = lambda *args: Stream()
    torch.cuda.memory_reserved = torch.cuda.memory_allocated = torch.cuda.max_memory_allocated = memory
    draw = torch.randn

    def drawn(*shape, **options):
        numbers = math.prod(each for each in shape if isinstance(each, int))
        if numbers > LARGEST:
            raise NeedsCuda(f"a tensor of {numbers} numbers")
        return draw(*shape, **options)

    torch.randn = drawn


class Gone:
    """A class that transformers had."""

    def __init__(self, *args, **kwargs):
        pytest.skip("library: transformers has it no more")


def pytest_configure(config):
    os.environ.setdefault("ORTMODULE_CAPTURE_SHARE", "inf")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = tempfile.mkdtemp()
    compat.enable(Path(folder))
    site.addsitedir(folder)
    sys.meta_path.append(Finder())
    import onnxruntime.training.ortmodule as names

    names.ORTMODULE_FALLBACK_POLICY = DEFAULT
    without_gpu()
    try:
        import transformers
    except ImportError:
        return
    if not hasattr(transformers, "AdamW"):
        transformers.AdamW = Gone


@pytest.fixture(autouse=True)
def alone():
    """The environment is put back, and time is limited."""
    before = dict(os.environ)

    def stop(*_):
        raise TookLong(f"it took more than {SECONDS} s of a processor")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    os.environ.clear()
    os.environ.update(before)


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def kind_of(outcome, error, function, statement):
    """passed, skipped, private, CUDA, library, time or failed. ``statement``: of the test ``function``, that raised."""
    text = " ".join(f"{type(each).__name__} {each}" for each in chain(error))
    if outcome == "passed":
        return "passed"
    if "library: " in text or "huggingface" in text or "OfflineMode" in text:
        return "library"
    if outcome == "skipped":
        return "CUDA" if "cuda" in text.lower() else "skipped"
    for each in chain(error):
        if isinstance(each, TookLong):
            return "time"
        named = isinstance(each, PrivateName) or STANDS_FOR in str(each)
        if named or (isinstance(each, AttributeError) and is_private(each)):
            return "private"
        if isinstance(each, NeedsCuda) or "not compiled with CUDA" in str(each):
            return "CUDA"
    if "DID NOT RAISE" in text and any(each in inspect.getsource(function) for each in TWO_DEVICES):
        return "CUDA"
    return "private" if any(each in statement for each in PRIVATE) else "failed"


def statement_of(excinfo, function):
    """The one of ``function`` in which the error came."""
    found = [entry for entry in excinfo.traceback if entry.name == function.__name__]
    return str(found[-1].statement) if found else ""


def is_private(error):
    """An attribute with an underscore, of a wrapped module, or of one of our objects or modules."""
    owner = error.obj if isinstance(error.obj, (type, types.ModuleType)) else type(error.obj)
    home = getattr(owner, "__module__", None) or owner.__name__
    ours = isinstance(error.obj, ortmodule.ORTModule) or home.partition(".")[0] in ("ortmodule", "onnxruntime")
    return ours and (error.name or "").startswith("_")


RESULTS = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" or (report.when == "setup" and not report.passed):
        error = call.excinfo.value if call.excinfo else None
        lines = str(error).strip().splitlines() if error is not None else []
        said = f"{type(error).__name__}: {lines[0][:200] if lines else ''}" if error is not None else ""
        statement = statement_of(call.excinfo, item.function) if call.excinfo else ""
        RESULTS[item.nodeid] = (kind_of(report.outcome, error, item.function, statement), said)
        Path(os.environ["ORIGINAL_RESULTS"]).write_text(json.dumps(RESULTS))
    return report
