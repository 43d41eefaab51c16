"""The wrapped module still is the user's module."""

import abc
import copy
import inspect
import io
import pickle
import types
import warnings

import pytest
import torch
import transformers
from torch import nn

from ortmodule import DebugOptions, ORTModule, explain


class Scaled(nn.Module):
    """A module with everything a wrapper can lose."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.note = "mine"

    def forward(self, x, *, scale=2.0):
        """Scales."""
        self.calls += 1
        return self.linear(x) * scale

    def thrice(self, x):
        return self(x, scale=3.0)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Scaled()


@pytest.fixture
def x():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def captured(wrapped):
    report = explain(wrapped)
    assert report.captured, report.fallback
    return report


# --- what it is -------------------------------------------------------------------------------------------------------


def test_is_both(model):
    wrapped = ORTModule(model)
    assert isinstance(wrapped, Scaled) and isinstance(wrapped, ORTModule)
    assert type(wrapped).__name__ == "Scaled" and type(wrapped).__doc__ == Scaled.__doc__
    assert type(ORTModule(Scaled())) is type(wrapped)
    assert repr(wrapped) == repr(model)


def test_signature(model):
    wrapped = ORTModule(model)
    assert inspect.signature(wrapped.forward) == inspect.signature(model.forward)
    assert inspect.signature(type(wrapped).forward) == inspect.signature(Scaled.forward)
    assert wrapped.forward.__doc__ == "Scales."


def test_shares_everything(model, x):
    wrapped = ORTModule(model)
    assert list(wrapped.state_dict()) == list(model.state_dict())
    assert [n for n, _ in wrapped.named_parameters()] == ["linear.weight", "linear.bias"]
    assert wrapped.linear is model.linear
    wrapped.note, model.other = "ours", 5
    assert model.note == "ours" and wrapped.other == 5
    wrapped.extra = nn.Linear(2, 2)
    model.register_buffer("late", torch.ones(1))
    assert "extra.weight" in model.state_dict() and "late" in wrapped.state_dict()
    del wrapped.extra
    assert not hasattr(model, "extra")
    wrapped.eval()
    assert not model.training and not model.linear.training


def test_methods_call_the_engine(model, x):
    expected = copy.deepcopy(model).thrice(x)
    wrapped = ORTModule(model)
    torch.testing.assert_close(wrapped.thrice(x), expected)
    captured(wrapped)


def test_types_follow(model, x):
    wrapped = ORTModule(model)
    wrapped(x)
    for change, dtype in (
        (nn.Module.double, torch.float64),
        (nn.Module.bfloat16, torch.bfloat16),
        (nn.Module.half, torch.float16),
        (nn.Module.float, torch.float32),
        (nn.Module.cpu, torch.float32),
    ):
        change(wrapped)
        assert model.linear.weight.dtype == dtype
        expected = copy.deepcopy(model)(x.to(dtype))
        found = wrapped(x.to(dtype))
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected)
        captured(wrapped)


def test_devices_follow(model, x):
    """The engine leaves other devices to PyTorch, and takes the module back."""
    wrapped = ORTModule(model)
    before = wrapped(x)
    state = copy.deepcopy(wrapped.state_dict())
    wrapped.to("meta")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert wrapped(x.to("meta")).device.type == "meta"
    assert "is on meta" in str(caught[0].message)
    wrapped.to_empty(device="cpu").load_state_dict(state)
    torch.testing.assert_close(wrapped(x), before)
    captured(wrapped)


def test_state_goes_in_and_out(model, x):
    other = Scaled()
    wrapped = ORTModule(model)
    wrapped(x)
    wrapped.load_state_dict(other.state_dict())
    torch.testing.assert_close(wrapped(x), other(x))
    wrapped.load_state_dict({k: v.clone() + 1 for k, v in other.state_dict().items()}, assign=True)
    other.load_state_dict(wrapped.state_dict())
    torch.testing.assert_close(wrapped(x), other(x))
    parent = nn.Sequential(wrapped, nn.ReLU())
    assert list(parent.state_dict()) == ["0.calls", "0.linear.weight", "0.linear.bias"]
    captured(wrapped)


def test_replaced_parts(model, x):
    wrapped = ORTModule(model)
    wrapped(x)
    wrapped.linear = nn.Linear(4, 2)
    torch.testing.assert_close(wrapped(x), copy.deepcopy(model)(x))
    wrapped.linear.weight = nn.Parameter(torch.ones(2, 4))
    torch.testing.assert_close(wrapped(x), copy.deepcopy(model)(x))
    captured(wrapped)


def test_deepcopy(model, x):
    wrapped = ORTModule(model)
    wrapped(x)
    copied = copy.deepcopy(wrapped)
    assert isinstance(copied, ORTModule) and copied.linear is not wrapped.linear
    with torch.no_grad():
        copied.linear.weight.zero_()
    assert not torch.equal(copied(x), wrapped(x))
    assert captured(copied).exports == 1


@pytest.mark.parametrize("save", [pickle.dump, torch.save])
def test_pickle(model, x, save):
    wrapped = ORTModule(model, DebugOptions())
    wrapped(x)
    file = io.BytesIO()
    save(wrapped, file)
    file.seek(0)
    loaded = pickle.load(file) if save is pickle.dump else torch.load(file, weights_only=False)
    assert isinstance(loaded, ORTModule) and isinstance(loaded, Scaled)
    torch.testing.assert_close(loaded(x), wrapped(x))
    captured(loaded)


def test_class_makes_plain_models():
    assert type(type(ORTModule(Scaled()))(6)) is Scaled


def test_patched_forward(model, x):
    """As accelerate does: the patch calls what it found, and is taken off again."""
    wrapped, calls = ORTModule(model), []
    found = wrapped.forward

    def patch(*args, **kwargs):
        calls.append(args)
        return found(*args, **kwargs)

    wrapped.forward = patch
    wrapped(x)
    captured(wrapped)
    wrapped.forward = types.MethodType(type(wrapped).forward, wrapped)
    wrapped(x)
    wrapped.forward = patch
    del wrapped.forward
    wrapped(x)
    assert len(calls) == 1 and "forward" not in vars(model)


def test_forward_that_was_patched_before(model, x):
    original = model.forward
    model.forward = lambda x: original(x) + 1
    wrapped = ORTModule(model)
    torch.testing.assert_close(wrapped(x), Scaled.forward(model, x) + 1)
    captured(wrapped)


def test_from_pretrained_and_resize(tmp_path):
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    wrapped = ORTModule(transformers.BertForMaskedLM(config).eval())
    ids = torch.arange(10).reshape(2, 5)
    before = wrapped(ids).logits
    wrapped.save_pretrained(tmp_path)
    again = type(wrapped).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(ids).logits, before)
    wrapped.resize_token_embeddings(40)
    assert wrapped(ids).logits.shape[-1] == 40
    captured(wrapped)


class Counts(abc.ABCMeta):
    """Counts what is made, as a registry does."""

    made = 0

    def __call__(cls, *args, **kwargs):
        cls.made += 1
        return super().__call__(*args, **kwargs)


class Counted(Scaled, metaclass=Counts):
    def __init__(self, size=3):
        super().__init__()
        self.size = size


@pytest.mark.parametrize("kind", [Scaled, Counted])
def test_what_the_class_of_a_wrapper_makes(kind, x):
    """A plain module, at once and in the two steps that some libraries take."""
    wrapped = ORTModule(kind())
    cls = type(wrapped)
    at_once, in_steps = cls(), cls.__new__(cls)
    in_steps.__init__(**{"size": 4} if kind is Counted else {})
    assert type(at_once) is type(in_steps) is kind and isinstance(wrapped, kind)
    if kind is Counted:
        assert (Counted.made, at_once.size, in_steps.size) == (2, 3, 4) and isinstance(cls, Counts)
    in_steps.load_state_dict(wrapped.state_dict())
    torch.testing.assert_close(ORTModule(in_steps)(x), wrapped(x))
    assert issubclass(cls, ORTModule) and type(copy.deepcopy(wrapped)) is cls
    captured(wrapped)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ORTModule(Scaled()), "already"),
        (lambda: nn.DataParallel(Scaled()), "DistributedDataParallel"),
        (lambda: 3, "not int"),
        (lambda: Scaled, "make an instance"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "ScriptModule"),
    ],
)
def test_refused(make, words):
    with pytest.raises(TypeError, match=words):
        ORTModule(make())


def test_the_other_order(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        outside = nn.parallel.DistributedDataParallel(Scaled())
        with pytest.raises(TypeError, match=r"before DistributedDataParallel.*DistributedDataParallel\(ORTModule\("):
            ORTModule(outside)
        del outside
    finally:
        torch.distributed.destroy_process_group()


def test_refused_options():
    with pytest.raises(TypeError, match="DebugOptions"):
        ORTModule(Scaled(), 3)
    with pytest.raises(TypeError, match="LogLevel"):
        DebugOptions(log_level="INFO")
    with pytest.raises(ValueError, match="onnx_prefix"):
        DebugOptions(save_onnx=True)


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 4)

    def forward(self, x):
        return self.module(x)


def test_module_is_the_plain_one(model):
    """As scripts for ONNX Runtime's ORTModule have it; a model's own comes first."""
    wrapped = ORTModule(model)
    assert wrapped.module is model and not isinstance(wrapped.module, ORTModule)
    assert pickle.loads(pickle.dumps(wrapped)).module is not model
    with pytest.raises(AttributeError, match="'nothing'"):
        getattr(wrapped, "nothing")  # noqa: B009
    own = Holding()
    assert ORTModule(own).module is own.module


def test_data_parallel_outside():
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        ORTModule(Scaled())._replicate_for_data_parallel()


def test_explain_wants_a_wrapped_module():
    with pytest.raises(TypeError, match="ORTModule"):
        explain(Scaled())


# --- with others ------------------------------------------------------------------------------------------------------


def test_inside_another(x):
    torch.manual_seed(0)
    inner = ORTModule(nn.Linear(4, 4))
    outer = ORTModule(nn.Sequential(inner, nn.Tanh()))
    torch.testing.assert_close(outer(x), torch.tanh(nn.functional.linear(x, inner.weight, inner.bias)))
    captured(outer)
    inner(x)
    captured(inner)


def test_chained(x):
    a, b = nn.Linear(4, 5), nn.Linear(5, 3)
    first, second = ORTModule(copy.deepcopy(a)), ORTModule(copy.deepcopy(b))
    b(torch.relu(a(x))).sum().backward()
    second(torch.relu(first(x))).sum().backward()
    for ours, theirs in ((first, a), (second, b)):
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_traced_by_another_library(model, x):
    wrapped = ORTModule(model)
    traced = torch.jit.trace(wrapped, x, check_trace=False)
    torch.testing.assert_close(traced(x), wrapped(x))


def test_optimizer_steps_are_seen(x):
    wrapped = ORTModule(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss = wrapped(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert captured(wrapped).exports == 1


# --- reports ----------------------------------------------------------------------------------------------------------


def test_explain(model, x):
    wrapped = ORTModule(model)
    report = explain(wrapped)
    assert not report.captured and report.fallback is None and "no call yet" in str(report)
    wrapped(x).sum().backward()
    report = captured(wrapped)
    assert report.exports == report.plans == 1 and report.aten_ops == report.python_ops == []
    assert report.nodes_exported > 0 and report.nodes_run > 0 and report.peak_bytes > 0
    assert {"capture", "read", "check", "plan"} == set(report.seconds) and all(s >= 0 for s in report.seconds.values())
    assert "Scaled: the engine runs it" in str(report)
    wrapped(torch.randn(7, 4))
    assert (explain(wrapped).exports, explain(wrapped).plans) == (1, 2)


def test_one_summary(model, x, caplog):
    caplog.set_level("INFO", "ortmodule")
    wrapped = ORTModule(model)
    for _ in range(3):
        wrapped(x)
    assert [r.getMessage() for r in caplog.records if "the engine runs it" in r.getMessage()] != []
    assert sum("the engine runs it" in r.getMessage() for r in caplog.records) == 1


def test_warnings_point_at_the_caller(x):
    wrapped = ORTModule(nn.Linear(4, 4))
    wrapped.weight.register_hook(lambda g: None)  # no forward hook: fine
    inner = nn.Sequential(nn.Linear(4, 4))
    seen = []
    inner[0].register_forward_hook(lambda *args: seen.append(args))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped(x)
        hooked = ORTModule(inner)
        hooked(x), hooked(x)
    assert [w.filename for w in caught] == [__file__]


def test_a_parameter_without_elements_receives_a_gradient_without_elements():
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.narrow = nn.Linear(4, 4), nn.Linear(4, 0)
            self.rows, self.none = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.empty(0))

        def forward(self, x):
            y = torch.cat([self.linear(x), self.rows], 0)
            return y.sum() + self.narrow(y).sum((0, 1)) + self.none.sum(0)

    module = Empty()
    wrapped = ORTModule(module)
    wrapped(torch.randn(3, 4)).backward()
    assert explain(wrapped).captured
    assert {name: p.grad.shape for name, p in module.named_parameters()} == {
        name: p.shape for name, p in module.named_parameters()
    }


def test_a_class_derived_from_the_wrapper():
    with pytest.raises(TypeError, match="class Mine: .* is not derived from"):

        class Mine(ORTModule):
            pass
