"""Every setting: where it comes from, what a bad value says, what it does."""

import ast
import copy
import dataclasses
import json
import os
import pickle
import warnings
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import ortmodule
from ortmodule import Config, DebugOptions, EngineError, Error, LogLevel, ORTModule, UnsupportedError, explain
from ortmodule.core import config
from ortmodule.core.config import VARIABLES, read_config
from ortmodule.engine import session
from scripts import settings_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No setting from outside, and warnings that come again."""
    for name in [name for name in os.environ if name.startswith("ORTMODULE_") and name != "ORTMODULE_BUILD"]:
        monkeypatch.delenv(name)
    config.warn_once.cache_clear()


@pytest.fixture
def env(monkeypatch):
    return lambda **values: [monkeypatch.setenv(f"ORTMODULE_{name}", value) for name, value in values.items()]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x).relu()


class Raises(Net):
    """No graph can be made of it unless the environment, where no guard looks, allows it."""

    def forward(self, x):
        if "WILLING" not in os.environ and torch._C._get_tracing_state() is not None:
            raise LookupError("not while tracing")
        return self.linear(x)


def x(rows=2):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_page_is_current():
    """`python -m scripts.settings_page docs/configuration.md` writes it."""
    assert PAGE.read_text() == settings_page.page()


GUIDELINE = """
    ONNX_OPSET_VERSION FALLBACK_POLICY FALLBACK_RETRY SKIPCHECK_POLICY LOG_LEVEL SAVE_ONNX_PATH CACHE_DIR
    ALLOW_AUTOGRAD_CHECKPOINT ENABLE_CUSTOM_AUTOGRAD DEEPCOPY_BEFORE_MODEL_EXPORT ENABLE_COMPUTE_OPTIMIZER
    ENABLE_SPARSE_OPTIMIZER ENABLE_LABEL_SPARSE_OPTIMIZER ENABLE_EMBEDDING_SPARSE_OPTIMIZER PRINT_INPUT_DENSITY
    PRINT_MEMORY_STATS MEMORY_OPT_LEVEL MEMORY_OPT_CONFIG MEMORY_BUDGET ENABLE_MEM_EFFICIENT_GRAD_MGMT
    MEMORY_OFFLOAD MEMORY_OFFLOAD_PATH KEEP_MEMORY MEMORY_OPT_LAYERS
    USE_EFFICIENT_ATTENTION
    USE_TRITON TRITON_CONFIG_FILE TRITON_DEBUG ENABLE_TUNING MAX_TUNING_DURATION_MS TUNING_RESULTS_PATH
    USE_FLASH_ATTENTION CONV_ALGO_SEARCH JSON_CONFIG_PATH EXPORTER VERIFY DEFER_LOGITS ENABLE_CUDA_GRAPHS
    DISABLED_PASSES CAPTURE_SHARE STRICT SAVE_ONNX ONNX_PREFIX ENABLE_ZERO_STAGE3 ATEN_SDPA_FALLBACK IS_DETERMINISTIC
    EXTERNAL_TORCH_CPP_EXTENSION_DIR
