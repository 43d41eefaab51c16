"""What builtins and libraries make of a size is what PyTorch's forward gets, at any length."""

import array
import ast
import bisect
import collections
import copy
import decimal
import enum
import fractions
import functools
import hashlib
import heapq
import itertools
import json
import logging
import math
import operator
import pickle
import re
import statistics
import string
import struct
import zlib

import numpy
import pytest
import torch
from torch import nn

from ortmodule import ORTModule
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTHS = ((2, 4), (3, 6), (2, 9), (2, 4), (4, 12), (2, 14))


class Sizes(enum.IntEnum):
    FOUR = 4
    SIX = 6
    NINE = 9


class Held:
    a4, a6, a9 = 2.0, 3.0, 4.0


def matched(n):
    match n:
        case 4:
            return 2.0
        case int():
            return 3.0
        case _:
            return 4.0


def works(function):
    try:
        function()
    except Exception:
        return 3
    return 2


@functools.singledispatch
def dispatched(n):
    return 4


@dispatched.register
def _(n: int):
    return 2


@dispatched.register
def _(n: torch.Tensor):
    return 3


def executed(n):
    space = {"n": n}
    exec("m = n + 1", space)
    return space["m"]


def raised(n):
    try:
        if n > 5:
            raise ValueError(n)
    except ValueError as error:
        return error.args[0]
    return 3


def logged(n):
    logging.getLogger("tests.sizes").debug(f"a length of {n}")
    return 2


