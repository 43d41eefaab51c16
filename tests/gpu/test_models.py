"""Training steps on a GPU, in every float type, against PyTorch's on the same GPU and against float64.

`scripts/gpu` runs them. Without a GPU they run on the emulated one, if the build has it.
"""

import contextlib
import copy
import os

import pytest
import torch

from ortmodule import ORTModule, _core, explain
from tests.models.compare import InDouble, Sides, loss_of, to
from tests.models.zoo import ARCHITECTURES

DEVICE = torch.device(os.environ.get("ORTMODULE_TEST_DEVICE", "cpu"))

pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cpu" and not _core.emulated, reason="a GPU is needed (scripts/gpu)"),
    pytest.mark.filterwarnings("ignore"),  # of the exporter and of transformers
]

#: The first of the zoo, those with convolutions, and some whose layers are their own.
OTHERS = ["resnet", "transformer", "mlp", "cnn", "gpt-neox", "gemma2", "deberta", "lstm"]
NAMES = list(dict.fromkeys([*list(ARCHITECTURES)[:16], *OTHERS]))
#: (type of the parameters, autocast)
TYPES = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "autocast-bfloat16": (torch.float32, torch.bfloat16),
    "autocast-float16": (torch.float32, torch.float16),
}
#: On the emulated GPU, which is slow, these run in every type, the others in one: the rest takes the same kernels.
IN_EVERY_TYPE = ("gpt2", "llama", "mlp", "lstm")


def marks(name, kind):
    one = ("float32", "bfloat16")[NAMES.index(name) % 2]
    return [] if name in IN_EVERY_TYPE or kind == one else [pytest.mark.emulated_full]


STEPS = [pytest.param(name, kind, marks=marks(name, kind)) for name in NAMES for kind in TYPES]
#: Of a gradient: what an error may be where PyTorch's own is smaller. Those of a step differ by chance.
LEAST = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
TIMES = 2  # PyTorch's error


def moved(batch):
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


class WithSides(torch.nn.Module):
    """The results of a model, and of its ReLUs, whose sides may be ``given``."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, given=None, **batch):
        with Sides(given) as sides:
            outputs = self.model(**batch)
        return outputs, sides.seen


def has_relus(model, batch):
    with torch.no_grad(), Sides() as sides:
        copy.deepcopy(model)(**batch)
    return bool(sides.seen)


def run(model, batch, autocast=None):
    """Loss, gradients by name, and the results of ReLUs, of a model that tells these."""
    on = torch.autocast(DEVICE.type, autocast) if autocast else contextlib.nullcontext()
    model.zero_grad(set_to_none=True)
    with on:
        outputs, sides = model(**batch) if isinstance(model, WithSides) else (model(**batch), None)
    loss = loss_of(outputs)
    loss.backward()
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach().double(), grads, sides


def too_far(found, expected, exact, least):
    """The gradients that are farther from the exact ones than TIMES PyTorch's, each by its own norm; where PyTorch's
    is nearer by chance, by ``least`` of the gradient and a hundredth of that of all gradients together."""
    everything = torch.stack([g.norm() for g in exact.values()]).norm()
    wrong = []
    for name, g in exact.items():
        ours, theirs = ((side[name] - g).norm().item() for side in (found, expected))
        if ours > TIMES * theirs + least * (g.norm() + everything / 100):
            wrong.append(f"{name} is off by {ours:.3g}, PyTorch's by {theirs:.3g}, of {g.norm():.3g}")
    return "; ".join(wrong)


def exact_run(model, batch, sides):
    """In float64, with these sides of ReLUs."""
    with InDouble():
        return run(model, batch if sides is None else {**batch, "given": sides})[:2]


@pytest.mark.parametrize(("name", "kind"), STEPS)
def test_step(name, kind):
    """Of a run in few bits some ReLUs (of T5 in bfloat16 two in a thousand elements) are on the other side than in
    float64, PyTorch's as ours, and one alone may be 5 % of a gradient. So each run is compared with the exact gradients
    on its own sides."""
    dtype, autocast = TYPES[kind]
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = architecture.build().to(DEVICE, dtype).train()
    batches = [moved(to(dtype, architecture.batch(model, n, torch.Generator().manual_seed(n)))) for n in (0, 1)]
    exact = copy.deepcopy(model).double()
    if has_relus(exact, to(torch.float64, batches[0])):
        model, exact = WithSides(model), WithSides(exact)
    ours = ORTModule(copy.deepcopy(model))
    for batch in batches:
        wide = to(torch.float64, batch)
        try:
            expected_loss, expected, sides = run(model, batch, autocast)
        except (RuntimeError, NotImplementedError) as error:
            pytest.skip(f"PyTorch itself does not run it: {error}")
        theirs = exact_run(exact, wide, sides)[1]
        found_loss, found, sides = run(ours, batch, autocast)
        loss, grads = exact_run(exact, wide, sides)
        assert found.keys() == expected.keys() == grads.keys()
        expected = {n: grads[n] + expected[n] - theirs[n] for n in grads}
        least = LEAST[autocast or dtype]
        assert not (text := too_far(found, expected, grads, least)), text
        allowed = TIMES * abs(expected_loss - loss) + least * max(1, abs(loss))
        assert abs(found_loss - loss) <= allowed, f"the loss is {found_loss}, not {loss}"
    report = explain(ours)
    assert report.captured, report.fallback


def test_same_seed_same_bits():
    """Twice the same step, dropout included: the same bits."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    torch.manual_seed(0)
    model = ORTModule(BertForMaskedLM(BertConfig(vocab_size=99, **sizes)).to(DEVICE).train())
    tokens = torch.randint(0, 99, (4, 33), device=DEVICE)
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append(run(model, {"input_ids": tokens, "labels": tokens}, None))
    (loss, grads, *_), (again, others, *_) = runs
    assert torch.equal(loss, again)
    assert all(torch.equal(g, others[n]) for n, g in grads.items())
    assert explain(model).captured


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a GPU is needed (scripts/gpu)")
def test_memory_and_stream_are_torchs():
    """Arenas come from torch's allocator, and work is put into torch's current stream."""
    model = ORTModule(
        torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 8)).to(DEVICE)
    )
    x = torch.randn(64, 256, device=DEVICE)
    model(x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = model(x)
    assert torch.cuda.memory_allocated() > before
    del y
    assert torch.cuda.memory_allocated() <= before
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        found = model(x)
    stream.synchronize()
    torch.testing.assert_close(found, model(x))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a GPU is needed (scripts/gpu)")
def test_a_limit_of_memory_is_torchs():
    """A process that may have a part of the memory only is told so as by PyTorch, and goes on with more."""
    model = ORTModule(torch.nn.Sequential(torch.nn.Linear(256, 1 << 14), torch.nn.GELU()).to(DEVICE))
    x = torch.randn(1 << 13, 256, device=DEVICE)  # results of half a gigabyte
    y = model(x[:64])
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (128 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            model(x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(model(x)[:64], y)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a GPU is needed (scripts/gpu)")
def test_inputs_elsewhere_are_an_error(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    with pytest.raises(Exception, match="input 0 is on cpu, .* on cuda:0"):
        ORTModule(torch.nn.Linear(3, 2).to(DEVICE))(torch.randn(4, 3))
