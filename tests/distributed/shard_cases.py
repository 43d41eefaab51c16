"""Trains with FSDP2 in the usual order: each layer is sharded, then the model, and ORTModule wraps that."""

import os
import types
import warnings

import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

from ortmodule import ORTModule, explain
from tests.distributed.nets import Net, batch, both, net, whole

HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def sharded(mesh=None, reshard=(True, False), policy=None, model=None):
    model = net() if model is None else model
    options = {"mesh": mesh or init_device_mesh("cpu", (2,)), "mp_policy": policy or MixedPrecisionPolicy()}
    for layer, again in zip(model.layers, reshard, strict=True):
        fully_shard(layer, reshard_after_forward=again, **options)
    return fully_shard(model, **options)


def optimizer_of(model):
    # Not Adam, which makes much of the key's bias, whose gradient is rounding alone.
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(model, optimizer, rank, first, last, accumulate=1):
    seen = []
    for step in range(first, last):
        for part in range(accumulate):
            model.set_requires_gradient_sync(part == accumulate - 1)
            loss = model(*batch(10 * step + part, rank))
            (loss / accumulate).backward()
            seen.append(loss.detach())
        seen += whole(p.grad for p in model.parameters())
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_in_engine(report, layers=2):
    assert report.captured, report.fallback
    assert len(report.sharded) == layers and all(each.captured for each in report.sharded.values()), report
    assert not report.python_ops and report.weights_in_engine == 1.0, report
    assert report.pytorch_calls == 0 and not any(each.pytorch_calls for each in report.sharded.values())