"""


def test_every_name_is_there():
    assert set(GUIDELINE.split()) == set(VARIABLES)


OLD = "accepted for old scripts"


def read_names():
    """Settings that code of the package takes from a Config, the class itself left out: as an attribute, or by name."""
    found = set()
    for path in Path(ortmodule.__file__).parent.rglob("*.py"):
        if path.name == "original_keys.py":  # a table of names
            continue
        tree = ast.parse(path.read_text())
        table = {n for c in ast.walk(tree) if isinstance(c, ast.ClassDef) and c.name == "Config" for f in c.body
                 if isinstance(f, ast.AnnAssign) for n in ast.walk(f)}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found.add(node.attr.upper())
            elif isinstance(node, ast.Constant) and node not in table:
                found.add(str(node.value).upper())
    return found & set(VARIABLES)


def test_every_setting_is_read_or_says_that_it_has_no_effect():
    used, silent = read_names(), {name for name, v in VARIABLES.items() if not v.exists or v.doc.startswith(OLD)}
    assert set(VARIABLES) - used == silent, "a setting that does nothing, or one that does and says that it does not"
    assert {name for name, v in VARIABLES.items() if v.exists and v.doc.startswith(OLD)} == {
        "SKIPCHECK_POLICY",
        "DEEPCOPY_BEFORE_MODEL_EXPORT",
        "ENABLE_ZERO_STAGE3",
        "ATEN_SDPA_FALLBACK",
        "IS_DETERMINISTIC",
        "EXTERNAL_TORCH_CPP_EXTENSION_DIR",
    }


def test_defaults():
    read = read_config()
    assert read.log_level is LogLevel.WARNING and read.deepcopy_before_model_export is True
    assert read.enable_embedding_sparse_optimizer == "auto" and read.enable_label_sparse_optimizer is True
    assert read.conv_algo_search == "HEURISTIC" and read.memory_opt_level == 0 and read.verify == 0
    unsupported = {f"FALLBACK_UNSUPPORTED_{what}" for what in ("DEVICE", "DATA", "TORCH_MODEL", "ONNX_MODEL")}
    assert read.fallback_policy == unsupported


# A value that cannot be understood, and what the message must propose.
BAD = {
    "ONNX_OPSET_VERSION": ("5", "nearest is 17"),
    "FALLBACK_POLICY": ("FALLBACK_DISABLE|FALLBACK_UNSUPORTED_DATA", "did you mean FALLBACK_UNSUPPORTED_DATA?"),
    "SKIPCHECK_POLICY": ("SKIP_CHECK_DEVISE", "did you mean SKIP_CHECK_DEVICE?"),
    "LOG_LEVEL": ("WARN", "did you mean WARNING?"),
    "SAVE_ONNX_PATH": ("/no/such/folder", "a folder that can be written"),
    "CACHE_DIR": ("/proc/ortmodule", "a folder that can be made, and that only its owner can write"),
    "JSON_CONFIG_PATH": ("/no/such/file", "a file that can be read"),
    "CONV_ALGO_SEARCH": ("EXHAUSTED", "did you mean EXHAUSTIVE?"),
    "EXPORTER": ("torchscrip", "did you mean TORCHSCRIPT?"),
    "CAPTURE_SHARE": ("-0.1", "the nearest is 0"),
    "VERIFY": ("-1", "at least 0"),
    "ENABLE_EMBEDDING_SPARSE_OPTIMIZER": ("AUTOMATIC", "auto, 1 or 0"),
    "DEFER_LOGITS": ("YES PLEASE", "auto, 1 or 0"),
    "ENABLE_MEM_EFFICIENT_GRAD_MGMT": ("AUTOMATIC", "auto, 1 or 0"),
    "MEMORY_OPT_LEVEL": ("3", "nearest is 2"),
    "MEMORY_OPT_LAYERS": ("-1", "at least 0"),
    "MEMORY_OPT_CONFIG": ("Gelu+:1", "takes <cluster>:<strategy>:<count>, as Gelu+:1:-1"),
    "MEMORY_OFFLOAD_PATH": ("/no/such/folder", "a folder that can be written"),
    "MEMORY_BUDGET": ("much", "a number of bytes, as 8GiB"),
    "MAX_TUNING_DURATION_MS": ("soon", "a whole number"),
    "DISABLED_PASSES": ("gelu_fusion,silufusion", "takes names of passes (clean_up, masked_softmax, gelu_fusion,"),
}
FLAGS = [name for name, variable in VARIABLES.items() if variable.kind is config.FLAG]


@pytest.mark.parametrize(
    "text, count", [("8GiB", 8 << 30), ("500 MB", 500_000_000), ("1.5kib", 1536), ("1000", 1000), ("2 tb", 2 * 10**12)]
)
def test_bytes(text, count, monkeypatch):
    monkeypatch.setenv("ORTMODULE_MEMORY_BUDGET", text)
    assert read_config().memory_budget == count


#: Any text is one.
PATHS = {
    "TRITON_CONFIG_FILE", "TUNING_RESULTS_PATH", "ONNX_PREFIX", "EXTERNAL_TORCH_CPP_EXTENSION_DIR",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in VARIABLES if name not in PATHS])
def test_a_bad_value(name, env):
    text, advice = BAD.get(name, ("YESS", "did you mean YES?"))
    assert name in BAD or name in FLAGS
    env(**{name: text})
    with pytest.raises(ValueError) as caught:
        ORTModule(Net())
    assert f"ORTMODULE_{name}={text} (environment)" in str(caught.value) and advice in str(caught.value)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("silufusion", "did you mean silu_fusion?"),
        ("gelu_fusion,,norm_fusion", "not an empty name"),
    ],
)
def test_passes_that_cannot_be_switched_off(text, advice, env):
    env(DISABLED_PASSES=text)
    with pytest.raises(ValueError, match=advice.replace("?", r"\?")):
        read_config()


def test_passes_are_switched_off_by_name(env, tmp_path):
    """The result stays, the passes do not run; other settings go on switching theirs."""
    modules = [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    reports = []
    for module, off in zip(modules, ("", " GELU_fusion, pointwise_fusion"), strict=True):
        env(DISABLED_PASSES=off, ENABLE_COMPUTE_OPTIMIZER="0")
        wrapped = ORTModule(module)
        wrapped(x()).square().sum().backward()
        reports.append(explain(wrapped))
    assert {"gelu_fusion", "pointwise_fusion", "row_selection"} <= read_config().passes_off
    for a, b in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert "gelu_fusion" in reports[0].fused and not {"gelu_fusion", "pointwise_fusion"} & reports[1].fused.keys()
    assert all(report.captured for report in reports)
    (tmp_path / "settings.json").write_text(json.dumps({"DISABLED_PASSES": ["gelu_fusion", "norm_fusion"]}))
    env(JSON_CONFIG_PATH=str(tmp_path / "settings.json"))
    assert read_config().disabled_passes == {"gelu_fusion", "norm_fusion"}


def test_an_unknown_name(env):
    env(FALLBACK_POLICI="1", SOMETHING_ELSE_ALTOGETHER="1")
    with pytest.warns(UserWarning) as caught:
        ORTModule(Net())
    assert sorted(str(warning.message) for warning in caught) == [
        "there is no setting ORTMODULE_FALLBACK_POLICI (environment); did you mean ORTMODULE_FALLBACK_POLICY?",
        "there is no setting ORTMODULE_SOMETHING_ELSE_ALTOGETHER (environment)",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ORTModule(Net())  # once


LATER = {name for name, variable in VARIABLES.items() if not variable.exists}
OTHER = {"EXPORTER": "dynamo"} | dict.fromkeys(PATHS, "file")


@pytest.mark.parametrize("name", sorted(LATER))
def test_what_does_not_exist_yet_is_accepted(name, env):
    """With one warning, unless it asks for what happens anyway."""
    default = VARIABLES[name].default
    env(**{name: OTHER.get(name, "0" if default is True else "1")})
    with pytest.warns(UserWarning, match=f"ORTMODULE_{name} .* has no effect yet"):
        model = ORTModule(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ORTModule(Net())
    torch.testing.assert_close(model(x()), model._ortmodule.module.forward(x()))


# --- precedence -------------------------------------------------------------------------------------------------------


def test_precedence(env, tmp_path):
    debug = DebugOptions(log_level=LogLevel.ERROR)
    assert read_config(debug=debug).log_level is LogLevel.ERROR
    env(LOG_LEVEL="fatal")
    assert read_config(debug=debug).log_level is LogLevel.FATAL
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"ORTMODULE_LOG_LEVEL": "WARNING", "VERIFY": 3, "fallback_retry": True}))
    env(JSON_CONFIG_PATH=str(file), VERIFY="1")
    read = read_config(debug=debug)
    assert (read.log_level, read.verify, read.fallback_retry) == (LogLevel.WARNING, 3, True)


def test_a_file_in_the_originals_style(env, tmp_path):
    file = tmp_path / "settings.json"
    debug = {"LogLevel": "ERROR", "SaveONNX": True, "ONNXPrefix": "mine"}
    rest = {"SkipCheck": ["SKIP_CHECK_DEVICE"], "UseStaticShape": False, "PropagateCastOps": {"Level": 3}}
    policy = {"FallbackPolicy": ["FALLBACK_DISABLE"], "EnableCustomAutogradFunction": False}
    file.write_text(json.dumps({"DebugOptions": debug, "OnnxOpsetVersion": 17} | rest | policy))
    env(JSON_CONFIG_PATH=str(file), SAVE_ONNX_PATH=str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = read_config()
    assert (read.log_level, read.save_onnx, read.onnx_prefix) == (LogLevel.ERROR, True, "mine")
    assert (read.onnx_opset_version, read.skipcheck_policy) == (17, {"SKIP_CHECK_DEVICE"})
    assert read.fallback_policy == {"FALLBACK_DISABLE"} and read.enable_custom_autograd is False
    ORTModule(Net())(x())
    assert list(tmp_path.glob("mine_torch_exported_*.onnx"))


def test_saving_needs_a_prefix(env):
    env(SAVE_ONNX="1")
    with pytest.raises(ValueError, match="needs ORTMODULE_ONNX_PREFIX"):
        ORTModule(Net())


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "settings.json: "),
        ("[]", "an object"),
        ('{"VERIFY": "often"}', "a whole number"),
        ('{"VERIFY": 1.5}', "this setting is a whole number"),
        ('{"LOG_LEVEL": ["INFO", 3]}', "a list of texts"),
    ],
)
def test_a_bad_file(content, message, env, tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(content)
    env(JSON_CONFIG_PATH=str(file))
    with pytest.raises(ValueError, match="settings.json") as caught:
        read_config()
    assert message in str(caught.value)


def test_a_file_with_a_list_and_an_unknown_name(env, tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"FALLBACK_POLICY": ["FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DATA"], "VERIFI": 1}))
    env(JSON_CONFIG_PATH=str(file))
    with pytest.warns(UserWarning, match="ORTMODULE_VERIFI .*did you mean ORTMODULE_VERIFY?"):
        read = read_config()
    assert read.fallback_policy == {"FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DATA"}


def test_an_empty_value_is_none(env):
    env(VERIFY="", LOG_LEVEL=" ")
    assert read_config().verify == 0


# --- DebugOptions -----------------------------------------------------------------------------------------------------


def test_debug_options_are_checked(tmp_path):
    with pytest.raises(TypeError, match="LogLevel, not str"):
        DebugOptions(log_level="INFO")
    with pytest.raises(ValueError, match="onnx_prefix"):
        DebugOptions(save_onnx=True)
    with pytest.raises(ValueError, match="save_path"):
        DebugOptions(save_onnx=True, onnx_prefix="a/b")
    with pytest.raises(NotADirectoryError, match="no/such"):
        DebugOptions(save_onnx=True, onnx_prefix="a", save_path=str(tmp_path / "no" / "such"))
    with pytest.raises(TypeError, match="onnx_prefix is text, not int"):
        DebugOptions(save_onnx=True, onnx_prefix=3)
    with pytest.raises(TypeError, match="DebugOptions, not dict"):
        ORTModule(Net(), {})


KINDS = ["torch_exported", "post_processed", "optimized_pre_grad", "optimized", "execution_model"]


def saved(folder):
    return sorted(path.name for path in folder.iterdir())


def test_save_onnx(tmp_path):
    model = ORTModule(Net(), DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(tmp_path)))
    model(x()).sum().backward()
    assert saved(tmp_path) == sorted(f"net_{kind}_training.onnx" for kind in KINDS)
    graphs = {kind: onnx.load(tmp_path / f"net_{kind}_training.onnx").graph for kind in KINDS}
    assert "Gemm" in {node.op_type for node in graphs["torch_exported"].node}
    assert len(graphs["optimized"].node) > len(graphs["optimized_pre_grad"].node)  # the gradient
    model.eval()
    with torch.no_grad():
        model(x())
    evaluated = [f"net_{kind}_inference.onnx" for kind in KINDS if kind != "optimized_pre_grad"]
    assert set(evaluated) <= set(saved(tmp_path))


class Thirds(nn.Module):
    def forward(self, x):
        return x.chunk(3)


@pytest.mark.parametrize("module", [Net(), Thirds()], ids=["parameters", "none"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_kind_of_what_is_saved(module, training, grad, tmp_path):
    """By the module's mode, whether or not anything has a gradient."""
    model = ORTModule(module, DebugOptions(save_onnx=True, onnx_prefix="m", save_path=str(tmp_path))).train(training)
    with torch.set_grad_enabled(grad):
        model(x().requires_grad_(grad))
    kind = "training" if training and grad else "inference"
    assert saved(tmp_path) == sorted(f"m_{stage}_{kind}.onnx" for stage in KINDS)


