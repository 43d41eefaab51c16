"""Hostile input: bytes that are no model, models that make no sense, tensors that do not fit. Each is refused with an
exception that is documented and a sentence that says what is wrong; nothing crashes, hangs or takes much memory.

tests/c/test_hostile.c does the same to the reader alone, with many more bytes; tests/ops/test_absurd.py to
operators."""

import io
import random
import warnings

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from ortmodule import Error, InvalidModelError, ORTModule, _core
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


# --- running ----------------------------------------------------------------------------------------------------------


def run(nodes, *tensors, ranks=None, constants=(), dtypes=None, **settings):
    """A model of these nodes over inputs a, b, c, ... whose ranks and types are declared, unless told otherwise."""
    names = "abcdefgh"[: len(tensors) if ranks is None else len(ranks)]
    ranks = [t.dim() for t in tensors] if ranks is None else ranks
    dtypes = [FLOAT] * len(names) if dtypes is None else dtypes
    inputs = [tensor_type(*row) for row in zip(names, dtypes, ranks, strict=True)]
    outputs = [helper.make_tensor_value_info("y", FLOAT, None)]
    session = Session(model(nodes, inputs, outputs, constants, **settings))
    return session.run(list(tensors), [False] * len(tensors)).outputs[0]


def test_a_missing_input():
    with pytest.raises(ValueError, match="the model has 2 inputs; 1 .* were given"):
        run([("Add", "a b", "y")], torch.ones(2), ranks=[1, 1])


def test_an_input_too_many():
    with pytest.raises(ValueError, match="the model has 1 inputs; 2 .* were given"):
        run([("Relu", "a", "y")], torch.ones(2), torch.ones(2), ranks=[1])


def test_a_wrong_rank():
    with pytest.raises(ValueError, match="input a has rank 1, but the model was captured with rank 3"):
        run([("Relu", "a", "y")], torch.ones(2), ranks=[3])


