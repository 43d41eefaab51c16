"""What code writes into tensors around a module is undone, in whichever way; torch computes what it would without."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from ortmodule import ORTModule, explain
from ortmodule.guards.writes.outside_writes import OutsideWrites

pytestmark = pytest.mark.filterwarnings("ignore")
LARGE = 300_000  # more than what is copied at once


class Outside:
    """Tensors of one memory, and of others, as code around a module may hold them."""

    def __init__(self, size, dtype=torch.float32):
        self.whole = torch.arange(size, dtype=dtype)
        self.part, self.alias = self.whole[2:6], self.whole.detach()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.summed = (self.weight * 2).sum(1)  # a result of an operator
        self.other = torch.ones(size)
        self.norm = nn.BatchNorm1d(3)

    def tensors(self):
        held = [each for each in vars(self).values() if isinstance(each, torch.Tensor)]
        return [*held, *self.norm.parameters(), *self.norm.buffers()]


@torch.no_grad()
def parameter(o):
    o.weight.mul_(3)


def gradient(o):
    o.whole.add_(o.weight.sum())


def gradient_into_a_part(o):
    o.part[1] += o.weight.sum()


def gradient_into_a_result(o):
    o.summed *= o.weight[0]


def out(o):
    torch.add(o.whole, 1, out=o.whole)


def out_of_two(o):
    torch.max(o.other.view(-1, 2), 1, out=(o.whole[:1].resize_(0), torch.empty(0, dtype=torch.int64)))
    o.whole.zero_()


def set_item(o):
    o.whole[3] = 7


def index_put(o):
    o.whole.index_put_((torch.tensor([1, 2]),), torch.tensor(5.0))


def scatter(o):
    o.whole.scatter_(0, torch.tensor([1, 2]), 5.0)


def masked(o):
    o.whole[o.whole > 2] = 0


def of_a_view(o):
    o.whole.view(2, -1).t()[0].mul_(4)


def of_a_slice_of_a_part(o):
    o.part[1:3].copy_(torch.zeros(2))


def data(o):
    o.whole.data.add_(1)


def other_data(o):
    o.whole.data = torch.zeros(9)


@torch.no_grad()
def set_(o):
    o.whole.set_(torch.zeros(9))


def resize(o):
    o.other.resize_(4 * len(o.other)).zero_()


def foreach(o):
    torch._foreach_add_([o.whole, o.other], 1)


def numpys(o):
    o.whole.numpy()[1] = 5


def storage(o):
    o.whole.untyped_storage().fill_(0)


def random(o):
    F.dropout(o.whole, 0.5, inplace=True)


def statistics(o):
    o.norm(torch.randn(5, 3))


def needs(o):
    o.whole.requires_grad_()


def leaves_nothing(o):
    o.whole.add_(1)
    o.whole.sub_(1)


def scripted(o):
    _scripted(o.whole)


@torch.jit.script
def _scripted(x: torch.Tensor):
    x.add_(2)


def mapped(o):
    torch.vmap(lambda row: o.whole[:2].add_(1) * row, randomness="same")(torch.ones(2, 2))


WAYS = (
    parameter, gradient, gradient_into_a_part, gradient_into_a_result, out, out_of_two, set_item, index_put, scatter,
    masked, of_a_view, of_a_slice_of_a_part, data, other_data, set_, resize, foreach, numpys, storage, random,
    statistics, needs, leaves_nothing, scripted, mapped,
)  # fmt: skip


def facts(tensors):
    """All that is to be as before."""
    return [
        (
            t.detach().clone(), t.untyped_storage()._cdata, t._version, t.requires_grad, t.is_leaf, t.grad_fn,
            t.stride(), t.storage_offset(), t._base,
        )
        for t in tensors
    ]  # fmt: skip


def assert_same(tensors, then):
    for found, expected in zip(facts(tensors), then, strict=True):
        assert torch.equal(found[0], expected[0])
        assert found[1:5] == expected[1:5] and found[6:8] == expected[6:8]
        assert found[5] is expected[5] and found[8] is expected[8]


@pytest.mark.parametrize("size", [8, LARGE])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_way_to_write_is_undone(way, size):
    """Also where it is known before, which lets copies take the place."""
    expected, outside = Outside(size), Outside(size)
    torch.manual_seed(0)
    way(expected)
    tensors, known = outside.tensors(), {}
    for _ in range(2):
        then, written, used = facts(tensors), {}, []
        with OutsideWrites(tensors, written, known, used):
            torch.manual_seed(0)
            way(outside)
            for found, other in zip(tensors, expected.tensors(), strict=True):
                torch.testing.assert_close(found, other, rtol=0, atol=0)
                assert found.requires_grad == other.requires_grad
        assert written and {id(t) for t in tensors} >= written.keys() and known == written
        assert_same(tensors, then)


def test_what_is_read_alone_is_not_written():
    outside, written = Outside(8), {}
    tensors = outside.tensors()
    then = facts(tensors)
    with OutsideWrites(tensors, written, {}, []):
        (outside.whole.sum() * outside.weight).sum().add(outside.summed.sum()).backward()
        outside.norm.eval()(torch.randn(5, 3))
        outside.whole.numpy().sum(), outside.whole.data.sum(), outside.part.clone().add_(1)
    assert not written
    assert_same(tensors, then)


def test_what_is_computed_from_the_elements_stays():
    """Of a tensor that is known to be written: results, and what backward takes of them."""
    whole, weight = torch.zeros(3), torch.ones(3, requires_grad=True)
    with OutsideWrites([whole], {}, {id(whole): whole}, []):
        before = (whole * weight).sum()
        whole.add_(2)
        result, view = (whole * weight).sum(), whole[1:]
    assert whole.tolist() == [0, 0, 0] and view.tolist() == [2, 2] and result.item() == 6
    result.backward()
    assert weight.grad.tolist() == [2, 2, 2] and before.item() == 0


def test_a_graph_from_before_is_as_it_was():
    """Its tensors have the version that it has kept."""
    whole, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    loss = (whole * weight).sum()
    for known in ({}, {id(whole): whole}):
        with OutsideWrites([whole], {}, known, []):
            whole.add_(2)
    loss.backward()
    assert weight.grad.tolist() == [1, 1, 1]


def test_an_error_undoes_it():
    whole = torch.ones(3)
    with pytest.raises(KeyError), OutsideWrites([whole], {}, {}, []):
        whole.add_(2)
        raise KeyError
    assert whole.tolist() == [1, 1, 1]


def test_hooks_of_a_result_are_called():
    """Autograd's graph behind it is the one that there was."""
    weight, calls = torch.ones(3, requires_grad=True), []
    summed = weight * 2
    summed.register_hook(lambda grad: calls.append(grad.tolist()))
    with OutsideWrites([summed], {}, {}, []):
        summed.mul_(weight)
    summed.sum().backward()
    assert weight.grad.tolist() == [2, 2, 2] and calls == [[1, 1, 1]]


