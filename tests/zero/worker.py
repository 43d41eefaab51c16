"""Trains under DeepSpeed as one of two processes, with our parts and without; prints what it has seen.

python -m tests.zero.worker <rank> <file to meet in> <dtype,dtype...> <folder for checkpoints>
"""

import datetime
import json
import logging
import math
import os
import sys
import warnings

RANK, FILE, KINDS, FOLDER = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(","), sys.argv[4]
os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(RANK), "RANK": str(RANK), "WORLD_SIZE": "2",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip

import torch  # noqa: E402
from torch import nn  # noqa: E402

from ortmodule import ORTModule, explain  # noqa: E402
from ortmodule.optim import AdamWMode, FP16_Optimizer, FusedAdam  # noqa: E402

warnings.simplefilter("ignore")
warnings.filterwarnings("error", message=".*FP16_Optimizer")
torch.set_num_threads(1)

import deepspeed  # noqa: E402  after FusedAdam: it learns of it when it is imported
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.utils import set_z3_leaf_modules  # noqa: E402

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
for name in deepspeed.ops.__compatible_ops__:
    deepspeed.ops.__compatible_ops__[name] = False  # or it compiles its collectives for minutes
type(get_accelerator()).is_fp16_supported = lambda self: True  # PyTorch computes it anywhere; this asks for speed

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}
UNITS = {"units": True}  # the wrapped module is the unit that stage 3 gathers, not the whole model
OVERFLOW = 2  # the step at which rank 1 has no finite gradients


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 11)

    def forward(self, x):
        return self.down(self.norm(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.block = nn.Embedding(11, 16), Block()

    def forward(self, ids, labels, factor):
        logits = self.block(self.table(ids))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) * factor


def config(dtype, stage, options):
    chosen = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5, "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    if options == UNITS:
        chosen["zero_optimization"]["memory_efficient_linear"] = False  # a Python function of DeepSpeed's
        return chosen | precision(dtype)
    return chosen | precision(dtype) | options


def precision(dtype):
    if dtype == "float16":
        return {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}}
    return {"bf16": {"enabled": True}} if dtype == "bfloat16" else {}


def made(dtype, stage, ours, options):
    torch.manual_seed(0)
    model = Net()
    if options == UNITS:
        model.block = ORTModule(model.block) if ours else model.block
        set_z3_leaf_modules(model, [Block])  # gathered as a whole
    elif ours:
        model = ORTModule(model)
    if ours:
        optimizer = FusedAdam(model.parameters(), adam_w_mode=AdamWMode.ADAMW_TORCH, **SETTINGS)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    settings = config(dtype, stage, options)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if ours:
        assert FP16_Optimizer(optimizer) is optimizer and FP16_Optimizer(optimizer) is optimizer
    return engine


def train(engine, first, last, overflow=None):
    """Loss, scale, whether the step was skipped, and the norm, of each step."""
    seen = []
    for i in range(first, last):
        generator = torch.Generator().manual_seed(10 * i + RANK)
        ids, labels = (torch.randint(0, 11, (4, 5), generator=generator) for _ in range(2))
        loss = engine(ids, labels, torch.tensor(math.inf if (i, RANK) == (overflow, 1) else 1.0))
        engine.backward(loss)
        engine.step()
        optimizer = engine.optimizer
        norm = engine.get_global_grad_norm()
        seen.append((loss.item(), float(getattr(optimizer, "loss_scale", 1.0)), bool(getattr(optimizer, "overflow", 0)),
                     None if norm is None else float(norm)))  # fmt: skip
    return seen


def replaced(optimizer):
    """The methods that are ours by now; one that failed its first comparison would be a bound method again."""
    names = ["get_grad_norm_direct", "has_overflow_partitioned_grads_serial", "has_overflow", "get_grads_for_norm",
             "unscale_and_clip_grads"]  # fmt: skip
    checker = getattr(optimizer, "overflow_checker", None)
    found = {n for n in names if n in vars(optimizer) and not hasattr(vars(optimizer)[n], "__self__")}
    if checker is not None and "has_overflow_serial" in vars(checker):
        found.add("has_overflow_serial")
    return sorted(found)


def cell(dtype, stage, options):
    overflow = OVERFLOW if dtype != "float32" else None
    engines = {ours: made(dtype, stage, ours, options) for ours in (True, False)}
    seen = {ours: train(engine, 0, 6, overflow) for ours, engine in engines.items()}
    whole = engines[True].module
    report = explain(whole.block if options == UNITS else whole)
    result = {
        "dtype": dtype, "stage": stage, "options": options, "ours": seen[True], "theirs": seen[False],
        "optimizer": type(engines[True].optimizer).__name__, "replaced": replaced(engines[True].optimizer),
        "captured": report.captured, "fallback": str(report.fallback), "outside": sorted(report.python_ops),
    }  # fmt: skip
    for ours, engine in engines.items():
        engine.save_checkpoint(FOLDER, tag=f"{dtype}-{stage}-{len(options)}-{ours}")
        seen[ours] = train(engine, 6, 9)
    for ours in (True, False):  # each goes on from what the other has saved
        engine = made(dtype, stage, ours, options)
        engine.load_checkpoint(FOLDER, tag=f"{dtype}-{stage}-{len(options)}-{not ours}")
        result["ours from theirs" if ours else "theirs from ours"] = [train(engine, 6, 9), seen[not ours]]
    return result


def main():
    limit = datetime.timedelta(seconds=60)
    meet = {"init_method": f"file://{FILE}", "rank": RANK, "world_size": 2}
    deepspeed.init_distributed("gloo", timeout=limit, verbose=False, **meet)
    # The usual stage 3 last: it replaces torch.nn.functional.linear for good.
    cells = [(dtype, *each) for dtype in KINDS for each in [(0, {}), (1, {}), (2, {}), (3, UNITS)]]
    cells += [(dtype, 3, {}) for dtype in KINDS]
    if "bfloat16" in KINDS:  # has an optimizer of its own
        cells.insert(0, ("bfloat16", 1, {"data_types": {"grad_accum_dtype": "fp32"}}))
    for each in cells:
        print(json.dumps(cell(*each)), flush=True)
    os._exit(0)  # gloo's threads may outlive their group


main()
