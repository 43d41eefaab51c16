"""Trains a language model under DeepSpeed: ZeRO 1 to 3 with FusedAdam and FP16_Optimizer, or its pipelines.

    python -m examples.parallel.deepspeed_zero                           two processes of this machine, over gloo
    python -m examples.parallel.deepspeed_zero --stage 3
    python -m examples.parallel.deepspeed_zero --pipeline                the layers are split among the processes
    torchrun --nproc-per-node 8 -m examples.parallel.deepspeed_zero --stage 2 --dtype float16

Stages 1 and 2 go around the wrapped model. Stage 3 gathers the weights of one layer at a time, so each layer is
wrapped. A pipeline is ONNX Runtime's `ORTPipelineModule`, which wraps the layers of its stage.
"""

import logging
import os

import torch

from examples.parallel import shared

if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"


def set_up():
    """DeepSpeed, quietly, and without what it would compile for CPUs."""
    from ortmodule.optim import FusedAdam  # noqa: F401, I001  (before DeepSpeed, which learns of it when it is imported)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        for name in deepspeed.ops.__compatible_ops__:  # collectives that it would compile first, for minutes
            deepspeed.ops.__compatible_ops__[name] = False
        type(get_accelerator()).is_fp16_supported = lambda self: True  # PyTorch computes float16 on any CPU
    return deepspeed


def config_of(args):
    config = {"steps_per_print": 10**9, "gradient_clipping": shared.CLIP}
    if args.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    if args.dtype == "float16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 12}
    return config


def train_sharded(deepspeed, args, place):
    from deepspeed.utils import set_z3_leaf_modules

    torch.manual_seed(0)
    model = shared.Model(args)
    if args.stage < 3:
        wrapped = [model := shared.wrapped(model, args)]
    else:
        wrapped = [shared.wrapped(layer, args) for layer in model.layers]
        model.layers = torch.nn.ModuleList(wrapped)
        set_z3_leaf_modules(model, [shared.Layer])  # gathered as a whole
    config = config_of(args) | {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "zero_optimization": {"stage": args.stage, "memory_efficient_linear": False},
    }
    optimizer = shared.optimizer_of(model, args)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if args.backend == "ortmodule":
        from ortmodule.optim import FP16_Optimizer

        FP16_Optimizer(optimizer)

    def step_of(ids, labels):
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    batches = shared.Batches(args, place.device, place.rank, place.ranks)
    return shared.learn(args, batches, step_of) | shared.engine_of(*wrapped)


def train_pipeline(deepspeed, args, place):
    from deepspeed.pipe import PipelineModule

    from ortmodule.compat.pipeline import ORTPipelineModule

    torch.manual_seed(0)
    model = shared.Model(args)
    layers = [model.embedding, *model.layers, model.head]
    cls = ORTPipelineModule if args.backend == "ortmodule" else PipelineModule
    module = cls(layers=layers, num_stages=place.ranks, loss_fn=shared.loss_of, partition_method="uniform")
    rows = args.batch_size // args.parts
    config = config_of(args) | {
        "train_batch_size": rows * args.parts, "train_micro_batch_size_per_gpu": rows,
    }  # fmt: skip
    optimizer = shared.optimizer_of(module, args)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)

    def step_of(ids, labels):
        return engine.train_batch(zip(ids.split(rows), labels.split(rows), strict=True))

    mine = [layer for layer in module.forward_funcs if isinstance(layer, torch.nn.Module)]
    return shared.learn(args, shared.Batches(args, place.device), step_of) | shared.engine_of(*mine)


def train(args, place):
    deepspeed = set_up()
    deepspeed.init_distributed(verbose=False)
    return (train_pipeline if args.pipeline else train_sharded)(deepspeed, args, place)


def arguments(parser):
    parser.add_argument("--stage", type=int, choices=range(4), default=1, help="of ZeRO")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--pipeline", action="store_true", help="in place of ZeRO")
    parser.add_argument("--parts", type=int, default=4, help="micro-batches of a pipeline's batch")


if __name__ == "__main__":
    shared.main("examples.parallel.deepspeed_zero", __doc__, train, arguments)
