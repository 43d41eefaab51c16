"""Scripts that import ONNX Runtime's names run, once that is asked for, beside an installed onnxruntime or without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ortmodule import compat
from ortmodule.compat.__main__ import main

PACKAGE = Path(compat.__file__).resolve().parents[2]


@pytest.fixture
def site(tmp_path):
    """A folder that stands for site-packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


HIDE = """
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "onnxruntime" else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


def python(site, *arguments, path=(), hide=False):
    """Runs Python as if `site` were its site-packages. `path`: other folders with packages; `hide`: an onnxruntime that
    is installed is not seen."""
    start = f"import site, sys, runpy\nsite.addsitedir({str(site)!r})\n" + (HIDE if hide else "")
    if arguments[0] == "-m":
        start += f"runpy.run_module({arguments[1]!r}, run_name='__main__')"
    else:
        start += arguments[1]
    # (Python takes a compiled file for that of a source of the same size and second.)
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join([str(PACKAGE), *map(str, path)])}
    run = subprocess.run([sys.executable, "-c", start], env=env, cwd=site, capture_output=True, text=True)
    return run.returncode, run.stdout, run.stderr


@pytest.fixture
def official(tmp_path):
    """An installed onnxruntime for inference."""
    package = tmp_path / "official" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("InferenceSession, __version__ = 'theirs', '1.30.0'\n")
    return package.parent


SCRIPT = """if True:
    import torch
    from onnxruntime.training.ortmodule import ORTModule, DebugOptions, LogLevel
    from onnxruntime.training import ortmodule
    from onnxruntime.training.optim import FusedAdam
    model = ORTModule(torch.nn.Linear(3, 2), DebugOptions(log_level=LogLevel.ERROR))
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    print(model._ortmodule.compiler.exports, ORTModule.__module__)
"""


def test_names_are_not_there_unless_asked_for(site):
    code, _, error = python(site, "-c", "import torch_ort")
    assert code and "No module named 'torch_ort'" in error


@pytest.mark.parametrize("hide", [False, True])
def test_a_script_of_the_original_runs(hide, site):
    assert main(["enable", "--folder", str(site)]) == 0
    code, out, error = python(site, "-c", SCRIPT, hide=hide)
    assert (code, out) == (0, "1 ortmodule.module\n"), error


def test_beside_an_installed_onnxruntime(site, official):
    compat.enable(site)
    text = "import onnxruntime; from onnxruntime.training.ortmodule import ORTModule; "
    text += "print(onnxruntime.InferenceSession, onnxruntime.__file__, ORTModule.__module__)"
    code, out, error = python(site, "-c", text, path=[official])
    assert code == 0, error
    assert out.split() == ["theirs", str(official / "onnxruntime" / "__init__.py"), "ortmodule.module"]
    assert sorted(path.name for path in (official / "onnxruntime").iterdir() if path.name != "__pycache__") == [
        "__init__.py"
    ]


def test_without_an_installed_onnxruntime(site):
    compat.enable(site)
    code, _, error = python(site, "-c", "import onnxruntime; onnxruntime.InferenceSession", hide=True)
    assert code and "install onnxruntime for it" in error


def test_optimizers(site):
    compat.enable(site)
    text = "from onnxruntime.training.optim.fused_adam import FusedAdam, AdamWMode as M; import torch_ort.optim as t; "
    text += "from onnxruntime.training.optim import fp16_optimizer as f, FP16_Optimizer, AdamWMode; import ortmodule; "
    text += (
        "from onnxruntime.training.optim.fp16_optimizer import FP16_Optimizer as G; from ortmodule import optim as o; "
    )
    text += (
        "print(t.FusedAdam is FusedAdam is o.FusedAdam, G is FP16_Optimizer is t.FP16_Optimizer is o.FP16_Optimizer, "
    )
    text += "M is AdamWMode, 'deepspeed' in sys.modules)"
    code, out, error = python(site, "-c", text)
    assert (code, out) == (0, "True True True False\n"), error


def test_samplers(site):
    compat.enable(site)
    text = "from onnxruntime.training.utils.data import LoadBalancingDistributedSampler as a; "
    text += "import torch_ort.utils.data; "
    text += "from onnxruntime.training.utils.data import sampler; import ortmodule.utils.data as o; "
    text += "print(a is sampler.LoadBalancingDistributedSampler is o.LoadBalancingDistributedSampler, "
    text += "torch_ort.utils.data.LoadBalancingDistributedBatchSampler is o.LoadBalancingDistributedBatchSampler)"
    assert python(site, "-c", text)[:2] == (0, "True True\n")


TRAINER = """if True:
    import torch, warnings
    from onnxruntime.training import ORTTrainer, ORTTrainerOptions, amp, optim
    from onnxruntime.training.optim.lr_scheduler import LinearWarmupLRScheduler
    from onnxruntime.training.ortmodule.experimental.hierarchical_ortmodule import HierarchicalORTModule
    import ortmodule
    options = ORTTrainerOptions({"lr_scheduler": optim.lr_scheduler.LinearWarmupLRScheduler(total_steps=4),
                                 "mixed_precision": {"enabled": False, "loss_scaler": amp.LossScaler(8.0)}})
    description = {"inputs": [("x", ["n", 3]), ("y", ["n", 2])], "outputs": [("loss", [], True)]}
    model = torch.nn.Linear(3, 2)
    trainer = ORTTrainer(model, description, optim.LambConfig(lr=0.1), torch.nn.MSELoss(), options)
    print(trainer.train_step(torch.ones(4, 3), torch.ones(4, 2)).shape == (), ORTTrainer is ortmodule.ORTTrainer)

    class Island(torch.nn.Module):
        def forward(self, x):
            return torch.from_numpy(x.detach().numpy()) + x

    warnings.simplefilter("ignore")
    model = HierarchicalORTModule(torch.nn.Sequential(torch.nn.Linear(3, 3), Island(), torch.nn.Linear(3, 2)))
    model(torch.ones(2, 3)).sum().backward()
    print(type(model).__mro__[1].__name__, ortmodule.explain(model).captured, model[0].weight.grad.shape == (3, 3))
