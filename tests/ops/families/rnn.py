"""Lists cases of recurrent layers."""

import torch

from tests.ops.cases import FLOAT, Case, t, value


def rnn_step(activation):
    def step(x, h, _, w, r, wb, rb):
        return activation(x @ w.T + wb + h @ r.T + rb), None

    return step


def gru_step(x, h, _, w, r, wb, rb):
    z, reset, new = (x @ w.T + wb).chunk(3, -1)
    rz, rr, rn = (h @ r.T + rb).chunk(3, -1)
    update, reset = torch.sigmoid(z + rz), torch.sigmoid(reset + rr)
    new = torch.tanh(new + reset * rn)
    return (1 - update) * new + update * h, None


def lstm_step(x, h, c, w, r, wb, rb):
    i, o, f, g = (x @ w.T + wb + h @ r.T + rb).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def layer(step, cells, direction="forward", layout=0):
    """The layer step by step, as ONNX defines it: operands x, w, r, bias, lengths, first h, first c."""

    def run(x, w, r, bias, lengths, h, c, d):
        backwards = direction == "reverse" or d == 1
        hidden = r.shape[2]
        h = x.new_zeros(x.shape[1], hidden) if h is None else h[d]
        c = x.new_zeros(x.shape[1], hidden) if c is None else c[d]
        wb, rb = (x.new_zeros(w.shape[1]),) * 2 if bias is None else bias[d].chunk(2)
        ys = [None] * len(x)
        for at in reversed(range(len(x))) if backwards else range(len(x)):
            new_h, new_c = step(x[at], h, c, w[d], r[d], wb, rb)
            on = torch.ones(x.shape[1], 1, dtype=torch.bool) if lengths is None else (at < lengths)[:, None]
            h = torch.where(on, new_h, h)
            c = torch.where(on, new_c, c) if cells else c
            ys[at] = torch.where(on, h, 0.0)
        return torch.stack(ys) if ys else x.new_zeros(0, x.shape[1], hidden), h, c

    def ref(x, w, r, bias=None, lengths=None, h=None, c=None):
        if layout:
            x, h, c = (v if v is None else v.transpose(0, 1) for v in (x, h, c))
        ways = [run(x, w, r, bias, lengths, h, c, d) for d in range(len(w))]
        y, h, c = (torch.stack(parts, axis) for parts, axis in zip(zip(*ways, strict=True), (1, 0, 0), strict=True))
        if layout:
            y, h, c = y.permute(2, 0, 1, 3), h.transpose(0, 1), c.transpose(0, 1)
        return (y, h, c) if cells else (y, h)

    return ref


STEPS = {
    "RNN": (1, rnn_step(torch.tanh)),
    "GRU": (3, gru_step),
    "LSTM": (4, lstm_step),
}


def recurrent(
    op,
    steps=4,
    batch=3,
    inputs=5,
    hidden=6,
    *,
    bias=True,
    lengths=None,
    first=True,
    direction="forward",
    layout=0,
    **kwargs,
):
    gates, step = STEPS[op]
    ways = 2 if direction == "bidirectional" else 1
    attrs = {"hidden_size": hidden, "direction": direction, "layout": layout}
    attrs |= {"linear_before_reset": 1} if op == "GRU" else {}
    if "relu" in kwargs:
        step = rnn_step(torch.relu)
        attrs["activations"] = ["Relu"] * ways
        del kwargs["relu"]
    state = t(batch, ways, hidden) if layout else t(ways, batch, hidden)
    operands = [
        t(batch, steps, inputs) if layout else t(steps, batch, inputs),
        t(ways, gates * hidden, inputs, low=-0.5, high=0.5),
        t(ways, gates * hidden, hidden, low=-0.5, high=0.5),
        t(ways, 2 * gates * hidden) if bias else None,
        None if lengths is None else value(lengths, "int32"),
        state if first else None,
    ]
    if op == "LSTM":
        operands.append(state if first else None)
    while operands[-1] is None:
        operands.pop()
    return Case(
        op,
        operands,
        layer(step, op == "LSTM", direction, layout),
        attrs,
        opset=17,
        outputs=kwargs.pop("outputs", 3 if op == "LSTM" else 2),
        resize=False,
        tol=2,
        **kwargs,
    )


CASES = [
    case
    for op in ("RNN", "GRU", "LSTM")
    for case in (
        recurrent(op),
        recurrent(op, bias=False, first=False),
        recurrent(op, direction="reverse"),
        recurrent(op, direction="bidirectional"),
        recurrent(op, lengths=[4, 2, 0]),
        recurrent(op, direction="bidirectional", lengths=[1, 4, 3], first=False),
        recurrent(op, steps=1, batch=1),
        recurrent(op, steps=7, batch=2, inputs=33, hidden=40, dtypes=("float32", "float64")),
        recurrent(op, batch=0, dtypes=("float32",), fd=False),
        recurrent(op, outputs=1),
        recurrent(op, outputs=(False, True), direction="bidirectional"),
    )
]
CASES += [
    recurrent("RNN", relu=True, name="relu", dtypes=FLOAT),
    recurrent("RNN", relu=True, direction="bidirectional", name="relu"),
    recurrent("LSTM", outputs=(False, False, True)),
    recurrent("GRU", layout=1),
    recurrent("LSTM", layout=1, direction="bidirectional"),
]
