"""Options and settings of the whole suite.

--full                exhaustive: every architecture, long random search
--some                of tests with many cases that are alike some, as the whole run takes them (tests/selection.py)
--turn N              of what waits for --full the N-th of a hundred parts, too: scripts/test goes by the commit
--fast                a sample of every kind (tests/selection.py), without files: of those that it is from
--resume FILE         leaves out the tests whose names are in the file, and adds those that pass
--share I/N           only one of N parts, of about one size
--from-front FILE     shares the tests with another process, which is told --from-back and the same file
--ran FILE            adds to the file which tests were collected, run and skipped (tests/stages.py)
--time-limit SECONDS  begins no test after that many, and fails; with --resume another run goes on
ORTMODULE_BUILD=dir   test the package built there (a sanitized build) instead of the installed one
"""

import functools
import gc
import os
import random
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path

import hypothesis
import numpy
import pytest
import torch

from tests.both_ends import BothEnds
from tests.selection import COLLECTED, FAST, in_turn, sample, waiting

BUILD = os.environ.get("ORTMODULE_BUILD")
DEADLINE = pytest.StashKey[float | None]()
WAITING = pytest.StashKey[int]()
if BUILD:
    # Imported now: pytest puts the repository, which has the package too, before everything else later on.
    sys.path.insert(0, os.path.abspath(BUILD))
    import ortmodule._core

    if not Path(ortmodule._core.__file__).is_relative_to(os.path.abspath(BUILD)):
        raise ImportError(f"{ortmodule._core.__file__} was imported, which is not in ORTMODULE_BUILD={BUILD}")

