"""Records what Python learns from tensors while a module is traced, so that runs can compare it.

A trace records tensor operations; whatever Python decides with a number taken out of a tensor (`if mask.all():`,
`range(x.shape[1])`) is decided once, for ever. So every way out of a tensor is watched during a trace, and what was
read becomes an extra output of the graph: a run that would read something else is found by comparing.

Each read is classified by walking back from the value in the traced graph: it depends on nothing (a constant), on
sizes only (compared once for each new shape), or on data (compared after every run). A decision that depends on a
random number, and anything that autograd does inside forward, cannot be replayed: :class:`NotTraceable`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Distribution
from torch.nn.modules import module as nn_module
from torch.nn.utils import stateless

from ortmodule.capture.calls.conversion_calls import gives
from ortmodule.capture.numbers import size_arithmetic
from ortmodule.capture.numbers.part_counts import part_count
from ortmodule.capture.numbers.read_causes import DATA, RANDOM, SIZE, dependence
from ortmodule.core.errors import NotTraceable
from ortmodule.core.names import PACKAGE
from ortmodule.core.objects.dispatchers import dispatcher_of
from ortmodule.core.objects.interception import Replacement, replaced
from ortmodule.core.size_expr import SizeFormula, formula_of, is_number, is_whole, number_of
from ortmodule.core.torch_private import (
    CHECK,
    TracedValue,
    get_tracing_state,
    get_value_trace,
    is_vmapped,
    pack_padded_sequence,
    pad_packed_sequence,
    places,
    schemas_for_operator,
    untraced,
    validate_sample,
)
from ortmodule.guards.fields import FieldReads
from ortmodule.guards.reads import item_reads
from ortmodule.guards.reads.item_reads import WITH_ITEMS
from ortmodule.guards.reads.shown_texts import is_shown, is_written

#: Models ask whether numbers overflow. What was drawn has next to nothing to do with the answer, and a run that finds
#: another one is none of the graph's.
_ROUNDING = 1e-14
_OURS = ("ortmodule.", "torch.jit.", "torch.onnx.")  # classes of modules that a trace is made with
_TORCH = torch.__path__[0]
MOST_ELEMENTS = 16  # of a tensor that is read as a whole

_current = threading.local()


@dataclass
class Read:
    """One value that Python took out of a tensor."""

    tensor: torch.Tensor | None  # traced, of rank 0; none once the trace is made
    value: float
    depends: int
    place: str
    submodule: str | None = None  # whose forward it is in
    formula: SizeFormula | None = None  # how it follows from sizes

    def is_value(self, found: float) -> bool:
        """Is it what another run, or another trace, has found? What Python computes with sizes a graph repeats in
        float64, and the last place may differ."""
        if self.depends == SIZE and math.isclose(found, self.value, rel_tol=_ROUNDING):
            return True
        return found == self.value or (found != found and self.value != self.value)


@dataclass
class Recorder:
    """What was read during one trace."""

    reads: list[Read] = field(default_factory=list)
    attributes: dict[tuple[int, str], str] = field(default_factory=dict)  # (id of a module, name): where it is read
    fields: FieldReads = field(default_factory=FieldReads)  # of plain objects
    #: Of attributes that hold a dictionary or a namespace: which instructions read them.
    sites: dict[tuple[int, str], set[tuple[types.CodeType, int]]] = field(default_factory=dict)
    met: dict[tuple[int, str], int] = field(default_factory=dict)  # ids of attributes' values, by their dictionaries
    began: dict[int, Any] = field(default_factory=dict)  # what containers held when forward began, by their ids
    asks_layout: bool = False  # does forward ask how a tensor lies in memory?
    where: Callable[[], str | None] = lambda: None  # the submodule whose forward runs
    numbers: Any = None  # what becomes of numbers from data (data_numbers.py); None: they are compared
    checkpoints: Any = None  # what becomes of checkpoints (checkpoints.py); None: they are what they are
    _depends: dict[tuple[int, bool], int] = field(default_factory=dict)  # of a value; True: of its size
    _seen: set[int] = field(default_factory=set)
    _paused: bool = False
    _bounds: Iterable[Any] = ()  # of slices that are taken now

    def reset(self) -> None:
        """Forgets everything: a new trace begins."""
        for kept in (self.reads, self.attributes, self.met, self._depends, self._seen):
            kept.clear()

    def of(self, depends: int) -> list[Read]:
        return [read for read in self.reads if read.depends == depends]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def read(self, tensor: Any, least: int = SIZE) -> None:
        """Python sees the elements of ``tensor``. Reads that depend on less than ``least`` are not kept."""
        value = get_value_trace(tensor)
        depends = self.depends(value)
        if depends < least or value.unique() in self._seen:
            return
        self._seen.add(value.unique())
        if depends == RANDOM and _is_validation():
            depends = DATA  # where a run finds another answer an error follows, not another way
        if depends >= RANDOM:
            what = "a random number" if depends == RANDOM else "what a submodule that PyTorch runs computes"
            raise NotTraceable(f"{user_line()} decides something with {what}")
        if tensor.numel() > MOST_ELEMENTS:
            with untraced():
                shape = list(tensor.shape)
            raise NotTraceable(f"{user_line()} takes the values out of a tensor of shape {shape}")
        place, formula = user_line(), formula_of(tensor)
        number = None if formula is None else formula.at(formula.sizes)
        if number is not None:
            self.reads.append(Read(tensor, float(number), depends, place, self.where(), formula))
            return
        tensor = tensor.clone()  # as it is now: forward may change it
        for element in tensor.reshape(-1).unbind() if tensor.dim() else (tensor,):
            self.reads.append(Read(element, float(untraced_item(element)), depends, place, self.where()))

    def depends_of(self, tensor: torch.Tensor) -> int:
        """What a tensor of the trace depends on."""
        return self.depends(get_value_trace(tensor))

    def watches(self) -> bool:
        """Does it trace, and is not itself at work?"""
        return not self._paused and get_tracing_state() is not None

    def depends(self, value: TracedValue) -> int:
        """What a traced value depends on."""
        return dependence(value, self._depends)


@contextlib.contextmanager
def hidden_tracing() -> Iterator[None]:
    """Inside, in this thread, `torch.jit.is_tracing()` is false for user code."""
    _current.hidden = True
    try:
        yield
    finally:
        _current.hidden = False


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Watches the tensors of this thread. One thread at a time records (exporting holds a lock)."""
    recorder = _current.recorder = Recorder()
    try:
        with replaced(_REPLACEMENTS):
            yield recorder
    finally:
        _current.recorder = None


