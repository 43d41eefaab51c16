"""Key-value caches among the arguments: what forward puts into them is in the caller's own, as in PyTorch."""

import collections
import copy
import dataclasses
import itertools
import types

import pytest
import torch
import transformers
from torch import nn

from ortmodule import Error, ORTModule, explain
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")
LAYERS, HEADS, WIDTH, WORDS, MOST = 2, 2, 8, 11, 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache, layer, remember):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        k, v, begin = remember(cache, layer, k, v)
        seen = torch.arange(k.shape[2]) <= begin + torch.arange(x.shape[1])[:, None]
        weights = (q @ k.transpose(-1, -2)).masked_fill(~seen, -torch.inf).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, remember, returns=False):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Attention() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, WORDS)
        self.remember, self.returns = remember, returns

    def forward(self, words, cache=None):
        x = self.words(words)
        for i, layer in enumerate(self.layers):
            x = layer(x, cache, i, self.remember)
        return (self.head(x), cache) if self.returns else self.head(x)


def longer(then, k, v):
    """The keys and values so far, and how many there were before."""
    if then is None:
        return k, v, 0
    return torch.cat([then[0], k], 2), torch.cat([then[1], v], 2), then[0].shape[2]


def in_list(cache, i, k, v):
    k, v, begin = longer(cache[i], k, v)
    cache[i] = (k, v)
    return k, v, begin


def appended(cache, i, k, v):
    k, v, begin = longer(cache[i] if i < len(cache) else None, k, v)
    if i < len(cache):
        cache[i] = (k, v)
    else:
        cache.append((k, v))
    return k, v, begin


def in_pairs(cache, i, k, v):
    pair = cache[i]
    k, v, begin = longer(pair if pair else None, k, v)
    pair[:] = [k, v]
    return k, v, begin


def in_dictionary(cache, i, k, v):
    k, v, begin = longer(cache.get(i), k, v)
    cache[i] = (k, v)
    return k, v, begin


def by_name(cache, i, k, v):
    layer = cache.setdefault(f"layer.{i}", {})
    k, v, begin = longer((layer["k"], layer["v"]) if layer else None, k, v)
    layer.update(k=k, v=v)
    return k, v, begin


class Cache:
    def __init__(self):
        self.keys, self.values, self.calls = [None] * LAYERS, [None] * LAYERS, 0
        self._seen = 0

    def update(self, i, k, v):
        k, v, begin = longer(None if self.keys[i] is None else (self.keys[i], self.values[i]), k, v)
        self.keys[i], self.values[i] = k, v
        if i == 0:
            self._seen += k.shape[2] - begin
        return k, v, begin


class Layer:
    keys = values = None


class Layered:
    """As transformers' `DynamicCache`: layers that are made when they are first needed."""

    def __init__(self):
        self.layers, self.kind = [], Layer

    def update(self, i, k, v):
        while len(self.layers) <= i:
            self.layers.append(self.kind())
        layer = self.layers[i]
        k, v, begin = longer(None if layer.keys is None else (layer.keys, layer.values), k, v)
        layer.keys, layer.values = k, v
        return k, v, begin


@dataclasses.dataclass
class Fields:
    pairs: dict = dataclasses.field(default_factory=dict)


def in_place(cache, i, k, v):
    """Into memory that is there from the beginning, at a place that a tensor counts."""
    keys, values, used = cache[i]
    places = used + torch.arange(k.shape[2])
    keys.index_copy_(2, places, k)
    values.index_copy_(2, places, v)
    begin = used.clone()
    used.add_(k.shape[2])
    return keys, values, begin


def memory(rows=2):
    shape = rows, HEADS, MOST, WIDTH // HEADS
    return [(torch.zeros(shape), torch.zeros(shape), torch.tensor(0)) for _ in range(LAYERS)]


#: What the caller gives, what attention does with it.
KINDS = {
    "list": (lambda: [None] * LAYERS, in_list),
    "appended": (list, appended),
    "pairs": (lambda: [[] for _ in range(LAYERS)], in_pairs),
    "dictionary": (dict, in_dictionary),
    "ordered": (collections.OrderedDict, in_dictionary),
    "defaults": (lambda: collections.defaultdict(lambda: None), in_dictionary),
    "names": (dict, by_name),
    "deque": (lambda: collections.deque([None] * LAYERS), in_list),
    "object": (Cache, lambda cache, *rest: cache.update(*rest)),
    "layers": (Layered, lambda cache, *rest: cache.update(*rest)),
    "dataclass": (Fields, lambda cache, *rest: in_dictionary(cache.pairs, *rest)),
    "namespace": (lambda: types.SimpleNamespace(kv={}), lambda cache, *rest: in_dictionary(cache.kv, *rest)),
    "in place": (memory, in_place),
}
LENGTHS = (5, 3, 3, 1)


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [value[key] for key in value]
    elif hasattr(value, "__dict__"):
        value = list(vars(value).values())
    inside = value if isinstance(value, (list, tuple, collections.deque)) else ()
    return [t for each in inside for t in tensors_in(each)]


