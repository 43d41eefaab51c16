"""Trains with `parallelize_module`: column- and row-wise plans, sequence parallelism, a 2-D mesh."""

import functools
import warnings

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from ortmodule import ORTModule, explain
from ortmodule.guards.module_tree import Tree
from tests.distributed import collective_cases
from tests.distributed.nets import WIDTH, WORDS, Net, batch, both, net, whole

COLUMNS = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel)
ROWS = dict.fromkeys(("out", "down"), RowwiseParallel)
NODES = {"from_local", "redistribute", "wait_tensor"}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def parallel(mesh):
    model = net()
    for layer in model.layers:
        parallelize_module(layer, mesh, {name: style() for name, style in (COLUMNS | ROWS).items()})
    return model


def parts(tensors):
    """What this rank has of each, and how it lies on the mesh."""
    found = []
    for t in tensors:
        if isinstance(t, DTensor):
            found += [p.dim if p.is_shard() else -1 if p.is_replicate() else -2 for p in t.placements]
            t = t.to_local()
        found += [] if t is None else [t.detach().clone()]
    return found


def _count():
    return distributed.group.WORLD._get_sequence_number_for_group()


def _train(rank, model, same, batches=batch):
    """Every rank of a group has the same batch. Losses, gradients, parameters, and how many collectives there were."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        before = _count()
        loss = model(*batches(step, 0 if same else rank))
        loss.backward()
        seen += [_count() - before, loss.detach(), *parts(p.grad for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen + parts(model.parameters())


def _in_engine(report, nodes=NODES):
    assert report.captured and not report.pytorch_calls and not report.breaks, report
    assert set(report.python_ops) == nodes, report
    return "same"


def columns_and_rows(rank, folder):
    """Losses, gradients and parameters; what the layers communicate is in the graph."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    model = parallel(mesh)
    tree, before = Tree(model), parts(model.parameters())
    with tree.isolated():  # a check of rounding gives each rank's part other values
        tree.replace_parameters(lambda part: part + 1)
        found = parts(model.parameters())
    for p, q in zip(found, before, strict=True):
        assert p == q if isinstance(p, int) else torch.equal(p, q + 1)
    return _in_engine(both(lambda: parallel(mesh), functools.partial(_train, rank, same=True), **CLOSE))


class Rows(nn.Module):
    """A norm and a residual for each part of the tokens, products for all of them."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x))))).square().mean()


def _tokens(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(2, 4 + step, WIDTH, generator=generator).requires_grad_()]


def sequence(rank, folder):
    """Tokens are split among the ranks but where there are products; a DTensor goes from the norm to them, or not."""
    mesh = init_device_mesh("cpu", (2,))
    for local in (False, True):
        plan = {
            "norm": SequenceParallel(use_local_output=local),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }

        def train(model):
            given = [_tokens(step, rank) for step in range(3)]
            found = _train(rank, model, False, lambda step, rank, given=given: given[step])
            return found + [x.grad for (x,) in given]

        _in_engine(
            both(lambda plan=plan: parallelize_module(net(Rows), mesh, plan), train, **CLOSE), NODES - {"from_local"}
        )
    return "same"


class RootMeanSquare(nn.Module):
    """As models have it in Python."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        rows, length, _ = x.shape
        query, key, value = (
            product(x).view(rows, length, -1, 2).transpose(1, 2) for product in (self.query, self.key, self.value)
        )
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(rows, length, -1))


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(a, b) for a, b in ((WIDTH, 16), (WIDTH, 16), (16, WIDTH)))

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = RootMeanSquare(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed = Attention(), Feed()

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class Decoder(Net):
    def __init__(self, layers=2):
        super().__init__(0)
        self.table = nn.Embedding(2 * WORDS, WIDTH, padding_idx=3)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 2 * WORDS)