def of_thread() -> Recorder | None:
    """The recorder of this thread, also while PyTorch runs a node of the trace."""
    return getattr(_current, "recorder", None)


def active() -> Recorder | None:
    """The recorder of this thread while it traces and is not itself at work."""
    recorder = of_thread()
    return recorder if recorder is not None and recorder.watches() else None


def converts(depth: int) -> None:
    """The caller's caller, ``depth`` frames above, makes a plain number of one that data decides."""
    if (recorder := active()) is not None and recorder.numbers is not None:
        recorder.numbers.calls.meet(sys._getframe(depth + 1))


def read(tensor: torch.Tensor) -> None:
    """Python sees the elements of a traced ``tensor``."""
    if (recorder := active()) is not None:
        recorder.read(tensor)


def decided_by_data(arguments: Iterable[Any]) -> bool:
    """Does one of these depend on data? (Python's numbers do not.)"""
    recorder, tensors = active(), [a for a in arguments if isinstance(a, torch.Tensor)]
    return recorder is not None and any(recorder.depends_of(t) >= DATA for t in tensors)


def untraced_item(tensor: torch.Tensor) -> Any:
    """The number in a traced ``tensor`` of rank 0."""
    with untraced():
        return _item(tensor)


#: Files whose lines say nothing to a user: torch's, ours, and those of Python that call others.
_PASSED = (torch.__path__[0], PACKAGE, contextlib.__file__, functools.__file__)


def user_line(frame: types.FrameType | None = None) -> str:
    """The line of the innermost frame, from ``frame`` on, that is neither torch's nor ours."""
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of_error(error: BaseException) -> str:
    """The line of the innermost frame that ``error`` comes through and that is neither torch's nor ours, or ""."""
    found, step = "", error.__traceback__
    while step is not None:
        if not step.tb_frame.f_code.co_filename.startswith(_PASSED):
            found = f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}"
        step = step.tb_next
    return found


def _is_validation() -> bool:
    """Does a distribution of torch's look at arguments or a sample (`validate_args`) that it raises an error for?"""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((torch.__path__[0], PACKAGE)):
        if frame.f_code in _VALIDATIONS:
            return True
        frame = frame.f_back
    return False


_VALIDATIONS = {Distribution.__init__.__code__, getattr(validate_sample, "__code__", None)}


# --- the ways out of a tensor -----------------------------------------------------------------------------------------


