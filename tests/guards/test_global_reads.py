"""Around a wrapped module: processes, threads, generators of random numbers, generation of text."""

import copy
import functools
import os
import pickle
import random
import subprocess
import sys
import threading
import warnings

import numpy
import pytest
import torch
import transformers
from torch import nn

from ortmodule import ORTModule, explain
from tests.twins import rows
from tests.workers import package_path


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 2))


# --- processes and threads --------------------------------------------------------------------------------------------


def test_data_parallel_is_refused():
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        ORTModule(nn.DataParallel(net()))
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        ORTModule(net())._replicate_for_data_parallel()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_fork():
    """As workers of a data loader: forward in the child, before and after a forward in the parent."""
    script = """
import os, torch
from torch import nn
from ortmodule import ORTModule, explain
torch.set_num_threads(1)
torch.manual_seed(0)
eager = nn.Linear(4, 4)
ours = ORTModule(eager)
x = torch.ones(3, 4)
expected = nn.functional.linear(x, eager.weight, eager.bias)
for attempt in range(2):
    child = os.fork()
    if child == 0:
        ok = False
        try:
            ok = torch.allclose(ours(x), expected) and explain(ours).captured
            y = ours(torch.ones(5, 4))
            y.sum().backward()
            ok = ok and torch.allclose(eager.weight.grad, torch.full((4, 4), 5.0))
        finally:
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, attempt
    assert torch.allclose(ours(x), expected)
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],  # without the folder that the tests run in, which may not be built
        env=os.environ | {"PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr


def test_threads_with_flips():
    """Forwards, backwards and other modes from several threads: the results of each are right."""
    eager = net()
    ours = ORTModule(copy.deepcopy(eager))
    errors = []

    def work(seed):
        try:
            for i in range(12):
                x = rows(2 + i % 3, 4, seed=seed).requires_grad_()
                if seed % 2:
                    with torch.no_grad():
                        torch.testing.assert_close(ours(x), eager(x))
                    continue
                found, expected = ours(x), eager(x)
                torch.testing.assert_close(found, expected)
                torch.testing.assert_close(*(torch.autograd.grad(y.pow(2).sum(), x) for y in (found, expected)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert explain(ours).exports == 2


def test_backward_in_another_thread():
    eager = net()
    ours = ORTModule(copy.deepcopy(eager))
    for module in (ours, eager):
        value = module(rows(3, 4)).pow(2).sum()
        thread = threading.Thread(target=value.backward)
        thread.start()
        thread.join(60)
    torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()])


# --- random numbers ---------------------------------------------------------------------------------------------------


def generators():
    return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())


def test_generators_are_left_alone():
    """By wrapping, capture, a flip, a refused capture."""

    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.flag = nn.Linear(4, 4), False

        def forward(self, x):
            if self.flag:
                torch.fft.fft(x)
            return nn.functional.dropout(self.linear(x), 0.0)

    model = Draws()
    before = generators()
    ours = ORTModule(model)
    ours(rows(3, 4))
    ours(rows(5, 4, 4)[0])
    ours.flag = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours(rows(3, 4))
    copy.deepcopy(ours)(rows(3, 4))
    pickle.dumps(ORTModule(ours.linear))
    assert generators() == before


def test_resuming_repeats_the_masks():
    torch.manual_seed(0)
    ours = ORTModule(nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5)))
    x = rows(8, 4)
    ours(x)
    state = torch.get_rng_state()
    first = [ours(x) for _ in range(3)]
    fresh = copy.deepcopy(ours)  # captures once more, and draws nothing for that
    torch.set_rng_state(state)
    torch.testing.assert_close([fresh(x) for _ in range(3)], first, rtol=0, atol=0)
    assert not torch.equal(first[0], first[1])


# --- text -------------------------------------------------------------------------------------------------------------


def language_models():
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    gpt2 = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    llama = transformers.LlamaConfig(**sizes, intermediate_size=32, max_position_embeddings=64)
    t5 = transformers.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                               decoder_start_token_id=0)  # fmt: skip
    yield "gpt2", transformers.GPT2LMHeadModel, gpt2
    yield "llama", transformers.LlamaForCausalLM, llama
    yield "t5", transformers.T5ForConditionalGeneration, t5


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("name, cls, config", language_models(), ids=lambda value: value if type(value) is str else "")
def test_generate(name, cls, config, cache):
    """Eager's tokens, and no export for every token."""
    torch.manual_seed(0)
    eager = cls(config).eval()
    ours = ORTModule(copy.deepcopy(eager))
    ids = torch.randint(3, 40, (2, 7))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for options in ({}, {"num_beams": 2}, {"do_sample": True}):
            found = []
            for model in (ours, eager):
                torch.manual_seed(3)
                found.append(model.generate(ids, max_new_tokens=12, use_cache=cache, pad_token_id=0, **options))
            torch.testing.assert_close(*found)
    assert explain(ours).exports <= 3


def test_training_between_generations():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    for rate in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, rate, 0.0)
    eager = transformers.GPT2LMHeadModel(config)
    ours = ORTModule(copy.deepcopy(eager))
    ids = torch.randint(3, 40, (2, 7))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            found = []
            for model in (ours, eager):
                model.train()
                loss = model(ids, labels=ids).loss
                loss.backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                        p.grad = None
                model.eval()
                found.append([loss.detach(), model.generate(ids, max_new_tokens=5, pad_token_id=0)])
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert explain(ours).exports <= 3  # training, the prompt, a token more


quiet = functools.wraps(print)(lambda *words: None)


class Quiet(nn.Module):
    """Calls a global that wraps a builtin, and has a method that does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    say = functools.wraps(print)(lambda self, *words: None)

    def forward(self, x):
        quiet("x")
        self.say("x")
        return self.layer(x)


def test_a_global_that_wraps_a_builtin():
    module = ORTModule(Quiet())
    x = torch.randn(2, 3)
    torch.testing.assert_close(module(x), module.layer(x))
    assert explain(module).captured, explain(module).fallback
