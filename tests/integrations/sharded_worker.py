"""Fine-tunes a Llama under DeepSpeed or FSDP2 as one of two processes; prints what it has seen.

On real text; as JSON.

python -m tests.integrations.sharded_worker <rank> <file to meet at> <road> <folder for checkpoints>
"""

import datetime
import json
import logging
import os
import sys
import warnings

RANK, FILE, ROAD, FOLDER = int(sys.argv[1]), *sys.argv[2:]
os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(RANK), "RANK": str(RANK)}

import torch  # noqa: E402
from torch import distributed  # noqa: E402
from torch.distributed import checkpoint  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from ortmodule import ORTModule, explain  # noqa: E402
from ortmodule.optim import AdamWMode, FusedAdam  # noqa: E402
from tests.integrations.small import llama, sentences, tokenizer  # noqa: E402

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}
STEPS, BATCH = 6, 4
SAVED = STEPS // 2  # steps before the checkpoint


def batches():
    """Of this rank."""
    texts = sentences()[RANK : 2 * STEPS * BATCH : 2]
    rows = tokenizer()(texts, padding=True, truncation=True, return_tensors="pt")
    for ids, mask in zip(rows["input_ids"].split(BATCH), rows["attention_mask"].split(BATCH), strict=True):
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def weights(module):
    """How many there are, those of embeddings aside. (Of what DeepSpeed has spread a process has none.)"""
    inner = [each for each in module.modules() if not isinstance(each, torch.nn.Embedding)]
    return sum(getattr(p, "ds_numel", p.numel()) for each in inner for p in each.parameters(recurse=False))


class FullyShard:
    """FSDP2 in its usual order: each layer, then the model; ORTModule wraps that."""

    def __init__(self, ours):
        self.mesh, model = init_device_mesh("cpu", (2,)), llama()
        for layer in model.model.layers:
            fully_shard(layer, mesh=self.mesh)
        model = fully_shard(model, mesh=self.mesh)
        self.model = ORTModule(model) if ours else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **SETTINGS)

    def step(self, batch):
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _state(self):
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))

    def save(self, path):
        checkpoint.save(self._state(), checkpoint_id=path)

    def load(self, path):
        checkpoint.load(state := self._state(), checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )  # fmt: skip

    def whole(self):
        return [parameter.full_tensor().tolist() for parameter in self.model.parameters()]

    @staticmethod
    def plain(path):
        """What the plain libraries read in the checkpoint: the state of a module."""
        dcp_to_torch_save(path, f"{path}.pt")
        return torch.load(f"{path}.pt", weights_only=False)["model"]

    def wrapped(self):
        return [self.model]

    def reports(self):
        report = explain(self.model)
        return [report, *report.sharded.values()]


class DeepSpeed:
    """A stage of ZeRO. In stage 3 layers are the units that are gathered; each is an ORTModule, and so is the head."""

    def __init__(self, ours):
        deepspeed.init_distributed("gloo", verbose=False)
        self.stage, model = int(ROAD[-1]), llama()
        layers = model.model.layers
        if self.stage == 3:
            deepspeed.utils.set_z3_leaf_modules(model, [type(layers[0])])
            for i, layer in enumerate(layers if ours else ()):
                layers[i] = ORTModule(layer)
            if ours:
                model.lm_head = ORTModule(model.lm_head)
        elif ours:
            model = ORTModule(model)
        mode = {"adam_w_mode": AdamWMode.ADAMW_TORCH} if ours else {}
        optimizer = (FusedAdam if ours else torch.optim.AdamW)(model.parameters(), **mode, **SETTINGS)
        zero = {"stage": self.stage, "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
        config = {"train_micro_batch_size_per_gpu": BATCH, "steps_per_print": 10**9, "zero_optimization": zero}
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(self, batch):
        loss = self.engine(**batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def save(self, path):
        self.engine.save_checkpoint(path, tag="saved")

    def load(self, path):
        self.engine.load_checkpoint(path, tag="saved")

    def whole(self):
        model = self.engine.module
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=self.stage == 3):
            return [parameter.tolist() for parameter in model.parameters()]

    def plain(self, path):
        if self.stage:
            return get_fp32_state_dict_from_zero_checkpoint(path, tag="saved")
        return torch.load(os.path.join(path, "saved", "mp_rank_00_model_states.pt"), weights_only=False)["module"]

    def wrapped(self):
        model = self.engine.module
        return [*model.model.layers, model.lm_head] if self.stage == 3 else [model]

    def reports(self):
        return [explain(each) for each in self.wrapped()]


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    limit = datetime.timedelta(seconds=60)
    distributed.init_process_group("gloo", init_method=f"file://{FILE}", rank=RANK, world_size=2, timeout=limit)
    make, data, result = FullyShard if ROAD == "FSDP2" else DeepSpeed, list(batches()), {}
    for name in ("theirs", "ours"):
        road, path = make(name == "ours"), os.path.join(FOLDER, name)
        result[name] = [road.step(batch).item() for batch in data[:SAVED]]
        road.save(path)
        at_checkpoint = road.whole()
        result[name] += [road.step(batch).item() for batch in data[SAVED:]]
    result["reports"] = [
        {"captured": each.captured, "engine": each.engine_calls, "pytorch": each.pytorch_calls,
         "unreached": each.unreached_steps, "outside": sorted(each.python_ops)}
        for each in road.reports()
    ]  # fmt: skip
    inside = sum(explain(each).weights_in_engine * weights(each) for each in road.wrapped())
    whole = road.wrapped()[0] if len(road.wrapped()) == 1 else road.engine.module
    result["share"] = inside / weights(whole)
    again = make(ours=True)
    again.load(path)
    result["resumed"] = [again.step(batch).item() for batch in data[SAVED:]]
    distributed.barrier()
    if RANK == 0:
        alone = llama()
        alone.load_state_dict(road.plain(path))
        result["reloaded"] = [p.tolist() for p in alone.parameters()] == at_checkpoint
    distributed.barrier()
    print(json.dumps(result), flush=True)
    os._exit(0)  # gloo's threads may outlive the group


if ROAD != "FSDP2":
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    for each in deepspeed.ops.__compatible_ops__:
        deepspeed.ops.__compatible_ops__[each] = False  # or it compiles its collectives for minutes
main()
