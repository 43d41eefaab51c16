"""Saved graphs say in ONNX's operators what these can say: the same numbers, by ONNX's own reference."""

import math

import onnx
import pytest
import torch
import transformers
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import nn

from ortmodule import DebugOptions, ORTModule, explain
from ortmodule.compat.gradient_graph import export_gradient_graph
from ortmodule.debug.standard_form import in_standard_form, name_apart

F32, I64 = TensorProto.FLOAT, TensorProto.INT64
UNKNOWN = [None, None]
KINDS = {torch.float32: F32, torch.int64: I64}


def model_of(kind, inputs, domain="ortmodule", result=F32, **attributes):
    names = [f"in{i}" for i in range(len(inputs))]
    node = helper.make_node(kind, names, ["out"], "node", domain=domain, **attributes)
    given = [
        helper.make_tensor_value_info(name, KINDS[value.dtype], value.shape)
        for name, value in zip(names, inputs, strict=True)
    ]
    graph = helper.make_graph([node], "main", given, [helper.make_tensor_value_info("out", result, UNKNOWN)])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ortmodule", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def by_onnx(model, inputs):
    given = {f"in{i}": value.numpy() for i, value in enumerate(inputs)}
    return torch.from_numpy(ReferenceEvaluator(model).run(None, given)[0].copy())


def some(*sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(len(sizes)))


