"""Ways past the engine: it is captured all the same, or one warning says so, `explain()` counts, STRICT raises."""

import concurrent.futures
import contextlib
import copy
import functools
import types
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortmodule import BypassError, Config, ORTModule, explain
from tests.selection import each

STEPS = 3
AT_ONCE = {"capture_share": float("inf")}


def contexts():
    return contextlib.nullcontext(), contextlib.nullcontext()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.saves_memory = nn.Linear(4, 4), False

    def forward(self, x):
        if self.saves_memory:
            # A context of its own is no graph's.
            return checkpoint(torch.relu, self.linear(x), use_reentrant=False, context_fn=contexts)
        return torch.relu(self.linear(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.scale = nn.Sequential(Layer(), Layer(), Layer()), 2.0

    def forward(self, x):
        return self.model(x)

    def training_step(self, x):
        return self.model(x)

    def saves_memory(self, on):
        for layer in self.model:
            layer.saves_memory = on


def scaled(self, x):
    return self.model(x) * self.scale


def data():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def plainly(optimizer, loss):
    loss()
    optimizer.step()


def train(model, call, step=plainly, kind=torch.optim.SGD, steps=STEPS):
    """Results, and gradients of the last step, of some steps of a training."""
    optimizer, results = kind(model.parameters(), lr=0.1), []
    for _ in range(steps):

        def loss():
            optimizer.zero_grad()
            results.append(call(data()))
            total = results[-1].square().sum()
            total.backward()
            return total

        step(optimizer, loss)
    return torch.stack(results).detach(), [p.grad for p in model.parameters()]


def after_a_closure(optimizer, loss):
    """As Lightning does in manual optimization."""
    loss()
    optimizer.step(closure=lambda: None)


#: Ways to take a step. (LBFGS calls its closure more than once.)
STEPPED = {
    "no closure": {},
    "a closure": {"step": lambda optimizer, loss: optimizer.step(loss)},
    "a closure by its name": {"step": lambda optimizer, loss: optimizer.step(closure=loss)},
    "a closure that does nothing": {"step": after_a_closure},
    "LBFGS": {
        "step": lambda optimizer, loss: optimizer.step(loss),
        "kind": functools.partial(torch.optim.LBFGS, max_iter=2),
    },
}


def compare(ours, call, theirs, their_call, **how):
    for found, expected in zip(train(ours, call, **how), train(theirs, their_call, **how), strict=True):
        torch.testing.assert_close(found, expected)


def make(**settings):
    torch.manual_seed(0)
    net = Net()
    torch.manual_seed(0)
    return ORTModule(Net(), config=Config(**AT_ONCE, **settings)), net


def method(model):
    model.forward = types.MethodType(scaled, model)
    return model


def function(model):
    model.forward = functools.partial(lambda of, x: scaled(of, x), model)
    return model


def around(model):
    own = model.forward
    model.forward = lambda x: own(x) * 2
    return model


def around_the_function(model):
    """As accelerate does for mixed precision."""
    own = model.forward.__func__
    model.forward = types.MethodType(functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs) * 2), model)
    return model


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def hooked(model):
    model.register_forward_hook(lambda module, args, result: result + module.model[0](args[0]))
    return model


def in_thread(model, x):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(model, x).result()


#: Roads on which the engine comes in: what is called instead of the model.
REACHED = {
    "a method is assigned": method,
    "a function is assigned": function,
    "what is assigned calls the forward it replaces": around,
    "what is assigned calls its function": around_the_function,
    "torch.compile": functools.partial(torch.compile, backend="eager"),
    "compile() of the module": compiled_in_place,
    "compiled with others": lambda model: torch.compile(nn.Sequential(model), backend="eager"),
    "nn.Sequential": nn.Sequential,
    "nn.DataParallel without a GPU": nn.DataParallel,
    "a checkpoint around": lambda model: functools.partial(checkpoint, model, use_reentrant=False),
    "functional_call": lambda model: lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
    "copy.copy": copy.copy,
    "a hook that calls a submodule": hooked,
    "a thread": lambda model: functools.partial(in_thread, model),
}