def test_a_wrong_size():
    info = helper.make_tensor_value_info("x", FLOAT, [2, 5])
    session = Session(model([("Relu", "x", "y")], [info]))
    with pytest.raises(ValueError, match="axis 1 of input x is 4, but the model was captured with 5"):
        session.run([torch.ones(2, 4)], [False])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_a_wrong_dtype(dtype):
    with pytest.raises(TypeError, match=f"input a is {str(dtype)[6:]}, but the model was captured with float32"):
        run([("Relu", "a", "y")], torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_a_dtype_that_is_not_supported(dtype):
    with pytest.raises(TypeError, match=f"tensors of type .*{str(dtype)[6:]} are not supported"):
        run([("Relu", "a", "y")], torch.ones(2).to(dtype))


def test_types_that_do_not_go_together():
    with pytest.raises(TypeError, match="(?s)different types, float32 and int64.*the_Add"):
        run([("Add", "a b", "y")], torch.ones(2), torch.ones(2).long(), dtypes=[FLOAT, INT64])


@pytest.mark.parametrize(
    ("nodes", "shapes"),
    [
        ([("Add", "a b", "y")], [(2, 3), (2, 4)]),
        ([("Relu", "a", "c"), ("Mul", "c b", "y")], [(4, 3), (2, 3)]),
        ([("MatMul", "a b", "y")], [(2, 3), (4, 5)]),
        ([("MatMul", "a b", "y")], [(2, 3, 4), (3, 4, 5)]),
        ([("Gemm", "a b", "y")], [(2, 3), (2, 3)]),
        ([("Concat", "a b", "y", {"axis": 0})], [(2, 3), (2, 4)]),
        ([("Where", "m a b", "y")], [(2, 3), (4,)]),
        ([("Conv", "a b", "y")], [(1, 3, 8, 8), (4, 2, 3, 3)]),
        ([("Einsum", "a b", "y", {"equation": "ij,jk->ik"})], [(2, 3), (4, 5)]),
        ([("SoftmaxCrossEntropyLoss", "a n", "y"), ("Relu", "b", "z")], [(2, 3), (1,)]),
    ],
    ids=lambda x: x[-1][0] if isinstance(x[0][0], str) else "",
)
def test_shapes_that_do_not_go_together(nodes, shapes):
    """The sentence names the node and both shapes."""
    constants = [helper.make_tensor("m", TensorProto.BOOL, [3], [True] * 3), constant("n", [0, 1, 2])]
    with pytest.raises(ValueError) as refusal:
        run(nodes, *(torch.ones(s) for s in shapes), constants=constants)
    op = next(op for op, *_ in nodes if op != "Relu")
    assert f"the_{op}" in str(refusal.value)
    seen = [list(s) for s in shapes] if op != "SoftmaxCrossEntropyLoss" else [[2, 3], [3]]
    assert all(str(s) in str(refusal.value) for s in seen), str(refusal.value)


PIXELS = constant("c", [1.0] * 4, [1, 1, 2, 2], dtype=FLOAT)
SIZES = [constant("s", [2**40]), constant("two", [2]), constant("zero", [0], [])]


@pytest.mark.parametrize(
    ("nodes", "extra"),
    [
        ([("Expand", "a s", "y")], []),
        ([("Expand", "a s", "b"), ("Relu", "b", "y")], []),
        ([("Tile", "a s", "y")], []),
        ([("ConstantOfShape", "s", "y")], []),
        ([("Range", "l h d", "y")], [constant("l", [0], []), constant("h", [2**50], []), constant("d", [1], [])]),
        ([("Resize", "a  f", "y")], [constant("f", [1e30], dtype=FLOAT)]),
        ([("Resize", "a   s", "y")], []),
        ([("OneHot", "i s v", "y")], [constant("i", [1, 2]), constant("v", [0.0, 1.0], dtype=FLOAT)]),
        ([("Pad", "a p", "y")], [constant("p", [2**40, 2**40])]),
        ([("Pad", "a p", "y")], [constant("p", [2**62, 2**62])]),
        ([("AveragePool", "c", "y", {"kernel_shape": [2**31 - 1] * 2, "pads": [2**30] * 4})], [PIXELS]),
        ([("MaxPool", "c", "y", {"kernel_shape": [2**20] * 2, "pads": [2**20] * 4})], [PIXELS]),
        ([("ConvTranspose", "c c", "y", {"output_padding": [2**63 - 1, 0]})], [PIXELS]),
        ([("ConvTranspose", "c c", "y", {"output_shape": [-(2**63), 1]})], [PIXELS]),
        ([("ConvTranspose", "c c", "y", {"strides": [2**31 - 1] * 2, "dilations": [2**31 - 1] * 2})], [PIXELS]),
        ([("RandomUniform", "", "y", {"shape": [2**40]})], []),
        ([("RandomUniform", "", "y", {"shape": [2**40, 2**40]})], []),
        ([("ConstantOfShape", "p", "y")], [constant("p", [2**30] * 5)]),
        ([("Expand", "a p", "b"), ("Reshape", "b two", "c"), ("CumSum", "c zero", "y")], [constant("p", [2, 2**45])]),
    ],
    ids=lambda x: "-".join(row[0] for row in x) if x and isinstance(x[0], tuple) else "",
)
def test_sizes_of_terabytes(nodes, extra):
    nodes = [(op, ins.replace("  f", " none none f").replace("   s", " none none none s"), *rest)
             for op, ins, *rest in nodes]  # fmt: skip
    nodes = [(op, " ".join(ins.split()), *rest) for op, ins, *rest in nodes]
    refused(lambda: run(nodes, torch.ones(1), constants=[*SIZES, *extra]), MemoryError, ValueError, Error)


# --- tensors that are none --------------------------------------------------------------------------------------------


def hollow():
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    return x


TENSORS = {
    "None": (lambda: None, TypeError, "NoneType"),
    "list": (lambda: [1.0] * 4, TypeError, "list"),
    "array": (lambda: torch.ones(4).numpy(), TypeError, "ndarray"),
    "meta": (lambda: torch.ones(4, device="meta"), TypeError, "meta"),
    "sparse": (lambda: torch.ones(4).to_sparse(), TypeError, "storage"),
    "mkldnn": (lambda: torch.ones(4).to_mkldnn(), TypeError, "storage"),
    "zeros": (lambda: torch._efficientzerotensor((4,)), ValueError, "no memory"),
    "hollow": (hollow, (RuntimeError, ValueError), "no memory|out of bounds for storage of size 0"),
    "strided": (lambda: torch.ones(8)[::2], ValueError, "not contiguous"),
    "wide": (lambda: torch.ones(4).double(), ValueError, r"expected float32 \[4\], got float64 \[4\]"),
    "long": (lambda: torch.ones(5), ValueError, r"expected float32 \[4\], got float32 \[5\]"),
    "high": (lambda: torch.ones(1, 4), ValueError, r"expected float32 \[4\], got float32 \[1, 4\]"),
    "complex": (lambda: torch.ones(4).cfloat(), ValueError, r"expected float32 \[4\], got none \[4\]"),
}
SPECS = [("float32", (4,)), ("float32", (4,))]
NODES = [("Mul", "a b", "c"), ("Exp", "c", "d"), ("Mul", "d b", "y")]


@pytest.fixture(scope="module")
def plan():
    return _core.Model(model(NODES, ["a", "b"])).plan(SPECS, [True, True], [True])


@pytest.fixture
def memory(plan):
    """What forward takes: arena, inputs, outputs, writes, seed."""
    return [_core.empty(torch.Tensor, "uint8", (plan.arena_bytes,)), [torch.ones(4)] * 2, [torch.empty(4)], [], 0]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("place", [1, 2])
def test_what_is_no_tensor_for_a_plan(plan, memory, name, place):
    make, exception, sentence = TENSORS[name]
    memory[place] = [*memory[place][:-1], make()]
    with pytest.raises(exception, match=sentence) as caught:
        plan.forward(*memory)
    assert f"put {len(memory[place]) - 1}" in str(caught.value)


@pytest.mark.parametrize("name", ["None", "meta", "sparse", "hollow", "strided"])
def test_what_is_no_arena(plan, memory, name):
    make, exception, sentence = TENSORS[name]
    memory[0] = make()
    with pytest.raises(exception, match=sentence) as caught:
        plan.forward(*memory)
    assert "the arena" in str(caught.value)


def test_an_arena_that_is_too_small_or_misaligned(plan, memory):
    n = plan.arena_bytes
    assert n > 0
    room = _core.empty(torch.Tensor, "uint8", (n + 64,))
    for arena in (room[: n - 1], room[4 : n + 4], room[:0]):
        with pytest.raises(ValueError, match=f"the arena needs {n} bytes aligned to 64"):
            plan.forward(arena, *memory[1:])
    plan.forward(room, *memory[1:])


def test_wrong_numbers_of_tensors(plan, memory):
    for place, what in ((1, "input"), (2, "output"), (3, "write")):
        for wrong in ([*memory[place], torch.ones(4)], memory[place][1:]):
            if len(wrong) == len(memory[place]):
                continue
            with pytest.raises(ValueError, match=f"{len(memory[place])} {what}s are needed, {len(wrong)} were given"):
                plan.forward(*memory[:place], wrong, *memory[place + 1 :])
    for wrong in (None, 3, torch.ones(())):
        with pytest.raises(TypeError):
            plan.forward(memory[0], wrong, *memory[2:])
    for arguments in (memory[:4], [*memory, None, 0], [*memory[:4], "seed"]):
        with pytest.raises(TypeError):
            plan.forward(*arguments)


def test_wrong_use_of_backward(plan, memory):
    plan.forward(*memory)
    arena, inputs, outputs, _, seed = memory
    dy, dx = [torch.ones(4)], [torch.empty(4), torch.empty(4)]
    plan.backward(arena, inputs, outputs, dy, dx, seed)
    for wrong in (
        (arena, inputs, outputs, [None], dx),
        (arena, inputs, outputs, dy, dx[:1]),
        (arena, inputs, outputs, dy, [torch.empty(3), dx[1]]),
        (arena, inputs, outputs, [torch.ones(2, 2)], dx),
        (arena[:1], inputs, outputs, dy, dx),
        (None, inputs, outputs, dy, dx),
    ):
        refused(lambda wrong=wrong: plan.backward(*wrong, seed), ValueError, TypeError)
    inference = _core.Model(model(NODES, ["a", "b"])).plan(SPECS, [True, True])
    with pytest.raises(RuntimeError, match="for inference"):
        inference.backward(arena, inputs, outputs, dy, dx, seed)


@pytest.mark.parametrize(
    ("specs", "needs", "grads", "exception"),
    [
        ([SPECS[0]], [True, True], [True], ValueError),
        (SPECS, [True], [True], ValueError),
        (SPECS, [True, True], [True, True], ValueError),
        ([SPECS[0], ("float32", (4, 4, 4))], [True, True], None, ValueError),
        ([SPECS[0], ("int64", (4,))], [True, True], None, TypeError),
        ([SPECS[0], ("float99", (4,))], [True, True], None, TypeError),
        ([SPECS[0], ("float32", (-4,))], [True, True], None, ValueError),
        ([SPECS[0], ("float32", (2**62, 4))], [True, True], None, (ValueError, MemoryError)),
        ([SPECS[0], ("float32", (2**70,))], [True, True], None, OverflowError),
        ([SPECS[0], ("float32", (4.5,))], [True, True], None, TypeError),
        ([SPECS[0], ("float32", (1,) * 9)], [True, True], None, ValueError),
        ([SPECS[0], ["float32", (4,)]], [True, True], None, TypeError),
        ([SPECS[0], ("float32",)], [True, True], None, TypeError),
        ([SPECS[0], (4, (4,))], [True, True], None, TypeError),
        ([SPECS[0], None], [True, True], None, TypeError),
        (None, [True, True], None, TypeError),
        (SPECS, None, None, TypeError),
        (SPECS, [True, True], 7, TypeError),
    ],
)
def test_wrong_descriptions_of_inputs(specs, needs, grads, exception):
    read = _core.Model(model(NODES, ["a", "b"]))
    refused(lambda: read.plan(specs, needs, grads), *(exception if isinstance(exception, tuple) else (exception,)))


def test_sizes_that_data_decides_do_not_lie():
    read = _core.Model(model([("NonZero", "a", "n"), ("Cast", "n", "y", {"to": FLOAT})], ["a"]))
    assert read.plan(SPECS[:1], [False]).prologue
    for sizes in ([-1], [2**62], [5] * 300, ["one"], [None], 3):
        with pytest.raises((*DOCUMENTED, OverflowError)):
            read.plan(SPECS[:1], [False], sizes=sizes)
    lying = read.plan(SPECS[:1], [False], sizes=[3])  # of four
    arena = _core.empty(torch.Tensor, "uint8", (lying.arena_bytes,)) if lying.arena_bytes else None
    outputs = [_core.empty(torch.Tensor, *spec) for spec in lying.outputs]
    refused(lambda: lying.forward(arena, [torch.ones(4)], outputs, [], 0), Error)


@pytest.mark.parametrize(
    ("dtype", "sizes", "exception"),
    [
        ("float32", (2**45,), MemoryError),
        ("float32", (2**62, 4), MemoryError),
        ("float32", (-1,), ValueError),
        ("float33", (1,), TypeError),
        ("float32", (1.5,), TypeError),
        ("float32", 5, TypeError),
        (None, (1,), TypeError),
    ],
)
def test_tensors_that_cannot_be_made(dtype, sizes, exception):
    refused(lambda: _core.empty(torch.Tensor, dtype, sizes), exception)


def test_copies_that_do_not_fit():
    with pytest.raises(ValueError, match="not of one size"):
        _core.copy(torch.ones(4), torch.ones(5))
    for wrong in (None, 3, torch.ones(4, device="meta")):
        refused(lambda wrong=wrong: _core.copy(torch.ones(4), wrong), TypeError)
        refused(lambda wrong=wrong: _core.zero(wrong), TypeError)


# --- a wrapped module -------------------------------------------------------------------------------------------------


@pytest.fixture
def pair():
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    return plain, ORTModule(plain)


@pytest.mark.filterwarnings("ignore:ORTModule")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 5),
        lambda: torch.randn(2, 4, dtype=torch.float64),
        lambda: torch.ones(2, 4, dtype=torch.int64),
        lambda: torch.randn(2, 4, device="meta"),
        lambda: None,
        lambda: "text",
    ],
    ids=["shape", "float64", "int64", "meta", "None", "text"],
)
def test_a_module_refuses_what_pytorch_refuses(pair, make):
    """The same exception as PyTorch's, before and after a call that goes well."""
    plain, ours = pair
    for _ in range(2):
        try:
            expected = plain(make())
        except Exception as error:
            with pytest.raises(type(error)):
                ours(make())
        else:
            found = ours(make())
            assert found.shape == expected.shape and found.device == expected.device
        assert torch.allclose(ours(torch.ones(2, 4)), plain(torch.ones(2, 4)))


@pytest.mark.filterwarnings("ignore:ORTModule", "ignore:.*quantize", "ignore:Sparse")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.complex(torch.zeros(1, 4), torch.arange(4.0)[None]).conj().imag,
        lambda: torch._neg_view(torch.arange(4.0)[None]),
        lambda: torch._efficientzerotensor((1, 4)),
        lambda: torch.arange(8.0)[::2][None],
        lambda: torch.ones(1, 1).expand(3, 4),
    ],
    ids=["sparse", "imaginary", "negated", "zeros", "strided", "expanded"],
)
def test_unusual_tensors_mean_what_they_mean_in_pytorch(pair, make):
    plain, ours = pair
    for _ in range(2):
        assert torch.allclose(ours(make()), plain(make()))