def gradient(function):
    """Of ``function``, from (dy, what the operator is given)."""

    def found(dy, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(function(x), x, dy)[0]

    return found


DY, X = some(3, 4), some(4, 3).T.contiguous()
BOX = {"starts": [2, 3], "counts": [1, 2], "steps": [1, -2]}

#: Operator, inputs, attributes, what it is.
CASES = {
    "product": ("MatMulBias", [X, some(4, 2)], {}, torch.mm),
    "product with a factor": ("MatMulBias", [X, some(4, 2)], {"alpha": 0.5}, lambda a, b: 0.5 * (a @ b)),
    "product and bias": ("MatMulBias", [X, some(4, 2), some(2)], {"alpha": 2.0}, lambda a, b, c: 2 * (a @ b) + c),
    "slice": ("StridedSlice", [X], BOX, lambda x: x[2:, [3, 1]]),
    "slice to the first": (
        "StridedSlice", [X], {"starts": [2, 0], "counts": [3, 4], "steps": [-1, 1]}, lambda x: x.flip(0),
    ),
    "place": (
        "Place", [X], {"starts": [1, 0], "shape": [5, 4], "steps": [1, 1]},
        lambda x: nn.functional.pad(x, (0, 0, 1, 1)),
    ),
    "place in a filler": (
        "Place", [X, torch.tensor(-7.0)], {"starts": [0, 2], "shape": [3, 6], "steps": [1, 1]},
        lambda x, filler: nn.functional.pad(x, (2, 0), value=float(filler)),
    ),
    "copy": ("Contiguous", [X], {}, lambda x: x),
    "embedding": ("Embedding", [X, torch.tensor([[2, 0]])], {"padding_idx": 2}, lambda w, i: w[i]),
    "relu's gradient": ("ReluGrad", [DY, X.relu()], {}, gradient(torch.relu)),
    "sigmoid's gradient": ("SigmoidGrad", [DY, X.sigmoid()], {}, lambda dy, y: gradient(torch.sigmoid)(dy, X)),
    "tanh's gradient": ("TanhGrad", [DY, X.tanh()], {}, lambda dy, y: gradient(torch.tanh)(dy, X)),
    "erf's gradient": ("ErfGrad", [DY, X], {}, gradient(torch.erf)),
    "softmax's gradient": (
        "SoftmaxGrad", [DY, X.softmax(0)], {"axis": 0}, lambda dy, y: gradient(lambda x: x.softmax(0))(dy, X),
    ),
    "log softmax's gradient": (
        "LogSoftmaxGrad", [DY, X.log_softmax(1)], {"axis": 1},
        lambda dy, y: gradient(lambda x: x.log_softmax(1))(dy, X),
    ),
    "floors": (
        "FloorDiv", [torch.tensor([7, -7, 7, -7]), torch.tensor([2, 2, -2, -2])], {},
        lambda a, b: torch.div(a, b, rounding_mode="floor"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_operator(case):
    kind, inputs, attributes, expected = CASES[case]
    wanted = expected(*inputs)
    model = in_standard_form(model_of(kind, inputs, result=KINDS[wanted.dtype], **attributes))
    assert not any(node.domain for node in model.graph.node)
    torch.testing.assert_close(by_onnx(model, inputs), wanted)


def test_a_gradient_at_zero_and_of_nothing():
    inputs = [torch.tensor([1.0, math.inf, 2.0]), torch.tensor([0.0, 0.0, 3.0])]
    assert by_onnx(in_standard_form(model_of("ReluGrad", inputs)), inputs).tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    "kind, inputs, attributes",
    [
        ("DropoutTrain", [X], {"ratio": 0.5}),
        ("MatMulBias", [X, some(4, 2)], {"wide": 1}),
        ("Place", [X], {"starts": [0, 0], "shape": [5, 4], "steps": [2, 1]}),  # gaps
        ("FloorDiv", [X, X], {}),
    ],
)
def test_what_stays(kind, inputs, attributes):
    model = in_standard_form(model_of(kind, inputs, **attributes))
    assert [(node.domain, node.op_type) for node in model.graph.node] == [("ortmodule", kind)]


def test_hints_go():
    model = in_standard_form(model_of("Gather", [X, torch.tensor([1])], domain="", axis=0, from_end=0))
    onnx.checker.check_model(model)
    assert [a.name for a in model.graph.node[0].attribute] == ["axis"]


def test_names_apart():
    names = ["a", "a", "a_1", "", "", "a"]
    nodes = [helper.make_node("Relu", ["x"], [f"y{i}"], name) for i, name in enumerate(names)]
    model = helper.make_model(helper.make_graph(nodes, "main", [], []))
    found = [node.name for node in name_apart(model).graph.node]
    assert found == ["a", "a_2", "a_1", "", "", "a_3"]


# --- whole files ------------------------------------------------------------------------------------------------------


def mlp():
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3), nn.Softmax(-1)
    return nn.Sequential(*layers)


def runs_of(path):
    """What runs a file: ONNX's reference, and ONNX Runtime where it is."""
    yield lambda given: ReferenceEvaluator(str(path)).run(None, given)
    try:
        import onnxruntime
    except ImportError:
        return
    yield lambda given: onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, given)


def test_a_gradient_graph_runs_elsewhere(tmp_path):
    model, x, y, path = mlp(), some(5, 6), some(5, 3), tmp_path / "gradients.onnx"
    export_gradient_graph(model, nn.MSELoss(), x, y, path)
    found = onnx.load(path).graph
    names = [node.name for node in found.node if node.name]
    assert len(set(names)) == len(names) and not any(node.domain for node in found.node)
    output = model(x)
    loss = nn.functional.mse_loss(output, y)
    loss.backward()
    given = {"input": x, "labels": y, **{name: p.detach() for name, p in model.named_parameters()}}
    wanted = [output, loss, *(p.grad for p in model.parameters())]
    for run in runs_of(path):
        results = run({name: value.numpy() for name, value in given.items()})
        torch.testing.assert_close(
            [torch.from_numpy(r) for r in results], [w.detach() for w in wanted], rtol=1e-4, atol=1e-5
        )


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 11)

    def forward(self, ids):
        return self.head(self.words(ids).mean(1))


