"""Collectives that forward calls: nodes of the graph, where nothing is communicated while a rank captures."""

import contextlib
import warnings

import torch
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import distributed, nn

from ortmodule import ORTModule, explain
from ortmodule.host.host_node import Calls
from tests.distributed.nets import WIDTH, net


class Net(nn.Module):
    """``how(x)`` communicates between two layers."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.how = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3), how

    def forward(self, x):
        return self.second(self.how(torch.tanh(self.first(x)))).square().mean()


def _world():
    return distributed.group.WORLD


def _functional_sum(x):
    return functional.all_reduce(x, "sum", _world()) / 2


def _functional_gather(x):
    return functional.all_gather_tensor(x, 0, _world()) * 1


def _functional_scatter(x):
    return functional.reduce_scatter_tensor(torch.cat([x, x.sin()]), "sum", 0, _world())


def _functional_lists(x):
    mean, square = functional.all_reduce_coalesced([x.detach().mean(0), x.detach().square().mean(0)], "avg", _world())
    return (x - mean) / (square + 1)


def _differentiable_sum(x):
    return differentiable.all_reduce(x.clone(), distributed.ReduceOp.SUM, _world())


def _differentiable_gather(x):
    return torch.cat(differentiable.all_gather(x))


def _in_place(x):
    mean = x.detach().mean(0)
    distributed.all_reduce(mean)
    return x - mean / 2


def _largest(x):
    largest = x.detach().amax(0)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return x / (largest + 2)


def _broadcast(x):
    first = x.detach()[0].clone()
    distributed.broadcast(first, 1)
    return x + first


def _list_gather(x):
    mine = x.detach().sum(0)
    every = [torch.empty_like(mine) for _ in range(2)]
    distributed.all_gather(every, mine)
    return x + torch.stack(every).cos().sum(0)


def _into_tensor(x):
    mine = x.detach().mean(0, keepdim=True)
    every = mine.new_empty(2, WIDTH)
    distributed.all_gather_into_tensor(every, mine)
    return x * every.var(0, correction=0)


def _begun(x):
    """The work in between does not depend on it."""
    mean = x.detach().mean(0)
    work = distributed.all_reduce(mean, async_op=True)
    other = x.exp()
    work.wait()
    return other - mean


def _several(x):
    """Sizes differ: another order on one rank would not go unnoticed."""
    whole = functional.all_reduce(x.sin(), "sum", _world())
    rows = functional.all_reduce(x.sum(0), "sum", _world())
    mean = x.detach().mean()
    distributed.all_reduce(mean)
    part = differentiable.all_reduce(x[:, :3].exp(), distributed.ReduceOp.SUM, _world())
    return x * rows + whole * part.sum() + mean


class _Everywhere(torch.autograd.Function):
    """Of a user's, as tensor parallel layers have it."""

    @staticmethod
    def forward(context, x):
        x = x.clone()
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(context, grad):
        grad = grad.clone()
        distributed.all_reduce(grad)
        return grad


#: By what PyTorch runs inside the graph.
INSIDE = {
    "all_reduce wait_tensor": [_functional_sum], "all_gather_into_tensor wait_tensor": [_functional_gather],
    "reduce_scatter_tensor wait_tensor": [_functional_scatter], "all_reduce_coalesced wait_tensor": [_functional_lists],
    "_AllReduce": [_differentiable_sum], "_AllGather": [_differentiable_gather],
    "allreduce": [_in_place, _largest], "allreduce wait_tensor": [_begun],
    "broadcast": [_broadcast], "allgather": [_list_gather],
    "_Everywhere": [_Everywhere.apply],
}  # fmt: skip


def _count():
    return _world()._get_sequence_number_for_group()


