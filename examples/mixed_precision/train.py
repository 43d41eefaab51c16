"""Teaches a small GPT-2 to add, in mixed precision: ORTModule, FusedAdam and FP16_Optimizer together.

    python -m examples.mixed_precision.train                    with DeepSpeed, where it is installed
    python -m examples.mixed_precision.train --plain            with PyTorch's autocast and GradScaler
    python -m examples.mixed_precision.train --dtype float16 --stage 2

Each way is a few lines (`DeepSpeed`, `Plain`); the model, the data and the loop are the same for both.
"""

import argparse
import importlib.util
import os
import socket

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ortmodule import ORTModule, explain
from ortmodule.optim import AdamWMode, FP16_Optimizer, FusedAdam

SIGNS = "0123456789+= "
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def sums(count, generator):
    """Rows such as "17+25=042", as numbers of signs."""
    a, b = torch.randint(0, 100, (2, count), generator=generator)
    texts = [f"{x:02}+{y:02}={x + y:03}" for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    return torch.tensor([[SIGNS.index(sign) for sign in text] for text in texts])


def labels_of(ids):
    """Only what comes after the equals sign is to be learned."""
    labels = ids.clone()
    labels[:, :6] = -100
    return labels


class Plain:
    """PyTorch's own mixed precision; FusedAdam unscales and checks while it steps."""

    def __init__(self, model, args):
        self.model, self.dtype = model, TYPES[args.dtype]
        self.optimizer = FusedAdam(model.parameters(), lr=args.lr, adam_w_mode=AdamWMode.ADAMW_TORCH)
        self.scaler = torch.amp.GradScaler("cpu", enabled=self.dtype == torch.float16)

    def step(self, ids):
        with torch.autocast("cpu", self.dtype):
            loss = self.model(input_ids=ids, labels=labels_of(ids)).loss
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.item()


class DeepSpeed:
    """ZeRO around the wrapped module; FP16_Optimizer makes its check and its norm one pass."""

    def __init__(self, model, args):
        deepspeed = one_process()
        config = {
            "train_micro_batch_size_per_gpu": args.batch_size,
            "zero_optimization": {"stage": args.stage},
            "gradient_clipping": 1.0,
            "bf16" if args.dtype == "bfloat16" else "fp16": {"enabled": True},
        }
        optimizer = FusedAdam(model.parameters(), lr=args.lr, adam_w_mode=AdamWMode.ADAMW_TORCH)
        self.model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.optimizer = FP16_Optimizer(optimizer)

    def step(self, ids):
        loss = self.model(input_ids=ids, labels=labels_of(ids)).loss
        self.model.backward(loss)
        self.model.step()
        return loss.item()


def one_process():
    """DeepSpeed on the CPU, started without its launcher. Returns the module."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    for name, value in {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1",
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():  # fmt: skip
        os.environ.setdefault(name, value)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    for name in deepspeed.ops.__compatible_ops__:  # collectives that it would compile first, for minutes
        deepspeed.ops.__compatible_ops__[name] = False
    type(get_accelerator()).is_fp16_supported = lambda self: True  # PyTorch computes float16 on any CPU
    deepspeed.init_distributed("gloo", verbose=False)
    return deepspeed


@torch.no_grad()
def right(model, ids):
    """Share of sums that are right."""
    model.eval()
    found = model(input_ids=ids).logits[:, 5:-1].argmax(-1)
    model.train()
    return (found == ids[:, 6:]).all(1).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without DeepSpeed")
    parser.add_argument("--dtype", choices=TYPES, default="bfloat16")
    parser.add_argument("--stage", type=int, choices=range(4), default=1, help="of ZeRO")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    config = GPT2Config(
        vocab_size=len(SIGNS), n_positions=16, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )  # fmt: skip
    model = ORTModule(GPT2LMHeadModel(config).train())
    way = DeepSpeed if not args.plain and importlib.util.find_spec("deepspeed") else Plain
    training = way(model, args)
    for step in range(1, args.steps + 1):
        loss = training.step(sums(args.batch_size, generator))
        if step % 50 == 0 or step == args.steps:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    share = right(training.model, sums(500, generator))
    print(explain(model))
    print(f"{way.__name__}, {args.dtype}: {100 * share:.0f} % of 500 sums are right, last loss {loss:.3f}", flush=True)
    os._exit(0)  # gloo's threads may outlive their group


if __name__ == "__main__":
    main()
