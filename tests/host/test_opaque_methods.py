"""A method of a submodule that no trace follows is one node that PyTorch runs; the engine has the rest."""

import copy
import itertools

import numpy
import pytest
import torch
import transformers
from torch import nn

from ortmodule import ORTModule, explain


class Part(nn.Module):
    """Positions count anew behind every change of the kind: what Python loops find out."""

    def __init__(self):
        super().__init__()
        self.table, self.linear, self.last = nn.Embedding(64, 8), nn.Linear(8, 8), None

    def forward(self, x, kinds):
        return self.linear(x + self.table(self.positions(kinds)))

    def positions(self, kinds):
        return torch.tensor([self.counted(row) for row in kinds.tolist()])

    def counted(self, row):
        return [i for _, group in itertools.groupby(row) for i, _ in enumerate(group)]


class Nested(Part):
    def positions(self, kinds):
        return self.found(kinds) * 1

    def found(self, kinds):
        return super().positions(kinds)


class Sets(Part):
    def positions(self, kinds):
        self.last = super().positions(kinds)
        return self.last


class Pairs(Part):
    def forward(self, x, kinds):
        (places, none), found = self.several(kinds, offset=1)
        assert none is None
        return self.linear(x + self.table(places) * found[..., None])

    def several(self, kinds, offset):
        return (super().positions(kinds) + offset, None), [(kinds > 0).float() for _ in kinds.tolist()][0]


class Differentiable(Part):
    """What it computes carries a gradient, of a parameter that it finds itself."""

    def forward(self, x, kinds):
        return self.linear(x + self.looked_up(kinds))

    def looked_up(self, kinds):
        return self.table(super().positions(kinds))


class Numbers(Part):
    def positions(self, kinds):
        return super().positions(kinds) * self.longest(kinds)

    def longest(self, kinds):
        return max(max(self.counted(row)) for row in kinds.tolist())


class Whole(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 8), part, nn.Linear(8, 3)

    def forward(self, x, kinds):
        return self.last(self.part(self.first(x), kinds).tanh()).square().mean()


def batch(rows, length, seed):
    make = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, 8, generator=make), torch.randint(0, 2, (rows, length), generator=make)


def compared(part):
    """The report after some batches that came out as in PyTorch, and both modules."""
    torch.manual_seed(0)
    eager = Whole(part())
    ours = ORTModule(copy.deepcopy(eager))
    for seed, (rows, length) in enumerate([(2, 12), (3, 20), (2, 12), (2, 9)]):
        x, kinds = batch(rows, length, seed)
        found = []
        for module in (ours, eager):
            module.zero_grad()
            operand = x.clone().requires_grad_()
            loss = module(operand, kinds)
            loss.backward()
            found.append([loss, operand.grad, *[p.grad for p in module.parameters()]])
        torch.testing.assert_close(*found)
        if part is Sets:
            torch.testing.assert_close(ours.part.last, eager.part.last)
    report = explain(ours)
    assert report.captured, report.fallback
    return report


@pytest.mark.parametrize(
    ("part", "name"),
    [(Part, "positions"), (Nested, "found"), (Sets, "positions"), (Pairs, "several")],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.filterwarnings("ignore:.*PyTorch runs")
def test_it_alone_is_left_to_pytorch(part, name):
    report = compared(part)
    assert report.python_ops == [f"part.{name}"] and report.exports == 1


@pytest.mark.parametrize("part", [Differentiable, Numbers], ids=lambda part: part.__name__)
@pytest.mark.filterwarnings("ignore:.*PyTorch runs")
def test_what_gives_more_than_tensors_without_a_gradient_is_not(part):
    assert compared(part).python_ops in (["part"], ["part.positions"])


def test_the_warning_names_it():
    with pytest.warns(UserWarning, match="PyTorch runs the method part.positions inside the graph: .*takes the values"):
        ORTModule(Whole(Part()))(*batch(2, 12, 0))


@pytest.mark.filterwarnings("ignore:.*PyTorch runs")
def test_an_error_in_it_is_the_callers():
    class Raises(Part):
        def positions(self, kinds):
            if kinds.max() > 1 and torch._C._get_tracing_state() is None:
                raise KeyError("no such kind")
            return super().positions(kinds)

    ours = ORTModule(Whole(Raises()))
    x, kinds = batch(2, 12, 0)
    ours(x, kinds)
    with pytest.raises(KeyError, match="no such kind"):
        ours(x, kinds + 1)
    ours(x, kinds).backward()
    assert explain(ours).captured


@pytest.mark.filterwarnings("ignore:.*PyTorch runs")
def test_classes_are_as_they_were():
    ours = ORTModule(Whole(Part()))
    before = dict(vars(Part))
    ours(*batch(2, 12, 0)).backward()
    assert explain(ours).captured and dict(vars(Part)) == before


class Masks(nn.Module):
    """Masks hidden states where NumPy says, with a parameter, as SpecAugment does."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.mask = nn.Parameter(torch.full((4,), 0.5))

    def masked(self, h):
        count = int(numpy.random.rand() * h.shape[0]) + 1
        h[torch.from_numpy(numpy.random.choice(h.shape[0], count, replace=False))] = self.mask
        return h

    def forward(self, x):
        return self.last(self.masked(self.first(x)).tanh()).square().sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("verify", [False, True])
def test_a_method_that_draws_and_has_a_gradient(verify, monkeypatch):
    """The rest runs in the engine, from one capture; NumPy's generator is where it would be."""
    if verify:
        monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    found = []
    for wrap in (lambda module: module, ORTModule):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), Masks())
        module = wrap(module)
        numpy.random.seed(0)
        losses = []
        for n in (5, 6, 7, 5):
            loss = module(torch.randn(n, 4, generator=torch.Generator().manual_seed(n)))
            loss.backward()
            losses.append(loss.detach())
        found.append([losses, [p.grad for p in module.parameters()], torch.tensor(numpy.random.rand())])
    torch.testing.assert_close(found[1], found[0])
    report = explain(module)
    assert report.captured and report.exports == 1 and report.python_ops == ["1.masked"], report


@pytest.mark.filterwarnings("ignore")
def test_wav2vec_2_in_training_mode():
    """Its masks are drawn anew at each call, by PyTorch's method; everything else is the engine's."""
    found = []
    for wrap in (lambda module: module, ORTModule):
        torch.manual_seed(0)
        config = transformers.Wav2Vec2Config(
            vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 4), num_feat_extract_layers=2,
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
            activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, mask_time_length=2,
            mask_time_prob=0.2,
        )  # fmt: skip
        model = wrap(transformers.Wav2Vec2ForCTC(config).train())
        numpy.random.seed(0)
        losses = []
        for i in range(3):
            given = torch.Generator().manual_seed(i)
            out = model(
                input_values=torch.randn(2, 800, generator=given),
                labels=torch.randint(1, 8, (2, 4), generator=given),
            )
            out.loss.backward()
            losses.append(out.loss.detach())
        found.append([losses, [p.grad for p in model.parameters()], torch.tensor(numpy.random.rand())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)
    report = explain(model)
    assert report.captured and report.exports == 1 and report.python_ops == ["wav2vec2._mask_hidden_states"], report
