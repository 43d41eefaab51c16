"""Lists every class of torch.nn as a module of one layer, with inputs of two sizes."""

import torch
from torch import nn

from tests.models.trial import Subject

ROWS = (3, 5)  # of the batches


class Layer(nn.Module):
    """A layer with its operands by name, and operations around it that hold no parameters."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x, y=None, z=None):
        given = [v for v in (x, y, z) if v is not None]
        return self.layer(*given) if self.call is None else self.call(self.layer, *given)


def floats(*shape, low=None):
    """Normal numbers that want a gradient, or uniform ones between `low` and `low` + 0.9; "n" is the batch."""

    def make(rows, generator):
        sizes = [rows if n == "n" else n for n in shape]
        x = torch.randn(sizes, generator=generator)
        x = x if low is None else torch.rand(sizes, generator=generator) * 0.9 + low
        return x.requires_grad_()

    return make


def still(*shape, low=None):
    """As :func:`floats`, without a gradient."""
    return lambda rows, generator: floats(*shape, low=low)(rows, generator).detach()


def classes(*shape, most=4):
    return lambda rows, generator: torch.randint(0, most, [rows if n == "n" else n for n in shape], generator=generator)


def signs(*shape):
    return lambda rows, generator: classes(*shape, most=2)(rows, generator) * 2.0 - 1


def layer(make, *operands, call=None):
    def batch(module, size, generator):
        return {name: operand(ROWS[size], generator) for name, operand in zip("xyz", operands, strict=False)}

    return Subject(lambda: Layer(make(), call), batch, "torch.nn")


LINE, PLANE, SPACE, FLAT = floats("n", 4, 12), floats("n", 4, 8, 8), floats("n", 4, 6, 6, 6), floats("n", 6)


def _by_rank(name, make, *more, call=None):
    """{class: subject} for a layer that there is for one, two and three dimensions."""
    return {
        f"{name}{rank}d": layer(lambda rank=rank: make(getattr(nn, f"{name}{rank}d")), x, *more, call=call)
        for rank, x in ((1, LINE), (2, PLANE), (3, SPACE))
        if hasattr(nn, f"{name}{rank}d")
    }


def _activations():
    plain = (
        "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU ReLU "
        "ReLU6 SELU SiLU Sigmoid Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink LogSoftmax Softmax"
    )
    arguments = {"Softmin": {"dim": 1}, "LogSoftmax": {"dim": 1}, "Softmax": {"dim": 1}}
    return {
        name: layer(lambda name=name: getattr(nn, name)(**arguments.get(name, {})), PLANE)
        for name in plain.split()
    } | {"Threshold": layer(lambda: nn.Threshold(0.1, -2.0), PLANE)}  # fmt: skip


def _losses():
    near = still("n", 6)
    probabilities, labels = floats("n", 6, low=0.05), still("n", 6, low=0.05)
    return {
        "L1Loss": layer(nn.L1Loss, FLAT, near),
        "MSELoss": layer(nn.MSELoss, FLAT, near),
        "HuberLoss": layer(nn.HuberLoss, FLAT, near),
        "SmoothL1Loss": layer(nn.SmoothL1Loss, FLAT, near),
        "SoftMarginLoss": layer(nn.SoftMarginLoss, FLAT, signs("n", 6)),
        "BCELoss": layer(nn.BCELoss, probabilities, labels),
        "BCEWithLogitsLoss": layer(nn.BCEWithLogitsLoss, FLAT, labels),
        "KLDivLoss": layer(lambda: nn.KLDivLoss(reduction="batchmean"), FLAT, labels),
        "PoissonNLLLoss": layer(nn.PoissonNLLLoss, FLAT, labels),
        "GaussianNLLLoss": layer(nn.GaussianNLLLoss, FLAT, near, floats("n", 6, low=0.3)),
        "CrossEntropyLoss": layer(nn.CrossEntropyLoss, FLAT, classes("n", most=6)),
        "NLLLoss": layer(nn.NLLLoss, FLAT, classes("n", most=6)),
        "NLLLoss2d": layer(nn.NLLLoss, PLANE, classes("n", 8, 8)),
        "MultiMarginLoss": layer(nn.MultiMarginLoss, FLAT, classes("n", most=6)),
        "MultiLabelMarginLoss": layer(nn.MultiLabelMarginLoss, FLAT, classes("n", 6, most=6)),
        "MultiLabelSoftMarginLoss": layer(nn.MultiLabelSoftMarginLoss, FLAT, labels),
        "HingeEmbeddingLoss": layer(nn.HingeEmbeddingLoss, FLAT, signs("n", 6)),
        "MarginRankingLoss": layer(nn.MarginRankingLoss, FLAT, floats("n", 6), signs("n", 6)),
        "CosineEmbeddingLoss": layer(nn.CosineEmbeddingLoss, FLAT, floats("n", 6), signs("n")),
        "TripletMarginLoss": layer(nn.TripletMarginLoss, FLAT, floats("n", 6), floats("n", 6)),
        "TripletMarginWithDistanceLoss": layer(nn.TripletMarginWithDistanceLoss, FLAT, floats("n", 6), floats("n", 6)),
        "CTCLoss": layer(nn.CTCLoss, floats(12, "n", 6), classes("n", 3, most=5), call=_ctc),
        "AdaptiveLogSoftmaxWithLoss": layer(
            lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 12, [4, 8]), FLAT, classes("n", most=12)
        ),
        "LinearCrossEntropyLoss": layer(lambda: nn.LinearCrossEntropyLoss(6, 5), FLAT, classes("n", most=5)),
    }


def _ctc(loss, x, targets):
    rows = x.shape[1]
    return loss(x.log_softmax(-1), targets + 1, torch.full((rows,), 12), torch.full((rows,), 3))


def _pools():
    found = _by_rank("MaxPool", lambda cls: cls(2)) | _by_rank("AvgPool", lambda cls: cls(2))
    found |= _by_rank("LPPool", lambda cls: cls(2, 2)) | _by_rank("AdaptiveAvgPool", lambda cls: cls(3))
    found |= _by_rank("AdaptiveMaxPool", lambda cls: cls(2))
    for rank, x in ((1, LINE), (2, PLANE), (3, SPACE)):
        pool, unpool = getattr(nn, f"MaxPool{rank}d"), getattr(nn, f"MaxUnpool{rank}d")
        found[f"MaxUnpool{rank}d"] = layer(
            lambda unpool=unpool: unpool(2), x,
            call=lambda inverse, x, pool=pool: inverse(*pool(2, return_indices=True)(x)),
        )  # fmt: skip
    found["FractionalMaxPool2d"] = layer(
        lambda: nn.FractionalMaxPool2d(2, output_size=4, _random_samples=torch.full((1, 4, 2), 0.4)), PLANE,
        call=lambda pool, x: nn.functional.fractional_max_pool2d(
            x, 2, output_size=4, _random_samples=pool._random_samples.expand(x.shape[0], -1, -1)
        ),
    )  # fmt: skip
    found["FractionalMaxPool3d"] = layer(
        lambda: nn.FractionalMaxPool3d(2, output_size=3, _random_samples=torch.full((1, 4, 3), 0.4)), SPACE,
        call=lambda pool, x: nn.functional.fractional_max_pool3d(
            x, 2, output_size=3, _random_samples=pool._random_samples.expand(x.shape[0], -1, -1)
        ),
    )  # fmt: skip
    return found


def _pads():
    found = {}
    for name in ("ConstantPad", "ZeroPad", "ReflectionPad", "ReplicationPad", "CircularPad"):
        found |= _by_rank(name, lambda cls, name=name: cls(2, 0.5) if name == "ConstantPad" else cls(2))
    return found


def _twice(layer, x):
    """In eval mode these layers do nothing, which would leave nothing to capture."""
    return layer(x) * 2


def _dropouts():
    """They draw random numbers in training, and so are compared in eval mode."""
    found = {"Dropout": layer(nn.Dropout, FLAT, call=_twice), "AlphaDropout": layer(nn.AlphaDropout, FLAT, call=_twice)}
    found |= {"FeatureAlphaDropout": layer(nn.FeatureAlphaDropout, PLANE, call=_twice)}
    return found | {"RReLU": layer(nn.RReLU, PLANE)} | _by_rank("Dropout", lambda cls: cls(), call=_twice)


def _recurrent():
    sequence = floats("n", 7, 6)
    found = {}
    for cls in (nn.RNN, nn.LSTM, nn.GRU):
        found[cls.__name__] = layer(lambda cls=cls: cls(6, 8, 2, batch_first=True, bidirectional=True), sequence)
    for cls in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
        found[cls.__name__] = layer(lambda cls=cls: cls(6, 8), FLAT)
    return found


def _attention():
    wide, short, mask = floats("n", 7, 16), floats("n", 5, 16), {"dropout": 0.0, "batch_first": True}
    return {
        "MultiheadAttention": layer(
            lambda: nn.MultiheadAttention(16, 4, batch_first=True), wide, call=lambda attend, x: attend(x, x, x)
        ),
        "TransformerEncoderLayer": layer(lambda: nn.TransformerEncoderLayer(16, 4, 32, **mask), wide),
        "TransformerDecoderLayer": layer(lambda: nn.TransformerDecoderLayer(16, 4, 32, **mask), wide, short),
        "TransformerEncoder": layer(
            lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(16, 4, 32, **mask), 2, enable_nested_tensor=False
            ),
            wide,
        ),
        "TransformerDecoder": layer(
            lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, **mask), 2), wide, floats("n", 5, 16)
        ),
        "Transformer": layer(lambda: nn.Transformer(16, 4, 1, 1, 32, **mask), wide, floats("n", 5, 16)),
    }  # fmt: skip


def _containers():
    def linears():
        return [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]

    def in_turn(parts, x):
        for part in parts:
            x = part(x)
        return x

    return {
        "Identity": layer(nn.Identity, FLAT, call=_twice),
        "Sequential": layer(lambda: nn.Sequential(*linears()), FLAT),
        "ModuleList": layer(lambda: nn.ModuleList(linears()), FLAT, call=in_turn),
        "ModuleDict": layer(
            lambda: nn.ModuleDict({str(i): part for i, part in enumerate(linears())}), FLAT,
            call=lambda parts, x: in_turn(parts.values(), x),
        ),
        "ParameterList": layer(
            lambda: nn.ParameterList([torch.randn(6, 6), torch.randn(6)]), FLAT, call=lambda p, x: x @ p[0] + p[1]
        ),
        "ParameterDict": layer(
            lambda: nn.ParameterDict({"w": torch.randn(6, 6)}), FLAT, call=lambda p, x: x @ p["w"]
        ),
    }  # fmt: skip


def _others():
    norms = _by_rank("BatchNorm", lambda cls: cls(4)) | _by_rank("InstanceNorm", lambda cls: cls(4, affine=True))
    norms |= {
        "LayerNorm": layer(lambda: nn.LayerNorm(6), FLAT),
        "RMSNorm": layer(lambda: nn.RMSNorm(6), FLAT),
        "GroupNorm": layer(lambda: nn.GroupNorm(2, 4), PLANE),
        "LocalResponseNorm": layer(lambda: nn.LocalResponseNorm(2), PLANE),
        "CrossMapLRN2d": layer(lambda: nn.CrossMapLRN2d(2), PLANE),
        "SyncBatchNorm": layer(lambda: nn.SyncBatchNorm(4), PLANE),
    }
    convs = _by_rank("Conv", lambda cls: cls(4, 6, 3, padding=1)) | _by_rank(
        "ConvTranspose", lambda cls: cls(4, 6, 3, 2)
    )
    shapes = {
        "Flatten": layer(nn.Flatten, PLANE),
        "Unflatten": layer(lambda: nn.Unflatten(1, (2, 3)), FLAT),
        "Fold": layer(lambda: nn.Fold(8, 2, stride=2), floats("n", 16, 16)),
        "Unfold": layer(lambda: nn.Unfold(3), PLANE),
        "PixelShuffle": layer(lambda: nn.PixelShuffle(2), PLANE),
        "PixelUnshuffle": layer(lambda: nn.PixelUnshuffle(2), PLANE),
        "ChannelShuffle": layer(lambda: nn.ChannelShuffle(2), PLANE),
        "Upsample": layer(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), PLANE),
        "UpsamplingNearest2d": layer(lambda: nn.UpsamplingNearest2d(scale_factor=2), PLANE),
        "UpsamplingBilinear2d": layer(lambda: nn.UpsamplingBilinear2d(scale_factor=2), PLANE),
    }
    return norms | convs | shapes | {
        "Linear": layer(lambda: nn.Linear(6, 5), FLAT),
        "Bilinear": layer(lambda: nn.Bilinear(6, 6, 5), FLAT, floats("n", 6)),
        "Embedding": layer(lambda: nn.Embedding(9, 5, padding_idx=0), classes("n", 4, most=9)),
        "EmbeddingBag": layer(lambda: nn.EmbeddingBag(9, 5), classes("n", 4, most=9)),
        "CosineSimilarity": layer(nn.CosineSimilarity, FLAT, floats("n", 6)),
        "PairwiseDistance": layer(nn.PairwiseDistance, FLAT, floats("n", 6)),
    }  # fmt: skip


LAYERS = _activations() | _losses() | _pools() | _pads() | _dropouts() | _recurrent() | _attention() | _containers()
LAYERS |= _others()

#: Classes of torch.nn that are no layers to compare.
APART = {
    "Module": "the base of all",
    "Container": "an old name of Module",
    "Parameter": "a tensor",
    "Buffer": "a tensor",
    "UninitializedParameter": "a tensor",
    "UninitializedBuffer": "a tensor",
    "DataParallel": "refused with a sentence",
    "LinearCrossEntropyOptions": "settings of LinearCrossEntropyLoss",
    "RNNBase": "the base of RNN, LSTM and GRU",
    "RNNCellBase": "the base of their cells",
}


def missing():
    """Classes of torch.nn that are neither here nor apart; lazy ones become the others at the first call."""
    every = {n for n, cls in vars(nn).items() if isinstance(cls, type) and not n.startswith(("_", "Lazy"))}
    return every - LAYERS.keys() - APART.keys()
