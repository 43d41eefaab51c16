"""What forward reads of its process: settings are compared from call to call, files and what moves are PyTorch's."""

import gc
import locale
import logging
import os
import pathlib
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.backends.opt_einsum
from torch.backends import cudnn

from ortmodule import ORTModule, explain
from tests.selection import each
from tests.twins import made, rows

LOG = logging.getLogger("tests.settings.logger")
PARENT = logging.getLogger("tests.settings")
DEPRECATED = ("ignore", None, DeprecationWarning, "nowhere", 0)


def factor(flag):
    return 2.0 if flag else 3.0


def imported():
    import warnings

    return factor(DEPRECATED in warnings.filters)  # their number is another while forward is traced


def imported_from():
    from torch.backends import opt_einsum

    return factor(opt_einsum.enabled)


def imported_value():
    from sys import dont_write_bytecode

    return factor(dont_write_bytecode)


def to(owner, name, *values):
    return [lambda value=value: setattr(owner, name, value) for value in values]


#: What forward reads, and what changes it once, and again.
SETTINGS = {
    "cwd": (lambda: len(os.getcwd()), lambda: os.chdir("/"), lambda: os.chdir("/usr")),
    "threads": (lambda: torch.get_num_threads(), lambda: torch.set_num_threads(1), lambda: torch.set_num_threads(2)),
    "precision": (
        lambda: len(torch.get_float32_matmul_precision()),
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "cudnn": (lambda: factor(torch.backends.cudnn.enabled), *to(cudnn, "enabled", False, True)),
    "cudnn, imported": (lambda: factor(cudnn.benchmark), *to(cudnn, "benchmark", True, False)),
    "tf32": (
        lambda: factor(torch.backends.cuda.matmul.allow_tf32),
        *to(torch.backends.cuda.matmul, "allow_tf32", True, False),
    ),
    "mkldnn": (lambda: factor(torch.backends.mkldnn.enabled), *to(torch.backends.mkldnn, "enabled", False, True)),
    "flash": (
        lambda: factor(torch.backends.cuda.flash_sdp_enabled()),
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.cuda.enable_flash_sdp(True),
    ),
    "einsum": (
        lambda: factor(torch.backends.opt_einsum.enabled),
        *to(torch.backends.opt_einsum, "enabled", False, True),
    ),
    "deterministic": (
        lambda: factor(torch.are_deterministic_algorithms_enabled()),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "anomaly": (
        lambda: factor(torch.is_anomaly_enabled()),
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.set_detect_anomaly(False),
    ),
    "warn always": (
        lambda: factor(torch.is_warn_always_enabled()),
        lambda: torch.set_warn_always(True),
        lambda: torch.set_warn_always(False),
    ),
    "filters, imported": (
        imported,
        lambda: warnings.filters.append(DEPRECATED),
        lambda: warnings.filters.remove(DEPRECATED),
    ),
    "einsum, imported": (imported_from, *to(torch.backends.opt_einsum, "enabled", False, True)),
    "value, imported": (imported_value, *to(sys, "dont_write_bytecode", True, False)),
    "variable of sys": (lambda: factor(sys.dont_write_bytecode), *to(sys, "dont_write_bytecode", True, False)),
    "argv": (lambda: float(len(sys.argv)), lambda: sys.argv.append("-x"), lambda: sys.argv.pop()),
    "recursion": (
        lambda: float(sys.getrecursionlimit()),
        lambda: sys.setrecursionlimit(5000),
        lambda: sys.setrecursionlimit(5001),
    ),
    "level": (lambda: 1.0 + LOG.level, lambda: LOG.setLevel(10), lambda: LOG.setLevel(30)),
    "enabled": (lambda: factor(LOG.isEnabledFor(10)), lambda: LOG.setLevel(10), lambda: LOG.setLevel(30)),
    "parent's level": (
        lambda: 1.0 + LOG.getEffectiveLevel(),
        lambda: PARENT.setLevel(10),
        lambda: PARENT.setLevel(40),
    ),
    "found level": (
        lambda: 1.0 + logging.getLogger("tests.settings").level,
        lambda: PARENT.setLevel(10),
        lambda: PARENT.setLevel(40),
    ),
    "disabled": (lambda: factor(LOG.isEnabledFor(30)), lambda: logging.disable(50), lambda: logging.disable(0)),
    "locale": (
        lambda: factor(locale.getlocale(locale.LC_NUMERIC)[0]),
        lambda: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8"),
        lambda: locale.setlocale(locale.LC_NUMERIC, "C"),
    ),
    "thread": (
        lambda: float(len(threading.current_thread().name)),
        *(lambda name=name: setattr(threading.current_thread(), "name", name) for name in ("abc", "MainThread")),
    ),
    "NumPy's errors": (
        lambda: factor(np.geterr()["over"] == "warn"),
        lambda: np.seterr(over="ignore"),
        lambda: np.seterr(over="warn"),
    ),
    "environment": (
        lambda: factor(os.environ.get("TESTS_SETTING")),
        lambda: os.environ.update(TESTS_SETTING="1"),
        lambda: os.environ.pop("TESTS_SETTING"),
    ),
}
SHORT = [
    "cwd",
    "threads",
    "cudnn",
    "einsum",
    "filters, imported",
    "value, imported",
    "enabled",
    "found level",
    "locale",
]


@pytest.fixture
def settings(monkeypatch):
    """All is as it was afterwards. Tests of torch's that others import may have locked its flags."""
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    before = os.getcwd(), torch.get_num_threads(), sys.getrecursionlimit(), LOG.level, PARENT.level
    yield
    os.chdir(before[0])
    torch.set_num_threads(before[1])
    sys.setrecursionlimit(before[2])
    LOG.setLevel(before[3]), PARENT.setLevel(before[4])


@each("name", list(SETTINGS), SHORT)
def test_a_setting(name, settings):
    read, change, again = SETTINGS[name]
    eager = made(lambda self, x: self.linear(x) * read())
    ours, x = ORTModule(eager), rows(3, 4)
    values = set()
    try:
        for step in (None, change, None, again, change, again):
            if step is not None:
                step()
            torch.testing.assert_close(ours(x), eager(x))
            values.add(read())
    finally:
        for step in (change, again):
            step()
    report = explain(ours)
    assert report.captured, report.fallback
    assert 2 <= report.exports == len(values)


def test_what_torch_itself_asks_is_no_matter(settings):
    """Its layers ask for settings; their results do not hang on them."""
    eager = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0)
    ours, x = ORTModule(eager), rows(2, 3, 8)
    torch.testing.assert_close(ours(x), eager(x))
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).captured and explain(ours).exports == 1