@pytest.mark.parametrize("name", REACHED)
def test_the_engine_comes_in(name):
    ours, theirs = make(strict=True)
    called, expected = REACHED[name](ours), theirs if "ompile" in name else REACHED[name](theirs)
    counted = called if name == "copy.copy" else ours
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compare(ours, called, theirs, expected)
    report = explain(counted)
    assert (report.engine_calls, report.pytorch_calls, report.unreached_steps) == (STEPS, 0, 0)
    assert report.captured and f"{STEPS} in the engine, 0 in PyTorch" in str(report)
    assert explain(ours).unreached_steps == 0


def transformed(model):
    return lambda x: torch.func.functional_call(model, {}, (x,)) + torch.func.grad(lambda y: model(y).sum())(x)


def plain(model):
    """The module that is wrapped; `wrapped.module` but for a model with an attribute of that name."""
    return getattr(model, "module", model)


def called_by_a_hook(model):
    around = nn.Identity()
    around.register_forward_hook(lambda module, args, result: plain(model)(result))
    return around


def with_its_parameters(model):
    inner = plain(model)
    return lambda x: torch.func.functional_call(inner, dict(inner.named_parameters()), (x,))


#: Other things that are made of the module: what is called is not the wrapper.
WARNED_AT_STEPS = {
    "wrapped.module": plain,
    "wrapped.module.forward": lambda model: plain(model).forward,
    "the class's forward": lambda model: functools.partial(Net.forward, model),
    "wrapped.module inside of another": lambda model: nn.Sequential(plain(model)),
    "functional_call of wrapped.module": with_its_parameters,
    "a hook that calls wrapped.module": called_by_a_hook,
    "children one by one": lambda model: nn.Sequential(*model.children()),
    "torch.export": lambda model: torch.export.export(model, (data(),)).module(),
    "torch.fx": torch.fx.symbolic_trace,
    "vmap": lambda model: torch.func.vmap(lambda row: plain(model)(row[None])[0]),
}


def unexported(model):
    model.forward = lambda x: scaled(model, x) * max(map(max, x.tolist()))
    return model


def computes_again(model):
    model.model[0].saves_memory = True
    return model


#: Roads past the engine: what is called, of every step how many calls (engine, PyTorch) and steps without a call are
#: counted, and what the warning says.
PAST = {
    "another method is called": (lambda model: model.training_step, (0, 0, 1), "wrap the module that the script calls"),
    "a submodule is called": (lambda model: model.model, (0, 0, 1), "wrap the module that the script calls"),
    "torch.func": (transformed, (1, 1, 0), "torch.func transforms"),
    "what is assigned cannot be captured": (unexported, (0, 1, 0), "PyTorch runs this module, not the engine"),
    "a layer is a checkpoint": (computes_again, (1, 0, 0), "ORTMODULE_MEMORY_OPT_LEVEL=1"),
    **{name: (road, (0, 0, 1), "wrap the module that the script calls") for name, road in WARNED_AT_STEPS.items()},
}


#: Rows, and how their steps are taken.
ROWS = [*((name, "no closure") for name in PAST), *(("a submodule is called", way) for way in STEPPED)]


def told_of(caught):
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning) and "ORTModule" in str(w.message)]


@pytest.mark.parametrize(("name", "stepped"), dict.fromkeys(ROWS))
def test_one_warning_and_a_count(name, stepped):
    road, (engine, pytorch, unreached), text = PAST[name]
    ours, theirs = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(ours, road(ours), theirs, road(theirs), **STEPPED[stepped])
    told = told_of(caught)
    assert len(told) == 1 and text in told[0], told
    report = explain(ours)
    counts = report.engine_calls, report.pytorch_calls, report.unreached_steps
    assert counts == tuple(STEPS * n for n in (engine, pytorch, unreached)), report
    line = f"{counts[0]} in the engine, {counts[1]} in PyTorch"
    assert line + (f", {counts[2]} optimizer steps without a call" if counts[2] else "") in str(report)


@pytest.mark.parametrize(("name", "stepped"), dict.fromkeys(ROWS))
def test_strict_raises(name, stepped, monkeypatch):
    monkeypatch.setenv("ORTMODULE_STRICT", "1")
    ours, _ = make()
    with pytest.raises(BypassError, match="ORTMODULE_STRICT=1"):
        train(ours, PAST[name][0](ours), **STEPPED[stepped])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("automatic", [False, True])
