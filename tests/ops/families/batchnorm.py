"""Lists cases of batch normalisation as nn.BatchNorm has it, with moved running moments and with given ones."""

import torch.nn.functional as F

from tests.ops.cases import FLOAT, Case, t

FEW = ("float32", "float64", "bfloat16")
EPSILON = 1e-3


def moments(channels):
    return [t(channels, grad=False), t(channels, low=0.5, high=2, grad=False)]


def train(shape, outputs=3, momentum=0.75, **kwargs):
    """ONNX's momentum is what is kept, PyTorch's what is taken. The moved moments carry no gradient, though they do
    depend on x, so finite differences are of the first output only."""

    def ref(x, w, b, mean, var):
        mean, var = mean.clone(), var.clone()
        y = F.batch_norm(x, mean, var, w, b, True, 1 - momentum, EPSILON)
        return (y, mean, var)[:outputs]

    inputs = [t(*shape), t(shape[1]), t(shape[1]), *moments(shape[1])]
    attrs = {"training_mode": 1, "epsilon": EPSILON, "momentum": momentum}
    options = {
        "dtypes": FEW,
        "opset": 15,
        "outputs": outputs,
        "name": f"train-{momentum}",
        "fd": outputs == 1,
        **kwargs,
    }
    return Case("BatchNormalization", inputs, ref, attrs=attrs, **options)


def given(shape, opset=15, **kwargs):
    def ref(x, w, b, mean, var):
        return F.batch_norm(x, mean, var, w, b, False, 0.1, EPSILON)

    inputs = [t(*shape), t(shape[1]), t(shape[1]), *moments(shape[1])]
    options = {"dtypes": FEW, "name": "given", **kwargs}
    return Case("BatchNormalization", inputs, ref, attrs={"epsilon": EPSILON}, opset=opset, **options)


def wide(training):
    """Narrow data, parameters and moments in float32, as modules under autocast have them."""

    def ref(x, w, b, mean, var):
        mean, var = mean.clone(), var.clone()
        y = F.batch_norm(x.float(), mean, var, w, b, bool(training), 0.25, EPSILON).to(x.dtype)
        return (y, mean, var) if training else y

    f32 = {"dtype": "float32"}
    inputs = [t(4, 3, 5), t(3, **f32), t(3, **f32), t(3, grad=False, **f32), t(3, low=0.5, high=2, grad=False, **f32)]
    attrs = {"training_mode": training, "epsilon": EPSILON, "momentum": 0.75}
    return Case("BatchNormalization", inputs, ref, attrs=attrs, opset=15, outputs=3 if training else 1,
                dtypes=("bfloat16", "float16"), name=f"wide{training}")  # fmt: skip


CASES = [
    train((4, 3), dtypes=FLOAT, large=[t(4096, 512), t(512), t(512), *moments(512)]),
    train((4, 3, 5), dtypes=FLOAT),
    train((2, 3, 4, 5), large=[t(16, 64, 56, 56), t(64), t(64), *moments(64)]),
    train((4, 3), outputs=1),
    train((2, 3, 4, 5), outputs=1),
    train((2, 3, 2, 2, 3)),
    train((4, 3, 5), momentum=0.0),
    train((4, 3, 5), momentum=1.0),
    train((2, 3, 1)),
    train((6, 700)),
    train((300, 5)),
    train((3, 40, 30, 30), tol=4),
    train((0, 3), resize=False),
    given((4, 3), dtypes=FLOAT),
    given((2, 3, 4, 5), dtypes=FLOAT, large=[t(16, 64, 56, 56), t(64), t(64), *moments(64)]),
    given((2, 3, 4, 5), opset=9),
    given((1, 3, 1)),
    given((6, 700), fd=False),
    given((0, 3, 4), resize=False),
    wide(1),
    wide(0),
]