def decoder(mesh, table=ColwiseParallel, layers=2):
    """Sequence parallel throughout, as models of language are trained."""
    model = parallelize_module(net(Decoder, layers), mesh, {
        "table": table(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    })  # fmt: skip
    for layer in model.layers:
        split = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        parallelize_module(layer, mesh, {
            "first": SequenceParallel(), "second": SequenceParallel(), "attention": split, "feed": split,
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "feed.gate": ColwiseParallel(), "feed.up": ColwiseParallel(),
            "feed.down": RowwiseParallel(output_layouts=Shard(1)),
        })  # fmt: skip
    return model


def words(step, rank, rows=2):
    """Lengths that two ranks can share."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(0, 2 * WORDS, (rows, 4 + 2 * (step % 2)), generator=generator) for _ in range(2)]


def decoders(rank, folder):
    """Norms in Python, DTensors that several products use, a table that is split by columns."""
    mesh = init_device_mesh("cpu", (2,))
    train = functools.partial(_train, rank, same=True, batches=words)
    return _in_engine(both(lambda: decoder(mesh), train, **CLOSE), NODES - {"from_local"})


def modes(rank, folder):
    """bfloat16, no gradient, frozen weights, gradients of gradients, a rank that runs it in PyTorch."""
    mesh = init_device_mesh("cpu", (2,))
    make = functools.partial(decoder, mesh, layers=1)

    def half(model):
        with torch.autocast("cpu", torch.bfloat16):
            return _train(rank, model, True, words)

    _in_engine(both(make, half, rtol=5e-2, atol=2e-2), NODES - {"from_local"})

    def frozen(model):
        for name, p in model.named_parameters():
            p.requires_grad_("query" not in name and "norm" not in name)
        found = _train(rank, model, True, words)
        with torch.no_grad():
            return [*found, model(*words(0, 0)), model.eval()(*words(1, 0))]

    _in_engine(both(make, frozen, **CLOSE), NODES - {"from_local"})

    def twice(model):
        loss = model(*batch(0, 0))
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(whole([g])[0].square().sum() for g in grads).backward()
        return parts(p.grad for p in model.parameters())

    both(lambda: parallel(mesh), twice, **CLOSE)
    expected = _train(rank, make(), True, words)
    for plain in range(2):
        model = make() if rank == plain else ORTModule(make())
        torch.testing.assert_close(_train(rank, model, True, words), expected, **CLOSE)
    return "same"


class Beside(nn.Module):
    """What does not depend on a product's communication."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        y = self.up(x)
        z = collective_cases.Between.apply(x)
        y = self.down(torch.tanh(y))
        return (y + collective_cases.Between.apply(z)).square().mean()


def overlap(rank, folder):
    """Communication is begun at its place, and waited for where its result is used first."""
    mesh = init_device_mesh("cpu", (2,))
    split = {"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}

    def make():
        return parallelize_module(
            net(Beside), mesh, {"up": ColwiseParallel(**split[0]), "down": RowwiseParallel(**split[1])}
        )

    report = both(make, lambda model: _train(rank, model, False, _tokens), **CLOSE)
    _in_engine(report, (NODES - {"from_local"}) | {"Between"})
    model = ORTModule(make())
    with collective_cases.noted() as met:
        model(*_tokens(0, rank))
    order = ["redistribute", "wait_tensor", "Between", "between", "redistribute", "Between", "between", "wait_tensor"]
    assert met[-len(order) :] == order, met
    return "same"


class Apart(nn.Module):
    """A softmax over what is split among the ranks, which needs communication of its own."""

    def __init__(self, hidden=16):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).softmax(-1)).square().mean()


def _columns(hidden, local, rows=True):
    mesh = init_device_mesh("cpu", (2,))
    replicated = Replicate() if local else None
    styles = {"up": ColwiseParallel(output_layouts=replicated, use_local_output=local)}
    return parallelize_module(net(Apart, hidden), mesh, styles | ({"down": RowwiseParallel()} if rows else {}))


def left_to_pytorch(rank, folder):
    """Parts that are not as large as others, a table split by words: breaks. A function without a rule: PyTorch runs
    the call, then the layers."""
    train = functools.partial(_train, rank, same=True, batches=_tokens)
    report = both(lambda: _columns(5, True, rows=False), train, **CLOSE)
    assert report.captured and set(report.breaks) == {"up"}, report
    mesh = init_device_mesh("cpu", (2,))
    train = functools.partial(_train, rank, same=True, batches=words)
    report = both(lambda: decoder(mesh, RowwiseParallel), train, **CLOSE)
    assert report.captured and set(report.breaks) == {"table"}, report
    assert set(report.python_ops) == (NODES - {"from_local"}) | {"table"}, report
    train = functools.partial(_train, rank, same=True, batches=_tokens)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        expected, model = train(_columns(16, False)), ORTModule(_columns(16, False))
        torch.testing.assert_close(train(model), expected, **CLOSE)
    text = "forward calls softmax of a DTensor: for which there is no rule"
    assert rank or any(text in str(each.message) for each in told), [str(each.message) for each in told]
    return "same"


