"""The planner sees strides through chains of views, copies where there is none, and differentiates all of it.

What is one node's business in the case list is the planner's here: reshapes, transposes, slices and repetitions.
"""

import math

import numpy as np
import onnx
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from ortmodule.engine.session import Session
from tests.ops.harness import assert_same, value_info

SIZES = [1, 1, 2, 3, 4, 6]


class Chain:
    """A model that grows node by node, and the same in PyTorch."""

    def __init__(self, data, x):
        self.draw, self.nodes, self.constants = data.draw, [], []
        self.values = [("x", x)]

    def constant(self, numbers):
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(numbers, dtype=np.int64), name))
        return name

    def node(self, op, inputs, results, **attrs):
        names = [f"v{len(self.values) + i}" for i in range(len(results))]
        self.nodes.append(helper.make_node(op, inputs, names, name=names[0], **attrs))
        self.values += zip(names, results, strict=True)

    def pick(self):
        return self.draw(st.sampled_from(self.values[-3:]))

    def step(self):
        name, x = self.pick()
        makers = [self.reshape, self.transpose, self.cut, self.split, self.repeat, self.select, self.join, self.use]
        self.draw(st.sampled_from([make for make in makers if x.dim() or make in (self.reshape, self.use)]))(name, x)

    def reshape(self, name, x):
        left, dims = x.numel(), []
        while left > 1 and len(dims) < 5:
            dims.append(self.draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
            left //= dims[-1]
        dims = [*dims, left] if x.numel() else [0, 2]
        self.node("Reshape", [name, self.constant(dims)], [x.reshape(dims)], allowzero=1)

    def transpose(self, name, x):
        perm = self.draw(st.permutations(range(x.dim())))
        self.node("Transpose", [name], [x.permute(perm)], perm=perm)

    def cut(self, name, x):
        axis = self.draw(st.integers(0, x.dim() - 1))
        size = x.shape[axis]
        start, end = self.draw(st.integers(-size - 1, size + 1)), self.draw(st.integers(-size - 1, size + 1))
        step = self.draw(st.sampled_from([1, 1, 1, 2, -1, -2]))
        rows = torch.tensor(range(size)[start:end:step], dtype=torch.int64)
        operands = [self.constant([n]) for n in (start, end, axis, step)]
        self.node("Slice", [name, *operands], [x.index_select(axis, rows)])

    def split(self, name, x):
        axis = self.draw(st.integers(0, x.dim() - 1))
        first = self.draw(st.integers(0, x.shape[axis]))
        sizes = [first, x.shape[axis] - first]
        self.node("Split", [name, self.constant(sizes)], list(x.split(sizes, axis)), axis=axis)

    def repeat(self, name, x):
        dims = [self.draw(st.sampled_from([1, 2, 3])) if d == 1 else d for d in x.shape]
        if math.prod(dims) <= 5000:
            self.node("Expand", [name, self.constant(dims)], [x.expand(dims)])

    def select(self, name, x):
        axis = self.draw(st.integers(0, x.dim() - 1))
        if x.shape[axis]:
            i = self.draw(st.integers(-x.shape[axis], x.shape[axis] - 1))
            self.node("Gather", [name, self.constant(i)], [x.select(axis, i)], axis=axis)

    def join(self, name, x):
        axis = self.draw(st.integers(0, x.dim() - 1))
        if x.numel() <= 2000:
            self.node("Concat", [name, name], [torch.cat([x, x], axis)], axis=axis)

    def use(self, name, x):
        other, y = self.pick()
        if y.shape == x.shape:
            self.node("Mul", [name, other], [x * y])
        else:
            self.node("Tanh", [name], [x.tanh()])

    def model(self):
        (name, last), x = self.values[-1], self.values[0][1]
        graph = helper.make_graph(
            self.nodes, "chain", [value_info("x", x)], [value_info(name, last)], initializer=self.constants
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), last


@given(data=st.data())
def test_chain(data):
    shape = data.draw(st.lists(st.sampled_from(SIZES), max_size=4), label="shape")
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()
    chain = Chain(data, x)
    for _ in range(data.draw(st.integers(1, 9), label="steps")):
        chain.step()
    model, expected = chain.model()
    if len(chain.values) == 1:
        return
    onnx.checker.check_model(model)
    run = Session(model.SerializeToString()).run([x.detach()], [True], [True])
    assert_same(run.outputs[0], expected, "the output")
    dy = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (dx,) = run.backward([dy])
    (expected_dx,) = torch.autograd.grad(expected, [x], dy)
    assert_same(dx, expected_dx, "the gradient")
