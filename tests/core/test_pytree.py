"""Taking Python values apart into tensors and a structure, and putting them together again."""

import copy
import dataclasses
import enum
import math
from collections import OrderedDict, defaultdict, deque, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import register_pytree_node
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from ortmodule import Config, ORTModule, explain
from ortmodule.core.errors import Unflattenable
from ortmodule.core.pytree import flatten

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Pair:
    first: object
    second: object = 3


class Box:
    def __init__(self, value):
        self.value = value


def tensor():
    return torch.ones(2)


ARGUMENTS = {
    "tensor": tensor(),
    "nothing": None,
    "numbers": [1, True, 1.0, -0.0, 2j, float("inf")],
    "text": ("a", b"b", Colour.RED, torch.float32, torch.device("cpu"), torch.Size([1, 2]), ...),
    "list": [tensor(), [tensor(), []]],
    "tuple": (tensor(), (), None),
    "named tuple": Point(tensor(), 2),
    "torch's tuple": torch.max(torch.ones(2, 2), 1),
    "dict": {"a": tensor(), 2: [tensor()], None: 1},
    "ordered": OrderedDict(b=tensor(), a=1),
    "default": defaultdict(list, a=[tensor()]),
    "deque": deque([tensor()], 3),
    "dataclass": Pair(tensor(), Pair(None)),
    "namespace": SimpleNamespace(a=tensor()),
    "model output": CausalLMOutputWithPast(loss=tensor(), logits=tensor()),
}


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple, deque)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if hasattr(a, "__dict__") and not isinstance(a, (type, enum.Enum)):
        return type(a) is type(b) and equal(vars(a), vars(b))
    if isinstance(a, float):
        return type(b) is float and a == b and math.copysign(1, a) == math.copysign(1, b)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("results", [False, True])
def test_there_and_back(name, results):
    value = ARGUMENTS[name]
    tensors, structure = flatten(value, results)
    again = structure.rebuild(tensors)
    assert equal(value, again)
    tensors_again, structure_again = flatten(again, results)
    assert structure_again == structure and hash(structure_again) == hash(structure)
    assert all(a is b for a, b in zip(tensors, tensors_again, strict=True))


def test_structures_differ_in_types_and_values():
    values = [
        1,
        1.0,
        True,
        "1",
        None,
        2,
        0.0,
        -0.0,
        [],
        (),
        {},
        [1],
        (1,),
        {"a": 1},
        {"b": 1},
        {1: 1},
        {True: 1},
        Pair(1),
    ]
    structures = [flatten(value)[1] for value in values]
    assert len(set(structures)) == len(values)


def test_nan_equals_itself():
    assert flatten(float("nan"))[1] == flatten(float("nan"))[1]


def test_numbers_can_be_ignored():
    a, b, c = (flatten(value)[1].without_numbers() for value in ([1, 2.0, "x"], [3, 4.0, "x"], [3, 4.0, "y"]))
    assert a == b != c


@pytest.mark.parametrize("value", [{1, 2}, torch.ones(2).to_sparse().requires_grad_(), iter([])])
def test_arguments_that_may_change(value):
    with pytest.raises(Unflattenable):
        flatten([value])


def test_cycles():
    around = []
    around.append(around)
    with pytest.raises(Unflattenable, match="itself"):
        flatten(around)
    box = Box(tensor())
    box.itself = box
    flatten(box, results=True)


def test_tensor_subclasses():
    class Mine(torch.Tensor):
        pass

    with pytest.raises(Unflattenable, match="Mine"):
        flatten(torch.ones(2).as_subclass(Mine))


def test_objects_in_results_are_rebuilt_around_tensors():
    plain, full = Box([1]), Box({"t": tensor(), "also": Box(None)})
    tensors, structure = flatten([plain, full], results=True)
    new = torch.zeros(2)
    again = structure.rebuild([new])
    assert again[0] is plain and again[1] is not full
    assert again[1].value["t"] is new and again[1].value["also"] is full.value["also"]
    assert tensors == [full.value["t"]]


def test_a_cache_in_a_model_output_stays_one_object():
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), 0)
    output = CausalLMOutputWithPast(logits=tensor(), past_key_values=cache)
    tensors, structure = flatten(output, results=True)
    assert len(tensors) == 4  # ModelOutput keeps its fields as items and as attributes; the cache is met once
    again = structure.rebuild([t + 1 for t in tensors])
    assert again.past_key_values is again["past_key_values"] is not cache
    assert again.past_key_values.layers[0].keys.sum() == 12
    assert again.past_key_values.get_seq_length() == 2


def test_a_named_tuple_whose_class_is_made_at_each_call():
    def made():
        return namedtuple("Made", "x y")(torch.ones(1), 2)

    values = made(), made()
    (_, first), (tensors, second) = (flatten(value, results=True) for value in values)
    assert first == second
    assert [type(each.rebuild(tensors)) for each in (first, second)] == list(map(type, values))
    again = first.rebuild(tensors)
    assert again._fields == ("x", "y") and again.x is tensors[0] and again.y == 2
    other = namedtuple("Made", "x z")(torch.ones(1), 2)
    assert flatten(other, results=True)[1] != first


class Linked:
    """A class that is more than its attributes, and has none to look at."""

    __slots__ = ("first", "second", "scale")

    def __init__(self, first, second, scale):
        self.first, self.second, self.scale = first, second, scale


register_pytree_node(
    Linked, lambda pair: ([pair.first, pair.second], pair.scale), lambda children, scale: Linked(*children, scale)
)


def test_types_that_users_have_registered():
    """With torch.utils._pytree: as arguments and as results, by their contexts."""

    class Scales(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, pair):
            return Linked(self.linear(pair.first) * pair.scale, pair.second + 1, pair.scale)

    theirs = Scales()
    ours = ORTModule(copy.deepcopy(theirs), config=Config(capture_share=float("inf")))
    for scale in (2, 3, 2):
        pair = Linked(torch.randn(2, 3), torch.randn(2), scale)
        found, expected = ours(pair), theirs(pair)
        assert type(found) is Linked and found.scale == scale
        for a, b in ((found.first, expected.first), (found.second, expected.second)):
            torch.testing.assert_close(a, b)
        found.first.sum().backward()
    assert explain(ours).engine_calls == 3 and explain(ours).exports <= 2
