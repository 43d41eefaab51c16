"""Hostile models are refused: bytes that are no model, models that make no sense.

Each with an exception that is documented and a sentence that says what is wrong; nothing crashes, hangs or takes much
memory.

test_hostile_tensors.py does the same to calls, tests/c/test_hostile.c to the reader alone, with many more bytes;
tests/ops/test_absurd.py to operators.
"""

import io
import random
import warnings

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from ortmodule import Error, InvalidModelError, _core
from ortmodule.engine.session import Session

DOCUMENTED = (Error, ValueError, TypeError, MemoryError)  # InvalidModelError and UnsupportedError are Errors
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def refused(attempt, *exceptions):
    """What `attempt` raises; it must be one of these, with a sentence."""
    with pytest.raises(exceptions or DOCUMENTED) as refusal:
        attempt()
    assert len(str(refusal.value)) > 8, repr(refusal.value)
    return str(refusal.value)


# --- bytes ------------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        x = self.layer(self.words(ids))
        return self.head(x.reshape(-1, 8)).softmax(-1)


IDS = torch.arange(10).reshape(2, 5)


@pytest.fixture(scope="module")
def exported():
    """A real model with its weights."""
    torch.manual_seed(0)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Small().train(),
            (IDS,),
            file,
            dynamo=False,
            opset_version=18,
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
            input_names=["ids"],
            dynamic_axes={"ids": [0, 1]},
        )
    return file.getvalue()


def use(data):
    """Reads, plans and runs, forward and backward, any bytes; False when it is refused."""
    try:
        session = Session(data)
        needs = [name != "ids" for name in session.inputs]
        fed = [IDS if name == "ids" else torch.ones(8) for name in session.inputs]
        run = session.run(fed, needs, [True] * len(session.outputs))
        run.backward([torch.ones_like(y) if y.is_floating_point() else None for y in run.outputs])
    except DOCUMENTED as refusal:
        assert len(str(refusal)) > 8, repr(refusal)
        return False
    return True


def test_the_real_model_is_read(exported):
    assert use(exported) and Session(exported).inputs == ["ids"]


def test_truncated(exported):
    lengths = {*range(0, len(exported), 61), *range(300), *range(len(exported) - 300, len(exported))}
    whole = sum(use(exported[:n]) for n in sorted(lengths))
    assert whole <= 1, "the last field, the opsets, may be missing"


def test_random_bytes():
    draw = random.Random(0)
    for _ in range(3000):
        assert not use(draw.randbytes(draw.randrange(200)))


def test_flipped_bits(exported):
    draw = random.Random(1)
    survived = 0
    for _ in range(300):
        data = bytearray(exported)
        for _ in range(draw.choice([1, 1, 2, 8])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        survived += use(bytes(data))
    assert 0 < survived < 300, "most bits are of weights; some are of the structure"


def test_flipped_bits_of_the_structure(exported):
    model = onnx.load_from_string(exported)
    for tensor in model.graph.initializer:  # none of it is weights now
        tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims))
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    data, draw = model.SerializeToString(), random.Random(2)
    for _ in range(600):
        changed = bytearray(data)
        start = draw.randrange(len(data))
        how = draw.randrange(4)
        if how == 0:
            changed[start] ^= 1 << draw.randrange(8)
        elif how == 1:
            changed[start] = draw.randrange(256)
        elif how == 2:
            del changed[start : start + draw.randrange(16)]
        else:
            changed[start:start] = changed[draw.randrange(len(data)) :][: draw.randrange(32)]
        use(bytes(changed))


def varint(n):
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def field(number, payload):
    return varint(number << 3 | 2) + varint(len(payload)) + payload


MODEL_GRAPH, GRAPH_NODE, NODE_ATTRIBUTE, ATTRIBUTE_GRAPH = 7, 1, 5, 6


def test_nested_5000_deep():
    inside = b""
    for i in range(5001):
        inside = field([ATTRIBUTE_GRAPH, NODE_ATTRIBUTE, GRAPH_NODE][i % 3], inside)
    assert "nested more than 64 deep" in refused(lambda: _core.Model(field(MODEL_GRAPH, inside)), InvalidModelError)
    inside = b""
    for i in range(5000):  # a sequence of sequences of ... as an input's type
        inside = field([1, 4][i % 2], inside)
    graph = field(11, field(1, b"x") + field(2, inside))
    assert "nested more than 64 deep" in refused(lambda: _core.Model(field(MODEL_GRAPH, graph)), InvalidModelError)


