"""Runs one of two stages of DeepSpeed's pipeline, of layers as they are and as ORTModules; prints both.

python -m tests.zero.pipeline_worker <rank> <file to meet in>
"""

import datetime
import json
import logging
import os
import sys
import warnings

RANK, FILE = int(sys.argv[1]), sys.argv[2]
os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(RANK), "RANK": str(RANK), "WORLD_SIZE": "2",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip

import torch  # noqa: E402
from torch import nn  # noqa: E402

warnings.simplefilter("ignore")
torch.set_num_threads(1)

import deepspeed  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402

from ortmodule import explain  # noqa: E402
from ortmodule.compat.pipeline import ORTPipelineModule  # noqa: E402

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
for name in deepspeed.ops.__compatible_ops__:
    deepspeed.ops.__compatible_ops__[name] = False  # or it compiles its collectives for minutes
CONFIG = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10**9}


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits, labels)


def train(cls):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 16, 16), torch.relu, nn.Linear(16, 3)]
    model = cls(layers=layers, num_stages=2, loss_fn=loss_of, partition_method="uniform")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    losses = []
    for step in range(3):
        g = torch.Generator().manual_seed(step)
        parts = [(torch.randn(2, 6, generator=g), torch.randint(3, (2,), generator=g)) for _ in range(4)]
        losses.append(engine.train_batch(iter(parts)).item())
    return losses, [p.flatten().tolist() for p in model.parameters()], list(model.state_dict()), model


def main():
    limit = datetime.timedelta(seconds=60)
    meet = {"init_method": f"file://{FILE}", "rank": RANK, "world_size": 2}
    deepspeed.init_distributed("gloo", timeout=limit, verbose=False, **meet)
    ours, theirs = train(ORTPipelineModule), train(PipelineModule)
    reports = [explain(layer) for layer in ours[-1].forward_funcs if isinstance(layer, nn.Module)]
    print(json.dumps({
        "ours": ours[:2], "theirs": theirs[:2], "names": ours[2] == theirs[2],
        "fallbacks": [str(each.fallback) for each in reports if not each.captured or each.pytorch_calls],
    }), flush=True)  # fmt: skip
    os._exit(0)  # gloo's threads may outlive their group


main()