TEXT = {
    "str": lambda n: len(str(n)),
    "int of str": lambda n: int(str(n)),
    "repr": lambda n: int(repr(n)),
    "f-string": lambda n: len(f"{n}"),
    "f-string, spec": lambda n: int(f"{n:04d}"),
    "f-string, hex": lambda n: int(f"{n:x}", 16),
    "f-string, repr": lambda n: int(f"{n!r}"),
    "format": lambda n: int(format(n)),
    "str.format": lambda n: int("{:d}".format(n)),  # noqa: UP032
    "%d": lambda n: int("%d" % n),  # noqa: UP031
    "%s": lambda n: int("%s" % n),  # noqa: UP031
    "template": lambda n: int(string.Template("$n").substitute(n=n)),
    "join": lambda n: int("".join(map(str, [n]))),
    "in": lambda n: 2 if "1" in f"{n}" else 3,
    "compared": lambda n: 2 if str(n) < "5" else 3,
    "a key": lambda n: {"4": 2.0, "6": 3.0}.get(f"{n}", 5.0),
    "a key by str": lambda n: {"4": 2.0, "6": 3.0}.get(str(n), 5.0),
    "a name": lambda n: getattr(Held, f"a{n}", 5.0),
    "a name by str": lambda n: getattr(Held, "a" + str(n), 5.0),
    "regex": lambda n: 2 if re.match("[1-5]$", str(n)) else 3,
    "zfill": lambda n: len(str(n).zfill(3)),
    "ljust": lambda n: len("a".ljust(n)),
    "literal": lambda n: ast.literal_eval(str(n)),
    "eval": lambda n: eval(f"{n} + 1"),
    "md5": lambda n: hashlib.md5(str(n).encode()).digest()[0],
    "json": lambda n: int(json.dumps(n)),
    "json list": lambda n: json.loads(json.dumps([n, n]))[1],
    "json dictionary": lambda n: json.loads(json.dumps({"n": n}))["n"],
    "json key": lambda n: int(*json.loads(json.dumps({n: 1}))),
    "bin": lambda n: len(bin(n)),
    "oct": lambda n: len(oct(n)),
    "hex": lambda n: int(hex(n), 16),
    "chr": lambda n: ord(chr(n + 60)),
    "log": logged,
    "exception": raised,
}
KEYS = {
    "hash": hash,
    "hash of a tuple": lambda n: hash((n, 1)) % 1000,
    "get": lambda n: {4: 2.0, 6: 3.0}.get(n, 5.0),
    "in a dictionary": lambda n: 2 if n in {4: 1, 9: 1} else 3,
    "its own key": lambda n: next(iter({n: 1})),
    "a value": lambda n: next(iter({1: n}.values())),
    "by type": lambda n: {int: 2.0, float: 3.0}.get(type(n), 5.0),
    "Counter": lambda n: collections.Counter([n, n, 4])[4],
    "in a frozenset": lambda n: 2 if n in frozenset((4, 6)) else 3,
    "in a set": lambda n: 2 if n in {4, 9} else 3,
    "a set of it": lambda n: len({n, 4, 6}),
    "least of a set": lambda n: min({n, 50}),
    "in a list": lambda n: 2 if n in [4, 9] else 3,
    "in a range": lambda n: 2 if n in range(5, 10) else 3,
    "index": lambda n: [4, 6, 9, 12, 14].index(n),
    "count": lambda n: [4, 6, n].count(n),
    "tuples": lambda n: 2 if (n, 1) == (6, 1) else 3,
    "match": matched,
    "enum": lambda n: len(Sizes(n).name) if n in (4, 6, 9) else 1,
    "namedtuple": lambda n: collections.namedtuple("P", "a")(n).a,
}
BYTES = {
    "pickle": lambda n: pickle.loads(pickle.dumps(n)),
    "copy": copy.copy,
    "deepcopy": lambda n: copy.deepcopy([n])[0],
    "bytes": lambda n: len(bytes(n)),
    "bytearray": lambda n: len(bytearray(n)),
    "bytes of a list": lambda n: bytes([n])[0],
    "struct": lambda n: struct.unpack("i", struct.pack("i", n))[0],
    "to_bytes": lambda n: int.from_bytes(n.to_bytes(4, "big"), "big"),
    "array": lambda n: array.array("i", [n])[0],
    "crc32": lambda n: zlib.crc32(bytes([n])) % 97,
}
NUMBERS = {
    "int": int,
    "float": float,
    "complex": lambda n: complex(n).real,
    "bool": lambda n: 1 + bool(n - 4),
    "round": lambda n: round(n / 4),
    "round to 2": lambda n: round(n / 7, 2),
    "abs": lambda n: abs(n - 7),
    "divmod": lambda n: divmod(n, 4)[1],
    "divmod by": lambda n: divmod(100, n)[1],
    "pow": lambda n: pow(n, 2),
    "pow mod": lambda n: pow(n, 2, 7),
    "invert": lambda n: ~n,
    "and": lambda n: n & 6,
    "or": lambda n: n | 1,
    "xor": lambda n: n ^ 5,
    "shift": lambda n: n << 2,
    "shift by": lambda n: 1 << n,
    "mod": lambda n: n % 4,
    "mod by": lambda n: 100 % n,
    "power of": lambda n: 2**n,
    "root": lambda n: n**0.5,
    "inverse": lambda n: n**-1,
    "index": operator.index,
    "min": lambda n: min(n, 7),
    "sum": lambda n: sum([n, n]),
    "sorted": lambda n: sorted([n, 7, 1])[1],
    "any": lambda n: 1 + any([n - 4]),
    "range": lambda n: sum(range(n)),
    "steps": lambda n: len(range(0, 100, n)),
    "slice": lambda n: len("abcdefghijklmnopqrst"[:n]),
    "text times": lambda n: len("ab" * n),
    "list times": lambda n: len(n * [1]),
    "item": lambda n: list(range(40))[n],
    "or else": lambda n: (n > 5 and 2) or 3,
    "between": lambda n: 2 if 4 < n < 10 else 3,
    "not": lambda n: 1 + (not n - 4),
    "true as 1": lambda n: (n > 5) * 2 + (n == 6),
    "bit_count": lambda n: n.bit_count(),
    "bit_length": lambda n: n.bit_length(),
    "imag": lambda n: 1 + n.imag,
    "sqrt": math.sqrt,
    "isqrt": math.isqrt,
    "log2": math.log2,
    "floor": lambda n: math.floor(n / 4),
    "ceil": lambda n: math.ceil(n / 4),
    "trunc": lambda n: math.trunc(n / 4),
    "gcd": lambda n: math.gcd(n, 6),
    "comb": lambda n: math.comb(n, 2),
    "prod": lambda n: math.prod([n, 2]),
    "fsum": lambda n: math.fsum([n, 0.5]),
    "isclose": lambda n: 2 if math.isclose(n, 6) else 3,
    "fmod": lambda n: math.fmod(n, 4),
    "frexp": lambda n: math.frexp(n)[1],
    "modf": lambda n: math.modf(n / 4)[0],
    "Decimal": lambda n: float(decimal.Decimal(n) / 3),
    "Fraction": lambda n: float(fractions.Fraction(n, 3)),
    "mean": lambda n: statistics.mean([n, 2]),
    "numpy": lambda n: float(numpy.sqrt(n)),
    "NumPy's array": lambda n: int(numpy.array([n, 2]).sum()),
    "NumPy's arange": lambda n: int(numpy.arange(n).sum()),
    "NumPy's factor": lambda n: float(numpy.float64(2.0) * n),
    "NumPy's clip": lambda n: int(numpy.clip(n, 5, 7)),
    "bisect": lambda n: bisect.bisect([5, 7, 10], n),
    "heapq": lambda n: heapq.nsmallest(1, [n, 7])[0],
    "islice": lambda n: len(list(itertools.islice(itertools.count(), n))),
    "reduce": lambda n: functools.reduce(operator.mul, [n, 2]),
    "partial": lambda n: functools.partial(operator.add, n)(1),
    "deque": lambda n: len(collections.deque(range(20), maxlen=n)),
    "exec": executed,
}
TYPES = {
    "is": lambda n: 2 if type(n) is int else 3,
    "equal": lambda n: 2 if operator.eq(type(n), int) else 3,
    "name": lambda n: 2 if type(n).__name__ == "int" else 3,
    "class": lambda n: 2 if n.__class__ is int else 3,
    "one of": lambda n: 2 if type(n) in (int, float) else 3,
    "called": lambda n: type(n)(3),
    "issubclass": lambda n: 2 if issubclass(type(n), int) else 3,
    "isinstance": lambda n: 2 if isinstance(n, int) else 3,
    "is_tensor": lambda n: 2 if torch.is_tensor(n) else 3,
    "shape": lambda n: 2 if hasattr(n, "shape") else 3,
    "item": lambda n: 2 if hasattr(n, "item") else 3,
    "__len__": lambda n: 2 if hasattr(n, "__len__") else 3,
    "isscalar": lambda n: 2 if numpy.isscalar(n) else 3,
    "dir": lambda n: 2 if "bit_count" in dir(n) else 3,
    "len": lambda n: works(lambda: len(n)),
    "call of item": lambda n: works(lambda: n.item()),
    "singledispatch": dispatched,
    "result type": lambda n: 2 if torch.result_type(torch.ones(1, dtype=torch.int8), n) == torch.int8 else 3,
    "promotion": lambda n: (torch.ones(1, dtype=torch.int8) + n).dtype.itemsize,
    "broadcast": lambda n: torch.broadcast_shapes((n, 1), (1, 3))[0],
}
GROUPS = {"text": TEXT, "keys": KEYS, "bytes": BYTES, "numbers": NUMBERS, "types": TYPES}
CASES = [(group, name) for group, found in GROUPS.items() for name in found]


class Scaled(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3), function

    def forward(self, x):
        return self.layer(x) * self.function(x.shape[1])


@each("group, name", CASES, lambda case: case[0] == "text" or zlib.crc32(case[1].encode()) % 8 == 0)
@pytest.mark.parametrize("share", ("0", "inf"))
def test_a_number_of_a_size(group, name, share, monkeypatch):
    """The first graph serves what it serves: a graph for each size, PyTorch, or one for all."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", share)
    torch.manual_seed(0)
    eager = Scaled(GROUPS[group][name])
    ours = ORTModule(copy.deepcopy(eager))
    for rows, length in LENGTHS:
        x = torch.randn(rows, length, 3)
        torch.testing.assert_close(ours(x), eager(x), rtol=1e-4, atol=1e-5)
