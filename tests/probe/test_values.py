"""A graph used with other data and sizes than those of its trace: negative indices, places, numbers from sizes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import DebugOptions, LogLevel, ORTModule, explain


@pytest.fixture(autouse=True)
def the_same_numbers():
    torch.manual_seed(0)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def check(function, *calls, tolerance=0.0, pytorch=""):
    """Results and gradients of one ORTModule in several calls are PyTorch's, and the engine runs it; or PyTorch does,
    for the reason ``pytorch``."""
    ours = ORTModule(Function(function), DebugOptions(log_level=LogLevel.ERROR))
    for call in calls:
        sides = []
        for f in (ours, function):
            given = [t.clone().requires_grad_() if t.is_floating_point() else t for t in call]
            result = f(*given)
            wanted = [t for t in given if t.requires_grad]
            grads = torch.autograd.grad(result.double().cos().sum(), wanted, materialize_grads=True, allow_unused=True)
            sides.append([result, *grads])
        for found, expected in zip(*sides, strict=True):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    report = explain(ours)
    assert report.captured != bool(pytorch) and pytorch in (report.fallback or ""), report.fallback
    return report


def numbers(*values):
    return torch.tensor(values)


FORWARD, BACKWARD = (numbers(0, 1, 2), numbers(3, 1, 2)), (numbers(0, -1, 2), numbers(3, -1, -2))
MASKS = [numbers(True, False, True, True), numbers(True, True, True, False)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, j, k: x[j, k] * 1,
        lambda x, j, k: x[j, :, k] * 1,
        lambda x, j, k: x[:, j, k] * 1,
        lambda x, j, k: x[j[:, None], k] * 1,
        lambda x, j, k: x[..., j, None, k] * 1,
        lambda x, j, k: x[:, j] * 1,
        lambda x, j, k: x.index_put((j, k), x[j, k].exp()),
        lambda x, j, k: x.index_put((j, k), x[k, j].exp(), accumulate=True),
    ],
)
def test_indices_count_from_the_end(function):
    x = torch.randn(4, 5, 6)
    check(function, (x, *FORWARD), (x, *BACKWARD), (torch.randn(6, 4, 7), *BACKWARD), tolerance=1e-5)


def test_a_mask_beside_indices():
    x = torch.randn(4, 5, 6)
    calls = [(x, mask, places) for mask in MASKS for places in (FORWARD[1], BACKWARD[1])]
    check(lambda x, mask, k: x[mask, k] * 1, *calls)
    check(lambda x, mask, k: x[mask, :, k] * 1, *calls)


@pytest.mark.parametrize(
    "function, pytorch",
    [
        (lambda x, k: x[k], "data decides where"),
        (lambda x, k: x[:, k], "data decides where"),
        (lambda x, k: x.narrow(1, k, 2), "data decides where"),
        (lambda x, k: x.select(0, k).t(), "data decides where"),
        (lambda x, k: x[k] * 2, ""),
    ],
)
def test_data_decides_the_place(function, pytorch):
    """Of a view PyTorch runs it: where in memory that is would be another place in each call."""
    x = torch.randn(4, 5, 6)
    check(function, *[(x, torch.tensor(k)) for k in (1, 2, 0, 3)], pytorch=pytorch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * (1 / x.shape[0]),
        lambda x: x + 0.1 / x.size(1),
        lambda x: x / x.size(1) ** 0.5,
        lambda x: x * (0.1 * x.shape[1]),
        lambda x: x.masked_fill(x > 0, 1 / x.size(0)),
        lambda x: x + torch.full((x.size(1),), 1 / x.shape[0], dtype=x.dtype),
        lambda x: F.cross_entropy(x, torch.zeros(x.size(0), dtype=torch.int64), label_smoothing=0.1),
        lambda x: F.cross_entropy(x, x.detach().softmax(1), label_smoothing=0.3),
    ],
)
def test_numbers_from_sizes(function, dtype):
    calls = [(torch.randn(n, 2 * n + 1, dtype=dtype),) for n in (3, 5, 7)]
    check(function, *calls, tolerance=1e-5 if dtype == torch.float32 else 1e-13)


def test_deviation_of_one_number():
    check(lambda x: x.std(unbiased=False), (torch.randn(()),))


def symmetric(x):
    return x @ x.mT + torch.eye(x.shape[-1])


def dynamic_convolution(x, w):
    return F.conv2d(x, w, padding=1) + F.conv_transpose2d(x, w.transpose(0, 1), stride=1, padding=1)


@pytest.mark.parametrize(
    "function, shapes",
    [
        (lambda x, w: F.layer_norm(x, x.shape[-1:], w), ["nm", "m"]),
        (lambda x: F.layer_norm(x, (x.size(-2), x.size(-1))), ["nm"]),
        (lambda x, w: F.rms_norm(x, (x.size(1),), w), ["nm", "m"]),
        (dynamic_convolution, ["2nmm", "nn33"]),
        (lambda x: torch.logdet(symmetric(x)), ["nmm"]),
        (lambda x: torch.linalg.cond(symmetric(x * 0.1)), ["nmm"]),
        (lambda x: x * F.one_hot((x > 0).sum(1) * 0 + torch.arange(x.size(0)))[:, :1], ["nm"]),
        (lambda x: x.repeat_interleave((x.detach() > 0).sum(1), dim=0), ["nm"]),
        (lambda x, m, v: F.instance_norm(x, m.detach(), v.detach().abs(), use_input_stats=False), ["2nm", "n", "n"]),
    ],
)
def test_the_engine_runs(function, shapes):
    def call(n, m):
        sizes = {"n": n, "m": m}
        return [torch.randn([sizes.get(c) or int(c) for c in shape]) for shape in shapes]

    report = check(function, call(3, 5), call(4, 7), tolerance=1e-4)
    assert report.captured, report.fallback


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True, momentum=0.3)

    def forward(self, x):
        return self.norm(x)


@pytest.mark.parametrize("again", [False, True])
def test_running_statistics_of_instances(again):
    plain, ours = Running(), ORTModule(Running(), DebugOptions(log_level=LogLevel.ERROR))
    for n in (3, 5):
        x = torch.randn(n, 4, 2 * n, requires_grad=True)
        grads = [torch.autograd.grad(m(x).cos().sum(), x, create_graph=again)[0] for m in (ours, plain)]
        torch.testing.assert_close(*grads)
        for found, expected in zip(ours.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(found, expected)
    assert explain(ours).captured and not explain(ours).aten_ops


def test_statistics_that_are_inputs_change_once():
    def norm(x, mean, variance):
        return F.batch_norm(x, mean, variance, training=True)

    ours, x = ORTModule(Function(norm)), torch.randn(3, 4, 5, requires_grad=True)
    sides = []
    for f in (ours, norm):
        mean, variance = torch.zeros(4), torch.ones(4)
        torch.autograd.grad(f(x, mean, variance).cos().sum(), x, create_graph=True)
        sides.append(mean)
    torch.testing.assert_close(*sides)


class Packed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(4, 5, batch_first=True, bidirectional=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        result, state = self.layer(packed)
        return nn.utils.rnn.pad_packed_sequence(result, batch_first=True)[0], state


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_in_any_order(kind):
    torch.manual_seed(0)
    plain = Packed(kind)
    ours = ORTModule(plain, DebugOptions(log_level=LogLevel.ERROR))
    for lengths in ([2, 4, 1], [3, 6, 6, 1, 5]):
        x, lengths = torch.randn(len(lengths), max(lengths), 4), torch.tensor(lengths)
        sides = []
        for m in (ours, plain):
            leaf = x.clone().requires_grad_()
            result = torch.utils._pytree.tree_leaves(m(leaf, lengths))
            wanted = [leaf, *plain.parameters()]
            sides.append([*result, *torch.autograd.grad(sum(t.cos().sum() for t in result), wanted)])
        for found, expected in zip(*sides, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert explain(ours).captured, explain(ours).fallback


@pytest.mark.parametrize("mode", ["nearest", "linear", "bilinear", "bicubic"])
@pytest.mark.parametrize("factor", [1.1, 1.3, 2.3])
def test_a_factor_that_leaves_a_size(mode, factor):
    """Sizes that a factor leaves as they are, or doubles by chance."""
    axes = (4,) if mode == "linear" else (3, 7)
    calls = [(torch.randn(2, 3, *(n + more for n in axes)),) for more in (0, 1, 6)]
    # With a size left as it is the graph's weights are others than PyTorch's, which the check of a new graph finds.
    pytorch = "does not compute what the module does" if (mode, factor) == ("bicubic", 1.1) else ""
    check(lambda x: F.interpolate(x, scale_factor=factor, mode=mode), *calls, tolerance=1e-5, pytorch=pytorch)


@pytest.mark.parametrize("function", [lambda x: x + True, lambda x: True * x, lambda x: x.mul(False).add(True) * x])
def test_arithmetic_with_a_bool(function):
    report = check(function, *[(torch.randn(n, 4),) for n in (3, 5)], tolerance=1e-6)
    assert report.captured, report.fallback


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", [F.l1_loss, F.mse_loss, F.huber_loss])
def test_weighted_distances(loss, reduction, dtype):
    calls = [tuple(torch.rand(n, 8, dtype=dtype) for _ in range(3)) for n in (3, 5)]
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    check(lambda x, y, w: loss(x, y, weight=w, reduction=reduction), *calls, tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_dropout_keeps_is_scaled_by_the_ratio_as_given(dtype):
    class Dropped(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.1) * 1

    x = torch.randn(64, 64, dtype=dtype, requires_grad=True)
    y = ORTModule(Dropped())(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    kept = y != 0
    exact = {"rtol": 1e-15 if dtype == torch.float64 else 2e-7, "atol": 0}
    torch.testing.assert_close(y[kept], (x / (1 - 0.1))[kept], **exact)
    torch.testing.assert_close(gradient, kept * torch.ones_like(x) / (1 - 0.1), **exact)
    assert 0.85 < kept.double().mean() < 0.95


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", ["n6", "n6m", "n6mm"])
def test_group_norm(shape, affine):
    class Norm(nn.GroupNorm):
        def forward(self, x):
            return super().forward(x).flatten(1)

    calls = [torch.randn(tuple({"n": n, "m": n + 2}.get(d) or int(d) for d in shape)) for n in (2, 3, 5)]
    layer = Norm(3, 6, affine=affine, eps=1e-3)
    ours = ORTModule(copy.deepcopy(layer))
    for x in calls:
        sides = []
        for norm in (ours, layer):
            y = norm(x.requires_grad_())
            sides.append([y, *torch.autograd.grad(y.sin().sum(), [x, *norm.parameters()])])
        for found, expected in zip(*sides, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert explain(ours).captured