def test_save_onnx_path(env, tmp_path):
    """Beats the argument."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    env(SAVE_ONNX_PATH=str(second))
    ORTModule(Net(), DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(first)))(x())
    assert not saved(first) and saved(second)
    env(SAVE_ONNX_PATH=str(tmp_path / "none"))
    with pytest.raises(NotADirectoryError, match="ORTMODULE_SAVE_ONNX_PATH: .*none is not a folder"):
        DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(first))


# --- effects ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", ["17", "20", "13"])
def test_opset(opset, env):
    """Of older ones, which older scripts name, the oldest that is there is taken."""
    env(ONNX_OPSET_VERSION=opset)
    model = ORTModule(Net())
    torch.testing.assert_close(model(x()), model._ortmodule.module.forward(x()))
    assert model._ortmodule.latest.capture.model.opset_import[0].version == max(int(opset), 17)


def test_fallback_disable_raises_the_original_exception(env):
    env(FALLBACK_POLICY="FALLBACK_DISABLE|FALLBACK_UNSUPPORTED_TORCH_MODEL")
    with pytest.raises(LookupError, match="not while tracing"):
        ORTModule(Raises())(x())


def test_fallback_disable_raises_an_error_of_ours(env):
    env(FALLBACK_POLICY="FALLBACK_DISABLE")
    with pytest.raises(Error, match="an input is empty"):
        ORTModule(Net())(torch.ones(0, 4))


def test_a_policy_that_does_not_allow_it(env):
    env(FALLBACK_POLICY="FALLBACK_UNSUPPORTED_DATA")
    with pytest.raises(LookupError, match="not while tracing"):
        ORTModule(Raises())(x())
    with pytest.warns(UserWarning, match="an input is empty"):
        assert ORTModule(Net())(torch.ones(0, 4)).shape == (0, 3)


@pytest.mark.filterwarnings("ignore:ORTModule")
def test_force_torch_forward(env):
    env(FALLBACK_POLICY="FALLBACK_FORCE_TORCH_FORWARD")
    model = ORTModule(Net())
    torch.testing.assert_close(model(x()), model._ortmodule.module.forward(x()))
    assert "FORCE_TORCH_FORWARD" in explain(model).fallback
    with torch.no_grad():
        model(x())
    assert not explain(model).captured


@pytest.mark.filterwarnings("ignore:ORTModule")
def test_force_torch_backward(env):
    env(FALLBACK_POLICY="FALLBACK_FORCE_TORCH_BACKWARD")
    model = ORTModule(Net())
    assert model(x()).grad_fn.name() == "ReluBackward0"
    with torch.no_grad():
        model(x())
    assert explain(model).captured


@pytest.mark.filterwarnings("ignore:ORTModule")
def test_bad_initialization(env):
    script = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(TypeError):
        ORTModule(script)
    env(FALLBACK_POLICY="FALLBACK_BAD_INITIALIZATION")
    assert ORTModule(script) is script


@pytest.mark.filterwarnings("ignore:ORTModule")
@pytest.mark.parametrize("retry", ["0", "1"])
def test_fallback_retry(retry, env, monkeypatch):
    env(FALLBACK_RETRY=retry)
    model = ORTModule(Raises())
    for _ in range(2):
        torch.testing.assert_close(model(x()), model._ortmodule.module.forward(x()))
    assert not explain(model).captured
    monkeypatch.setenv("WILLING", "1")
    model(x())
    assert explain(model).captured == (retry == "1")


def test_skipcheck_policy(env):
    """Accepted, and nothing is skipped."""
    env(SKIPCHECK_POLICY="SKIP_CHECK_DEVICE|SKIP_CHECK_BUILD_GRADIENT|SKIP_CHECK_EXECUTION_AGENT")
    model = ORTModule(Net())
    for rows in (2, 3):
        torch.testing.assert_close(model(x(rows)), model._ortmodule.module.forward(x(rows)))
    model.double()
    assert model(x().double()).dtype == torch.float64


@pytest.mark.parametrize("algorithm", ["HEURISTIC", "exhaustive"])
def test_conv_algo_search(algorithm, env):
    """The CPU has one algorithm: the same result, and nothing to say (a GPU: tests/cuda/test_conv_algo_search.py)."""
    env(CONV_ALGO_SEARCH=algorithm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_config().conv_algo_search == algorithm.upper()
        model = ORTModule(nn.Conv2d(2, 3, 3))
        image = torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(model(image), model._ortmodule.module.forward(image))


class Uncopiable(Net):
    def __deepcopy__(self, memo):
        raise AssertionError("it was copied")


@pytest.mark.parametrize("flag", ["0", "1"])
def test_deepcopy_before_model_export(flag, env):
    """Nothing is copied either way: capture leaves the module as it was."""
    env(DEEPCOPY_BEFORE_MODEL_EXPORT=flag)
    model = ORTModule(Uncopiable())
    model(x()).sum().backward()
    assert explain(model).captured


@pytest.mark.filterwarnings("ignore:ORTModule")
@pytest.mark.parametrize("allowed", [True, False])
def test_an_error_in_backward(allowed, env, monkeypatch):
    """PyTorch computes the gradients, with the engine's masks, and runs such calls from then on."""

    def fail(*args):
        raise EngineError("running MatMul (/first/MatMul): a kernel's error")

    if not allowed:
        env(FALLBACK_POLICY="FALLBACK_DISABLE")
    eager = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    model, grads = ORTModule(eager), []
    for broken in (False, True):
        torch.manual_seed(1)
        loss = model(x()).square().sum()
        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(session.Run, "backward", fail)
                if not allowed:
                    with pytest.raises(Error, match="a kernel's error"):
                        loss.backward()
                    return
            loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    assert any(grad.any() for grad in grads[0])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    model(x())
    assert "a kernel's error" in explain(model).fallback