@pytest.mark.parametrize("claimed", [2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("number", [1, 2, MODEL_GRAPH, 8, 100])
def test_a_field_claims_gigabytes(claimed, number):
    data = varint(number << 3 | 2) + varint(claimed) + b"\0" * 64
    refused(lambda: _core.Model(data), InvalidModelError)
    inner = field(GRAPH_NODE, b"") + varint(5 << 3 | 2) + varint(claimed) + b"\0" * 64
    assert "past the end" in refused(lambda: _core.Model(field(MODEL_GRAPH, inner)), InvalidModelError)


@pytest.mark.parametrize("data", [None, "text", 7, [1, 2], memoryview(b"abcdef")[::2]])
def test_what_is_not_bytes(data):
    with pytest.raises((TypeError, BufferError)):
        _core.Model(data)


def test_a_model_is_initialised_once(exported):
    model = _core.Model(exported)
    with pytest.raises(RuntimeError, match="once"):
        model.__init__(exported)
    assert model.inputs == ["ids"]
    with pytest.raises(RuntimeError, match="never read"):
        _core.Model.__new__(_core.Model).plan([], [])
    with pytest.raises(TypeError):
        _core.Plan()


# --- models -----------------------------------------------------------------------------------------------------------


def tensor_type(name, dtype=FLOAT, rank=1):
    return helper.make_tensor_value_info(name, dtype, [None] * rank)


def model(nodes, inputs=("x",), outputs=("y",), constants=(), opset=18):
    """Bytes. Nodes are rows ("Add", "a b", "c", {attributes}); inputs names or value infos."""
    graph = helper.make_graph(
        [
            helper.make_node(
                op.split("::")[-1],
                ins.split(),
                outs.split(),
                name=f"the_{op}",
                domain="ortmodule" if "::" in op else "",
                **(attrs[0] if attrs else {}),
            )
            for op, ins, outs, *attrs in nodes
        ],
        "hostile",
        [tensor_type(x) if isinstance(x, str) else x for x in inputs],
        [tensor_type(y) if isinstance(y, str) else y for y in outputs],
        initializer=list(constants),
    )
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def constant(name, numbers, dims=None, dtype=INT64):
    return helper.make_tensor(name, dtype, [len(numbers)] if dims is None else dims, numbers)


EXTERNAL = TensorProto(name="w", data_type=FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
EXTERNAL.external_data.add(key="location", value="/etc/passwd")


def with_initializer(**fields):
    return model([("Add", "x w", "y")], constants=[TensorProto(name="w", **fields)])


@pytest.mark.parametrize(
    ("sentence", "data"),
    [
        ("part of a cycle", model([("Relu", "b", "a"), ("Relu", "a", "b"), ("Add", "x b", "y")])),
        ("part of a cycle", model([("Add", "x y", "y")])),
        ('two values have the name "y"', model([("Relu", "x", "y"), ("Neg", "x", "y")])),
        ('two values have the name "x"', model([("Relu", "x", "x")])),
        ('two values have the name "x"', model([("Relu", "x", "y")], inputs=("x", "x"))),
        ('operand 1, "w", is defined nowhere', model([("Add", "x w", "y")])),
        ("nothing in the graph has this name\n.* z", model([("Relu", "x", "y")], outputs=("z",))),
        ("Mystery", model([("Mystery", "x", "y")])),
        ("ortmodule::LayerNormGrad", model([("ortmodule::LayerNormGrad", "x x x x x", "y")])),
        ("Relu has no attribute slope", model([("Relu", "x", "y", {"slope": 1})])),
        ("axis of Softmax is text; it is defined to be an integer", model([("Softmax", "x", "y", {"axis": "last"})])),
        ("value of ConstantOfShape is an integer", model([("ConstantOfShape", "x", "y", {"value": 3})])),
        ("opset 99", model([("Relu", "x", "y")], opset=99)),
        ("opset 3", model([("Relu", "x", "y")], opset=3)),
        ("it has 1 operands; Add takes 2", model([("Add", "x", "y")])),
        ("it has 3 results; Relu has at most 1", model([("Relu", "x", "y z v")])),
        ("another file", model([("Add", "x w", "y")], constants=[EXTERNAL])),
        ("16 bytes has 8 bytes", with_initializer(data_type=FLOAT, dims=[4], raw_data=b"\0" * 8)),
        ("16 bytes has 17 bytes", with_initializer(data_type=FLOAT, dims=[4], raw_data=b"\0" * 17)),
        ("twice", with_initializer(data_type=FLOAT, dims=[1], raw_data=b"\0" * 4, float_data=[1.0])),
        ("negative size -4", with_initializer(data_type=FLOAT, dims=[-4], raw_data=b"\0" * 16)),
        ("more than 2", with_initializer(data_type=FLOAT, dims=[2**40, 2**40], raw_data=b"\0" * 8)),
        ("more than 2", with_initializer(data_type=FLOAT, dims=[0, 2**62, 2**62])),
        ("element type 8", with_initializer(data_type=TensorProto.STRING, dims=[1], string_data=[b"a"])),
        ("rank 9", with_initializer(data_type=FLOAT, dims=[1] * 9, raw_data=b"\0" * 4)),
        ("negative size -3", model([("Relu", "x", "y")], [helper.make_tensor_value_info("x", FLOAT, [-3])])),
        ("If", model([("If", "x", "y", {"then_branch": helper.make_graph([], "g", [], [])})])),
    ],
    ids=str,
)
def test_a_model_that_makes_no_sense(sentence, data):
    with pytest.raises((Error, MemoryError), match=sentence):
        _core.Model(data)


@pytest.mark.parametrize("data", [b"", onnx.ModelProto(ir_version=8).SerializeToString()], ids=["nothing", "no graph"])
def test_a_model_without_a_graph(data):
    assert "graph" in refused(lambda: _core.Model(data), InvalidModelError)