def _elements(recorder: Recorder, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    recorder.read(tensor)


def _index(recorder: Recorder, tensor: torch.Tensor) -> None:
    if any(bound is tensor for bound in recorder._bounds):
        return
    if recorder.numbers is not None and recorder.numbers.symbolic and gives(caller := sys._getframe(2), 3):
        recorder.numbers.calls.meet(caller)  # `range(0, n, 8)`
    recorder.read(tensor)


def _count(recorder: Recorder, tensor: torch.Tensor) -> None:
    if tensor.dim() and not is_vmapped(tensor):
        recorder.read(tensor.size(0))


def _length(recorder: Recorder, tensor: torch.Tensor) -> None:
    """Where such calls are met it is a size as others are."""
    if recorder.numbers is not None and recorder.numbers.symbolic:
        recorder.numbers.calls.meet(sys._getframe(2))
    _count(recorder, tensor)


def _squeezed(recorder: Recorder, input: torch.Tensor, dim: Any = None) -> None:
    """Whether a dimension goes away depends on its size."""
    dims = range(input.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    for d in dims:
        if -input.dim() <= d < input.dim():
            recorder.read(input.size(d) == 1)


def _watched(owner: Any, name: str, watch: Callable[..., None]) -> Replacement:
    """`watch(recorder, tensor, ...)` goes first. Of numbers Python gets what it would have computed."""
    convert: Any = _CONVERSIONS.get(name)

    def make(original: Callable) -> Callable:
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            recorder = active()
            if recorder is not None:
                with recorder.paused():
                    if name in _WRITTEN and (text := _written(tensor, sys._getframe(1))) is not None:
                        return convert(text)
                    if name in _LOOKS and (found := _from_data(recorder, tensor, name)) is not NotImplemented:
                        return found
                    watch(recorder, tensor, *args, **kwargs)
                    number = number_of(tensor) if convert is not None else None
                if number is not None:
                    return convert(number)
            return original(tensor, *args, **kwargs)

        return method

    return Replacement.around(owner, name, make)


def _from_data(recorder: Recorder, tensor: torch.Tensor, name: str) -> Any:
    """The number in ``tensor`` as one that is traced, where data decides it and `name` may give such a one."""
    numbers = recorder.numbers
    if numbers is not None and numbers.symbolic and name in ("item", "tolist"):
        return numbers.take(recorder, tensor)
    if numbers is not None and numbers.symbolic and (recorder.depends_of(tensor) >= DATA or is_number(tensor)):
        numbers.calls.meet(sys._getframe(2))
    return NotImplemented


def _written(tensor: torch.Tensor, frame: types.FrameType) -> float | int | None:
    """The number that goes into a text for people, which decides nothing (`"%d" % n`); None: it does not."""
    return number_of(tensor) if is_written(frame) else None


def _text(name: str) -> Replacement:
    """Text for people decides nothing; other text is a read."""

    def make(original: Callable) -> Callable:
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            recorder = active()
            if recorder is None:
                return original(tensor, *args, **kwargs)
            frame = sys._getframe(1)
            with recorder.paused():
                if not (frame.f_code.co_filename.startswith((PACKAGE, _TORCH)) or is_shown(frame)):
                    recorder.read(tensor)
                number = number_of(tensor)
                if number is None:
                    return original(tensor, *args, **kwargs)
                return getattr(type(number), name)(number, *args, **kwargs)

        return method

    return Replacement.around(torch.Tensor, name, make)


def _hashes() -> Replacement:
    """A number that follows from a size finds what is kept under it. (Tensors in torch's own sets may have no data.)"""

    def make(original: Callable) -> Callable:
        def hash_of(tensor: torch.Tensor) -> int:
            recorder = active()
            file = sys._getframe(1).f_code.co_filename
            if recorder is None or _is_torch(file) or file.startswith(PACKAGE) or not is_number(tensor):
                return original(tensor)
            with recorder.paused():
                recorder.read(tensor)
            return hash(untraced_item(tensor))

        return hash_of

    return Replacement.around(torch.Tensor, "__hash__", make)


def _of_numbers(name: str, compute: Callable) -> Replacement:
    """What numbers have and tensors have not: a size is a tensor while it is traced."""

    def method(tensor: torch.Tensor, *args: Any) -> Any:
        if active() is None or not is_number(tensor):
            raise TypeError(f"type Tensor doesn't define {name} method")
        return compute(tensor, *args)

    return Replacement(torch.Tensor, name, method)


def _rounded(tensor: torch.Tensor, digits: int | None = None) -> Any:
    recorder = active()
    if digits is None and recorder is not None and recorder.numbers is not None:
        found = recorder.numbers.converted(recorder, round, tensor)
        if found is not None:
            return found
    return tensor if is_whole(tensor) and digits is None else round(tensor.item(), digits)


def _attribute_reads() -> Replacement:
    """Notes which attributes of modules forward looks at."""

    def make(original: Callable) -> Callable:
        def method(module: nn.Module, name: str) -> Any:
            recorder = active()
            if recorder is not None:
                if (id(module), name) not in recorder.attributes:
                    _note(recorder, module, name)
                if (sites := recorder.sites.get((id(module), name))) is not None:
                    frame = sys._getframe(1)
                    value = object.__getattribute__(module, "__dict__").get(name)
                    if not item_reads.are_own(value, recorder.began, name, frame.f_code, frame.f_lasti):
                        sites.add((frame.f_code, frame.f_lasti))
            return original(module, name)

        return method

    return Replacement.around(nn.Module, "__getattribute__", make)


def _note(recorder: Recorder, module: nn.Module, name: str) -> None:
    # The machinery of modules looks into the dictionary for every parameter.
    if name == "__dict__" and sys._getframe(2).f_code.co_filename == nn_module.__file__:
        return
    sites: set[tuple[types.CodeType, int]] = set()
    if (dispatcher := dispatcher_of(module)) is not None:
        module = dispatcher.module  # whose dictionary a wrapped module has
        sites.add((_note.__code__, -1))
    attributes = object.__getattribute__(module, "__dict__")
    if type(attributes.get(name, getattr(type(module), name, None))) in WITH_ITEMS:
        recorder.sites.setdefault((id(module), name), set()).update(sites)
    recorder.attributes[id(module), name] = user_line()
    for holder in (attributes, attributes.get("_buffers")):
        if isinstance(holder, dict):  # a scripted module has none
            recorder.met[id(holder), name] = id(holder.get(name))
    if not type(module).__module__.startswith(_OURS):
        recorder.fields.modules[id(module)] = module


def observed(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """For every function of torch that is called in a trace, whatever name it is called by: notes what decides its
    result. That of a comparison, or of arithmetic with sizes that torch has otherwise than Python; NotImplemented."""
    if function is pack_padded_sequence and active() is not None:
        bool(_packable(*args))
    recorder = active()
    if recorder is None:
        return NotImplemented
    _read_lists(recorder, function, args, kwargs)
    if function in _COMPARISONS:  # a Python bool: tensor operations, and a read of their result
        return bool(_COMPARISONS[function](*args, **kwargs))
    with recorder.paused():
        if (number := size_arithmetic.computed(function, args, kwargs, recorder.read)) is not NotImplemented:
            return number
        size_arithmetic.read_bounds(function, args, kwargs, recorder.read)
        if function in _SQUEEZES:
            _squeezed(recorder, *args, **kwargs)
        elif (found := part_count(function, args, kwargs)) is not None and isinstance(found[0], torch.Tensor):
            recorder.read(found[0], SIZE if found[1] else DATA)  # a graph is for each number of elements in any case
    return NotImplemented


def _read_lists(recorder: Recorder, function: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """A number for a list of numbers (`padding=n`): torch traces those of a list alone."""
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, torch.Tensor) and not value.dim() and key in _lists_of(function.__name__):
            recorder.read(value)


@functools.cache
def _lists_of(name: str) -> frozenset[int | str]:
    """The places and names of an operator's parameters that are lists of so many numbers, for which one may stand."""
    found: list[int | str] = []
    for schema in schemas_for_operator(f"aten::{name}"):
        for i, argument in enumerate(schema.arguments):
            found += (i, argument.name) if argument.N is not None else ()
    return frozenset(found)


def _packable(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """Whether torch takes these lengths."""
    fits = (lengths > 0).all() & (lengths <= x.size(1 if batch_first else 0)).all()
    return fits & (lengths[1:] <= lengths[:-1]).all()


@contextlib.contextmanager
def slicing(function: Any, args: tuple) -> Iterator[None]:
    """torch itself traces the bounds of slices, and other numbers: that it looks at them, inside, decides nothing.

    (To replace `Tensor.__getitem__` for a while would leave a class that C code takes for a sequence.)
    """
    recorder = active() if function in _SLICES or function in _TRACING else None
    if recorder is None:
        yield
        return
    if function in _SLICES:
        parts = args[1] if isinstance(args[1], tuple) else args[1:2]
        args = tuple(bound for s in parts if isinstance(s, slice) for bound in (s.start, s.stop, s.step))
    before, recorder._bounds = recorder._bounds, args
    try:
        yield
    finally:
        recorder._bounds = before


def _refused(owner: Any, name: str, what: str) -> Replacement:
    def make(original: Callable) -> Callable:
        def function(*args: Any, **kwargs: Any) -> Any:
            if active() is not None:
                raise NotTraceable(f"{user_line()} {what}")
            return original(*args, **kwargs)

        return function

    return Replacement.around(owner, name, make)


def _tracing_flag() -> Replacement:
    """torch itself has to know; a module may do less when it is traced."""

    def make(original: Callable) -> Callable:
        def is_tracing() -> bool:
            if active() is None:
                return original()
            file, hidden = sys._getframe(1).f_code.co_filename, getattr(_current, "hidden", False)
            # What `functional_call` puts into a module are tensors of the trace.
            return original() and file != _STATELESS and not (hidden and not _is_torch(file))

        return is_tracing

    return Replacement.around(torch.jit, "is_tracing", make)


def _checks() -> list[Replacement]:
    """A condition on sizes is a tensor in a trace, and `torch._check` wants a bool."""

    def make(original: Callable) -> Callable:
        def check(error_type: type[Exception], condition: Any, message: Any) -> None:
            traced = isinstance(condition, torch.Tensor) and active() is not None
            return original(error_type, bool(condition) if traced else condition, message)

        return check

    return [Replacement.around(owner, name, make) for owner, name in places(CHECK)]


def _weighted() -> Replacement:
    """`l1_loss` does not tell its weight to those who ask what is called, which a trace does."""

    def make(original: Callable) -> Callable:
        def call(function: Callable, relevant: Any, *args: Any, **kwargs: Any) -> Any:
            if function is F.l1_loss and active() is not None:
                kwargs.setdefault("weight", sys._getframe(1).f_locals.get("weight"))
            return original(function, relevant, *args, **kwargs)

        return call

    return Replacement.around(F, "handle_torch_function", make)


_STATELESS = stateless.__file__


def _is_torch(file: str) -> bool:
    return file.startswith(_TORCH)


_WAYS_OUT = {
    "__bool__": _elements, "__int__": _elements, "__float__": _elements, "__complex__": _elements, "item": _elements,
    "tolist": _elements, "numpy": _elements, "__array__": _elements, "__index__": _index, "__len__": _length,
    "__iter__": _count,
}  # fmt: skip
_CONVERSIONS = {
    "__bool__": bool, "__int__": int, "__float__": float, "__complex__": complex, "item": lambda number: number,
    "tolist": lambda number: number,
}  # fmt: skip
_WRITTEN = {"__int__", "__float__"}
_LOOKS = {"item", "tolist", "__int__", "__float__", "__array__"}
_SLICES = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_TRACING = {torch.narrow, torch.Tensor.narrow, pad_packed_sequence, torch.linspace}
#: How many dimensions these have depends on sizes.
_SQUEEZES = {torch.squeeze, torch.Tensor.squeeze, torch.Tensor.squeeze_}
_COMPARED: dict[str, Callable[..., Any]] = {
    "equal": lambda a, b: torch.eq(a, b).all() if a.shape == b.shape else False,
    "allclose": lambda a, b, *tolerances, **named: torch.isclose(a, b, *tolerances, **named).all(),
    "is_nonzero": lambda a: a != 0,
}
_COMPARISONS = {getattr(owner, name): compare for owner in (torch.Tensor, torch) for name, compare in _COMPARED.items()}
_item = torch.Tensor.item
_REPLACEMENTS = [
    *(_watched(torch.Tensor, name, watch) for name, watch in _WAYS_OUT.items()),
    *(_text(name) for name in ("__format__", "__repr__", "__str__")),
    _hashes(),
    _of_numbers("__divmod__", lambda a, b: (a // b, a % b)),
    _of_numbers("__rdivmod__", lambda b, a: (a // b, a % b)),
    _of_numbers("__round__", lambda a, *digits: _rounded(a, *digits)),
    _of_numbers("__trunc__", lambda a: a if is_whole(a) else int(a)),
    _attribute_reads(),
    _tracing_flag(),
    *_checks(),
    _weighted(),
    _refused(torch.Tensor, "register_hook", "registers a hook on a gradient"),
    _refused(torch.Tensor, "retain_grad", "asks for the gradient of an intermediate value"),
    _refused(torch.Tensor, "backward", "runs a backward inside forward"),
    _refused(torch, "manual_seed", "seeds torch's generator"),
    _refused(torch.autograd, "grad", "differentiates inside forward"),
]