def test_a_lightning_module_whose_step_calls_a_submodule(automatic, strict):
    """Lightning's steps have closures, also where the script takes them by itself."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.automatic_optimization = Net(), automatic

        def training_step(self, batch, index):
            loss = self.model(batch).square().sum()
            if automatic:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trained = []
    for wrap in (functools.partial(ORTModule, config=Config(strict=strict)), lambda module: module):
        torch.manual_seed(0)
        module = wrap(Module())
        trainer = lightning.Trainer(
            max_steps=STEPS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False,
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(BypassError) if strict and not trained else contextlib.nullcontext():
                trainer.fit(module, torch.utils.data.DataLoader(torch.stack([data()] * STEPS), batch_size=None))
        trained.append((module, told_of(caught)))
    (ours, told), (theirs, _) = trained
    report = explain(ours)
    assert (report.engine_calls, report.pytorch_calls) == (0, 0)
    assert report.unreached_steps == (1 if strict else STEPS)
    if not strict:
        assert len(told) == 1 and "wrap the module that the script calls" in told[0], told
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_strict_of_a_submodule_and_of_a_policy():
    ours, _ = make(strict=True)
    ours.saves_memory(True)
    with pytest.raises(BypassError, match=r"^model\.0: "):
        ours(data())
    ours, _ = make(strict=True, fallback_policy="FALLBACK_FORCE_TORCH_FORWARD")
    ours(data())
    assert explain(ours).engine_calls == 1


def test_no_work_goes_past_the_engine_where_there_is_none():
    ours, x = ORTModule(nn.Identity(), config=Config(**AT_ONCE, strict=True)), data()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert ours(x) is x
    assert explain(ours).pytorch_calls == 1


def test_a_switch_of_a_layer_that_was_left_to_pytorch():
    ours, theirs = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for on in (True, False, True):
            ours.saves_memory(on)
            theirs.saves_memory(on)
            compare(ours, ours, theirs, theirs)
            assert explain(ours).python_ops == ([f"model.{i}" for i in range(3)] if on else [])
    report = explain(ours)
    assert (report.engine_calls, report.pytorch_calls, report.exports) == (3 * STEPS, 0, 2)


def test_an_assigned_forward_is_watched_as_the_modules_own():
    ours, theirs = make()
    for assign in (method, function):
        assign(ours), assign(theirs)
        for scale in (2.0, 3.0):
            ours.scale = theirs.scale = scale
            torch.testing.assert_close(ours(data()), theirs(data()))
    assert explain(ours).engine_calls == 4
    del ours.forward
    torch.testing.assert_close(ours(data()), Net.forward(theirs, data()))


def test_an_assigned_forward_reads_as_it_was_given():
    ours, _ = make()
    given = types.MethodType(scaled, ours)
    ours.forward = given
    assert ours.forward == given and ours.forward.__func__ is scaled and ours.forward.__wrapped__ is given
    found = ours.forward
    ours.forward = lambda x: found(x) + 1
    torch.testing.assert_close(ours(data()), given(data()) + 1)
    ours.forward = found
    torch.testing.assert_close(ours(data()), given(data()))
    assert explain(ours).engine_calls == 2


def fused(model):
    """As TRL's trainers do: some calls are another forward, the others the one that it replaces."""
    own = model.forward

    def forward(self, x, fused=False, note=None):
        return self.model[0](x) * 2 if fused else own(x) + 1

    model.forward = types.MethodType(forward, model)
    return model


def test_a_forward_that_calls_the_replaced_one_in_some_calls():
    ours, theirs = make(strict=True)
    fused(ours), fused(theirs)
    for is_fused in (True, False, True, False):
        for note in (None, "another"):
            found, expected = (model(data(), fused=is_fused, note=note) for model in (ours, theirs))
            torch.testing.assert_close(found, expected)
            found.sum().backward()
    report = explain(ours)
    assert (report.engine_calls, report.pytorch_calls) == (8, 0)
    assert report.exports == 3  # two of the fused call, one of the module's own
    torch.testing.assert_close(type(ours).forward(ours, data()), Net.forward(theirs, data()))


def test_a_forward_that_is_not_captured_as_a_whole_and_calls_the_replaced_one():
    """What is around cannot be captured; the module can."""
    ours, theirs = make()
    for model in (ours, theirs):
        own = model.forward
        model.forward = lambda x, own=own: own(x * max(map(max, x.tolist())))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compare(ours, ours, theirs, theirs)
    assert explain(ours).engine_calls == STEPS and explain(ours).pytorch_calls == 0