def _train(rank, model, rows=lambda step, rank: 3 + step % 2):
    """Losses, gradients, and how many collectives there were in each step."""
    seen, counts = [], []
    for step in range(3):
        x = torch.randn(rows(step, rank), 4, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
        before = _count()
        loss = model(x)
        loss.backward()
        counts.append(_count() - before)
        seen += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return seen, counts


def _compared(rank, how, **options):
    """What `explain` says of a module that is the same with and without the engine, on the wire, too."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        expected, counts = _train(rank, net(Net, how), **options)
        model = ORTModule(net(Net, how))
        found, ours = _train(rank, model, **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert ours == counts and all(counts), (how, ours, counts)
    return explain(model), [str(each.message) for each in told if "ORTModule" in str(each.message)]


def inside(rank, folder):
    """Each is a node; gradients and the number of collectives are those of PyTorch's, in the first step, too."""
    for name, functions in INSIDE.items():
        for how in functions:
            report, told = _compared(rank, how)
            assert report.captured and not report.pytorch_calls and not told, (how, report, told)
            assert set(report.python_ops) == set(name.split()), (how, report.python_ops)
    report, _ = _compared(rank, _into_tensor)
    assert report.captured and len(set(report.python_ops)) == 1, report
    return "same"


class Between(torch.autograd.Function):
    """Notes what had run when it runs itself."""

    @staticmethod
    def forward(context, x):
        MET.append("between")
        return x.exp()

    @staticmethod
    def backward(context, grad):
        return grad


MET = []


def _overlapped(x):
    """Nothing in between depends on the collectives."""
    whole = functional.all_reduce(x.sin(), "sum", _world())
    mean = x.detach().mean(0)
    work = distributed.all_reduce(mean, async_op=True)
    other = Between.apply(x)
    work.wait()
    return other * mean + whole


@contextlib.contextmanager
def noted():
    """The names of the nodes that run inside, in their order."""
    run = Calls.forward

    def forward(self, number, given, expected):
        MET.append(self.known.nodes[number].name)
        return run(self, number, given, expected)

    Calls.forward = forward
    MET.clear()
    try:
        yield MET
    finally:
        Calls.forward = run


def overlap(rank, folder):
    """A collective is begun at its place, and waited for where its result is used first."""
    report, _ = _compared(rank, _overlapped)
    assert report.captured and not report.pytorch_calls, report
    model = ORTModule(net(Net, _overlapped))
    _train(rank, model)
    with noted() as met:
        model(torch.ones(3, 4).requires_grad_())
    assert met == ["all_reduce", "allreduce", "Between", "between", "wait_tensor", "wait_tensor"], met
    return "same"


def one_captures_alone(rank, folder):
    """A rank captures for sizes that the other does not have; the other waits for it in its own forward."""

    def rows(step, rank):
        return 3 + 2 * step if rank else 3

    for how in (_in_place, _largest, _broadcast, _list_gather, _begun):
        report, _ = _compared(rank, how, rows=rows)
        assert report.captured and not report.pytorch_calls, (how, report)
    return "same"


def one_in_pytorch(rank, folder):
    """The engine has the collectives in PyTorch's order, forward and backward: one rank has the module in PyTorch."""
    expected, _ = _train(rank, net(Net, _several))
    for plain in range(2):
        model = net(Net, _several) if rank == plain else ORTModule(net(Net, _several))
        found, _ = _train(rank, model)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        if rank != plain:
            assert explain(model).captured and not explain(model).pytorch_calls, explain(model)
    return "same"


def left_to_pytorch(rank, folder):
    """What a graph has no node for runs in PyTorch, and a warning names it."""

    def with_gradient(x):
        y = x * 1
        distributed.all_reduce(y)
        return y * 1

    def never_waited(x):
        mean = x.detach().mean(0)
        work = distributed.all_reduce(mean, async_op=True)
        works.append(work)
        return x * 2

    def waits(x):
        distributed.barrier()
        return x * 2

    def objects(x):
        found = [None, None]
        distributed.all_gather_object(found, 1 + rank)
        return x * sum(found)

    works = []
    for how, text in (
        (with_gradient, "changes a tensor that carries a gradient"), (never_waited, "PyTorch runs this module"),
        (waits, "barrier of a process group"), (objects, "PyTorch runs this module"),
    ):  # fmt: skip
        report, told = _compared(rank, how)
        assert not report.captured and (rank or any(text in each for each in told)), (how, report, told)
    for work in works:
        with contextlib.suppress(AttributeError):
            work.wait()
    return "same"


def messages(rank, folder):
    """From one rank to the other: both ways at once, one way that waits, batched."""
    other = 1 - rank

    def both_ways(x):
        mine, theirs = x.detach().mean(0), x.detach().new_empty(WIDTH)
        works = [distributed.isend(mine, other), distributed.irecv(theirs, other)]
        y = x.exp()
        for work in works:
            work.wait()
        return y * theirs.cos()

    def one_way(x):
        if rank:
            distributed.send(x.detach()[0] * 2, other)
            return x * 1
        theirs = x.detach()[0] * 0
        distributed.recv(theirs, other)
        return x + theirs

    def batched(x):
        mine, theirs = x.detach().sin().sum(0), x.detach().new_empty(WIDTH)
        each = [distributed.P2POp(distributed.isend, mine, other), distributed.P2POp(distributed.irecv, theirs, other)]
        for work in distributed.batch_isend_irecv(each):
            work.wait()
        return x * theirs

    names = {both_ways: {"send", "recv"}, batched: {"send", "recv"}, one_way: {"send"} if rank else {"recv"}}
    for how, expected in names.items():
        told = warnings.catch_warnings(record=True)
        with told as found:
            warnings.simplefilter("always")
            plain, ours = net(Net, how), ORTModule(net(Net, how))
            torch.testing.assert_close(_train(rank, ours)[0], _train(rank, plain)[0], rtol=1e-4, atol=1e-6)
        report = explain(ours)
        assert report.captured and not report.pytorch_calls, (how, report)
        assert set(report.python_ops) == expected | {"wait_tensor"}, report.python_ops
        assert not [each for each in found if "ORTModule" in str(each.message)], [str(e.message) for e in found]
    return "same"


class Context(nn.Module):
    """Attention of this rank's part of the tokens to those of all ranks: context parallelism."""

    def __init__(self, gathers):
        super().__init__()
        self.norm, self.gathers = nn.LayerNorm(WIDTH), gathers
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        query, key, value = self.query(y), self.key(y), self.value(y)
        if self.gathers:
            key, value = (functional.all_gather_tensor_autograd(t, 0, _world()) * 1 for t in (key, value))
        return x + nn.functional.scaled_dot_product_attention(query[None], key[None], value[None])[0]


def context_parallel(rank, folder):
    """Gradients, added up over the ranks, are those of the whole sequence in one process."""
    model, whole = ORTModule(net(Context, True)), net(Context, False)
    for step in range(3):
        x = torch.randn(8 + 2 * step, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x.chunk(2)[rank]).square().sum().backward()
        whole(x).square().sum().backward()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            distributed.all_reduce(p.grad)
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
            p.grad = q.grad = None
    report = explain(model)
    assert report.captured and not report.pytorch_calls, report
    return "same"
