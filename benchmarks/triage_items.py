"""Lists the items of triage: each is a function that returns what it found out, as fields of a line.

    python -m benchmarks.triage_items --items NAME... --device cuda     a line of JSON before and after each

Results are compared as in tests/gpu: with float64, and PyTorch's own error beside ours is the bound. Times are medians
of turns, ours and PyTorch's alternating, forward and backward.
"""

import argparse
import contextlib
import copy
import functools
import io
import json
import os
import sys
import traceback
import warnings
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import large, rows
from benchmarks.report import machine, middle
from ortmodule import ORTModule, _core
from ortmodule.debug.verify import Verifier
from ortmodule.optim import AdamWMode, FusedAdam

TIMES = 2  # PyTorch's error is allowed so often
LEAST = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the norm, where PyTorch's own error is smaller
TURNS = 5
A_WHILE = 0.03  # seconds of a turn
MOST_REASON = 600  # characters


class Settings(SimpleNamespace):
    """``device``: torch's; ``small``: sizes for a CPU."""

    def size(self, usual, small):
        return small if self.small else usual


ITEMS = {}


def item(*names):
    """Registers ``function(settings, name)``, once for each of the names."""

    def register(function):
        ITEMS.update(dict.fromkeys(names, function))
        return function

    return register


# --- comparing --------------------------------------------------------------------------------------------------------


def clones(tensors):
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]


def tensor_of(outputs):
    return outputs if isinstance(outputs, torch.Tensor) else outputs.loss