def compare(eager, wrapped, caches, lengths=LENGTHS, grad=True, call=None, sampled=0):
    """A cache that grows in some calls: results, what is in it, who holds it, gradients through all calls but the first
    so many, ``sampled``, which record none."""
    call = call or (lambda module, words, cache: module(words, cache))
    losses = []
    calls = [torch.randint(0, WORDS, (2, n)) for n in lengths]
    kept = [list(map(id, containers_in(cache))) for cache in caches]
    for number, words in enumerate(calls):
        with torch.set_grad_enabled(grad and number >= sampled):
            results = [call(module, words, cache) for module, cache in zip((eager, wrapped), caches, strict=True)]
            theirs, ours = ([*tensors_in(r), *tensors_in(c)] for r, c in zip(results, caches, strict=True))
            torch.testing.assert_close(ours, theirs)
            assert [t.requires_grad for t in ours] == [t.requires_grad for t in theirs]
            shapes = [[type(each) for each in containers_in(cache)] for cache in caches]
            assert shapes[0] == shapes[1]
            losses.append([sum(t.float().square().sum() for t in found) for found in (theirs, ours)])
    for cache, before in zip(caches, kept, strict=True):
        held = list(map(id, containers_in(cache)))
        assert held[:1] == before[:1]
    if not grad:
        return
    for module, loss in zip((eager, wrapped), losses[-1], strict=True):
        module.zero_grad()
        loss.backward()
    for (name, p), q in zip(eager.named_parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=lambda text, name=name: f"{name}: {text}")


def containers_in(value):
    if isinstance(value, (torch.Tensor, int, str, type(None), type, torch.dtype, torch.device)):
        return []
    inside = list(vars(value).values()) if hasattr(value, "__dict__") else []
    inside += list(value.values() if isinstance(value, dict) else value) if hasattr(value, "__iter__") else []
    return [value, *(c for each in inside for c in containers_in(each))]


WAYS = [(True, True), (True, False), (False, True), (False, False)]  # training, with gradients
SHORT = {("layers", False, False), ("in place", True, True)}


@each("kind, training, grad", [(kind, *way) for kind in KINDS for way in WAYS], SHORT)
def test_containers(kind, training, grad):
    torch.manual_seed(0)
    make, remember = KINDS[kind]
    eager = Model(remember).train(training)
    wrapped = ORTModule(copy.deepcopy(eager))
    # PyTorch refuses to differentiate what a later call has written over.
    sampled = len(LENGTHS) - 1 if kind == "in place" else 0
    compare(eager, wrapped, [make(), make()], grad=grad, sampled=sampled)
    report = explain(wrapped)
    assert report.captured and not report.breaks and report.pytorch_calls == 0, report


class Losses(nn.Module):
    """Puts a loss, or how many tokens an expert got, into what it is given, and does no more with it."""

    def __init__(self, put):
        super().__init__()
        self.first, self.last, self.put = nn.Linear(4, 4), nn.Linear(4, 2), put

    def forward(self, x, losses):
        h = self.first(x).relu()
        self.put(losses, h.square().mean(), (h > 0).sum(0))
        return self.last(h)


def total(losses, loss, counts):
    losses["total"] = losses.get("total", 0.0) + loss
    losses.setdefault("counts", []).append(counts)


PUTS = {
    "list": (list, lambda losses, loss, counts: losses.append(loss)),
    "pairs": (list, lambda losses, loss, counts: losses.extend([loss, counts])),
    "total": (dict, total),
    "number": (dict, lambda losses, loss, counts: losses.update(loss=loss, count=losses.get("count", 0) + 1)),
    "attribute": (types.SimpleNamespace, lambda losses, loss, counts: setattr(losses, "loss", loss)),
}


@each("kind", PUTS, {"total"})
def test_losses(kind):
    """In the engine as a whole: nothing in forward hangs on what was put there."""
    torch.manual_seed(0)
    make, put = PUTS[kind]
    eager = Losses(put)
    wrapped = ORTModule(copy.deepcopy(eager))
    given = make(), make()
    for _ in range(3):
        x, found = torch.randn(3, 4), []
        for module, losses in zip((eager, wrapped), given, strict=True):
            module.zero_grad()
            y = module(x, losses)
            (y.square().sum() + sum(t for t in tensors_in(losses) if t.requires_grad)).backward(retain_graph=True)
            found.append([y, *tensors_in(losses), *[p.grad for p in module.parameters()]])
        torch.testing.assert_close(found[1], found[0])
    report = explain(wrapped)
    assert report.captured and not report.breaks and report.pytorch_calls == 0, report