def text_of_stream(path):
    with path.open("rb") as stream:
        return stream.read()


#: What forward reads of a file, and of what else no guard can compare; and the sentence.
ELSEWHERE = {
    "open": (lambda path: float(open(path).read()), "reads a file"),  # noqa: SIM115
    "lines": (lambda path: [float(line) for line in open(path)][0], "reads a file"),  # noqa: SIM115, RUF015
    "read_text": (lambda path: float(path.read_text()), "reads a file"),
    "stream": (lambda path: float(text_of_stream(path)), "reads a file"),
    "loadtxt": (lambda path: float(np.loadtxt(path)), "reads the file system"),
    "exists": (lambda path: factor(os.path.exists(f"{path}x")), "reads the file system"),
    "is_file": (lambda path: factor(path.with_suffix(".x").is_file()), "reads the file system"),
    "listdir": (lambda path: 1.0 + len(os.listdir(path.parent)), "reads the file system"),
    "process": (lambda path: float(subprocess.run(["cat", path], capture_output=True).stdout), "reads "),
    "seed": (lambda path: 1.0 + torch.initial_seed() % 7, "state of a torch.Generator"),
    "state": (lambda path: 1.0 + float(torch.get_rng_state()[0]) % 7, "state of a torch.Generator"),
    "collector": (lambda path: factor(gc.isenabled()), "changes by itself"),
}


@each("name", list(ELSEWHERE), ["open", "lines", "exists", "seed", "collector"])
def test_what_guards_cannot_compare(name, tmp_path):
    read, sentence = ELSEWHERE[name]
    path = tmp_path / "value.txt"
    path.write_text("2.0")
    eager = made(lambda self, x: self.linear(x) * read(path))
    ours, x = ORTModule(eager), rows(3, 4)
    for step in range(4):
        path.write_text(str(1.0 + step))
        if step % 2:
            pathlib.Path(f"{path}x").touch()
            path.with_suffix(".x").touch()
            gc.disable()
        else:
            gc.enable()
        torch.manual_seed(step)
        torch.testing.assert_close(ours(x), eager(x))
    assert sentence in explain(ours).fallback or name in ("loadtxt", "process")


def test_a_submodule_that_reads_a_file(tmp_path):
    """The others are in the engine."""
    path = tmp_path / "scale.txt"

    class Reads(torch.nn.Module):
        def forward(self, x):
            return x * float(path.read_text())

    eager = torch.nn.Sequential(torch.nn.Linear(4, 4), Reads(), torch.nn.Linear(4, 4))
    ours, x = ORTModule(eager), rows(3, 4)
    for scale in (1.0, 2.0, 3.0):
        path.write_text(str(scale))
        torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).captured


def test_log_lines_are_no_setting():
    """Whether a line is logged decides nothing."""

    def forward(self, x):
        LOG.debug("a line")
        warnings.warn("a line", DeprecationWarning, stacklevel=1)
        return self.linear(x)

    ours, x = ORTModule(made(forward)), rows(3, 4)
    for level in (10, 30):
        LOG.setLevel(level)
        ours(x)
    assert explain(ours).captured and explain(ours).exports == 1