@pytest.fixture
def compiling(monkeypatch):
    """Trainer tells accelerate in the environment, which keeps it for the process."""
    for name in ("BACKEND", "MODE"):
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "")
    yield
    pytest.importorskip("accelerate").state.AcceleratorState._reset_state(reset_partial_state=True)


class WithLoss(Net):
    def forward(self, x, labels=None):
        return {"loss": nn.functional.mse_loss(self.model(x), labels)}


@pytest.mark.parametrize("strict", [False, True])
def test_a_trainer_that_compiles(strict, compiling, tmp_path):
    """Trainer(torch_compile=True): the compiler leaves the module to the engine."""
    transformers = pytest.importorskip("transformers")
    rows, found = [{"x": x, "labels": x.cos()} for x in torch.randn(4 * STEPS, 4)], []
    for wrap in (functools.partial(ORTModule, config=Config(**AT_ONCE, strict=strict)), lambda model: model):
        torch.manual_seed(0)
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=4, torch_compile=True,
            torch_compile_backend="eager", report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1,
            save_strategy="no", learning_rate=0.1,
        )  # fmt: skip
        trainer = transformers.Trainer(model=wrap(WithLoss()), args=args, train_dataset=rows)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        assert not [str(w.message) for w in caught if "ORTModule" in str(w.message)]
        found.append((trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
    (ours, losses), (_, expected) = found
    assert losses == pytest.approx(expected, rel=1e-4) and len(losses) == STEPS
    report = explain(ours)
    assert (report.engine_calls, report.pytorch_calls, report.unreached_steps) == (STEPS, 0, 0)


class Plain(nn.Module):
    """What `torch.jit` compiles, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.sin(self.linear(x))


@pytest.mark.parametrize("make_other", [torch.jit.script, lambda module: torch.jit.trace(module, data())])
@pytest.mark.parametrize("around", [lambda module: module, nn.Sequential])
@pytest.mark.parametrize("strict", [False, True])
def test_torch_jit(make_other, around, strict):
    """What it makes is a plain one: steps that train it are warned of."""
    theirs = Plain()
    ours = ORTModule(copy.deepcopy(theirs), config=Config(**AT_ONCE, strict=strict))
    if strict:
        with pytest.raises(BypassError, match="wrap the module that the script calls"):
            train(ours, make_other(around(ours)))
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(ours, make_other(around(ours)), theirs, make_other(around(theirs)))
    told = [str(w.message) for w in caught if "ORTModule(" in str(w.message)]
    assert len(told) == 1 and "wrap the module that the script calls" in told[0]
    assert explain(ours).unreached_steps >= STEPS - 1  # the check of a trace calls the module


def test_torch_fx():
    ours, theirs = make()
    found, expected = torch.fx.symbolic_trace(ours), torch.fx.symbolic_trace(theirs)
    assert found.code == expected.code
    torch.testing.assert_close(found(data()), theirs(data()))
    whole = torch.fx.symbolic_trace(nn.Sequential(ours, nn.ReLU()))
    torch.testing.assert_close(whole(data()), theirs(data()).relu())
    assert explain(ours).pytorch_calls == 0  # of the traces, which are no calls


@each(
    "kind", ["unused", "zeros", "inside of another", "two optimizers", "closure", "LBFGS"], ["zeros", "two optimizers"]
)
def test_steps_that_miss_nothing(kind):
    """No gradient, or none of a call that went past the engine."""
    ours, _ = make(strict=True)
    head = nn.Linear(4, 1)
    optimizers = [torch.optim.SGD([*ours.parameters(), *head.parameters()], lr=0.1)]
    whole = lambda x: head(ours(x))  # noqa: E731
    if kind == "inside of another":
        whole = ORTModule(nn.Sequential(ours, head))
    if kind == "two optimizers":
        first, *rest = ours.parameters()
        optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD([*rest, *head.parameters()], lr=0.1)]
    if kind == "LBFGS":
        optimizers = [torch.optim.LBFGS([*ours.parameters(), *head.parameters()], max_iter=2)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=kind != "zeros")
        used = step == 0 or kind not in ("unused", "zeros")

        def loss(used=used):
            result = (whole if used else head)(data()).sum()
            result.backward()
            return result

        if kind in ("closure", "LBFGS"):
            optimizers[0].step(loss)
            continue
        loss()
        for optimizer in optimizers:
            optimizer.step()
    assert explain(ours).unreached_steps == 0