# --- what torch computes ----------------------------------------------------------------------------------------------

ATTENTION = nn.MultiheadAttention(8, 2, batch_first=True).eval()
LAYER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
ENCODER = nn.TransformerEncoder(LAYER, 2).eval()
X, TARGET = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
PADDING = torch.arange(5)[None] >= torch.tensor([[5], [3], [2]])
CLASSES = torch.tensor([0, 1, 3, 2, 4])


@functools.cache
def compiled():
    """Not when tests are collected: the compiler changes defaults of torch's, as that of `validate_args`."""
    return torch.compile(lambda x, y: (x * y).sum(), backend="eager")


FUNCTIONS = {
    "l1": lambda: F.l1_loss(X, TARGET, weight=X.abs()),
    "mse": lambda: F.mse_loss(X, TARGET, weight=X.abs()),
    "huber": lambda: F.huber_loss(X, TARGET, weight=X.abs(), delta=0.3),
    "smooth l1": lambda: F.smooth_l1_loss(X, TARGET, beta=0.3),
    "cross entropy": lambda: F.cross_entropy(X[0], CLASSES, weight=X[0, 0].abs(), label_smoothing=0.1, ignore_index=2),
    "nll": lambda: F.nll_loss(X[0].log_softmax(1), CLASSES, weight=X[0, 0].abs(), ignore_index=1),
    "binary": lambda: F.binary_cross_entropy_with_logits(X, TARGET.sigmoid(), X.abs(), pos_weight=X[0, 0].abs()),
    "gaussian": lambda: F.gaussian_nll_loss(X, TARGET, X.abs(), full=True),
    "poisson": lambda: F.poisson_nll_loss(X, TARGET.abs(), full=True),
    "kl": lambda: F.kl_div(X, TARGET, log_target=True, reduction="batchmean"),
    "triplet": lambda: F.triplet_margin_with_distance_loss(X, TARGET, X + 1, margin=0.3, swap=True),
    "multi margin": lambda: F.multi_margin_loss(X[0], CLASSES, p=2, margin=0.5, weight=X[0, 0].abs()),
    "embedding": lambda: F.embedding(CLASSES, X[0], padding_idx=1, max_norm=0.5),
    "bag": lambda: F.embedding_bag(CLASSES[None], X[0], per_sample_weights=X[:1, :, 0], mode="sum"),
    "pool": lambda: F.max_pool1d(X, 2, return_indices=True),
    "fractional": lambda: F.fractional_max_pool2d(
        X[None], 2, output_ratio=(0.5, 0.5), _random_samples=torch.ones(1, 3, 2) / 3
    ),
    "interpolate": lambda: F.interpolate(X, scale_factor=1.5, mode="linear", align_corners=True),
    "norm": lambda: F.layer_norm(X, (8,), X[0, 0], X[0, 1], 1e-3),
    "rms": lambda: F.rms_norm(X, (8,), X[0, 0], 1e-3),
    "groups": lambda: F.group_norm(X, 5, X[0, :, 0], X[0, :, 1], 1e-2),
    "pad": lambda: F.pad(X, (1, 2), mode="reflect"),
    "unique": lambda: torch.unique(CLASSES % 3, return_counts=True),
    "einsum": lambda: torch.einsum("bij,bkj->bik", X, TARGET),
    "norms": lambda: torch.norm(X, p=3, dim=1, keepdim=True),
    "stft": lambda: torch.stft(X[0].T, 4, 2, window=X[0, 0, :4], return_complex=True),
    "products": lambda: torch.chain_matmul(X[0], X[1].T, X[2]),
    "products into": lambda: torch.chain_matmul(X[0], X[1].T, X[2], out=torch.zeros(5, 8)),
    "split": lambda: torch.split(X, [2, 3], dim=1),
    "order": lambda: torch.tensor(X.mT.dim_order(ambiguity_check=[torch.contiguous_format])),
    "reversed": lambda: 2 / X + (2 - X) + 2**X + X // 0.3,
    "asked": lambda: torch.tensor(has_torch_function((X,))),
    "attention": lambda: ATTENTION(X, X, X, key_padding_mask=PADDING),
    "scaled attention": lambda: F.scaled_dot_product_attention(X, X, TARGET, is_causal=True, scale=0.3),
    "layer": lambda: LAYER(X),
    "encoder": lambda: ENCODER(X, src_key_padding_mask=PADDING),
    "compiled": lambda: compiled()(X, TARGET),
}