class Logits(Net):
    """Without its loss."""

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class WithLoss(Logits):
    def __init__(self, reduction):
        super().__init__()
        self.reduction = reduction

    def forward(self, ids, labels):
        logits = super().forward(ids).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction=self.reduction)


def _split_logits(mesh, cls, *args):
    model = net(cls, *args)
    model.head = nn.Linear(WIDTH, 2 * WORDS)
    for layer in model.layers:
        parallelize_module(layer, mesh, {name: style() for name, style in (COLUMNS | ROWS).items()})
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(model, mesh, {"head": style})


def _train_in_parallel(model, inside):
    """A loss of logits that are split by words, and its backward, without gathering them."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(4):
        before, (ids, labels) = _count(), batch(step, 0)
        labels[0, :2] = -100
        with loss_parallel():
            if inside:
                loss = model(ids, labels).sum()
            else:
                logits = model(ids)
                seen += parts([logits])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
        assert type(loss) is DTensor
        seen += [_count() - before, *parts([loss, *(p.grad for p in model.parameters())])]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen += [] if inside else parts([model(ids)])
    return seen + parts(model.parameters())


def parallel_loss(rank, folder):
    """`loss_parallel` around a module that returns logits as a DTensor, and one that returns their loss."""
    mesh = init_device_mesh("cpu", (2,))
    report = both(lambda: _split_logits(mesh, Logits), lambda model: _train_in_parallel(model, False), **CLOSE)
    _in_engine(report, NODES - {"from_local"})  # the latest graph has no gradients
    for reduction in ("mean", "sum", "none"):

        def train(model):
            found = _train_in_parallel(model, True)
            captured = explain(model) if isinstance(model, ORTModule) else None
            try:  # outside of it PyTorch refuses labels that are no DTensor
                model(*batch(0, 0))
            except RuntimeError as error:
                assert "mixed torch.Tensor and DTensor" in str(error), error
            else:
                raise AssertionError("there is no error")
            if captured is not None:
                _in_engine(captured)
            return found

        text = "forward calls cross_entropy of a DTensor: its operands lie on the mesh"
        both(lambda how=reduction: _split_logits(mesh, WithLoss, how), train, text, **CLOSE)
    return "same"


def data_parallel(rank, folder):
    """DistributedDataParallel over one dimension of a mesh, products over the other. PyTorch runs these: in
    each call it makes DTensors of their weights."""
    for shape in ((1, 2), (2, 1)) if distributed.get_world_size() == 2 else ((2, 2),):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        row, found = mesh["data"].get_local_rank(), []
        for wrap in (False, True):
            inner = ORTModule(parallel(mesh["tensor"])) if wrap else parallel(mesh["tensor"])
            model = DistributedDataParallel(inner, device_mesh=mesh["data"])
            # (The order of its collectives and the layers' may be another one.)
            found.append([x for x in _train(row, model, same=False) if isinstance(x, torch.Tensor)])
        torch.testing.assert_close(found[1], found[0], **CLOSE)
        report = explain(inner)
        assert report.captured and not report.pytorch_calls, report
        assert {name.rpartition(".")[2] for name in report.breaks} == {*COLUMNS, *ROWS}, report
    return "same"


def two_dimensions(rank, folder):
    """Layers that are sharded over one dimension of a mesh, and whose products are parallel over the other."""
    for shape in ((1, 2), (2, 1)) if distributed.get_world_size() == 2 else ((2, 2),):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))

        def make(mesh=mesh):
            model = parallel(mesh["tensor"])
            for layer in model.layers:
                fully_shard(layer, mesh=mesh["data"])
            return fully_shard(model, mesh=mesh["data"])

        report = both(make, functools.partial(_train, mesh["data"].get_local_rank(), same=False), **CLOSE)
        assert report.captured and len(report.sharded) == 2, report
        for layer in report.sharded.values():
            assert layer.captured and not layer.breaks and set(layer.python_ops) <= NODES, layer
    return "same"