def usual(rank, folder):
    """Losses, gradients, norms and parameters; accumulation; a checkpoint that plain FSDP2 goes on from."""

    def train(model):
        assert isinstance(model, FSDPModule)
        optimizer = optimizer_of(model)
        seen = steps(model, optimizer, rank, 0, 2) + steps(model, optimizer, rank, 2, 4, accumulate=2)
        path = os.path.join(folder, f"usual-{isinstance(model, ORTModule)}")
        weights, states = get_state_dict(model, optimizer)
        checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=path)
        seen += steps(model, optimizer, rank, 4, 5)
        # Another one goes on from it.
        other = sharded()
        again = optimizer_of(other)
        weights, states = get_state_dict(other, again)
        checkpoint.load(state := {"model": weights, "optimizer": states}, checkpoint_id=path)
        set_state_dict(other, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        steps(other, again, rank, 4, 5)
        torch.testing.assert_close(whole(other.parameters()), whole(model.parameters()), rtol=1e-4, atol=1e-5)
        return seen + whole(model.parameters())

    report = both(sharded, train, rtol=1e-4, atol=1e-5)
    assert_in_engine(report)
    assert "2 submodules are graphs of their own" in str(report)
    return "same"


def half(rank, folder):
    """Parameters as bfloat16, gradients reduced as float32."""

    def train(model):
        return steps(model, optimizer_of(model), rank, 0, 3) + whole(model.parameters())

    assert_in_engine(both(lambda: sharded(policy=HALF), train, rtol=2e-2, atol=1e-2))
    return "same"


def lengths_of_one_rank(rank, folder):
    """Rank 0 captures for lengths that rank 1 does not have: no collective is a part of that."""

    def train(model):
        seen, optimizer = [], optimizer_of(model)
        for step in range(4):
            ids = torch.arange(8).view(2, 4) if rank or step < 2 else torch.arange(8).view(1, 8)
            loss = model(ids, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        model.eval()
        with torch.no_grad() if rank else torch.enable_grad():
            seen.append(model(ids, ids).detach())
        return seen + whole(model.parameters())

    assert_in_engine(both(sharded, train, rtol=1e-4, atol=1e-5))
    return "same"


class Grouped(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        for layer in self.layers:
            layer.norm = nn.BatchNorm1d(8)
            layer.forward = types.MethodType(_forward_of_rows, layer)


def _forward_of_rows(self, x):
    return x + self.down(torch.tanh(self.up(self.norm(x.flatten(0, 1)).view_as(x))))


def groups(rank, folder):
    """`fully_shard` of a list, one shard inside of another, buffers that forward changes, a frozen table."""

    def make():
        mesh = init_device_mesh("cpu", (2,))
        model = net(Grouped)
        model.table.weight.requires_grad_(False)
        fully_shard([model.norm, model.head], mesh=mesh)
        fully_shard(model.layers[1].down, mesh=mesh)
        return sharded(mesh, model=model)

    def train(model):
        seen = steps(model, optimizer_of(model), rank, 0, 3)
        return seen + whole(model.parameters()) + [b.clone() for b in model.buffers()]

    assert_in_engine(both(make, train, rtol=1e-4, atol=1e-5), layers=4)
    return "same"


class Reading(Net):
    def forward(self, ids, labels):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
            if x.mean().item() > 1e9:
                x = x * 2
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def layers_alone(rank, folder):
    """What no graph can be made of around the layers: they still are graphs of their own."""

    def train(model):
        return steps(model, optimizer_of(model), rank, 0, 2) + whole(model.parameters())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = both(lambda: sharded(model=net(Reading)), train, said="PyTorch runs this module", rtol=1e-4, atol=1e-5)
    text = "decides something with what a submodule that PyTorch runs computes"
    assert not report.captured and text in report.fallback, report.fallback
    calls = [(each.captured, each.engine_calls, each.pytorch_calls) for each in report.sharded.values()]
    assert calls == [(True, 2, 0)] * 2, calls
    return "same"


def wrapped_first(rank, folder):
    """The other order: layers are sharded, the model is wrapped, then sharded."""

    def make():
        mesh = init_device_mesh("cpu", (2,))
        model = net()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return model

    found = []
    for wrap in (False, True):
        model = ORTModule(make()) if wrap else make()
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        found.append(steps(model, optimizer_of(model), rank, 0, 3) + whole(model.parameters()))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert_in_engine(explain(model))
    return "same"


def gpt2(rank, folder):
    """That of transformers."""
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **rates, use_cache=False, bos_token_id=1, eos_token_id=2)

    def make():
        torch.manual_seed(0)
        model, mesh = GPT2LMHeadModel(config), init_device_mesh("cpu", (2,))
        for layer in model.transformer.h:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def train(model):
        seen, optimizer = [], optimizer_of(model)
        for step in range(3):
            ids = torch.randint(0, 97, (2, 9 + step), generator=torch.Generator().manual_seed(10 * step + rank))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            seen += [loss.detach(), *whole(p.grad for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return seen + whole(model.parameters())

    report = both(make, train, said="forward prints", rtol=1e-4, atol=1e-5)
    assert_in_engine(report, layers=3)
    assert report.weights_in_engine >= 0.95
    return "same"


def prefetch(rank, folder):
    """Layers are gathered ahead of their turn, in forward where the script says so, as in PyTorch."""
    orders = []

    def make():
        model = sharded(reshard=(True,) * 4, model=net(Net, 4))
        for layer, following in zip(model.layers, model.layers[1:], strict=False):
            layer.set_modules_to_forward_prefetch([following])
        return model

    def train(model):
        optimizer = optimizer_of(model)
        seen = steps(model, optimizer, rank, 0, 2)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            seen += steps(model, optimizer, rank, 2, 3)
        events = sorted(found.events(), key=lambda event: event.time_range.start)
        orders.append([event.name for event in events if event.name.startswith("FSDP::")])
        return seen

    assert_in_engine(both(make, train, rtol=1e-4, atol=1e-5), layers=4)
    plain, ours = orders
    for part in ("forward", "backward"):
        assert sum(f"{part}_prefetch" in name for name in plain) >= 3, plain
    assert ours == plain
    return "same"
