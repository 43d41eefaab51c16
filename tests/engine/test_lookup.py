"""Costly functions of bfloat16 are looked up for large tensors, with the bits of computing every element.

They are as near to the exact value as PyTorch's.
"""

import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from ortmodule.engine.session import Session

#: Every bfloat16 there is, and as many as are looked up (csrc/ops/pointwise/lookup.h).
ALL = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
LARGE = 2**18
TORCH = {
    "Exp": torch.exp,
    "Tanh": torch.tanh,
    "Erf": torch.erf,
    "Sigmoid": torch.sigmoid,
    "Softplus": F.softplus,
    "Mish": F.mish,
    "Gelu": F.gelu,
    "GeluTanh": lambda x: F.gelu(x, approximate="tanh"),
    "Swish": F.silu,
}
NODES = {"GeluTanh": ("Gelu", {"approximate": "tanh"})}
#: Where PyTorch's own formula loses digits even in float64.
EXACT = {
    "Gelu": lambda x: x * torch.erfc(x * -(0.5**0.5)) / 2,
    "GeluTanh": lambda x: x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
}
GRADIENTS = ["Gelu", "GeluTanh", "Swish", "Softplus", "Mish"]


def session(name, more=()):
    operator, attributes = NODES.get(name, (name, {}))
    node = helper.make_node(operator, ["x"], ["y"], **attributes)
    info = helper.make_tensor_value_info("x", TensorProto.BFLOAT16, ["n", "m"])
    outputs = [helper.make_tensor_value_info("z" if more else "y", TensorProto.BFLOAT16, None)]
    graph = helper.make_graph([node, *more], name, [info], outputs)
    return Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)]).SerializeToString())


def bits(x):
    """Equal for equal values; all NaN are one."""
    return torch.where(x.isnan(), torch.tensor(0x7FC0, dtype=torch.int16), x.view(torch.int16))


def forward_and_backward(engine, x, dy):
    run = engine.run([x], [True], [True])
    return run.outputs[0], run.backward([dy])[0]


def same_in_parts(engine, x, dy):
    """Is a large tensor's result that of its parts, which are not looked up?"""
    y, dx = forward_and_backward(engine, x, dy)
    for part in range(0, len(x), len(x) // 8):
        rows = slice(part, part + len(x) // 8)
        small_y, small_dx = forward_and_backward(engine, x[rows].contiguous(), dy[rows].contiguous())
        assert torch.equal(bits(y[rows]), bits(small_y)) and torch.equal(bits(dx[rows]), bits(small_dx))
    return y, dx


@pytest.mark.parametrize("name", TORCH)
def test_large_tensors_have_the_bits_of_small_ones(name):
    torch.manual_seed(0)
    x = ALL.repeat(LARGE // len(ALL) + 1)[: LARGE + 64 * 8].reshape(-1, 64)
    dy = torch.randn(x.shape).to(torch.bfloat16)
    engine = session(name)
    same_in_parts(engine, x, dy)
    large, small = (
        max(p.arena_bytes for k, p in engine.plans.items() if k[0][0][1][0] == n) for n in (len(x), len(x) // 8)
    )
    assert large >= 4 * len(ALL) > small  # there is room for a table


@pytest.mark.parametrize("name", TORCH)
def test_every_value_is_as_near_as_pytorch(name):
    """The exact value is float64's; a result may be further off than PyTorch's by a hundredth of a step of bfloat16,
    which is what float32 loses before it is rounded."""
    x = ALL.repeat(LARGE // len(ALL)).reshape(-1, 64)
    y = session(name).run([x], [False]).outputs[0].flatten()[: len(ALL)]
    exact, eager = EXACT.get(name, TORCH[name])(ALL.double()), TORCH[name](ALL)
    finite = exact.isfinite() & y.isfinite() & eager.isfinite()
    assert torch.equal(y.isnan(), exact.isnan())
    step = torch.finfo(torch.bfloat16).eps * exact.abs().clamp(min=torch.finfo(torch.bfloat16).tiny)
    off, theirs = ((v.double() - exact).abs()[finite] / step[finite] for v in (y, eager))
    assert (off <= torch.maximum(theirs, torch.tensor(0.5)) + 0.01).all()


@pytest.mark.parametrize("name", GRADIENTS)
def test_every_slope_is_as_near_as_pytorch(name):
    x = ALL[ALL.isfinite()]
    x = x.repeat(LARGE // len(x) + 1)[:LARGE].reshape(-1, 64)
    dy = torch.full_like(x, 1.5)
    dx = forward_and_backward(session(name), x, dy)[1].double()
    leaf = x.double().requires_grad_()
    EXACT.get(name, TORCH[name])(leaf).backward(dy.double())
    exact = leaf.grad
    leaf = x.clone().requires_grad_()
    TORCH[name](leaf).backward(dy)
    theirs = leaf.grad.double()
    known = theirs.isfinite() & exact.isfinite()  # a slope at the largest numbers is infinity times 0 in float32
    # Near its zero a slope is a difference: what float32 loses of 1 is allowed everywhere.
    step = torch.finfo(torch.bfloat16).eps * exact.abs() + 4e-6
    off, torchs = ((v - exact).abs()[known] / step[known] for v in (dx, theirs))
    assert (off <= torch.maximum(torchs, torch.tensor(0.5)) + 0.02).all()


@pytest.mark.parametrize("name", TORCH)
def test_in_a_fused_chain(name):
    """x -> f(x) * f(x) + x, with its gradient: one chain, whose large tensors have the bits of small ones."""
    torch.manual_seed(0)
    more = [helper.make_node("Mul", ["y", "y"], ["s"]), helper.make_node("Add", ["s", "x"], ["z"])]
    engine = session(name, more)
    x = torch.randn(LARGE // 64 + 8, 64).to(torch.bfloat16)
    same_in_parts(engine, x, torch.randn(x.shape).to(torch.bfloat16))
    assert any(plan.fired.get("pointwise_fusion") for plan in engine.plans.values())


def test_a_view_is_computed():
    node = [helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]), helper.make_node("Gelu", ["t"], ["y"])]
    info = helper.make_tensor_value_info("x", TensorProto.BFLOAT16, ["n", "m"])
    graph = helper.make_graph(node, "view", [info], [helper.make_tensor_value_info("y", TensorProto.BFLOAT16, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString()
    x = torch.randn(1024, 300).to(torch.bfloat16)
    found = Session(model).run([x], [False]).outputs[0]
    flat = session("Gelu").run([x.t().contiguous()], [False]).outputs[0]
    assert torch.equal(found, flat)
