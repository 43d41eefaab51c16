"""Old scripts run unmodified: names, hooks, JSON settings, gradient graphs, Optimum's trainers."""

import json
import subprocess
import sys

import onnx
import pytest
import torch
from torch import nn

from ortmodule import Error, ORTModule, compat, explain
from ortmodule.compat.gradient_graph import export_gradient_graph
from ortmodule.compat.hooks import GlobalSubscriberManager, StatisticsSubscriber, inspect_activation
from ortmodule.compat.json_config import load_from_json
from ortmodule.core.errors import CompatError
from ortmodule.core.onnx_utils import constants
from ortmodule.debug.onnx_interpreter import evaluate
from tests.compat.test_compat import official, python, site  # noqa: F401  (fixtures)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.relu, self.fc2 = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)

    def forward(self, x):
        return self.fc2(inspect_activation("hidden", self.relu(self.fc1(x))))


def net():
    torch.manual_seed(0)
    return Net()


IMPORTS = """if True:
    import onnxruntime, sys
    assert "torch" not in sys.modules
    import onnxruntime.training as training
    assert training.optim.FusedAdam and training.amp.LossScaler and training.ortmodule.ORTModule
    from onnxruntime.training import ORTModule, DebugOptions, LogLevel
    from onnxruntime.training.ortmodule import ORTModule as Same
    from onnxruntime.training.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber, inspect_activation
    from onnxruntime.training.ortmodule.experimental.json_config import load_from_json
    from onnxruntime.training.experimental import export_gradient_graph
    from torch_ort.experimental.json_config import load_from_json as also
    from torch_ort import set_seed
    import torch
    onnxruntime.set_seed(3); a = torch.rand(1); set_seed(3)
    assert ORTModule is Same and also is load_from_json and torch.equal(a, torch.rand(1))
    print("all there")
"""


def test_imports(site):  # noqa: F811
    compat.enable(site)
    code, out, error = python(site, "-c", IMPORTS, hide=True)
    assert (code, out) == (0, "all there\n"), error


# --- beside other packages that come and go ---------------------------------------------------------------------------

LOOK = """if True:
    import importlib.util, onnxruntime
    print(onnxruntime.__version__, getattr(onnxruntime, "InferenceSession", None) if onnxruntime.__file__.startswith(
        {there!r}) else "stand-in", importlib.util.find_spec("onnxruntime.training").origin is not None)
"""


def tree(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.suffix == ".py"}


def test_an_onnxruntime_that_comes_and_goes(site, official):  # noqa: F811
    before = tree(site)
    compat.enable(site)
    package = official / "onnxruntime"
    text = (package / "__init__.py").read_text()
    look = LOOK.format(there=str(official))
    for version in ("1.30.0", "1.31.0"):  # installed, upgraded
        (package / "__init__.py").write_text(text.replace("1.30.0", version))
        theirs = tree(official)
        code, out, error = python(site, "-c", look, path=[official])
        assert (code, out) == (0, f"{version} theirs True\n"), error
        assert tree(official) == theirs
    (package / "__init__.py").unlink()  # removed
    package.rename(official / "gone")
    code, out, error = python(site, "-c", look, path=[official], hide=True)
    assert code == 0 and out.endswith("stand-in True\n"), error
    compat.disable(site)
    assert tree(site) == before


OPTIMUM = """if True:
    import optimum, sys, types
    try:
        from optimum.onnxruntime import ORTTrainer
    except ImportError as error:
        print("no ortmodule.hf", "transformers" in str(error))
    else:
        print(ORTTrainer if isinstance(ORTTrainer, str) else ORTTrainer.__module__)
    import optimum.onnxruntime as found
    print(getattr(found, "ORTModel", None), hasattr(found, "Missing"))
"""
LAZY = """if True:
    import sys, types
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            if name == "ORTModel": return "theirs"
            raise AttributeError(name)
    lazy = Lazy(__name__)
    lazy.__path__, lazy.__spec__ = __path__, __spec__
    sys.modules[__name__] = lazy
"""


