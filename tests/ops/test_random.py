"""Random operators as statistics, and what they depend on: the seed, the node and the element, nothing else."""

import math

import pytest
import torch
from onnx import TensorProto, helper

from tests.ops.harness import ONNX_TYPE, tensor_proto

pytestmark = pytest.mark.emulated

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MANY = 200_000


def session(nodes, inputs, outputs, dtype=torch.float32, constants=()):
    """`inputs`: name -> rank. All values are of one type."""
    from ortmodule.engine.session import Session

    graph = helper.make_graph(
        nodes,
        "random",
        [helper.make_tensor_value_info(name, ONNX_TYPE[dtype], [None] * rank) for name, rank in inputs.items()],
        [helper.make_tensor_value_info(name, type_, None) for name, type_ in outputs.items()],
        initializer=[tensor_proto(tensor, name) for name, tensor in constants],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ortmodule", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return Session(model.SerializeToString())


def dropouts(ratio, count=1, dtype=torch.float32, masks=False):
    """`count` dropouts of one input, side by side."""
    nodes, outputs = [], {}
    for i in range(count):
        results = [f"y{i}"] + [f"mask{i}"] * masks
        nodes.append(helper.make_node("Dropout", ["x", "ratio", "training"], results, name=f"dropout{i}"))
        outputs |= {f"y{i}": ONNX_TYPE[dtype]} | ({f"mask{i}": TensorProto.BOOL} if masks else {})
    constants = [("ratio", torch.tensor(ratio)), ("training", torch.tensor(True))]
    return session(nodes, {"x": 1}, outputs, dtype, constants)


def draw(op, dtype=torch.float32, shape=(MANY,), seed=0, **attrs):
    node = helper.make_node(op, [], ["y"], name=op, shape=list(shape), dtype=ONNX_TYPE[dtype], **attrs)
    return session([node], {}, {"y": ONNX_TYPE[dtype]}).run([], [], seed=seed).outputs[0]


def within(found, expected, deviation, samples):
    """A mean of so many samples: a difference of six deviations does not happen."""
    assert abs(float(found) - expected) <= 6 * deviation / math.sqrt(samples)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.999])
def test_dropout(ratio, dtype):
    x = torch.ones(MANY, dtype=dtype)
    run = dropouts(ratio, dtype=dtype, masks=True).run([x], [True], [True, False], seed=1234)
    y, mask = run.outputs
    (dx,) = run.backward([x, None])
    scale = 1 / (1 - torch.tensor(ratio).double())
    assert torch.equal(y, (mask * scale).to(dtype))
    assert torch.equal(dx, y), "backward drew another mask"
    within(mask.double().mean(), 1 - ratio, math.sqrt(ratio * (1 - ratio)), MANY)


def test_dropout_depends_on_seed_node_and_element():
    model = dropouts(0.5, count=2)

    def keep(size, seed):
        return [y != 0 for y in model.run([torch.ones(size)], [False], seed=seed).outputs]

    a, b = keep(MANY, 7)
    assert torch.equal(a, keep(MANY, 7)[0])
    assert torch.equal(a[:1000], keep(1000, 7)[0]), "an element's number depends on how many there are"
    seeds = 8, 7 + 2**32, 7 + 2**63
    for other in (b, a.roll(1), a.roll(64), *(keep(MANY, seed)[0] for seed in seeds)):
        within((a == other).double().mean(), 0.5, 0.5, MANY)


def test_random_numbers_do_not_depend_on_threads():
    model = dropouts(0.3)
    x, threads, found = torch.randn(MANY), torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            run = model.run([x], [True], [True], seed=99)
            found.append((run.outputs[0], run.backward([x])[0], draw("RandomNormal"), draw("RandomUniform")))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform(dtype):
    y = draw("RandomUniform", dtype, low=-1.0, high=3.0)
    assert y.min() >= -1 and y.max() < 3 if dtype in (torch.float32, torch.float64) else y.max() <= 3
    counts = torch.histc(y.double(), 16, -1, 3)
    chi_square = ((counts - MANY / 16) ** 2 / (MANY / 16)).sum()
    assert chi_square < 60, "chi-square of 15 degrees of freedom"


def test_uniform_has_all_its_digits():
    assert draw("RandomUniform", torch.float64).unique().numel() == MANY
    assert draw("RandomUniform").unique().numel() > 0.98 * MANY


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(MANY,), (333, 601)])
def test_normal(dtype, shape):
    y = draw("RandomNormal", dtype, shape, seed=5, mean=3.0, scale=2.0).double().flatten()
    z = (y - 3) / 2
    for power, moment, deviation in [(1, 0, 1), (2, 1, math.sqrt(2)), (3, 0, math.sqrt(15)), (4, 3, math.sqrt(96))]:
        assert abs(float((z**power).mean()) - moment) <= 6 * deviation / math.sqrt(z.numel()) + (
            0.01 if dtype == torch.bfloat16 else 0
        )
    within((z[:-1] * z[1:]).mean(), 0, 1, z.numel())
    within((z[: z.numel() // 2] * z[z.numel() // 2 :][: z.numel() // 2]).mean(), 0, 1, z.numel() // 2)


def test_like_takes_the_shape_of_its_operand():
    nodes = [helper.make_node("RandomNormalLike", ["x"], ["y"]), helper.make_node("RandomUniformLike", ["x"], ["z"])]
    model = session(nodes, {"x": 2}, {"y": TensorProto.FLOAT, "z": TensorProto.FLOAT})
    y, z = model.run([torch.zeros(7, 300)], [False], seed=3).outputs
    assert y.shape == z.shape == (7, 300)
    assert y.std() > 0.9 and z.min() >= 0 and z.max() < 1


def test_bernoulli():
    model = session([helper.make_node("Bernoulli", ["p"], ["y"])], {"p": 1}, {"y": TensorProto.FLOAT})
    p = torch.linspace(0, 1, 11).repeat_interleave(MANY // 11)
    (y,) = model.run([p], [False], seed=17).outputs
    for part, probability in zip(y.chunk(11), p.chunk(11), strict=True):
        q = float(probability[0])
        within(part.mean(), q, math.sqrt(q * (1 - q)) + 1e-6, part.numel())
    with pytest.raises(Exception, match="element 2 .* is no probability"):
        model.run([torch.tensor([0.5, 1.0, 1.5])], [False])


def test_multinomial():
    node = helper.make_node("Multinomial", ["x"], ["y"], dtype=TensorProto.INT64, sample_size=MANY // 4)
    model = session([node], {"x": 2}, {"y": TensorProto.INT64})
    p = torch.tensor([[0.1, 0.0, 0.6, 0.3], [0.25, 0.25, 0.5, 0.0]])
    (y,) = model.run([p.log() + torch.tensor([[5.0], [-200.0]])], [False], seed=23).outputs
    for row, expected in zip(y, p, strict=True):
        for k, q in enumerate(expected.tolist()):
            within((row == k).double().mean(), q, math.sqrt(q * (1 - q)), row.numel())
    with pytest.raises(Exception, match="row 1 .* holds no log probabilities"):
        model.run([torch.tensor([[0.0, 1.0], [-math.inf, -math.inf]])], [False])


def test_training_mode_must_be_known():
    nodes = [helper.make_node("Cast", ["x"], ["mode"], to=TensorProto.BOOL),
             helper.make_node("Dropout", ["x", "", "mode"], ["y"])]  # fmt: skip
    model = session(nodes, {"x": 0}, {"y": TensorProto.FLOAT})
    with pytest.raises(Exception, match="the training mode of Dropout is computed while running"):
        model.run([torch.tensor(1.0)], [False])
