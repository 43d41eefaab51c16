"""What a step under bfloat16 autocast runs on a GPU, and what it computes: language models on the emulated one."""

import collections
import re

import pytest
import torch
import transformers

from ortmodule import _core, explain
from tests.cuda.test_emulated import driver, library  # noqa: F401  (a fixture)
from tests.exact import check_step
from tests.models.test_autocast import MODELS
from tests.models.zoo import SMALL
from tests.passes.test_rows import graphs
from tests.selection import each

pytestmark = [
    pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed"),
    pytest.mark.filterwarnings("ignore"),  # of the exporter and of transformers
]

LAYERS = 3
#: Products of a layer, each with a weight of its own.
LINEAR = 7


def llama(groups, dropout=0.0, cache=False):
    config = {**SMALL, "num_attention_heads": 4, "num_hidden_layers": LAYERS, "hidden_size": 64}
    config |= {"num_key_value_heads": groups, "attention_dropout": dropout, "use_cache": cache}
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model("llama", **config)
    return transformers.AutoModelForCausalLM.from_config(made).train()


def batch_of(samples, length=12):
    tokens = torch.randint(3, 90, (samples, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


def plan_of(ours):
    """That of the whole module, with a gradient."""
    plans = [plan for graph in graphs(ours) for plan in graph.session.plans.values() if plan.differentiates]
    return max(plans, key=lambda plan: len(plan.code()))


@pytest.fixture(params=["products", "one operator"])
def attention(request, monkeypatch):
    """How attention is computed; as one operator by torch's kernels, where they take it: a library stands for them."""
    library("libtorch_cuda.so")
    monkeypatch.setenv("ORTMODULE_MEMORY_BUDGET", "1TiB")  # nothing is computed again to take less
    if request.param == "one operator":
        monkeypatch.setenv("ORTMODULE_USE_EFFICIENT_ATTENTION", "1")
    return request.param


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("groups", [4, 2])
def test_llama(driver, attention, groups, samples):  # noqa: F811
    """Weights are cast once, rotations are one operator in each direction, and gradients of weights are made in
    float32; keys and values are not copied, nor repeated for groups of heads."""
    ours, _ = check_step(llama(groups), batch_of(samples), autocast=torch.bfloat16)
    plan = plan_of(ours)
    found = collections.Counter(row[0] for row in plan.code())
    assert found["Rotary"] == 4 * LAYERS
    assert found["Neg"] == 0
    assert found["Concat"] == 1  # the angles
    assert plan.text().count('steps="Swish Mul Mul SwishGrad"') == LAYERS  # backward computes it again
    weights, norms = LINEAR * LAYERS + 1, 2 * LAYERS
    if attention == "products":
        return
    assert found["Cast"] == weights + norms
    assert found["MatMulAdd"] == 3 * LAYERS
    assert found["Add"] <= 1  # of the logits, where they have a gradient of their own
    assert found["ReduceSum"] == 0
    assert found["Contiguous"] <= 2  # the labels, and how many rows there are


def test_repeated_keys(driver, monkeypatch):  # noqa: F811
    """Of float32, where the kernel of torch's wants as many heads of keys as of queries: one copy for each."""
    library("libtorch_cuda.so")
    monkeypatch.setenv("ORTMODULE_USE_EFFICIENT_ATTENTION", "1")
    ours, _ = check_step(llama(2), batch_of(2))
    plan = plan_of(ours)
    assert "torch=2" in plan.text()
    found = collections.Counter(row[0] for row in plan.code())
    assert found["ReduceSum"] == 2 * LAYERS
    assert len(re.findall(r"= Expand\(.*float32\[2, 12, 2, 2, 16\]", plan.text())) == 2 * LAYERS  # tokens first


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_dropout(driver, attention, name):  # noqa: F811
    """Gradients that meet in a residual or in the input of three projections are added by products."""
    build, batch = MODELS[name]
    torch.manual_seed(0)
    module = build().train()
    given = batch(module, 0, torch.Generator().manual_seed(0))
    ours, recorder = check_step(module, given, autocast=torch.bfloat16)
    assert recorder.draws
    if name == "bert":
        assert explain(ours).fused["gradient_sum"]


def test_dropout_and_keys_that_are_given_back(driver, attention):  # noqa: F811
    """A cache of keys holds them in float32, attention reads them in 16 bits: they are turned for each."""
    ours, recorder = check_step(llama(2, 0.1, True), batch_of(2), autocast=torch.bfloat16)
    assert recorder.draws
    found = collections.Counter(row[0] for row in plan_of(ours).code())
    assert found["Rotary"] >= 5 * LAYERS
    assert (found["Neg"], found["Concat"]) == (0, 1)


@each("dtype", [torch.bfloat16, torch.float16], [torch.bfloat16], pytest.mark.emulated_full)
def test_without_the_passes(driver, attention, monkeypatch, dtype):  # noqa: F811
    """As near to the exact gradients as PyTorch's with each of them switched off, too."""
    for name in ("early_cast", "rotary_fusion", "product_cast"):
        monkeypatch.setenv("ORTMODULE_DISABLED_PASSES", name)
        ours, _ = check_step(llama(2), batch_of(1), autocast=dtype)
        assert name not in explain(ours).fused