GPU = bool(BUILD) and (ortmodule._core.emulated or os.environ.get("ORTMODULE_TEST_DEVICE", "cpu") != "cpu")
QUIET = [hypothesis.HealthCheck.filter_too_much, hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
hypothesis.settings.register_profile(
    "short", max_examples=40, deadline=None, derandomize=True, suppress_health_check=QUIET, database=None
)
hypothesis.settings.register_profile(
    "full", max_examples=2000, deadline=timedelta(minutes=1), suppress_health_check=QUIET, database=None
)


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws hangs on no other test that the same process has run."""
    torch.default_generator.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def loggers_as_before():
    """A module's log level is that of the process's loggers."""
    from ortmodule.core import logger

    known = (logger.LOGGER, logger.ENGINE)
    before, all_ranks = [(each.level, list(each.handlers)) for each in known], logger._RANKS.all_ranks
    yield
    for each, (level, handlers) in zip(known, before, strict=True):
        if (
            each.level != level
        ):  # what a level was found to be is forgotten for all loggers, of which there are thousands
            each.setLevel(level)
        each.handlers[:] = handlers
    logger._RANKS.all_ranks = all_ranks


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="the exhaustive form: all architectures, long random search")
    parser.addoption("--some", action="store_true", help="of tests with many cases that are alike, some")
    parser.addoption("--turn", type=int, metavar="N", help="of what waits for --full the N-th part of 100, too")
    parser.addoption("--fast", action="store_true", help="a sample of every kind of test")
    parser.addoption("--resume", metavar="FILE", help="leave out tests named in FILE, add those that pass")
    parser.addoption("--ran", metavar="FILE", help="add to FILE which tests were collected, run and skipped")
    parser.addoption("--share", metavar="I/N", help="only one of N parts of the tests")
    parser.addoption("--from-front", metavar="FILE", help="begin with the first test, end where --from-back FILE is")
    parser.addoption("--from-back", metavar="FILE", help="begin with the last test, end where --from-front FILE is")
    parser.addoption("--time-limit", type=int, metavar="SECONDS", help="begin no test after that many")


def pytest_configure(config):
    if config.getoption("--fast") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args[:] = [str(config.rootpath / file) for file in FAST]
    config.addinivalue_line("markers", "full: only with --full")
    config.addinivalue_line("markers", "emulated: run on the emulated GPU, too, as all of tests/cuda and tests/gpu")
    config.addinivalue_line("markers", "emulated_full: there only with --full")
    config.addinivalue_line("markers", "sanitized: there under sanitizers, too, as all of tests/cuda")
    config.addinivalue_line(
        "markers", "together(argument...): in one process with those of its file with these arguments"
    )
    hypothesis.settings.load_profile("full" if config.getoption("--full") else "short")
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    # Steps of tests are short: no second graph would pay. (tests/runtime/test_capture_budget.py is about that.)
    os.environ.setdefault("ORTMODULE_CAPTURE_SHARE", "inf")
    if config.getoption("--resume"):
        config.pluginmanager.register(Resume(Path(config.getoption("--resume"))))
    if config.getoption("--ran"):
        from tests.stages import Ran

        end = "back" if config.getoption("--from-back") else "front"
        path = f"{config.getoption('--ran')}-{end}"
        config.pluginmanager.register(Ran(path, functools.partial(_left_out, config)))
    for end in "front", "back":
        if file := config.getoption(f"--from-{end}"):
            config.pluginmanager.register(BothEnds(file, end == "back", _indivisible))


def pytest_make_parametrize_id(config, val, argname):
    """Of values that pytest would number: types of elements, and settings by name."""
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    if isinstance(val, dict) and all(isinstance(x, (str, int, float)) for x in val.values()):
        return ",".join(f"{name}={x}" for name, x in val.items()) or "nothing"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing of a million objects that it makes is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()  # they are old from now on
        gc.enable()


#: Markers of all tests in these folders.
OF_FOLDERS = {"cuda": ("emulated", "sanitized"), "gpu": ("emulated",)}


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item):
    for name in OF_FOLDERS.get(item.path.parent.name, ()):
        item.add_marker(name)


def _is_left_out(config, item):
    """On an emulated GPU, which is slow."""
    emulated = bool(BUILD) and ortmodule._core.emulated
    return emulated and not config.getoption("--full") and item.get_closest_marker("emulated_full") is not None


def _for_full(config, items):
    """Those of ``items`` that only --full runs."""
    if config.getoption("--full"):
        return set()
    full = {
        item for item in items if item.get_closest_marker("full") is not None
    }  # (keywords have names of folders, too)
    if config.getoption("--some"):
        names = waiting([item.nodeid for item in items if item not in full], Path(BUILD).name if BUILD else "")
        full |= {item for item in items if item.nodeid in names}
    turn = config.getoption("--turn")
    return full if turn is None else {item for item in full if not in_turn(item.nodeid, turn)}


def _left_out(config, items):
    """Those of ``items`` that this run does not take."""
    return {item for item in items if _is_left_out(config, item)} | _for_full(config, items)


def _keep(config, items, chosen):
    """Of ``items``, which are changed, those that are chosen."""
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def pytest_collection_modifyitems(config, items):
    config.stash[COLLECTED] = [item.nodeid for item in items if item.get_closest_marker("full") is None]
    for_full = _for_full(config, items)
    _keep(config, items, [item for item in items if not _is_left_out(config, item)])
    possible = len(items)
    _keep(config, items, [item for item in items if item not in for_full])
    config.stash[WAITING] = possible - len(items)
    if config.getoption("--fast"):
        _keep(config, items, sample(items))
    if config.getoption("--share"):
        first, step = map(int, config.getoption("--share").split("/"))
        _keep(config, items, [item for item in items if zlib.crc32(_indivisible(item).encode()) % step == first - 1])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session):
    """Lets go of the tests that are not run: each collection of garbage, and each search for what holds a tensor, would
    walk through them."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and (deselected := reporter.stats.get("deselected")):
        deselected[:] = deselected[:1] * len(deselected)  # their number is all that is shown


def pytest_terminal_summary(terminalreporter, config):
    if waiting := config.stash.get(WAITING, 0):
        terminalreporter.line(f"{waiting} tests wait for --full")


def _indivisible(item):
    """What all tests have in common that one process is to run."""
    mark = item.get_closest_marker("together")
    if mark is None:
        return item.nodeid
    return f"{item.path.name} {[item.callspec.params[each] for each in mark.args]}"


def pytest_sessionstart(session):
    limit = session.config.getoption("--time-limit")
    session.config.stash[DEADLINE] = None if limit is None else time.monotonic() + limit


def pytest_runtest_setup(item):
    deadline = item.config.stash[DEADLINE]
    if deadline is not None and time.monotonic() > deadline:
        item.session.shouldfail = "the time is over: run it again"
        pytest.skip("the time is over")


class Resume:
    """A run that was stopped goes on where it was."""

    def __init__(self, path):
        self.path = path
        self.passed = set(path.read_text().splitlines()) if path.exists() else set()

    def pytest_collection_modifyitems(self, config, items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.passed])
        items[:] = [item for item in items if item.nodeid not in self.passed]

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            with self.path.open("a") as file:
                file.write(report.nodeid + "\n")

    def pytest_sessionfinish(self, session, exitstatus):
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.passed:
            session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """On a GPU, an emulated one (EMULATED=1) too, a test of an operator that has no kernel there yet is skipped."""
    try:
        return (yield)
    except Exception as error:
        if GPU and "no CUDA kernel" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise
