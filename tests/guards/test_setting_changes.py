"""Settings of the process that forward changes: as PyTorch leaves them, and put back by a trace that fails."""

import copy
import os
import sys

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.core.errors import NotTraceable
from ortmodule.guards.writes.setting_changes import settings_left_alone
from tests.selection import each
from tests.twins import rows

pytestmark = pytest.mark.filterwarnings("ignore")


def environment(value):
    os.environ.pop("ORTMODULE_TESTS_SETTING", None)
    if value:
        os.environ["ORTMODULE_TESTS_SETTING"] = value


def benchmark(on):
    """torch.testing, which other tests import, lets nothing but this context manager set it."""
    with torch.backends.__allow_nonbracketed_mutation():
        torch.backends.cudnn.benchmark = on


#: What sets it, what tells it, and two values.
SETTINGS = {
    "gradients": (torch.set_grad_enabled, torch.is_grad_enabled, True, False),
    "default type": (torch.set_default_dtype, torch.get_default_dtype, torch.float32, torch.float64),
    "autocast": (
        lambda on: torch.set_autocast_enabled("cpu", on), lambda: torch.is_autocast_enabled("cpu"), False, True,
    ),
    "autocast's type": (
        lambda dtype: torch.set_autocast_dtype("cpu", dtype), lambda: torch.get_autocast_dtype("cpu"),
        torch.bfloat16, torch.float16,
    ),
    "precision": (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "highest", "medium"),
    "threads": (torch.set_num_threads, torch.get_num_threads, 1, 2),
    "deterministic": (
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, False, True,
    ),
    "anomalies": (torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled, False, True),
    "cudnn": (benchmark, lambda: torch.backends.cudnn.benchmark, False, True),
    "directory": (os.chdir, os.getcwd, os.getcwd(), "/"),
    "recursion": (sys.setrecursionlimit, sys.getrecursionlimit, sys.getrecursionlimit(), 5000),
    "environment": (environment, lambda: os.environ.get("ORTMODULE_TESTS_SETTING"), None, "1"),
}  # fmt: skip


@pytest.fixture(params=SETTINGS)
def setting(request):
    put, tell, *values = SETTINGS[request.param]
    before = tell()
    put(values[0])
    yield put, tell, *values
    put(before)


class Net(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.first, self.last, self.change = nn.Linear(4, 4), nn.Linear(4, 4), change

    def forward(self, x):
        h = self.first(x)
        self.change()
        return self.last(h)


def test_what_forward_leaves(setting):
    put, tell, usual, other = setting
    eager = Net(lambda: put(other))
    for module in (eager, ORTModule(copy.deepcopy(eager))):
        for _ in range(3):
            put(usual)
            module(rows(3, 4))
            assert tell() == other


class Between(Net):
    """It is another one meanwhile, without a context manager, and decides nothing."""

    def forward(self, x):
        put, tell, other = self.change
        usual = tell()
        put(other)
        factor = self.first(x.detach())
        put(usual)
        return self.last(x) * factor.to(x.dtype)


@each("name", SETTINGS, ("gradients", "environment"))
def test_what_forward_puts_back(name):
    """The second trace fails in between: the third begins as the first."""
    put, tell, usual, other = SETTINGS[name]
    before = tell()
    put(usual)
    torch.manual_seed(0)
    eager = Between((put, tell, other))
    ours = ORTModule(copy.deepcopy(eager))
    for count in (3, 5, 4):
        x, results = rows(count, 4), []
        for module in (eager, ours):
            module.zero_grad()
            y = module(x)
            y.square().sum().backward()
            results.append([y, *(p.grad for p in module.parameters())])
            assert tell() == usual
        torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-2)
    put(before)


def test_settings_left_alone(setting):
    put, tell, usual, other = setting
    with settings_left_alone():
        put(other)
        put(usual)
    with pytest.raises(NotTraceable, match="forward changes"), settings_left_alone():
        put(other)
    assert tell() == usual
    with pytest.raises(ZeroDivisionError), settings_left_alone():
        put(other)
        raise ZeroDivisionError
    assert tell() == usual


class Imports(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x):
        import sets_an_environment_variable as imported

        return self.line(x) * imported.FACTOR


def test_what_an_import_sets_stays(tmp_path, monkeypatch):
    """A module is imported once: what it does then is not done again by the forward that PyTorch runs."""
    (tmp_path / "sets_an_environment_variable.py").write_text(
        "import os\nos.environ['ORTMODULE_TESTS_SETTING'] = '1'\nFACTOR = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ORTMODULE_TESTS_SETTING", "0")
    eager = Imports()
    module = ORTModule(copy.deepcopy(eager))
    for count in (3, 5):
        ours = module(rows(count, 4))
        assert os.environ["ORTMODULE_TESTS_SETTING"] == "1"
        torch.testing.assert_close(ours, eager(rows(count, 4)))
    assert explain(module).captured


def test_a_usual_module_is_the_engines():
    module = ORTModule(Net(lambda: None))
    module(rows(3, 4))
    assert explain(module).captured