@pytest.mark.parametrize(
    "files, first, model",
    [
        ({}, "ortmodule.hf", "None"),
        ({"optimum/__init__.py": ""}, "ortmodule.hf", "None"),
        ({"optimum/__init__.py": "", "optimum/onnxruntime/__init__.py": LAZY}, "ortmodule.hf", "theirs"),
        (
            {"optimum/__init__.py": "", "optimum/onnxruntime/__init__.py": "ORTTrainer = 'their own'"},
            "their own",
            "None",
        ),
    ],
    ids=["none", "without onnxruntime", "without trainers", "with trainers"],
)
def test_optimum(files, first, model, site, tmp_path):  # noqa: F811
    pytest.importorskip("accelerate")
    compat.enable(site)
    for name, text in files.items():
        path = tmp_path / "theirs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code, out, error = python(site, "-c", OPTIMUM, path=[tmp_path / "theirs"])
    assert (code, out) == (0, f"{first}\n{model} False\n"), error


def test_the_finder_without_ortmodule(site, tmp_path):  # noqa: F811
    """Uninstalling ortmodule leaves imports of others as they are."""
    compat.enable(site)
    package = tmp_path / "theirs" / "optimum" / "onnxruntime"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("ORTModel = 'theirs'")
    start = f"import site, sys; site.addsitedir({str(site)!r}); sys.path.append({str(tmp_path / 'theirs')!r}); "
    start += "from optimum.onnxruntime import ORTModel; print(ORTModel); import torch_ort"
    run = subprocess.run([sys.executable, "-I", "-S", "-c", start], cwd=site, capture_output=True, text=True)
    assert run.stdout == "theirs\n" and "No module named 'torch_ort'" in run.stderr


# --- hooks ------------------------------------------------------------------------------------------------------------

FILES = {"Net_0", "Linear_1", "ReLU_2", "Linear_3"}


@pytest.fixture
def unsubscribed():
    yield
    GlobalSubscriberManager.unsubscribe()


def statistics(folder, wrap, when):
    model = net()
    if when == "before":
        GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(folder, start_step=1, end_step=3)])
    model = wrap(model)
    if when == "after":
        GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(folder, start_step=1, end_step=3)])
    for step in range(4):
        model(torch.full((2, 8), float(step))).square().sum().backward()
    GlobalSubscriberManager.unsubscribe()
    assert not any("forward" in vars(module) for module in model.modules())
    return model


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.full)])
def test_statistics_of_a_wrapped_module_are_those_of_a_plain_one(when, tmp_path, unsubscribed):
    theirs, ours = tmp_path / "pt_out", tmp_path / "ort_out"
    statistics(theirs, lambda model: model, "before")
    wrapped = statistics(ours, ORTModule, when)
    report = explain(wrapped)
    assert report.captured and report.engine_calls == 4, report
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir()) == ["step_1", "step_2"]
    for step in ("step_1", "step_2"):
        names = {p.name for p in (ours / step).iterdir()}
        runs = {f"{name}_0th_output_{way}" for name in FILES for way in ("forward", "backward")}
        assert names == {p.name for p in (theirs / step).iterdir()}
        assert names == runs | {"order.txt", "hidden_forward", "hidden_backward"}
        for name in names - {"order.txt"}:
            found, expected = ((folder / step / name).read_text().splitlines() for folder in (ours, theirs))
            assert found[0] == expected[0] and found[2:4] == expected[2:4], name