"""


def test_the_first_generation(site):
    compat.enable(site)
    code, out, error = python(site, "-c", TRAINER)
    assert (code, out) == (0, "True True\nORTModule True True\n"), error


def test_torch_ort(site):
    compat.enable(site)
    text = "import torch, torch_ort; torch_ort.set_seed(5); a = torch.rand(1); torch_ort.set_seed(5); "
    text += "print(torch.equal(a, torch.rand(1)), torch_ort.ORTModule.__module__, torch_ort.LogLevel.INFO.name)"
    assert python(site, "-c", text)[:2] == (0, "True ortmodule.module INFO\n")


@pytest.mark.parametrize(
    "module", ["onnxruntime.training.ortmodule.torch_cpp_extensions.install", "torch_ort.configure"]
)
def test_there_is_nothing_to_install(module, site):
    compat.enable(site)
    code, out, error = python(site, "-m", module)
    assert code == 0, error
    assert "nothing to do" in out


def test_custom_autograd_switch(site):
    compat.enable(site)
    text = "from onnxruntime.training.ortmodule._custom_autograd_function import enable_custom_autograd_support as e; "
    text += "from ortmodule.core.config import read_config; before = read_config().enable_custom_autograd; e(False); "
    text += "print(before, read_config().enable_custom_autograd)"
    assert python(site, "-c", text)[:2] == (0, "True False\n")


def test_starting_python_stays_cheap(site):
    """The finder imports nothing of ours before it is asked."""
    compat.enable(site)
    assert python(site, "-c", "print('torch' in sys.modules, 'ortmodule' in sys.modules)")[1] == "False False\n"


def test_after_ortmodule_is_gone(site):
    compat.enable(site)
    env = {**os.environ, "PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
    start = f"import site; site.addsitedir({str(site)!r}); import importlib.util as u; print(u.find_spec('torch_ort'))"
    run = subprocess.run([sys.executable, "-I", "-S", "-c", start], env=env, cwd=site, capture_output=True, text=True)
    assert run.stdout == "None\n", run.stderr


EDITED = f"""
import importlib.util as util, sys
class Edited:
    @staticmethod
    def find_spec(name, path=None, target=None):
        folder = {str(PACKAGE / "ortmodule")!r}
        if name == "ortmodule":
            return util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
sys.meta_path.append(Edited)
print(util.find_spec("torch_ort").origin, "torch" in sys.modules)
"""


def test_an_ortmodule_that_is_installed_to_be_edited(site):
    """No folder on the path has it."""
    compat.enable(site)
    start = f"import site; site.addsitedir({str(site)!r}){EDITED}"
    run = subprocess.run([sys.executable, "-I", "-S", "-c", start], cwd=site, capture_output=True, text=True)
    assert run.stdout.endswith("packages/torch_ort/__init__.py False\n"), run.stderr


def test_enable_disable_status(site, capsys):
    assert main(["status", "--folder", str(site)]) == 0 and capsys.readouterr().out.startswith("disabled")
    for _ in range(2):
        assert main(["enable", "--folder", str(site)]) == 0 and capsys.readouterr().out.startswith("enabled")
    assert sorted(path.name for path in site.iterdir()) == sorted(compat.FILES)
    for _ in range(2):
        assert main(["disable", "--folder", str(site)]) == 0 and capsys.readouterr().out.startswith("disabled")
    assert not list(site.iterdir())
    assert python(site, "-c", "import torch_ort")[0] != 0


@pytest.mark.parametrize("others", [False, True])
def test_what_python_has_compiled_goes(others, site):
    """Also for other versions of Python; what it has compiled of others stays."""
    cache = site / "__pycache__"
    if others:
        cache.mkdir()
        (cache / "theirs.cpython-311.pyc").write_bytes(b"theirs")
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}
    compat.enable(site)
    start = f"import site; site.addsitedir({str(site)!r})"
    off = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
    env = {name: text for name, text in os.environ.items() if name not in off}
    subprocess.run([sys.executable, "-c", start], env=env, check=True)
    made = compat.compiled(site)
    assert len(made) == 1 and made[0].parent == cache
    (cache / "ortmodule_compat_finder.cpython-399.opt-1.pyc").write_bytes(b"another version's")
    assert compat.disable(site) == list(compat.FILES)
    assert {path: path.read_bytes() for path in site.rglob("*") if path.is_file()} == before
    assert cache.exists() is others


@pytest.mark.parametrize("name", compat.FILES)
@pytest.mark.parametrize("action", ["enable", "disable"])
def test_a_file_that_is_not_ours_stays(name, action, site, capsys):
    (site / name).write_text("theirs\n")
    assert main([action, "--folder", str(site)]) == 1
    assert str(site / name) in capsys.readouterr().err
    assert [path.read_text() for path in site.iterdir()] == ["theirs\n"]


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    assert main(["enable", "--folder", str(tmp_path / "none")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_beside_a_training_build(site, official, monkeypatch, capsys):
    (official / "onnxruntime" / "training").mkdir()
    monkeypatch.syspath_prepend(str(official))
    assert main(["enable", "--folder", str(site)]) == 1
    assert "training package of its own" in capsys.readouterr().err
    assert not list(site.iterdir())