@functools.lru_cache(maxsize=4)
def upstream(shape):
    """The gradient that a backward begins with. Of ones a norm's and a softmax's gradients would be rounding alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)) if shape else torch.ones(shape)


def forward_backward(module, inputs, context=contextlib.nullcontext):
    """{name: the result, and gradients of inputs and parameters}."""
    return again(module, clones(inputs), context)


def again(module, inputs, context=contextlib.nullcontext):
    """The same on these very leaves, whose memory stays where it is."""
    module.zero_grad(set_to_none=True)
    for t in inputs:
        t.grad = None
    with context():
        y = tensor_of(module(*inputs))
    y.backward(upstream(tuple(y.shape)).to(y.device, y.dtype))
    found = {"result": y.detach()}
    found |= {f"gradient of input {i}": t.grad for i, t in enumerate(inputs) if t.grad is not None}
    for name, p in module.named_parameters():
        if p.grad is not None:
            found[f"gradient of {name}"] = p.grad
    return found


def distance(found, exact):
    """Of the norm; NaN where there is one."""
    exact = exact.double()
    return ((found.double() - exact).norm() / (exact.norm() + 1e-30)).item()


def compare(ours, eager, exact, dtype):
    """Fields: the two errors of the tensor that is worst by what is allowed, and whether all are allowed."""
    worst, fields = -1.0, {"state": "ok"}
    if ours.keys() != eager.keys():
        return {"state": "wrong", "reason": f"gradients of {sorted(ours.keys() ^ eager.keys())} are on one side only"}
    for name in ours:
        mine, theirs = distance(ours[name], exact[name]), distance(eager[name], exact[name])
        allowed = TIMES * theirs + LEAST[dtype]
        share = mine / allowed if mine == mine else float("inf")
        if share > worst:
            worst, fields["errors"] = share, [mine, theirs]
        if not mine <= allowed and fields["state"] == "ok":
            fields |= {"state": "wrong", "reason": f"{name} is off by {mine:.2g} of its norm, eager by {theirs:.2g}"}
    return fields


def settled(fields, ran):
    """With who ran it: results that are right are "not ours" unless the engine ran all of it."""
    if not ran:
        return fields
    outside, reason = [*ran["aten_ops"], *ran["python_ops"]], None
    if not ran["captured"]:
        reason = f"PyTorch ran it: {ran['fallback']}"
    elif outside:
        reason = f"PyTorch ran {', '.join(outside)}"
    if reason and fields["state"] == "ok":
        fields = {**fields, "state": "not ours", "reason": reason[:MOST_REASON]}
    return {**fields, "ran": ran}


def verified(module, inputs, context=contextlib.nullcontext):
    """What ORTMODULE_VERIFY finds in one step, PyTorch with the engine's masks: "" is that nothing differs. Raises
    RuntimeError where it could not compare."""
    os.environ["ORTMODULE_VERIFY"] = "1"
    try:
        ours = ORTModule(copy.deepcopy(module))
    finally:
        del os.environ["ORTMODULE_VERIFY"]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        forward_backward(ours, inputs, context)
    verifier = ours._ortmodule.observers.one(Verifier)
    if not verifier.findings and not (verifier.compared and verifier.gradients):
        said = [str(each.message) for each in told] or ["PyTorch ran it"]
        raise RuntimeError(f"verification has compared nothing: {said[-1]}")
    return " / ".join(map(str, verifier.findings))[:MOST_REASON]


def first_difference(*of):
    """For a line that says what is wrong already."""
    try:
        return verified(*of) or "verification, with PyTorch's error of one rounding more, finds nothing"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:MOST_REASON]


# --- time -------------------------------------------------------------------------------------------------------------


def seconds(settings, *functions):
    """The median of each, taking turns."""
    often, found = [1] * len(functions), [[] for _ in functions]
    for turn in range(settings.size(TURNS, 1) + 1):
        for i, function in enumerate(functions):
            function()
            clock = large.Clock(settings.device)
            clock.mark()
            for _ in range(often[i]):
                function()
            clock.mark()
            spent = clock.seconds()[0] / often[i]
            if turn:
                found[i].append(spent)
            else:
                often[i] = settings.size(max(1, min(200, round(A_WHILE / max(spent, 1e-6)))), 1)
    return [middle(each)["median"] for each in found]


def measured(settings, ours, eager, inputs, context=contextlib.nullcontext):
    """Fields: seconds of a forward and backward."""

    def step(module):
        with context():
            y = tensor_of(module(*inputs))
        y.backward(torch.ones_like(y))

    mine, theirs = seconds(settings, lambda: step(ours), lambda: step(eager))
    sides = {"ours": ours, "eager": eager}
    kernels = {name: large.traced(settings.device, lambda i, m=m: step(m), 3, 8)[1] for name, m in sides.items()}
    return {"ours": mine, "eager": theirs, "kernels": kernels}


def beside_eager(settings, module, inputs, dtype):
    """Values, then time, of a module without random numbers."""
    inputs = [t.to(settings.device, dtype if t.is_floating_point() else None) for t in inputs]
    module = module.to(settings.device, dtype).train()
    ours, exact = ORTModule(copy.deepcopy(module)), copy.deepcopy(module).double()
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    for _ in range(3):  # the third may be a CUDA graph
        found = forward_backward(ours, inputs)
    fields = compare(found, forward_backward(module, inputs), forward_backward(exact, wide), dtype)
    if fields["state"] == "wrong":
        fields["said"] = first_difference(module, inputs)
    fields |= measured(settings, ours, module, clones(inputs))
    return settled(fields, large.ran_by(ours))


# --- libraries --------------------------------------------------------------------------------------------------------


@item("device")
def device(settings, name):
    found = about(settings)
    said = ", ".join(f"{k} {found[k]}" for k in ("device", "driver_version", "torch", "cuda", "python") if k in found)
    return {"state": "ok", "said": said, "machine": found}


@item("engine")
def engine(settings, name):
    """Which package was imported, and whether it sees a GPU."""
    found = {"said": os.path.dirname(_core.__file__), "emulated": _core.emulated}
    try:
        found["gpus"] = _core.cuda_devices()
    except _core.Error as error:
        return {**found, "state": "failed", "reason": str(error)}
    return {**found, "state": "ok", "said": f"{found['said']}, {found['gpus']} GPUs"}


@item("first-kernel")
def first_kernel(settings, name):
    """The kernels of this architecture are loaded, and one is started."""
    return beside_eager(settings, nn.Softmax(-1), [torch.randn(33, 65)], torch.float32)


@item("cublaslt")
def cublaslt(settings, name):
    x = torch.randn(64, 64, device=settings.device)
    ORTModule(nn.Linear(64, 64).to(settings.device))(x)
    return {"state": "ok", "said": str(_core.cuda_place(0))}


@item("cudnn")
def cudnn(settings, name):
    fields = beside_eager(settings, nn.Conv2d(8, 16, 3, padding=1), [torch.randn(2, 8, 15, 15)], torch.float32)
    return {**fields, "said": f"torch's cuDNN {torch.backends.cudnn.version()}"}


@item("nccl")
def nccl(settings, name):
    return {"state": "ok", "said": str(_core.nccl_version())}


class Chain(nn.Module):
    def forward(self, x):
        return torch.tanh(x * 1.5 + 0.25) * torch.sigmoid(x) - x.abs()


@item("nvrtc")
def nvrtc(settings, name):
    """A chain that no other item has: without NVRTC an interpreter runs it, and its results are right, too."""
    before = _core.cuda_chains()
    fields = beside_eager(settings, Chain(), [torch.randn(257, 129)], torch.float32)
    after = _core.cuda_chains()
    made = after["compiled"] + after["read"] - before["compiled"] - before["read"]
    fields["said"] = f"{made} chains compiled"
    if after["reason"] or not made:
        reason = after["reason"] or "no chain was compiled, and nothing says why"
        fields |= {"state": "failed" if fields["state"] == "ok" else fields["state"], "reason": reason}
    return fields


def about(settings):
    """The machine and the libraries, whatever of it can be had."""
    on_gpu = settings.device != "cpu" and torch.cuda.is_available()
    found = machine("cuda" if on_gpu else "cpu")
    found["torch cuda"], found["gpus"] = torch.version.cuda, torch.cuda.device_count()
    found["engine"] = os.path.dirname(_core.__file__)
    if on_gpu:
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        found["free, GB"] = round(torch.cuda.mem_get_info()[0] / 1e9, 1)
    elif settings.device != "cpu":
        raise RuntimeError("torch finds no GPU (torch.cuda.is_available() is False)")
    return found


# --- operators --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """As models have it: heads behind tokens."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if k.shape[1] != q.shape[1]:  # as models repeat them
            k, v = (t[:, :, None].expand(-1, -1, q.shape[1] // k.shape[1], -1, -1).flatten(1, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate, is_causal=True)
        return y.transpose(1, 2)


def attention_inputs(settings, shared=1):
    """``shared``: so many heads have the same keys and values."""
    batch, length, heads, width = settings.size((8, 1024, 16, 64), (1, 24, 4, 8))
    return [torch.randn(batch, length, heads // n, width) for n in (1, shared, shared)]


class Loss(nn.Module):
    def forward(self, logits, labels):
        return F.cross_entropy(logits.float(), labels)


def operator(settings, name):
    """(module, inputs) of a name in OPERATORS."""
    tokens, width, vocabulary = settings.size((8192, 1024, 32_000), (24, 16, 61))
    if name == "linear":
        return nn.Linear(width, 4 * width), [torch.randn(tokens, width)]
    if name == "layer-norm":
        return nn.LayerNorm(width), [torch.randn(tokens, width)]
    if name == "attention":
        return Attention(0.0), attention_inputs(settings)
    if name == "attention-grouped":
        return Attention(0.0), attention_inputs(settings, shared=4)
    if name == "embedding":
        ids = torch.randint(0, vocabulary, (tokens,))
        ids[: tokens // 8] = 2  # as [MASK] has: its row gets many gradients
        return nn.Embedding(vocabulary, width), [ids]
    labels = torch.randint(0, vocabulary, (tokens // 2,))
    labels[::7] = -100
    return Loss(), [torch.randn(tokens // 2, vocabulary), labels]


def plain(settings, name):
    name, _, dtype = name.partition(" ")
    module, inputs = operator(settings, name)
    return beside_eager(settings, module, inputs, getattr(torch, dtype))


def attention_dropout(settings, name):
    """PyTorch is given the engine's masks to be compared (ORTMODULE_VERIFY): its own are others."""
    dtype = getattr(torch, name.partition(" ")[2])
    inputs = [t.to(settings.device, dtype) for t in attention_inputs(settings)]
    module = Attention(0.1).train()
    ours = ORTModule(copy.deepcopy(module))
    for _ in range(3):
        found = forward_backward(ours, inputs)
    said = verified(module, inputs)
    fields = {"state": "wrong", "reason": said} if said else {"state": "ok", "said": "verified with the engine's masks"}
    if not all(torch.isfinite(t).all() for t in found.values()):
        fields = {"state": "wrong", "reason": "a result or a gradient is not finite"}
    fields |= measured(settings, ours, module, clones(inputs))
    return settled(fields, large.ran_by(ours))


def adam(settings, name):
    """Steps over the parameters of a layer of Llama, beside torch's fused AdamW, against float64."""
    dtype, width = getattr(torch, name.partition(" ")[2]), settings.size(2048, 24)
    shapes = [(width, width)] * 4 + [(4 * width, width)] * 3 + [(width,)] * 2
    start = [torch.randn(shape) for shape in shapes]
    grads = [[torch.randn(shape) for shape in shapes] for _ in range(2)]

    def side(kind, make):
        parameters = [nn.Parameter(p.to(settings.device, dtype).to(kind)) for p in start]
        return parameters, make(parameters)

    def give(parameters, which):
        for p, g in zip(parameters, grads[which], strict=True):
            p.grad = g.to(settings.device, dtype).to(p.dtype)

    common = {"lr": 1e-2, "weight_decay": 0.1}
    sides = [
        side(dtype, lambda p: FusedAdam(p, adam_w_mode=AdamWMode.ADAMW_TORCH, **common)),
        side(dtype, lambda p: torch.optim.AdamW(p, fused=True, **common)),
        side(torch.float64, lambda p: torch.optim.AdamW(p, foreach=True, **common)),
    ]
    for which in (0, 1):
        for parameters, optimizer in sides:
            give(parameters, which)
            optimizer.step()
    found = [{f"parameter {i}": p.detach() for i, p in enumerate(parameters)} for parameters, _ in sides]
    fields = compare(*found, dtype)
    fields["ours"], fields["eager"] = seconds(settings, sides[0][1].step, sides[1][1].step)
    return fields


for _dtype in ("float32", "bfloat16"):
    for _name in ("linear", "layer-norm", "attention", "attention-grouped", "embedding", "cross-entropy"):
        item(f"{_name} {_dtype}")(plain)
    item(f"attention-dropout {_dtype}")(attention_dropout)
    item(f"adam {_dtype}")(adam)


# --- CUDA graphs ------------------------------------------------------------------------------------------------------


STEPS = 8  # before one is compared


def wrapped(module, graphs):
    before = os.environ.get("ORTMODULE_ENABLE_CUDA_GRAPHS")
    os.environ["ORTMODULE_ENABLE_CUDA_GRAPHS"] = "1" if graphs else "0"
    try:
        return ORTModule(copy.deepcopy(module))
    finally:
        del os.environ["ORTMODULE_ENABLE_CUDA_GRAPHS"]
        if before is not None:
            os.environ["ORTMODULE_ENABLE_CUDA_GRAPHS"] = before


@item("graphs mlp", "graphs gpt2-small")
def graphs(settings, name):
    """The same step as CUDA graphs and kernel by kernel: the same bits, and the time of both beside eager."""
    torch.manual_seed(0)
    if name == "graphs mlp":
        rows_of, width, depth = settings.size((64, 512, 8), (4, 8, 2))
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
        module, inputs = nn.Sequential(*layers).to(settings.device), [torch.randn(rows_of, width).to(settings.device)]
    else:
        module, inputs = language_model("gpt2", settings, settings.size(6, 1), settings.size(256, 16))
    module.train()
    with_graphs, without = wrapped(module, True), wrapped(module, False)
    inputs = clones(inputs)

    def seeded(model):
        torch.manual_seed(1)
        return again(model, inputs)

    def started():
        return large.ran_by(with_graphs).get("cuda_graphs", {}).get("started", 0)

    for _ in range(STEPS):  # recorded when the memory of an earlier one comes back; nothing of them is kept
        seeded(with_graphs)
    before, found = started(), [seeded(with_graphs)]
    compared = started() - before
    found.append(seeded(without))
    differ = [key for key in found[0] if not torch.equal(found[0][key], found[1][key])]

    def step(model):
        def run():
            y = tensor_of(model(*inputs))
            y.backward(torch.ones_like(y))

        return run

    ours, apart, eager = seconds(settings, *map(step, (with_graphs, without, module)))
    ran = large.ran_by(with_graphs)
    fields = {"state": "ok", "ours": ours, "eager": eager, "kernel_by_kernel": apart}
    counts = ran.get("cuda_graphs", {})
    fields["said"] = f"kernel by kernel {1e3 * apart:.3g} ms; graphs {counts}"
    if differ:
        fields |= {"state": "wrong", "reason": f"{differ[0]} and {len(differ) - 1} more have other bits than without"}
    elif not compared:
        fields |= {"state": "failed", "reason": f"the step that was compared, number {STEPS + 1}, was no CUDA graph"}
    return settled(fields, ran)


# --- models -----------------------------------------------------------------------------------------------------------


class Scored(nn.Module):
    """A language model whose labels are its tokens."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens, labels=tokens).loss


def language_model(kind, settings, layers, width):
    """(module, inputs), without dropout: its masks are others than PyTorch's."""
    heads, vocabulary = 2 if width < 64 else width // 64, settings.size(5000, 61)
    batch, length = settings.size((8, 128), (2, 11))
    if kind == "gpt2":
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 2 * length}
        model = rows.hf("GPT2LMHeadModel", "GPT2Config", vocab_size=vocabulary, **sizes, **rates)()
    else:
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
        sizes |= {"num_key_value_heads": heads // 2 or 1, "intermediate_size": 3 * width}
        model = rows.hf("LlamaForCausalLM", "LlamaConfig", vocab_size=vocabulary, **sizes)()
    model.config.use_cache = False
    tokens = torch.randint(3, vocabulary, (batch, length), device=settings.device)
    return Scored(model).to(settings.device).train(), [tokens]


@item(*(f"{kind} {how}" for kind in ("gpt2", "llama") for how in ("float32", "autocast")))
def model(settings, name):
    """Loss and gradients of two layers; "autocast" is that of bfloat16."""
    from tests.models.compare import InDouble

    kind, _, how = name.partition(" ")
    torch.manual_seed(0)
    module, inputs = language_model(kind, settings, 2, settings.size(256, 16))
    ours, dtype, context = ORTModule(copy.deepcopy(module)), torch.float32, contextlib.nullcontext
    if how == "autocast":
        dtype = torch.bfloat16
        context = lambda: torch.autocast(settings.device, torch.bfloat16)  # noqa: E731
    for _ in range(3):
        found = forward_backward(ours, inputs, context)
    exact = forward_backward(copy.deepcopy(module).double(), inputs, InDouble)
    fields = compare(found, forward_backward(module, inputs, context), exact, dtype)
    fields["loss"] = found["result"].item()
    if fields["state"] == "wrong":
        fields["said"] = first_difference(module, inputs, context)
    fields |= measured(settings, ours, module, inputs, context)
    return settled(fields, large.ran_by(ours))


# --- steps ------------------------------------------------------------------------------------------------------------

#: Samples of a step: what fits into 80 GB in eager PyTorch with room to spare.
SAMPLES = {"llama-1b": 4, "bert-large": 32, "gpt2-medium": 8}
#: The same models for a rehearsal.
SMALL = {
    "llama-1b": rows.large(
        "Llama 2×32", rows.hf("LlamaForCausalLM", "LlamaConfig", vocab_size=99, hidden_size=32, num_hidden_layers=2,
                              num_attention_heads=4, num_key_value_heads=2, intermediate_size=64),
        rows.language, 2, 12, 99,
    ),
    "bert-large": rows.large(
        "BERT 2×32", rows.hf("BertForMaskedLM", "BertConfig", vocab_size=99, hidden_size=32, num_hidden_layers=2,
                             num_attention_heads=4, intermediate_size=64),
        rows.masked, 2, 12, 99,
    ),
    "gpt2-medium": rows.large(
        "GPT-2 2×32", rows.hf("GPT2LMHeadModel", "GPT2Config", vocab_size=99, n_embd=32, n_layer=2, n_head=2),
        rows.language, 2, 12, 99,
    ),
}  # fmt: skip


@item(*(f"{row} {column}" for row in SAMPLES for column in ("ortmodule", "eager", "compile")))
def step(settings, name):
    """Training steps under autocast in bfloat16 with AdamW, as benchmarks/large.py measures them."""
    name, _, column = name.partition(" ")
    row = SMALL[name] if settings.small else rows.EVERY[name]
    args = SimpleNamespace(device=settings.device, dtype=torch.float32, autocast=torch.bfloat16, column=column)
    args.together = False
    args.steps, args.batch = settings.size(10, 2), settings.size(SAMPLES[name], 2)
    found = large.measure(row, args)
    fields = {"state": "ok", "ours": found["step"]["median"], "peak": found["peak_bytes"], "loss": found["loss"]}
    fields["kernels"] = found["kernels"]
    fields |= {"first_step": found["first_step"], "first_peak": found["first_peak_bytes"], "busy": found["busy"]}
    busy = "" if found["busy"] is None else f", GPU busy {found['busy']:.0%}"
    fields["said"] = f"loss {found['loss']:.3f}, first step {found['first_step']:.1f} s{busy}"
    return settled(fields, found["ran"])


# --- a process --------------------------------------------------------------------------------------------------------


def answer(settings, name):
    """The fields of one item. Exceptions are results, too."""
    torch.manual_seed(0)
    try:
        fields = ITEMS[name](settings, name)
        large.finished(settings.device)  # errors of kernels come late
        return fields
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        traceback.print_exc()
        return {"state": "failed", "reason": f"{type(error).__name__}: {error}"[:MOST_REASON]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", nargs="+", default=[], choices=ITEMS, metavar="ITEM")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--about", action="store_true", help="only the machine")
    args = parser.parse_args()
    # What is printed, by libraries too, is no answer.
    answers = io.TextIOWrapper(os.fdopen(os.dup(1), "wb", 0), write_through=True)
    os.dup2(2, 1)
    settings = Settings(device=args.device, small=args.small)
    if args.about:
        answers.write(json.dumps(about(settings)) + "\n")
        return 0
    for name in args.items:
        answers.write(json.dumps({"begin": name}) + "\n")
        answers.write(json.dumps(answer(settings, name)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
