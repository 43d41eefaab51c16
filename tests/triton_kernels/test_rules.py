"""ORTMODULE_TRITON_CONFIG_FILE: what a file may say, what each part of it does, and what is said of a bad one."""

import json

import pytest
import torch
from torch import nn

from ortmodule import Config, ORTModule
from ortmodule.core.logger import warn_once
from ortmodule.triton_kernels.rules import MIN_NODES, all_rules, read_rules, supported
from ortmodule.triton_kernels.use import TritonUse

EXAMPLE = {
    "ops": {
        "Add": {"versions": [13, 14]},
        "ReduceSum": {"versions": [13], "conditions": {"axes": "[-1]"}},
        "Identity": {"versions": [13], "is_no_op": True},
        "SoftmaxGrad_13": {"domain": "com.microsoft", "versions": [1]},
    },
    "initializer": "scalar",
    "min_nodes": 2,
}


@pytest.fixture
def read(tmp_path):
    warn_once.cache_clear()

    def read(content, opset=17):
        path = tmp_path / "rules.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return read_rules(str(path), opset)

    return read


def names(rules):
    return {operator[0] for operator in rules.operators}


def test_the_example(read):
    rules = read(EXAMPLE)
    assert names(rules) == {"Add", "ReduceSum", "SoftmaxGrad"} and rules.min_nodes == 2 and rules.inlines
    assert {o[0]: o[3] for o in rules.operators}["ReduceSum"] == (("axes", 0, (-1,)),)


def test_without_a_file_everything_is_taken():
    assert names(all_rules()) == set(supported()) and all_rules().min_nodes == MIN_NODES
    assert {"Add", "Exp", "Softmax", "SoftmaxGrad", "LayerNormGrad", "ReduceMax", "DropoutTrain"} <= set(supported())


@pytest.mark.parametrize(
    ("versions", "opset", "taken"), [([13, 14], 17, True), ([14], 13, False), ([13], 13, True), ([7], 17, False)]
)
def test_versions_are_those_of_the_opset(read, versions, opset, taken):
    """The form that Add has in this opset is that of the newest version up to it."""
    assert ("Add" in names(read({"ops": {"Add": {"versions": versions}}}, opset))) is taken


def test_a_gradient_comes_with_its_operator(read):
    assert names(read({"ops": {"Tanh": {"versions": [13]}, "Gelu": {"domain": "com.microsoft", "versions": [1]}}})) == {
        "Tanh", "TanhGrad", "Gelu", "GeluGrad",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "condition"),
    [
        ("single", ("axes", 1, ())),
        ("constant", ("axes", 2, ())),
        ("[-1]", ("axes", 0, (-1,))),
        ([0, 1], ("axes", 0, (0, 1))),
    ],
)
def test_conditions(read, wanted, condition):
    rules = read({"ops": {"ReduceMax": {"versions": [13], "conditions": {"axes": wanted}}}})
    assert rules.operators[0][3] == (condition,)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "rules.json"),
        ([], "the file holds an object with ops, initializer and min_nodes"),
        ({"opps": {}}, "there is no opps; did you mean ops?"),
        ({"min_nodes": 2}, "ops is an object with an operator for each name"),
        ({"ops": {}, "min_nodes": 0}, "min_nodes is a whole number, at least 1, not 0"),
        ({"ops": {}, "min_nodes": True}, "min_nodes is a whole number, at least 1, not true"),
        ({"ops": {}, "initializer": "scaler"}, 'initializer is none, scalar, all, not "scaler"'),
        ({"ops": {"Add": [13]}}, "Add is described by an object with versions, not by [13]"),
        ({"ops": {"Add": {"version": [13]}}}, "Add: there is no version; did you mean versions?"),
        ({"ops": {"Add": {"versions": 13}}}, "Add: versions is a list of opset versions, as [13, 14], not 13"),
        ({"ops": {"Add": {"versions": []}}}, "Add: versions is a list of opset versions"),
        ({"ops": {"Add": {"versions": [13], "domain": "com.example"}}}, 'Add: there is no domain "com.example"'),
        ({"ops": {"Add": {"versions": [13], "is_no_op": "yes"}}}, 'Add: is_no_op is true or false, not "yes"'),
        ({"ops": {"Addd": {"versions": [13]}}}, "there is no operator Addd; did you mean Add?"),
        ({"ops": {"ReduceSum": {"versions": [13], "conditions": {"axes": "last"}}}},
         'ReduceSum: the condition on axes is single, constant, or numbers as [-1], not "last"'),
        ({"ops": {"ReduceSum": {"versions": [13], "conditions": []}}}, "ReduceSum: conditions is an object"),
    ],
)  # fmt: skip
def test_a_bad_file(read, content, sentence):
    with pytest.raises(ValueError, match="ORTMODULE_TRITON_CONFIG_FILE=") as caught:
        read(content)
    assert sentence in str(caught.value)


