"""Hooks on layers that take or return caches, tuples, dictionaries, dataclasses: PyTorch has the layer, and no more."""

import functools
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each

LAYERS, WIDTH = 3, 4


class Cache:
    """Of keys, as transformers have it."""

    def __init__(self):
        self.layers = []

    def put(self, key):
        self.layers.append(key)
        return sum(self.layers)


@dataclass
class State:
    h: torch.Tensor
    steps: list


class Layer(nn.Module):
    """Takes and returns hidden states in one of several forms."""

    def __init__(self, form):
        super().__init__()
        self.form, self.linear = form, nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache=None, scale=1.0):
        if self.form == "dataclass":
            x.steps.append(x.h)
            return State(self.linear(x.h).tanh() + x.steps[0], x.steps)
        h = self.linear(x)
        if self.form == "dictionary":
            return {"h": (h + cache["scale"]).tanh(), "cache": cache}
        h = (h + cache.put(h)).tanh() * scale
        return (h, cache) if self.form == "tuple" else h


class Net(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.first, self.last = form, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(Layer(form) for _ in range(LAYERS))

    def forward(self, x):
        x = self.first(x)
        if self.form == "dataclass":
            state = State(x, [])
            for layer in self.layers:
                state = layer(state)
            return self.last(state.h).square().mean(), sum(state.steps)
        cache = {"scale": x.mean()} if self.form == "dictionary" else Cache()
        for layer in self.layers:
            found = layer(x, cache=cache) if self.form == "named" else layer(x, cache)
            x = found[0] if self.form == "tuple" else found["h"] if self.form == "dictionary" else found
        return self.last(x).square().mean(), cache


FORMS = ("object", "named", "tuple", "dictionary", "dataclass")
SEEN: list = []


def hidden(module, inputs, output):
    SEEN.append((len(inputs), inputs[0].norm().item()) if isinstance(inputs[0], torch.Tensor) else len(inputs))


def scales(module, inputs):
    return (inputs[0] * 0.5, *inputs[1:])


def scales_the_first(module, inputs):
    return (inputs[0] * 0.5,) + inputs[1:]


def named(module, inputs, named):
    named["scale"] = 0.5
    return inputs, named


def result(module, inputs, output):
    x = output[0]
    SEEN.append(x.detach().clone())
    return (x * 0.5, output[1])


def item(module, inputs, output):
    SEEN.append(output["h"].detach().clone())


def field(module, inputs, output):
    SEEN.append(output.h.detach().clone())


class Keeper:
    def hook(self, module, inputs, output):
        SEEN.append(tensor_of(output))

    def __call__(self, module, inputs):
        SEEN.append(len(inputs))


def tensor_of(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else None


@torch.no_grad()
def without_gradients(module, inputs, output):
    SEEN.append(inputs[0].sum().item())


def backward(module, grad_input, grad_output):
    SEEN.append([g is not None and g.norm().item() for g in grad_output])


def forward_hook(hook, **more):
    return lambda layer: layer.register_forward_hook(hook, **more)


def pre_hook(hook, **more):
    return lambda layer: layer.register_forward_pre_hook(hook, **more)


#: Hooks that leave containers alone, and the forms for which that shows.
HARMLESS = {
    "hidden states": (forward_hook(hidden), ("object", "named", "tuple", "dictionary")),
    "a method": (forward_hook(Keeper().hook), ("object", "named")),
    "an object": (pre_hook(Keeper()), FORMS[:4]),
    "a lambda": (forward_hook(lambda module, inputs, output: SEEN.append(1)), FORMS),
    "partial": (forward_hook(functools.partial(lambda kept, module, inputs, output: kept.append(1), SEEN)), FORMS),
    "without gradients": (forward_hook(without_gradients), ("object", "named", "tuple", "dictionary")),
    "a scaled input": (pre_hook(scales), ("object", "tuple", "dictionary")),
    "another sum": (pre_hook(scales_the_first), ("object", "tuple", "dictionary")),
    "named": (pre_hook(named, with_kwargs=True), ("named",)),
    "a scaled result": (forward_hook(result), ("tuple",)),
    "an item": (forward_hook(item), ("dictionary",)),
    "a field": (forward_hook(field), ("dataclass",)),
    "backward": (lambda layer: layer.register_full_backward_hook(backward), ("object", "named")),
}
PAIRS = [(name, form) for name, (_, forms) in HARMLESS.items() for form in forms]


def train(wrap, form, put, at, steps=3):
    torch.manual_seed(0)
    module = Net(form).double()
    for i in at:
        put(module.layers[i])
    module, found = wrap(module), []
    SEEN.clear()
    for step in range(steps):
        x = torch.randn(5 + step, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss, more = module(x)
        loss.backward()
        found += [loss.detach(), [t.detach() for t in more.layers] if isinstance(more, Cache) else more]
    return module, [found, [p.grad for p in module.parameters()], list(SEEN)]


def assert_as_eager(form, put, at):
    _, eager = train(lambda module: module, form, put, at)
    module, ours = train(ORTModule, form, put, at)
    torch.testing.assert_close(ours, eager, rtol=1e-9, atol=1e-12)
    return explain(module)


@each("name, form", PAIRS, [("hidden states", "tuple"), ("a scaled input", "object"), ("a field", "dataclass")])
@pytest.mark.parametrize("at", [(1,), (0, 2)], ids=["one layer", "two layers"])
def test_a_hook_that_leaves_containers_alone(name, form, at, monkeypatch):
    monkeypatch.setattr("ortmodule.runtime.broken_graph.MOST_OUTSIDE", 1.0)  # two of three layers
    report = assert_as_eager(form, HARMLESS[name][0], at)
    assert report.captured and report.exports == 1, report.fallback
    assert report.breaks == [f"layers.{i}" for i in at]


def keeps(module, inputs, output):
    SEEN.append(inputs)


def keeps_an_item(module, inputs, output):
    SEEN.append(inputs[1])


def adds(module, inputs, output):
    cache = inputs[1]
    cache.layers.append(output * 2)


def adds_by_a_function(module, inputs):
    _add(inputs[1])


def _add(cache):
    cache.layers.append(torch.ones(1, WIDTH, dtype=torch.float64))


def keeps_the_result(module, inputs, output):
    SEEN.append(output[1])


def all_of_them(*given):
    SEEN.append(given[1])


TAKING = {
    "keeps": (forward_hook(keeps), "object"),
    "keeps an item": (forward_hook(keeps_an_item), "object"),
    "adds": (forward_hook(adds), "object"),
    "adds by a function": (pre_hook(adds_by_a_function), "object"),
    "keeps the result": (forward_hook(keeps_the_result), "tuple"),
    "all of them": (forward_hook(all_of_them), "object"),
    "by its name": (
        forward_hook(lambda module, inputs, named, output: SEEN.append(named), with_kwargs=True), "named",
    ),
}  # fmt: skip


def tensors_in(value):
    if isinstance(value, Cache):
        return tensors_in(value.layers)
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    return [tensors_in(each) for each in value] if isinstance(value, (list, tuple)) else value.detach()


@pytest.mark.filterwarnings("ignore")
@each("name", TAKING, ["keeps an item", "adds", "keeps the result"])
def test_a_hook_that_changes_or_keeps_a_container(name):
    """The cache that it keeps has the keys of all layers when forward is over: PyTorch runs what makes it."""
    put, form = TAKING[name]
    found = []
    for wrap in (lambda module: module, ORTModule):
        module, values = train(wrap, form, put, (1,))
        found.append([values[:2], tensors_in(values[2])])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
    report = explain(module)
    assert "there are hooks on layers.1" in report.fallback and "cache" not in report.fallback.lower()


# --- transformers' caches ---------------------------------------------------------------------------------------------


def language_model(kind):
    torch.manual_seed(0)
    if kind == "GPT-2":
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).train()
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def layer_of(model, kind):
    return model.transformer.h[1] if kind == "GPT-2" else model.model.layers[1]


def features(module, inputs, output):
    SEEN.append((output[0] if isinstance(output, tuple) else output).detach().clone())


def steering(module, inputs):
    return (inputs[0] + 0.25, *inputs[1:])


OF_MODELS = {
    "forward": forward_hook(features),
    "pre": pre_hook(steering),
    "pre, named": pre_hook(lambda module, inputs, named: SEEN.append(len(named)), with_kwargs=True),
    "forward, named": forward_hook(lambda module, inputs, named, output: SEEN.append(len(named)), with_kwargs=True),
    "backward": lambda layer: layer.register_full_backward_hook(backward),
}


@pytest.mark.filterwarnings("ignore")
@each("kind, hook", [(kind, hook) for kind in ("GPT-2", "Llama") for hook in OF_MODELS], [("GPT-2", "forward")])
def test_a_layer_of_transformers_with_a_cache(kind, hook):
    """`use_cache` is on, as it is by default."""
    found = []
    ids = torch.randint(2, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    for wrap in (lambda module: module, ORTModule):
        model = language_model(kind)
        OF_MODELS[hook](layer_of(model, kind))
        model = wrap(model)
        SEEN.clear()
        losses = []
        for _ in range(2):
            out = model(input_ids=ids, labels=ids)
            out.loss.backward()
            losses.append(out.loss.detach())
        keys = [layer.keys.detach() for layer in out.past_key_values.layers]
        found.append([losses, keys, [p.grad for p in model.parameters()], list(SEEN)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    report = explain(model)
    assert report.captured and report.breaks == ["transformer.h.1" if kind == "GPT-2" else "model.layers.1"]
