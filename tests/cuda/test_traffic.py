"""The bytes that kernels move are counted on the emulated GPU, beside the account of docs/gpu-roofline.md.

The build that looks for races sees every access to memory (traffic.h). A byte counts once a launch, as where caches
hold what is read again; of the operands of streaming kernels also how often each byte is read.
"""

import ctypes
import re
from collections import defaultdict

import pytest
import torch
from torch.nn import functional as F

from benchmarks import roofline_plan
from ortmodule import ORTModule, _core
from tests.cuda.test_emulated import driver  # noqa: F401  (a fixture)
from tests.cuda.test_linear_loss import session_of
from tests.passes.session import Function, export
from tests.selection import each

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

LAUNCHES, READ, WRITTEN, FIRST_READ, FIRST_WRITTEN, MOST = range(6)  # of traffic.h
ROWS, WIDTH = 32, 1024
TYPES = [torch.bfloat16, torch.float32, torch.float16]


class Traffic:
    def __init__(self, fake):
        self.fake = fake
        fake.fake_traffic_name.restype = ctypes.c_char_p
        fake.fake_traffic_of.restype = fake.fake_traffic_watched.restype = ctypes.c_ulong
        fake.fake_traffic_watch.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong]

    def watch(self, *tensors):
        self.tensors = tensors
        self.fake.fake_traffic_forget()
        for i, t in enumerate(tensors):
            self.fake.fake_traffic_watch(i, t.data_ptr(), t.nbytes)

    def times_read(self):
        """How often each byte of the tensors was read, as a mean."""
        return [self.fake.fake_traffic_watched(i, 0) / t.nbytes for i, t in enumerate(self.tensors)]

    def of(self, what, pattern=""):
        """A number of each kernel whose name begins so: {name: number}."""
        count = self.fake.fake_traffic_kernels()
        assert count >= 0, "there are more kernels than places"
        names = [self.fake.fake_traffic_name(i).decode() for i in range(count)]
        return {n: self.fake.fake_traffic_of(i, what) for i, n in enumerate(names) if re.match(pattern, n)}

    def bytes(self, pattern=""):
        """That such kernels have moved: what a launch reads twice counts once."""
        return sum(self.of(FIRST_READ, pattern).values()) + sum(self.of(FIRST_WRITTEN, pattern).values())


@pytest.fixture
def traffic(driver):  # noqa: F811
    if not driver.fake_traffic_is_counted():
        pytest.skip("accesses are counted in the build that looks for races")
    found = Traffic(driver)
    yield found
    driver.fake_traffic_forget()


def rms_norm(x, scale):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


#: Functions of rows and of vectors as long as a row; which of x, y and dy backward reads.
STREAMS = {
    "layer_norm": (lambda x, scale, bias: F.layer_norm(x, (WIDTH,), scale, bias), 2, "x dy"),
    "rms_norm": (rms_norm, 1, "x dy"),
    "softmax": (lambda x: x.softmax(-1), 0, "y dy"),
    "log_softmax": (lambda x: x.log_softmax(-1), 0, "y dy"),
    "gelu": (lambda x: F.gelu(x) * 2, 0, "x dy"),
    "columns": (lambda x: (x * 2).sum(0), 0, ""),
}


@each("dtype", TYPES, TYPES[:2])
@pytest.mark.parametrize("name", STREAMS)
def test_operands_are_read_once(traffic, name, dtype):
    """Held in registers after that; and kernels move the bytes that the account says."""
    function, vectors, backward = STREAMS[name]
    x, *others = [torch.randn(ROWS, WIDTH, dtype=dtype), *(torch.rand(WIDTH, dtype=dtype) + 1 for _ in range(vectors))]
    session = export(Function(function), [x, *others])
    traffic.watch(x)
    run = session.run([x, *others], [True] * (1 + vectors), [True])
    forward = traffic.bytes()
    assert traffic.times_read() == [1]
    y, dy = run.outputs[0], torch.randn_like(run.outputs[0])
    tensors = {"x": x, "y": y, "dy": dy}
    traffic.watch(*(tensors[n] for n in backward.split()))
    run.backward([dy])
    assert all(times == 1 for times in traffic.times_read())
    account = roofline_plan.kernels_of(next(iter(session.plans.values()))).kernels
    for there, is_backward in ((forward, False), (traffic.bytes(), True)):
        expected = sum(k.bytes for k in account if k.backward == is_backward)
        assert abs(there / expected - 1) < 2e-3, (there, expected, is_backward)