@pytest.mark.filterwarnings("ignore:ORTModule")
@pytest.mark.parametrize("where", ["plan", "forward"])
def test_an_error_of_plans_and_kernels(where, monkeypatch):
    def fail(*args, **kwargs):
        raise UnsupportedError("differentiating Erf (/Erf): no gradient")

    monkeypatch.setattr(*((session.Session, "plan") if where == "plan" else (session, "Run")), fail)
    model = ORTModule(Net())
    torch.testing.assert_close(model(x()), model._ortmodule.module.forward(x()))
    assert "no gradient" in explain(model).fallback


# --- from Python ------------------------------------------------------------------------------------------------------


def test_every_setting_is_a_field():
    assert {field.name.upper() for field in dataclasses.fields(Config)} == VARIABLES.keys()


def test_config_reaches_the_module(monkeypatch):
    found = ORTModule(nn.Linear(2, 2), config=Config(fallback_retry=True, verify=3))._ortmodule.config
    assert found.fallback_retry and found.verify == 3 and found.log_level is LogLevel.WARNING
    assert ORTModule(nn.Linear(2, 2), DebugOptions(log_level=LogLevel.ERROR), Config())._ortmodule.log.level == 4
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")  # beats it
    assert ORTModule(nn.Linear(2, 2), config=Config(verify=3))._ortmodule.config.verify == 1


