"""The ONNX interpreter of verify and a fuzz target computes what PyTorch does for each case, or raises."""

import pytest
import torch

from ortmodule.core.errors import Unknown
from ortmodule.core.onnx_utils import RANDOM, constants
from ortmodule.debug import onnx_operators
from ortmodule.debug.onnx_interpreter import evaluate
from tests.ops.cases import FAMILIES
from tests.ops.harness import build_model, fed_operands, wanted_outputs

#: Forms of operators before this are not exported.
OPSET = 13
DRAWN = ("random", "dropout")


#: Families of which it computes nothing.
NOTHING = {"host_call", "random", "resize", "rnn", "rotary", "sequence"}


def interpreted(case, dtype):
    """(PyTorch's outputs, the interpreter's); None where it has no such operator or form."""
    tensors = case.tensors(dtype, 0)
    expected = wanted_outputs(case, tensors)
    model = build_model(case, dtype, tensors, expected)
    values = constants(model) | {f"x{i}": tensors[i] for i in fed_operands(case, tensors)}
    try:
        evaluate(model.graph.node, values, {})
    except (Unknown, IndexError):  # IndexError: gathering from a scalar
        return None
    return expected, [values[value.name] for value in model.graph.output]


def is_compared(case):
    return (
        case.opset >= OPSET
        and case.op not in RANDOM
        and not any(word in f"{case.op} {case.name}".lower() for word in DRAWN)
    )


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    compared = 0
    for case in filter(is_compared, FAMILIES[family]):
        dtype = "float32" if "float32" in case.dtypes else case.dtypes[0]
        if (both := interpreted(case, dtype)) is None:
            continue
        if case.op == "TopK":  # of elements that are the same any may be first
            both = [outputs[:1] for outputs in both]
        for expected, found in zip(*both, strict=True):
            same = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True}
            torch.testing.assert_close(found, expected, **same, msg=lambda said, case=case: f"{case.label}: {said}")
        compared += 1
    assert (compared > 0) == (family not in NOTHING)


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("k", [1, 7, 64])
def test_elements_that_are_the_same_keep_their_order(k, largest):
    """As in the engine, and in Tensor.sort: a graph that is cut is differentiated twice by what is interpreted."""
    generator = torch.Generator().manual_seed(k)
    for dtype in (torch.float32, torch.int64):
        x = torch.randint(0, 3, (64, 5), generator=generator).to(dtype)
        found = onnx_operators.TABLE["", "TopK"]({"axis": 0, "largest": largest}, 2, x, torch.tensor([k]))
        expected = x.sort(dim=0, descending=bool(largest), stable=True)
        assert all(torch.equal(ours, theirs[:k]) for ours, theirs in zip(found, expected, strict=True))