def test_hooks_that_cannot_be(tmp_path, unsubscribed):
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="override_output_dir"):
        StatisticsSubscriber(tmp_path / "there")
    StatisticsSubscriber(tmp_path / "there", override_output_dir=True)
    assert not (tmp_path / "there").exists()
    with pytest.raises(CompatError, match="not str"):
        GlobalSubscriberManager.subscribe(net(), ["out"])
    first, second = net(), net()
    for number, model in enumerate((first, second)):
        GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(tmp_path / str(number))])
        assert "forward" in vars(model.fc1)
    assert "forward" not in vars(first) and "forward" not in vars(first.fc1)
    GlobalSubscriberManager.unsubscribe()
    x = torch.ones(2)
    assert inspect_activation("x", x) is x


# --- settings, gradient graphs ----------------------------------------------------------------------------------------


def test_load_from_json(tmp_path, monkeypatch):
    model, x = ORTModule(net()), torch.ones(2, 8)
    expected = model(x)
    for number, level in enumerate(("ERROR", "FATAL")):
        file = tmp_path / f"{number}.json"
        debug = {"LogLevel": level, "SaveONNX": True, "ONNXPrefix": f"my_{number}"}
        file.write_text(
            json.dumps({"DebugOptions": debug, "UseStaticShape": True, "UseMemoryEfficientGradient": False})
        )
        monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
        load_from_json(model, str(file))
        assert model._ortmodule.config.log_level.name == level
        torch.testing.assert_close(model(x), expected)
        assert list(tmp_path.glob(f"my_{number}_execution_model_*.onnx"))
    with pytest.raises(CompatError, match="JSON_CONFIG_PATH"):
        load_from_json(model)
    with pytest.raises(TypeError, match="not Net"):
        load_from_json(net(), str(file))
    assert issubclass(CompatError, Error)


def test_export_gradient_graph(tmp_path):
    """The original's names, and PyTorch's numbers."""
    model, path, loss = net(), tmp_path / "gradients.onnx", nn.CrossEntropyLoss()
    model.fc1.weight.requires_grad_(False)
    x, labels = torch.randn(3, 8), torch.tensor([0, 1, 3])
    export_gradient_graph(model, loss, x.clone().requires_grad_(), labels, path, opset_version=12)
    graph = onnx.load(path).graph
    assert all(p.grad is None for p in model.parameters())
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert [value.name for value in graph.input] == ["input", "labels", *dict(model.named_parameters())]
    assert [value.name for value in graph.output] == ["output", "loss", *(f"{name}_grad" for name in names)]
    standard = {node.op_type for node in graph.node if not node.domain}
    assert {"MatMul", "ReduceSum"} <= standard and not any("Fused" in node.op_type for node in graph.node)


class Squares(nn.Module):
    """Of operators that are ONNX's own, with those of its gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 5, bias=False), nn.Linear(5, 4, bias=False)

    def forward(self, x):
        return self.second(self.first(x) * 3)


def test_numbers_of_a_gradient_graph(tmp_path):
    torch.manual_seed(0)
    model, path, x, labels = Squares(), tmp_path / "gradients.onnx", torch.randn(3, 8), torch.randn(3, 4)
    export_gradient_graph(model, lambda found, wanted: (found * wanted).sum(), x, labels, path)
    graph = onnx.load(path).graph
    values = {"input": x, "labels": labels, **{name: p.detach() for name, p in model.named_parameters()}}
    values |= constants(onnx.load(path))
    evaluate(graph.node, values, {})
    output = model(x)
    loss = (output * labels).sum()
    loss.backward()
    wanted = [output.detach(), loss.detach(), *(p.grad for p in model.parameters())]
    torch.testing.assert_close([values[value.name] for value in graph.output], wanted, rtol=1e-4, atol=1e-5)


def test_multinomial_of_one_row():
    class Sampler(nn.Module):
        def forward(self, weights):
            return torch.multinomial(weights, 2), weights * 2

    model = ORTModule(Sampler())
    weights = torch.tensor([0.0, 3.0, 0.0, 2.0])
    found, _ = model(weights)
    assert sorted(found.tolist()) == [1, 3] and found.dtype == torch.int64
    assert explain(model).engine_calls == 1