def test_a_default_that_config_gives_beats_debug_options(tmp_path):
    debug = DebugOptions(log_level=LogLevel.ERROR, save_path=str(tmp_path))
    assert read_config(Config(log_level=LogLevel.WARNING), debug).log_level is LogLevel.WARNING
    assert read_config(Config(save_onnx_path=""), debug).save_onnx_path == ""
    assert read_config(Config(verify=1), debug).log_level is LogLevel.ERROR
    assert copy.deepcopy(Config(log_level=LogLevel.WARNING)).given == {"log_level"}
    assert pickle.loads(pickle.dumps(Config(log_level=LogLevel.WARNING))).given == {"log_level"}


def test_config_stays_with_copies():
    ours = ORTModule(nn.Linear(2, 2), config=Config(verify=2))
    assert copy.deepcopy(ours)._ortmodule.config.verify == 2
    assert pickle.loads(pickle.dumps(ours))._ortmodule.config.verify == 2


def test_config_is_frozen_and_its_values_are_checked():
    config = Config(fallback_policy=["FALLBACK_DISABLE"], log_level=LogLevel.INFO, defer_logits=True, enable_tuning=1)
    assert (
        config.fallback_policy == {"FALLBACK_DISABLE"} and config.defer_logits == "1" and config.enable_tuning is True
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.verify = 1
    with pytest.raises(
        ValueError, match="ORTMODULE_VERIFY=-1 \\(Config\\): this setting is a whole number, at least 0"
    ):
        Config(verify=-1)
    with pytest.raises(ValueError, match="did you mean FALLBACK_DISABLE"):
        Config(fallback_policy="FALLBACK_DISABL")
    with pytest.raises(TypeError, match="unexpected keyword argument 'verfy'"):
        Config(verfy=1)
    with pytest.raises(TypeError, match="config is a Config, not dict"):
        ORTModule(nn.Linear(2, 2), config={"verify": 1})


def test_config_for_what_does_not_exist_yet_warns():
    with pytest.warns(UserWarning, match="ORTMODULE_EXPORTER \\(Config\\) is accepted, but has no effect yet"):
        ORTModule(nn.Linear(2, 2), config=Config(exporter="dynamo"))
