"""Makes the seeds of the fuzz target `onnx`: exports of small modules, as the package exports, without their weights.

python -m tests.fuzz.corpus    writes tests/fuzz/corpus/onnx
"""

import io
import warnings
from pathlib import Path

import onnx
import torch
import torch.nn.functional as F
from torch import nn

FOLDER = Path(__file__).parent / "corpus" / "onnx"
MOST_BYTES = 32768
IDS = torch.arange(6).reshape(2, 3)


class Function(nn.Module):
    def __init__(self, function, *parameters):
        super().__init__()
        self.parameters_ = nn.ParameterList(parameters)
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs, *self.parameters_)


class Classifier(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(7, 4), layer, nn.Linear(4, 7)

    def forward(self, ids, labels):
        logits = self.head(self.layer(self.words(ids)))
        return F.cross_entropy(logits.reshape(-1, 7), labels.reshape(-1))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(4, 3, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.layer(x)[0]


X, IMAGE = torch.randn(2, 3, 4), torch.randn(1, 2, 6, 6)
MODELS = {
    "attention": (Classifier(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)), (IDS, IDS)),
    "classifier": (Classifier(nn.Sequential(nn.LayerNorm(4), nn.GELU(), nn.Dropout(0.2))), (IDS, IDS)),
    "convolutions": (
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        (IMAGE,),
    ),
    "images": (
        Function(lambda x: F.interpolate(F.pad(F.avg_pool2d(x, 2), (1, 1, 0, 2), "reflect"), scale_factor=2.0)),
        (IMAGE,),
    ),
    "grid": (Function(lambda x, g: F.grid_sample(x, g, align_corners=False)), (IMAGE, torch.rand(1, 3, 3, 2))),
    "lstm": (Recurrent(nn.LSTM), (X,)),
    "gru": (Recurrent(nn.GRU), (X,)),
    "indices": (
        Function(lambda x, i: torch.cat([x[i[:, 0] % 2], x[:, :1]], 1).cumsum(-1)),
        (X, IDS),
    ),
    "scatter": (
        Function(lambda x, i: x.scatter(1, i[..., None].expand_as(x) % 3, 1).topk(2)[0].masked_fill(x[..., :2] > 0, 1)),
        (X, IDS),
    ),
    "einsum": (Function(lambda x: torch.einsum("bij,bkj->bik", x, x).softmax(-1).tril()), (X,)),
    "sizes": (Function(lambda x: x.reshape(x.shape[0], -1).repeat(1, 2)[:, : x.shape[1] * 3].split(4, 1)[0]), (X,)),
    "selected": (Function(lambda x: x[x > 0].sum() + torch.nonzero(x).float().mean()), (X,)),
    "pointwise": (
        Function(lambda x: torch.where(x.isnan(), x.sign(), x.abs().pow(1.5).log1p().clamp(0, 2)) * x.erf().round()),
        (X,),
    ),
}  # fmt: skip


def export(module, inputs):
    file = io.BytesIO()
    names = [f"x{i}" for i in range(len(inputs))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.train(), inputs, file, dynamo=False, opset_version=18, input_names=names, do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE, export_params=False, keep_initializers_as_inputs=True,
            dynamic_axes={name: list(range(x.ndim)) for name, x in zip(names, inputs, strict=True)},
        )  # fmt: skip
    model = onnx.load_from_string(file.getvalue())
    for node in model.graph.node:  # where in the module it comes from
        node.ClearField("doc_string")
        node.ClearField("metadata_props")
    return model.SerializeToString()


def main():
    torch.manual_seed(0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (module, inputs) in MODELS.items():
        data = export(module, inputs)
        assert len(data) <= MOST_BYTES, f"{name}: {len(data)} bytes"
        (FOLDER / name).write_bytes(data)
        print(name, len(data))


if __name__ == "__main__":
    main()