@pytest.mark.parametrize("training", [False, True])
def test_saved_stages_run_elsewhere(training, tmp_path):
    torch.manual_seed(0)
    plain, ids = Words().train(training), torch.tensor([[1, 2, 0], [3, 10, 4]])
    model = ORTModule(plain, DebugOptions(save_onnx=True, onnx_prefix="words", save_path=str(tmp_path)))
    with torch.set_grad_enabled(training):
        wanted = model(ids).detach()
    for stage in ("torch_exported", "post_processed"):
        path = tmp_path / f"words_{stage}_{'training' if training else 'inference'}.onnx"
        state = {f"state/{name}": value for name, value in plain.state_dict().items()}
        for run in runs_of(path):
            given = {v.name: state.get(v.name, ids).numpy() for v in onnx.load(path).graph.input}
            torch.testing.assert_close(torch.from_numpy(run(given)[0]), wanted)
    for path in tmp_path.iterdir():
        names = [node.name for node in onnx.load(path).graph.node if node.name]
        assert len(set(names)) == len(names), path.name


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Twice(Words):
    def forward(self, ids):
        return Doubled.apply(super().forward(ids))


@pytest.mark.parametrize("training", [False, True])
def test_saved_stages_with_a_function_of_pythons(training, tmp_path):
    model = ORTModule(
        Twice().train(training), DebugOptions(save_onnx=True, onnx_prefix="twice", save_path=str(tmp_path))
    )
    with torch.set_grad_enabled(training):
        model(torch.tensor([[1, 2, 0]]))
    assert explain(model).captured
    stages = {path.name: [node.op_type for node in onnx.load(path).graph.node] for path in tmp_path.iterdir()}
    found = {name.split("_", 1)[1]: set(operators) & {"PythonOp", "HostCall"} for name, operators in stages.items()}
    assert len(found) == 5 and all(found.values()), stages


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


#: Stages, and what they have of the engine's own domain: in inference, and in training, where the loss is in the graph.
STAGES = {
    "torch_exported": (set(), set()),
    "post_processed": (set(), {"CrossEntropy"}),
    "optimized_pre_grad": ({"MatMulBias"}, {"MatMulBias", "CrossEntropy"}),
    "optimized": ({"MatMulBias"}, {"MatMulBias", "CrossEntropyGrad"}),
    "execution_model": ({"MatMulBias"}, {"MatMulBias", "CrossEntropyGrad"}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [gpt2, bert])
def test_stages_of_transformers(make, training, tmp_path):
    """Those without operators of our own are valid, and have PyTorch's results in ONNX Runtime, where it is."""
    torch.manual_seed(0)
    plain, ids = make().train(training), torch.tensor([[1, 2, 5, 7], [3, 8, 4, 9]])
    model = ORTModule(plain, DebugOptions(save_onnx=True, onnx_prefix="m", save_path=str(tmp_path)))
    given = {"input_ids": ids, "labels": ids} if training else {"input_ids": ids}
    with torch.set_grad_enabled(training):
        model(**given)
        wanted = plain(**given)
    tensors = {**dict(plain.named_buffers()), **dict(plain.named_parameters(remove_duplicate=False))}
    state = {f"state/{name}": value.detach() for name, value in tensors.items()}
    opened = []
    for stage, own in STAGES.items():
        path = tmp_path / f"m_{stage}_{'training' if training else 'inference'}.onnx"
        saved = onnx.load(path)
        ours = {node.op_type for node in saved.graph.node if node.domain}
        assert own[training] <= ours and bool(own[training]) == bool(ours), (stage, ours)
        if ours:
            continue
        onnx.checker.check_model(saved, full_check=True)
        opened.append(stage)
        *_, run = runs_of(path)
        results = run({v.name: state.get(v.name, ids).numpy() for v in saved.graph.input})
        expected = [wanted.loss, wanted.logits] if training else [wanted.logits]
        for found, tensor in zip(results, expected, strict=False):  # behind them are masks that the engine asks for
            torch.testing.assert_close(torch.from_numpy(found), tensor.detach(), rtol=1e-4, atol=1e-5)
    assert opened == (["torch_exported"] if training else ["torch_exported", "post_processed"])
