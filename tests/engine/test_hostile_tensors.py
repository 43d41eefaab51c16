"""Hostile calls are refused: tensors that do not fit a model, sizes of terabytes, what is no tensor.

And wrong use of a plan: each with an exception that is documented and a sentence that says what is wrong.
"""

import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from ortmodule import Error, ORTModule, _core
from ortmodule.engine.session import Session
from tests.engine.test_hostile import DOCUMENTED, FLOAT, INT64, constant, model, refused, tensor_type

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
    prologue = read.plan(SPECS[:1], [False])
    assert prologue.prologue
    (key,) = prologue.pending_keys
    for sizes in ([key, -1], [key, 2**62], [key], [5] * 3000, [key, "one"], [None, 3], [key, None], 3):
        with pytest.raises((*DOCUMENTED, OverflowError)):
            read.plan(SPECS[:1], [False], sizes=sizes)
    lying = read.plan(SPECS[:1], [False], sizes=[key, 3])  # of four
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