FAST = ("layer", "encoder")


class Operators(TorchDispatchMode):
    """Which are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_computes_the_same(name, grad):
    """The same bits, by the same operators: also where torch asks whether something looks at its functions."""
    with torch.set_grad_enabled(grad):
        with Operators() as expected_calls:
            expected = FUNCTIONS[name]()
        with OutsideWrites([X, TARGET, CLASSES], {}, {}, []), Operators() as calls:
            found = FUNCTIONS[name]()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert calls.names == expected_calls.names
    assert grad or name not in FAST or any("_encoder_layer_fwd" in each for each in calls.names)


# --- modules ----------------------------------------------------------------------------------------------------------

TOTAL, COUNTS, WEIGHTS = torch.zeros(()), {"rows": torch.zeros(4)}, torch.linspace(0.5, 2, 4)


class Counting(nn.Module):
    """A submodule that writes around itself, and uses what it has written."""

    def __init__(self, use):
        super().__init__()
        self.linear, self.use = nn.Linear(4, 4), use

    def forward(self, x):
        return self.use(self.linear(x))


class Whole(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 4), Counting(use), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.part(self.first(x))).sum()


def sums(y):
    TOTAL.add_(y.detach().sum())
    return y * (1 + TOTAL)


def rows(y):
    COUNTS["rows"] += y.detach().sum(0)
    return F.l1_loss(y, torch.zeros_like(y), reduction="none", weight=WEIGHTS.expand_as(y)) * COUNTS["rows"]


def arrays(y):
    COUNTS["rows"].numpy()[1] += 1
    return y * COUNTS["rows"]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("use", [sums, rows, arrays])
def test_a_part_that_writes_around_itself(use, verify, monkeypatch):
    if verify:
        monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    torch.manual_seed(0)
    eager = Whole(use)
    found = []
    for module in (eager, ORTModule(copy.deepcopy(eager))):
        TOTAL.zero_(), COUNTS["rows"].zero_()
        for n in (3, 5, 3, 4):
            module.zero_grad()
            loss = module(torch.randn(n, 4, generator=torch.Generator().manual_seed(n)))
            loss.backward()
            grads = [p.grad.clone() for p in module.parameters()]
            found.append([loss.detach(), TOTAL.clone(), COUNTS["rows"].clone(), *grads])
    assert explain(module).captured, explain(module).fallback
    for expected, ours in zip(found[:4], found[4:], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert all(math.isfinite(each[0]) for each in found)