def test_a_file_that_is_missing_is_an_error_of_the_wrapping(tmp_path):
    with pytest.raises(ValueError, match="ORTMODULE_TRITON_CONFIG_FILE=.*none.json"):
        ORTModule(nn.Linear(2, 2), config=Config(use_triton=True, triton_config_file=str(tmp_path / "none.json")))


def test_an_operator_without_a_kernel_is_said_once(read):
    with pytest.warns(UserWarning, match="there is no Triton kernel for MatMul"):
        assert names(read({"ops": {"MatMul": {"versions": [13]}, "Add": {"versions": [14]}}})) == {"Add"}


@pytest.mark.parametrize("name", ["triton_config_file", "triton_debug"])
def test_settings_that_need_another(name):
    warn_once.cache_clear()
    given = {name: "rules.json" if name == "triton_config_file" else True}
    with pytest.warns(UserWarning, match=f"ORTMODULE_{name.upper()} has no effect without ORTMODULE_USE_TRITON=1"):
        assert TritonUse.of(Config(**given)) is None


# --- what becomes a kernel --------------------------------------------------------------------------------------------


class Tail(nn.Module):
    def forward(self, x):
        y = (x + 1).tanh()
        return (y - y.sum(-1, keepdim=True)).exp()


def kernels(path, x=None):
    """How many kernels the tail becomes, by the rules of a file."""
    from tests.triton_kernels.test_models import kernels_of, plans_of

    wrapped = ORTModule(Tail(), config=Config(use_triton=True, triton_config_file=str(path)))
    x = torch.randn(4, 8) if x is None else x
    torch.testing.assert_close(wrapped(x), Tail()(x))
    assert [plan.fired.get("triton_fusion", 0) for plan in plans_of(wrapped)] == [len(kernels_of(wrapped))]
    return [list(ops) for ops in kernels_of(wrapped)]


ALL = {"Add": {"versions": [14]}, "Sub": {"versions": [14]}, "Tanh": {"versions": [13]}, "Exp": {"versions": [13]}}
SUM = {"versions": [13]}
WHOLE = ["Add", "Tanh", "ReduceSum", "Sub", "Exp"]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"ops": {**ALL, "ReduceSum": SUM}}, [WHOLE]),
        ({"ops": ALL}, [["Add", "Tanh"], ["Sub", "Exp"]]),
        ({"ops": {**ALL, "ReduceSum": {**SUM, "conditions": {"axes": "[1]"}}}}, [WHOLE]),
        ({"ops": {**ALL, "ReduceSum": {**SUM, "conditions": {"axes": "[0]"}}}}, [["Add", "Tanh"], ["Sub", "Exp"]]),
        ({"ops": {**ALL, "ReduceSum": {**SUM, "conditions": {"axes": "single"}}}}, [WHOLE]),
        ({"ops": ALL, "min_nodes": 3}, []),
        ({"ops": {**ALL, "Add": {"versions": [14], "is_no_op": True}}}, [["Sub", "Exp"]]),
        ({"ops": {**ALL, "Tanh": {"versions": [6]}}}, [["Sub", "Exp"]]),
    ],
)  # fmt: skip
def test_what_becomes_a_kernel(content, found, tmp_path):
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(content))
    warn_once.cache_clear()
    assert kernels(path) == found


@pytest.mark.parametrize(("initializer", "count"), [("none", 0), ("scalar", 1), ("all", 1)])
def test_constants_in_the_text(initializer, count, tmp_path):
    """A constant of one element is a part of the kernel, or one of its operands."""
    from tests.triton_kernels.test_models import programs_of

    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"ops": ALL, "initializer": initializer}))
    wrapped = ORTModule(Tail(), config=Config(use_triton=True, triton_config_file=str(path)))
    wrapped(torch.randn(4, 8))
    programs = programs_of(wrapped)
    assert programs[0].count("constant") == count