@each("dtype", TYPES, TYPES[:2])
def test_a_loss_reads_its_logits_once(traffic, dtype):
    """And its gradient once more; beside one element of each row, its label's."""
    x, labels = torch.randn(ROWS, WIDTH, dtype=dtype), torch.randint(0, WIDTH, (ROWS,))
    session = export(Function(F.cross_entropy), [x, labels])
    traffic.watch(x)
    run = session.run([x, labels], [True, False], [True])
    labelled = ROWS * x.itemsize / x.nbytes
    assert traffic.times_read() == [1 + labelled]
    traffic.watch(x)
    run.backward([torch.ones_like(run.outputs[0])])
    assert traffic.times_read() == [1]


def linear_loss(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight), labels)


@each("dtype", [torch.bfloat16, torch.float32], [torch.bfloat16])
def test_a_linear_layers_loss_is_one_sweep(traffic, dtype):
    """What is not a product's: logits are read by the loss and for their gradient, which is written once."""
    rows, classes = 1056, 1024
    hidden, weight = torch.randn(rows, 8, dtype=dtype), torch.randn(classes, 8, dtype=dtype)
    labels = torch.randint(0, classes, (rows,))
    session = session_of(Function(linear_loss), [hidden, weight, labels])
    traffic.watch(hidden)
    run = session.run([hidden, weight, labels], [True, True, False], [True])
    run.backward([torch.ones_like(run.outputs[0])])
    assert "LinearCrossEntropy(" in next(iter(session.plans.values())).text()
    logits = rows * classes * (4 + 4 + hidden.itemsize)
    assert abs(traffic.bytes("linear_loss|cross_entropy|loss") / logits - 1) < 0.02, traffic.of(READ)


@pytest.mark.parametrize("count", [1024, 4096])
def test_no_thread_walks_all_duplicates(traffic, count):
    """Of an embedding's gradient where all tokens are one: parts of the duplicates are added up by many threads."""
    weight, tokens = torch.randn(2, 64), torch.zeros(count, dtype=torch.int64)
    session = export(Function(lambda weight, tokens: F.embedding(tokens, weight)), [weight, tokens])
    run = session.run([weight, tokens], [True, False], [True])
    dy = torch.randn_like(run.outputs[0])
    traffic.watch(dy)
    (gradient, *_) = run.backward([dy])
    torch.testing.assert_close(gradient[0], dy.sum(0), rtol=1e-4, atol=1e-3)
    assert traffic.times_read() == [1]
    alone = count * 8 * dy.itemsize  # a thread that adds up eight columns of all duplicates
    most = traffic.of(MOST, "gather_grad")
    assert most and max(most.values()) <= max(alone // 64, 1024), most


# --- the account of whole steps ---------------------------------------------------------------------------------------

SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": 256, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=128, num_key_value_heads=1, use_cache=False))


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, intermediate_size=128, max_position_embeddings=64))


#: Kernels that are one operator's each, whose bytes are the account's.
OPERATORS = {
    "Cast": "cast_", "(Layer|RMS)NormGrad": "norm_grad_", "(FusedNorm|LayerNormalization)": "norm_(sum|even|rows)",
    "(Masked)?Softmax$": "(masked_)?softmax_(?!grad)", "SoftmaxGrad": "softmax_grad", "Gelu": "gelu_",
    "Rotary": "rotary",
}  # fmt: skip
#: Products are a library's, and attention's operator is none of theirs.
STREAMING = r"(?!attention|matmul)"


@each("make", [gpt2, llama, bert], [gpt2])
def test_steps_move_what_the_account_says(traffic, make):
    """A step of a layer under autocast: operator by operator, and all that is no product."""
    torch.manual_seed(0)
    wrapped = ORTModule(make().train())
    tokens = torch.randint(0, 256, (4, 16))
    with torch.autocast("cpu", torch.bfloat16):
        wrapped(tokens, labels=tokens)  # what a first call does besides
        traffic.watch()
        loss = wrapped(tokens, labels=tokens).loss
    loss.backward()
    plans = [p for graphs in wrapped._ortmodule.graphs.values() for g in graphs for p in g.session.plans.values()]
    account = defaultdict(int)
    for kernel in roofline_plan.kernels_of(plans[-1]).kernels:
        account[kernel.name] += kernel.bytes if kernel.kind in ("stream", "other") else 0
    there = {name: sum(b for n, b in account.items() if re.match(name, n)) for name in OPERATORS}
    for name, expected in there.items():
        assert abs(traffic.bytes(OPERATORS[name]) - expected) <= 0.04 * expected, name
    assert sum(there.values()) > 0.4 * sum(account.values())
    # the account has more of gradients of embeddings than they move, and rows that no label needs
    assert 0.93 <= traffic.bytes(STREAMING) / sum(account.values()) <= 1.01
