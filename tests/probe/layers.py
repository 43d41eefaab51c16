"""Layers of torch.nn, each with what a small model of it takes: names, (functions, shapes)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.probe.values import SHAPE, index, random


class Layer(nn.Module):
    """A layer with what it takes besides its input, as a function."""

    def __init__(self, layer, *more):
        super().__init__()
        self.layer, self.more = layer, more

    def forward(self, x):
        result = self.layer(x, *self.more)
        return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def _layer(make, shape=SHAPE, *more):
    torch.manual_seed(0)
    return Layer(make(), *more), shape


class SelfAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, **options)

    def forward(self, x, **options):
        return self.attention(x, x, x, **options)


class Packed(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer, self.first = kind(6, 5, **options), options.get("batch_first", False)

    def forward(self, x):
        lengths = torch.tensor([3, 2]) if self.first else torch.tensor([4, 3, 1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=self.first)
        result, state = self.layer(packed)
        return nn.utils.rnn.pad_packed_sequence(result, batch_first=self.first)[0], state


IMAGE, LINE, CUBE = (1, 2, 3, 4), (2, 3, 4), (1, 2, 2, 2, 3)
BIG = (1, 1, 4, 6)


def layers():
    yield "nn.Linear", _layer(lambda: nn.Linear(6, 3))
    yield "nn.Bilinear", (lambda x: F.bilinear(x, x * 2, random(3, 6, 6), random(3)), SHAPE)
    yield "nn.Conv1d", _layer(lambda: nn.Conv1d(3, 4, 2, padding=1), LINE)
    yield "nn.Conv2d", _layer(lambda: nn.Conv2d(2, 4, 3, padding=1, stride=2, groups=2), IMAGE)
    yield "nn.Conv3d", _layer(lambda: nn.Conv3d(2, 3, 2), CUBE)
    for mode in ["reflect", "replicate", "circular"]:
        yield f"nn.Conv2d.{mode}", _layer(lambda m=mode: nn.Conv2d(2, 3, 3, padding=1, padding_mode=m), IMAGE)
    for mode in ["same", "valid"]:
        yield f"nn.Conv2d.{mode}", _layer(lambda m=mode: nn.Conv2d(2, 3, 2, padding=m, dilation=2), IMAGE)
    yield "nn.ConvTranspose1d", _layer(lambda: nn.ConvTranspose1d(3, 2, 3, 2, 1, 1), LINE)
    yield "nn.ConvTranspose2d", _layer(lambda: nn.ConvTranspose2d(2, 4, 3, 2, 1, 1, groups=2, dilation=2), IMAGE)
    yield "nn.ConvTranspose3d", _layer(lambda: nn.ConvTranspose3d(2, 3, 2), CUBE)
    yield "nn.ConvTranspose2d.size", _layer(lambda: nn.ConvTranspose2d(2, 2, 3, 2), IMAGE, [8, 10])
    for n, shape in ((1, LINE), (2, IMAGE), (3, CUBE)):
        for name, make in {
            f"MaxPool{n}d": lambda n=n: getattr(nn, f"MaxPool{n}d")(2),
            f"MaxPool{n}d.ceil": lambda n=n: getattr(nn, f"MaxPool{n}d")(2, 1, 1, ceil_mode=True),
            f"MaxPool{n}d.indices": lambda n=n: getattr(nn, f"MaxPool{n}d")(2, return_indices=True),
            f"AvgPool{n}d": lambda n=n: getattr(nn, f"AvgPool{n}d")(2),
            f"AvgPool{n}d.ceil": lambda n=n: getattr(nn, f"AvgPool{n}d")(
                2, 1, 1, ceil_mode=True, count_include_pad=False
            ),
            f"AdaptiveAvgPool{n}d": lambda n=n: getattr(nn, f"AdaptiveAvgPool{n}d")(2),
            f"AdaptiveMaxPool{n}d": lambda n=n: getattr(nn, f"AdaptiveMaxPool{n}d")(2, return_indices=True),
            f"AdaptiveMaxPool{n}d.one": lambda n=n: getattr(nn, f"AdaptiveMaxPool{n}d")(1),
            f"BatchNorm{n}d": lambda n=n, c=shape[1]: getattr(nn, f"BatchNorm{n}d")(c),
            f"BatchNorm{n}d.plain": lambda n=n, c=shape[1]: getattr(nn, f"BatchNorm{n}d")(
                c, affine=False, track_running_stats=False
            ),
            f"BatchNorm{n}d.cumulative": lambda n=n, c=shape[1]: getattr(nn, f"BatchNorm{n}d")(c, momentum=None),
            f"InstanceNorm{n}d": lambda n=n, c=shape[1]: getattr(nn, f"InstanceNorm{n}d")(c),
            f"InstanceNorm{n}d.all": lambda n=n, c=shape[1]: getattr(nn, f"InstanceNorm{n}d")(
                c, affine=True, track_running_stats=True
            ),
            f"InstanceNorm{n}d.eval": lambda n=n, c=shape[1]: getattr(nn, f"InstanceNorm{n}d")(
                c, affine=True, track_running_stats=True
            ).eval(),
            f"Dropout{n}d": lambda n=n: getattr(nn, f"Dropout{n}d")(0.5),
            f"ConstantPad{n}d": lambda n=n: getattr(nn, f"ConstantPad{n}d")(1, 0.5),
            f"ZeroPad{n}d": lambda n=n: getattr(nn, f"ZeroPad{n}d")(2),
            f"ReflectionPad{n}d": lambda n=n: getattr(nn, f"ReflectionPad{n}d")(1),
            f"ReplicationPad{n}d": lambda n=n: getattr(nn, f"ReplicationPad{n}d")(2),
            f"CircularPad{n}d": lambda n=n: getattr(nn, f"CircularPad{n}d")(1),
        }.items():
            yield f"nn.{name}", _layer(make, shape)
        yield f"nn.MaxUnpool{n}d", (lambda x, n=n: _unpool(x, n), shape)
        if n < 3:
            yield f"nn.LPPool{n}d", _layer(lambda n=n: getattr(nn, f"LPPool{n}d")(2, 2), shape)
    yield "nn.LPPool3d", _layer(lambda: nn.LPPool3d(2, 2), CUBE)
    yield "nn.AvgPool2d.divisor", _layer(lambda: nn.AvgPool2d(2, 1, divisor_override=3), IMAGE)
    yield "nn.AvgPool2d.divisor.ceil", _layer(lambda: nn.AvgPool2d(2, 2, 1, ceil_mode=True, divisor_override=3), IMAGE)
    yield "nn.MaxPool2d.dilation", _layer(lambda: nn.MaxPool2d(2, 1, dilation=2), IMAGE)
    yield "nn.AdaptiveAvgPool2d.none", _layer(lambda: nn.AdaptiveAvgPool2d((2, None)), IMAGE)
    yield "nn.AdaptiveMaxPool2d.none", _layer(lambda: nn.AdaptiveMaxPool2d((None, 3)), IMAGE)
    yield "nn.FractionalMaxPool2d", _layer(lambda: nn.FractionalMaxPool2d(2, (2, 3)), BIG)
    yield "nn.LayerNorm", _layer(lambda: nn.LayerNorm(6))
    yield "nn.LayerNorm.two", _layer(lambda: nn.LayerNorm((3, 4), bias=False), LINE)
    yield "nn.LayerNorm.plain", _layer(lambda: nn.LayerNorm(6, elementwise_affine=False))
    yield "nn.RMSNorm", _layer(lambda: nn.RMSNorm(6))
    yield "nn.GroupNorm", _layer(lambda: nn.GroupNorm(2, 6))
    yield "nn.GroupNorm.image", _layer(lambda: nn.GroupNorm(2, 2, affine=False), IMAGE)
    yield "nn.LocalResponseNorm", _layer(lambda: nn.LocalResponseNorm(2), IMAGE)
    yield "nn.Dropout", _layer(lambda: nn.Dropout(0.3))
    yield "nn.AlphaDropout", _layer(lambda: nn.AlphaDropout(0.3))
    yield "nn.FeatureAlphaDropout", _layer(lambda: nn.FeatureAlphaDropout(0.3), IMAGE)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        name = f"nn.{kind.__name__}"
        shape = (4, 1, 6)
        yield name, _layer(lambda k=kind: k(6, 5), shape)
        yield f"{name}.first", _layer(lambda k=kind: k(6, 5, batch_first=True, bidirectional=True), (2, 2, 6))
        yield f"{name}.deep", _layer(lambda k=kind: k(6, 5, num_layers=2, bidirectional=True, bias=False), shape)
        yield f"{name}.dropout", _layer(lambda k=kind: k(6, 5, num_layers=2, dropout=0.5), shape)
        yield f"{name}.rank2", _layer(lambda k=kind: k(6, 5))
        state = random(1, 2, 5)
        yield (
            f"{name}.state",
            _layer(lambda k=kind: k(6, 5), (2, 2, 6), (state, state * 2) if kind is nn.LSTM else state),
        )
        yield f"{name}.packed", _layer(lambda k=kind: Packed(k, bidirectional=True), (4, 3, 6))
        cell = getattr(nn, kind.__name__ + "Cell")
        yield f"{name}Cell", _layer(lambda c=cell: c(6, 5))
    yield "nn.LSTM.proj", _layer(lambda: nn.LSTM(6, 5, proj_size=3, num_layers=2), (4, 1, 6))
    yield "nn.RNN.relu", _layer(lambda: nn.RNN(6, 5, nonlinearity="relu"), (4, 1, 6))
    tokens = (2, 2, 6)
    mask = torch.tensor([[False, True], [False, False]])
    for name, (make, options) in {
        "plain": ({}, {}),
        "first": ({"batch_first": True}, {}),
        "no_weights": ({}, {"need_weights": False}),
        "heads": ({}, {"average_attn_weights": False}),
        "padding": ({}, {"key_padding_mask": mask}),
        "mask": ({}, {"attn_mask": mask}),
        "both": ({}, {"attn_mask": mask, "key_padding_mask": mask}),
        "bias_kv": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
        "dropout": ({"dropout": 0.2}, {}),
        "no_bias": ({"bias": False}, {}),
        "causal": ({}, {"attn_mask": torch.tensor([[False, True], [False, False]]), "is_causal": True}),
    }.items():
        torch.manual_seed(0)
        attention = Options(SelfAttention(**make), options)
        yield f"nn.MultiheadAttention.{name}", (attention, tokens)
    yield "nn.MultiheadAttention.kdim", (Options(CrossAttention(), {}), tokens)
    for first in (True, False):
        for activation in ("relu", "gelu"):
            options = dict(dim_feedforward=8, dropout=0.0, activation=activation, norm_first=first, batch_first=first)
            yield (
                f"nn.TransformerEncoderLayer.{first}.{activation}",
                _layer(lambda o=options: nn.TransformerEncoderLayer(6, 2, **o), tokens),
            )
            yield (
                f"nn.TransformerDecoderLayer.{first}.{activation}",
                _layer(lambda o=options: nn.TransformerDecoderLayer(6, 2, **o), tokens, random(2, 2, 6)),
            )
    yield (
        "nn.Transformer",
        _layer(lambda: nn.Transformer(6, 2, 1, 1, 8, dropout=0.0), tokens, random(2, 2, 6)),
    )
    yield (
        "nn.TransformerEncoder.padding",
        _layer(
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 2),
            tokens,
            None,
            mask,
        ),
    )
    for name, f in _embeddings():
        yield name, (f, SHAPE)
    for mode in ["nearest", "nearest-exact", "linear", "area"]:
        yield f"interpolate.line.{mode}", (lambda x, m=mode: F.interpolate(x, 7, mode=m), LINE)
    for mode in ["nearest", "nearest-exact", "bilinear", "bicubic", "area"]:
        yield f"interpolate.{mode}", (lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m), IMAGE)
        yield f"interpolate.size.{mode}", (lambda x, m=mode: F.interpolate(x, (2, 5), mode=m), IMAGE)
    for mode in ["nearest", "nearest-exact", "trilinear", "area"]:
        yield f"interpolate.cube.{mode}", (lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m), CUBE)
    yield "interpolate.corners", (lambda x: F.interpolate(x, (5, 7), mode="bilinear", align_corners=True), IMAGE)
    yield (
        "interpolate.antialias",
        (lambda x: F.interpolate(x, (2, 3), mode="bilinear", antialias=True), BIG),
    )
    for mode in ["bilinear", "nearest", "bicubic"]:
        for padding in ["zeros", "border", "reflection"]:
            yield (
                f"grid_sample.{mode}.{padding}",
                (
                    lambda x, m=mode, p=padding: F.grid_sample(
                        x, random(1, 5, 5, 2), mode=m, padding_mode=p, align_corners=False
                    ),
                    IMAGE,
                ),
            )
    yield "affine_grid", (lambda x: F.affine_grid(x.reshape(4, 2, 3), (4, 1, 2, 2), align_corners=False), SHAPE)
    yield "F.unfold", (lambda x: F.unfold(x, 2, padding=1, stride=2), IMAGE)
    yield "F.fold", (lambda x: F.fold(x.reshape(1, 4, 6), (3, 4), 2), SHAPE)
    yield "pixel_shuffle", (lambda x: F.pixel_shuffle(x, 2), (1, 4, 2, 3))
    yield "pixel_unshuffle", (lambda x: F.pixel_unshuffle(x, 2), BIG)
    yield "channel_shuffle", (lambda x: F.channel_shuffle(x, 2), (1, 4, 2, 3))
    for mode in ["constant", "reflect", "replicate", "circular"]:
        yield f"F.pad.{mode}", (lambda x, m=mode: F.pad(x, (1, 2, 1, 0), mode=m), IMAGE)
    yield "F.pad.negative", (lambda x: F.pad(x, (-1, 2)), IMAGE)
    for name in ["Flatten", "Identity", "Softmax2d", "Unflatten"]:
        make = {"Unflatten": lambda: nn.Unflatten(1, (1, 2))}.get(name, getattr(nn, name))
        yield f"nn.{name}", _layer(make, IMAGE)
    yield "nn.Upsample", _layer(lambda: nn.Upsample(scale_factor=2), IMAGE)
    yield "nn.PReLU", _layer(lambda: nn.PReLU(2), IMAGE)
    yield "nn.AdaptiveLogSoftmax", (AdaptiveLoss(), SHAPE)
    yield "nn.CosineSimilarity", _layer(lambda: nn.CosineSimilarity(), SHAPE, random(*SHAPE))
    yield "nn.utils.weight_norm", _layer(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))
    yield "nn.utils.spectral_norm", _layer(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))
    yield "checkpoint", (lambda x: checkpoint(torch.tanh, x, use_reentrant=False), SHAPE)


class AdaptiveLoss(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(6, 10, [3, 6])

    def forward(self, x):
        return self.loss(x, torch.tensor([0, 4, 7, 1]))


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(6, 2, kdim=4, vdim=3)

    def forward(self, x):
        return self.attention(x, x[..., :4], x[..., 3:])


class Options(nn.Module):
    def __init__(self, layer, options):
        super().__init__()
        self.layer, self.options = layer, options

    def forward(self, x):
        return [t for t in self.layer(x, **self.options) if t is not None]


def _unpool(x, n):
    values, places = getattr(F, f"max_pool{n}d")(x, 2, return_indices=True)
    return getattr(F, f"max_unpool{n}d")(values, places, 2, output_size=x.shape[2:])


def _embeddings():
    indices = index(3, 4, of=4)
    for name, options in {
        "plain": {},
        "padding": {"padding_idx": 1},
        "max_norm": {"max_norm": 0.5},
        "frequency": {"scale_grad_by_freq": True},
    }.items():
        yield f"F.embedding.{name}", lambda x, o=options: F.embedding(indices, x * 1, **o)
    for mode in ["sum", "mean", "max"]:
        yield f"F.embedding_bag.{mode}", lambda x, m=mode: F.embedding_bag(indices, x, mode=m)
        yield (
            f"F.embedding_bag.offsets.{mode}",
            lambda x, m=mode: F.embedding_bag(
                indices.reshape(-1), x, torch.tensor([0, 3, 3, 7]), mode=m, padding_idx=2
            ),
        )
    yield (
        "F.embedding_bag.weights",
        lambda x: F.embedding_bag(indices, x, per_sample_weights=x[:3, :4], mode="sum"),
    )
    yield (
        "F.embedding_bag.last.short",  # what is behind the last bag is in none
        lambda x: F.embedding_bag(indices.reshape(-1), x, torch.tensor([0, 3, 10]), include_last_offset=True),
    )
    yield (
        "F.embedding_bag.last",
        lambda x: F.embedding_bag(indices.reshape(-1), x, torch.tensor([0, 3, 12]), include_last_offset=True),
    )