def test_the_same_cache_twice():
    """One object in two places is one object to forward, too."""
    eager = Model(lambda caches, *rest: in_list(caches[1], *rest), returns=True).eval()
    wrapped = ORTModule(copy.deepcopy(eager))
    found = []
    for module in (eager, wrapped):
        one, words = [None] * LAYERS, torch.arange(3)[None]
        with torch.no_grad():
            for _ in range(3):
                y, caches = module(words, (one, one))
                assert caches[0] is caches[1] is one
        found.append([y, *tensors_in(one)])
    torch.testing.assert_close(found[1], found[0])
    assert explain(wrapped).captured


class Holding(nn.Module):
    """Holds the very cache that it is given."""

    def __init__(self):
        super().__init__()
        self.linear, self.cache = nn.Linear(4, 4), Cache()

    def forward(self, x, cache):
        cache.keys[0] = self.linear(x)
        return self.linear(x) + (0 if self.cache.keys[0] is None else self.cache.keys[0])


def test_a_cache_that_the_module_holds():
    eager = Holding()
    wrapped = ORTModule(copy.deepcopy(eager))
    held = wrapped._ortmodule.module
    x = torch.randn(3, 4)
    for theirs, ours in ((Cache(), Cache()), (eager.cache, held.cache), (Cache(), Cache()), (eager.cache, held.cache)):
        torch.testing.assert_close(wrapped(x, ours), eager(x, theirs))
        torch.testing.assert_close(tensors_in(ours), tensors_in(theirs))


class Sentinel:
    """An object without tensors, which forward may compare."""


def test_an_object_that_gets_no_tensors():
    given = Sentinel()
    wrapped = ORTModule(Losses(lambda other, *rest: None))
    wrapped.first.flag = given  # forward would not see that another one is given
    with pytest.warns(UserWarning, match="an argument holds a value of type .*Sentinel, which may change"):
        wrapped(torch.ones(2, 4), given)
    assert explain(wrapped).pytorch_calls == 1


@pytest.mark.parametrize("policy", ["FALLBACK_UNSUPPORTED_DATA", "FALLBACK_UNSUPPORTED_TORCH_MODEL"])
def test_an_argument_that_no_graph_is_given_is_data(policy, monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", policy)
    wrapped = ORTModule(Losses(lambda other, *rest: None))
    text = "an argument holds a value of type .*Sentinel, which may change"
    with pytest.warns(UserWarning, match=text) if policy.endswith("DATA") else pytest.raises(Error, match=text):
        wrapped(torch.ones(2, 4), Sentinel())
    assert explain(wrapped).pytorch_calls == policy.endswith("DATA")


# --- transformers -----------------------------------------------------------------------------------------------------


def gpt2():
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=WORDS, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0, **small)
    )


def llama():
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **small, **heads))


def mistral():
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 6}
    return transformers.MistralForCausalLM(transformers.MistralConfig(vocab_size=WORDS, **small, **heads))


CACHES = {
    "DynamicCache": lambda config: transformers.DynamicCache(config=config),
    "without a config": lambda config: transformers.DynamicCache(),
    "StaticCache": lambda config: transformers.StaticCache(config=config, max_cache_len=MOST),
    "use_cache": lambda config: None,
}
MODELS = {"gpt2": gpt2, "llama": llama, "mistral": mistral}
FULL = [(model, cache, *way) for model in MODELS for cache in CACHES for way in WAYS]


@each("model, cache, training, grad", FULL, {("llama", "DynamicCache", True, False)})
def test_transformers(model, cache, training, grad):
    torch.manual_seed(0)
    eager = MODELS[model]().train(training)
    wrapped = ORTModule(copy.deepcopy(eager))
    sampled = len(LENGTHS) - 1 if cache == "StaticCache" else 0
    caches = [CACHES[cache](eager.config) for _ in range(2)]

    def call(module, words, given):
        result = module(words, past_key_values=given, use_cache=True)
        assert given is None or result.past_key_values is given
        layers = result.past_key_values.layers
        return [result.logits, *[t for layer in layers for t in (layer.keys, layer.values)]]

    compare(eager, wrapped, caches, (3, 3, 3, 1), grad=grad, call=call, sampled=sampled)
    report = explain(wrapped)
    assert report.captured and not report.breaks and report.pytorch_calls == 0, report


class TwoCaches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, first=None, second=None, third=None):
        y = self.linear(x)
        first.append(y)
        second["y"], second["first"] = y * 2, first
        third[0] = (y * 3, second)
        return y


@pytest.mark.parametrize("names", itertools.permutations(["first", "second", "third"]), ids="-".join)
def test_caches_by_name_in_any_order(names):
    eager = TwoCaches().eval()
    ours = ORTModule(copy.deepcopy(eager))
    with torch.no_grad():
        for _ in range(2):
            x, seen = torch.randn(3, WIDTH), []
            for model in eager, ours:
                given = {"first": [], "second": {}, "third": [None]}
                model(x, **{name: given[name] for name in names})
                assert given["second"]["first"] is given["first"] and given["third"][0][1] is given["second"]
                seen.append([given["first"][0], given["second"]["y"], given["third"][0][0]])
            torch.testing.assert_close(*seen)
    assert explain(ours).captured and explain(ours).exports == 1
