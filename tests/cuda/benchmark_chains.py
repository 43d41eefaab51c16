"""Writes every chain that the benchmarked models (benchmarks/rows.py) have on a GPU into a folder, as NVRTC gets them.

    ORTMODULE_BUILD=build/emulated python -m tests.cuda.benchmark_chains FOLDER [ROW...]

A training step of each runs on the emulated GPU, of the same architecture with small sizes, in float32 and under
autocast to bfloat16. Chains that are added up as they are made are those of a module of this file's, since products
take the sums that the models have. A libnvrtc of this file's writes down what it is told and compiles nothing: `N.cu` a
chain, once each; `options`, one a line; `headers.json`, what a chain may include.
"""

import ctypes
import hashlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

RECORDER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef void told(const char *text, int n, const char *const *headers, const char *const *names);
typedef void asked(int n, const char *const *options);
static told *tell;
static asked *ask;
void record(told *t, asked *a) { tell = t, ask = a; }
int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0; }
int nvrtcCreateProgram(void **out, const char *text, const char *name, int n, const char *const *h, const char *const *names) {
    tell(text, n, h, names);
    return *out = "program", 0;
}
int nvrtcCompileProgram(void *p, int n, const char *const *options) { return ask(n, options), 6; }
int nvrtcGetProgramLogSize(void *p, size_t *out) { return *out = 0, 0; }
int nvrtcGetProgramLog(void *p, char *out) { return 0; }
int nvrtcGetCUBINSize(void *p, size_t *out) { return *out = 0, 0; }
int nvrtcGetCUBIN(void *p, char *out) { return 0; }
int nvrtcDestroyProgram(void **p) { return 0; }
"""  # noqa: E501
WORD = ctypes.POINTER(ctypes.c_char_p)
TOLD = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int, WORD, WORD)
ASKED = ctypes.CFUNCTYPE(None, ctypes.c_int, WORD)

WIDTH, VOCABULARY, SIDE, LENGTH, SAMPLES = 32, 211, 32, 11, 3
BERT = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
#: Sizes by configuration; all else is the row's.
SMALL = {
    "BertConfig": {**BERT, "vocab_size": VOCABULARY},
    "GPT2Config": {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "bos_token_id": 0}
    | {"eos_token_id": 0},
    "LlamaConfig": {**BERT, "vocab_size": VOCABULARY, "num_key_value_heads": 1},
    "ViTConfig": {**BERT, "image_size": SIDE, "patch_size": 16},
    "ResNetConfig": {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 16, 32], "embedding_size": 8},
    "T5Config": {"d_model": WIDTH, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 2, "vocab_size": VOCABULARY},
}


def small_build(build):
    """A function that makes a row's model with few numbers, and what of it is not a number of SMALL's."""
    from benchmarks.rows import adapted, hf

    if isinstance(build, type):
        return lambda: build(vocabulary=VOCABULARY, width=WIDTH, layers=2), build.__name__
    known = inspect.getclosurevars(build).nonlocals
    if "layers" in known:
        small, title = small_build(known["build"])
        return adapted(small, *known["layers"]), f"{title} with adapters on {known['layers']}"
    settings = known["settings"] | SMALL[known["config"]]
    return hf(known["head"], known["config"], **settings), f"{known['head']} {settings}"


def small_batch(batch):
    """Of the row's batch the beginning."""
    parts = {}
    for name, x in batch.items():
        x = x[:SAMPLES]
        if x.dim() == 2:
            x = x[:, :LENGTH]
            x = x.where(x < 0, x % VOCABULARY)
        parts[name] = x[..., :SIDE, :SIDE] if x.dim() == 4 else x
    return parts


def folds(kind):
    """(function that makes it, operands): a module with sums along rows, and along columns, of all floats."""
    import torch

    class Folds(torch.nn.Module):
        def forward(self, x, y, scale):
            whole = torch.tanh(x * y) * scale
            dropped = torch.nn.functional.dropout(torch.sigmoid(x * scale))
            return whole, whole.sum(-1), whole.mean(0), dropped.sum(0), (dropped * y).mean(-1)

    generator = torch.Generator().manual_seed(0)
    return Folds(), [torch.randn(s, generator=generator).to(kind).requires_grad_() for s in [(80, 64), (80, 64), (64,)]]


class Recorder:
    def __init__(self, folder):
        self.folder, self.known = folder, set()
        with tempfile.TemporaryDirectory() as there:
            file = Path(there, "libnvrtc.so.13")
            command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{file.name}", "-x", "c", "-", "-o", str(file)]
            subprocess.run(command, input=RECORDER, text=True, check=True)
            self.library = ctypes.CDLL(str(file))
        self.functions = TOLD(self.tell), ASKED(self.ask)
        self.library.record(*self.functions)

    def tell(self, text, n, headers, names):
        if not self.known:
            told = {names[i].decode(): headers[i].decode() for i in range(n)}
            Path(self.folder, "headers.json").write_text(json.dumps(told))
        if (name := hashlib.sha256(text).hexdigest()[:16]) not in self.known:
            self.known.add(name)
            Path(self.folder, f"{name}.cu").write_bytes(text)

    def ask(self, n, options):
        Path(self.folder, "options").write_text("".join(f"{options[i].decode()}\n" for i in range(n)))


def main(folder, *names):
    recorder = Recorder(folder)  # before the engine looks for NVRTC: it takes the one that is loaded
    sys.path.insert(0, os.path.abspath(os.environ["ORTMODULE_BUILD"]))
    import torch

    from benchmarks.rows import EVERY
    from ortmodule import ORTModule, _core, explain

    assert _core.emulated, "a build with an emulated GPU is needed"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    done = set()
    left_out = {"minilm-glosses"}  # its texts are not here; minilm has its chains
    if importlib.util.find_spec("peft") is None:
        left_out |= {"gpt2-lora", "llama-lora"}
    for name in names or [n for n in EVERY if n not in left_out]:
        build, title = small_build(EVERY[name].build)
        batch = small_batch(EVERY[name].batch(torch.Generator().manual_seed(0)))
        padded = {key: bool((x == 0).any()) for key, x in batch.items() if key == "attention_mask"}
        if (key := f"{title} {padded}") in done:
            continue
        done.add(key)
        for autocast in (None, torch.bfloat16):
            torch.manual_seed(0)
            module = ORTModule(build().train())
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                out = module(**batch)
            (out if isinstance(out, torch.Tensor) else out.loss).backward()
            report = explain(module)
            assert report.captured, f"{name}: {report.fallback}"
        print(f"{name}: {len(recorder.known)} chains so far", flush=True)
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        module, operands = folds(kind)
        sum(x.float().sum() for x in ORTModule(module)(*operands)).backward()


if __name__ == "__main__":
    main(*sys.argv[1:])
