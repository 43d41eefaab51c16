"""Defines the exceptions: those that a user sees, which all derive from `ortmodule.Error`, and those of packages alone.

Each carries a sentence that names the thing. What a user sees derives from Python's class for such an error, too; some
of these the engine raises itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from ortmodule import _core
from ortmodule._core import ArgumentError as ArgumentError
from ortmodule._core import ArgumentTypeError as ArgumentTypeError
from ortmodule._core import FileError as FileError
from ortmodule._core import OutOfMemoryError as OutOfMemoryError

if TYPE_CHECKING:
    from ortmodule.core.traced_types import TracedNode

# Objects of later packages that an error carries to where it is caught.
SlotT = TypeVar("SlotT")
NumberT = TypeVar("NumberT")
TableT = TypeVar("TableT")
VariantT = TypeVar("VariantT")


class BypassError(_core.Error):
    """A call went past the engine, which STRICT or FALLBACK_POLICY forbids; the sentence says why."""


class CompatError(_core.Error, ValueError):
    """A compatibility name cannot do what was asked for; the sentence says why."""


class TritonError(_core.EngineError):
    """Triton made no kernel of a part of a graph; the sentence has its reason."""


class SettingError(ArgumentError):
    """A setting has a value that it cannot have; the sentence names it, and what it takes."""


class StateError(_core.Error):
    """What was asked for cannot be now, or no longer; the sentence says why."""


class UnknownNameError(KeyError, _core.Error):
    """There is nothing of the name that was given."""


class MissingFileError(FileNotFoundError, FileError):
    """A file or a folder is not there."""


class NotAFolderError(NotADirectoryError, FileError):
    """A path is not that of a folder."""


class NotWritableError(PermissionError, FileError):
    """A file or a folder cannot be written."""


class ExistingFileError(FileExistsError, FileError):
    """A file or a folder is there already."""


class MissingPackageError(ImportError, _core.Error):
    """A package that is needed is not installed, or cannot be imported."""


class Cause(Enum):
    """Why a call cannot be run by the engine; the value is the policy that allows PyTorch to take over."""

    DEVICE = "FALLBACK_UNSUPPORTED_DEVICE"
    DATA = "FALLBACK_UNSUPPORTED_DATA"
    TORCH_MODEL = "FALLBACK_UNSUPPORTED_TORCH_MODEL"
    ONNX_MODEL = "FALLBACK_UNSUPPORTED_ONNX_MODEL"


class Condition(Protocol):
    """Holds or does not, at one state of a module (:class:`ortmodule.guards.guards.Guards`)."""

    def hold(self, epoch: int) -> bool: ...


class NotInEngine(Exception):
    """A call that the engine cannot run; the sentence says why. ``key``: the calls that it is true for."""

    def __init__(self, cause: Cause, reason: str, key: object = None) -> None:
        super().__init__(reason)
        self.cause, self.reason, self.key = cause, reason, key
        self.warning: str | None = None  # what a user is told, once; "": nothing; None: the reason
        self.guards: Condition | None = None  # it is true as long as these hold
        self.finish: Callable[[], Any] | None = None  # runs what is left of the call, where a part of it was run
        self.found: Any = None  # what holds for other such calls (runtime/variants/known_waits.py)


class NoOtherGraph(NotInEngine):
    """No graph can be made for a call; those that there are still hold for others."""


class Waits(NotInEngine, Generic[VariantT]):
    """A call whose variant has no graph yet; ``key`` is None, as it may have one the next time."""

    inputs: Sequence[torch.Tensor] | None

    def __init__(self, variant: VariantT | None, reason: str, warning: str) -> None:
        super().__init__(Cause.TORCH_MODEL, reason)
        self.variant, self.inputs = variant, None
        self.warning = warning


class NotCaptured(Exception):
    """A forward that was assigned is not captured, for this ``reason``."""

    def __init__(self, reason: NotInEngine) -> None:
        super().__init__(reason.reason)
        self.reason = reason


class CallsOwn(BaseException):
    """A forward that was assigned calls the one that it replaces: such calls are not captured as a whole. It goes
    through the user's code, whose handlers of errors must not take it."""


class MissingPrivate(_core.Error):
    """This PyTorch lacks a private name that is needed; the sentence says which, and what happens without it."""


# --- capture ----------------------------------------------------------------------------------------------------------


class NotTraceable(Exception):
    """The module does something that a graph cannot repeat; the sentence says what, and where."""

    node: TracedNode  # of the trace, where one is to blame
    submodule: str | None
    cause = Cause.TORCH_MODEL


class RefusedArgument(NotTraceable):
    """An argument of the module's is none that a graph can be given; the sentence says what it is."""

    cause = Cause.DATA


class ChangesAround(NotTraceable):
    """Forward changes what is around its module, or containers and objects that attributes hold."""


class CountsAttribute(NotTraceable):
    """Forward reads an attribute that is a number, and sets it to another one."""

    def __init__(self, reason: str, path: str, key: str) -> None:
        super().__init__(reason)
        self.path, self.key = path, key


class WritesParameter(NotTraceable):
    """Forward changes a parameter without a gradient: to a graph it is like a buffer."""

    def __init__(self, reason: str, parameter: torch.Tensor) -> None:
        super().__init__(reason)
        self.parameter = parameter


class DrawsOperand(NotTraceable):
    """A number that Python draws goes into arithmetic: draws are to be operands in another trace."""


class Moved(NotTraceable):
    """A generator of NumPy's has been drawn from, since the state was looked at last."""


class FillsCache(BaseException, Generic[SlotT, NumberT, TableT]):
    """Forward fills a cache. It goes through the user's code, whose handlers of errors must not take it."""

    def __init__(
        self, reason: str, slots: Sequence[SlotT] = (), numbers: Sequence[NumberT] = (),
        tables: Sequence[TableT] = (), refused: Sequence[TableT] = (),
    ) -> None:  # fmt: skip
        """``slots``: with tensors, ``numbers``: that it sets beside them; ``tables``: in dictionaries; ``refused``:
        what was taken for such tables, and is none."""
        super().__init__(reason)
        self.slots, self.numbers, self.tables, self.refused = slots, numbers, tables, refused


class NotScripted(Exception):
    """A value is not of the type that a scripted function has for it."""


class TraceFailed(Exception):
    """One trace of several failed; the sentence says why. ``submodule``: the path of the one that is to blame."""

    submodule: str | None = None
    cause = Cause.TORCH_MODEL


class Unrepeatable(Exception):
    """A graph in which no repetition is looked for, or found; the sentence says why."""


class Uncacheable(Exception):
    """The key of a graph in the cache on disk would not say everything; the sentence says what is left out."""


class FromElsewhere(Exception):
    """Forward has a parameter from elsewhere than its module."""


@contextmanager
def blaming(submodule: str) -> Iterator[None]:
    """Inside, what is not traceable is a matter of the submodule with this path, which PyTorch can run."""
    try:
        yield
    except NotTraceable as error:
        error.submodule = submodule
        raise


class CaptureError(Exception):
    """The module cannot be captured; the sentence says why. ``submodule``: the path of the one that is to blame."""

    def __init__(self, reason: str, kind: str = "") -> None:
        """``kind``: of the ATen operator that the exporter does not translate."""
        super().__init__(reason)
        self.kind = kind
        self.submodule: str | None = None
        self.cause = Cause.TORCH_MODEL


class ExportError(Exception):
    """The exporter refused the module; the sentence says why."""

    def __init__(self, reason: str, kind: str = "") -> None:
        """``kind``: of the operator of the trace that it is about."""
        super().__init__(reason)
        self.kind = kind


class Unflattenable(ArgumentTypeError):
    """An argument or a result that cannot be taken apart; the sentence says which."""


class Unguardable(Exception):
    """A value that cannot be compared from call to call; the sentence says why."""


class Unclear(Exception):
    """Two traces do not show how a result shares memory with something else."""


class NoRule(Exception):
    """There is no rule for what is done with a DTensor; the sentence says why."""


class NotInTriton(Exception):
    """A formula has something that there is no Triton for; the sentence says what."""


class Keep(Exception):
    """A decomposition declines: the operator stays."""


class Leave(Exception):
    """A decomposition has not this form of the operator: PyTorch runs it."""


# --- a run ------------------------------------------------------------------------------------------------------------


class Raised(Exception):
    """User code raised ``error`` inside a node: the caller gets that, not this."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Mismatch(Exception):
    """A plan assumed something of a node that is not so in this run; the next one will not."""


class NotKnown(Exception):
    """The sizes of a node's results are not known before it runs."""


class Disagrees(_core.Error):
    """A node did something that its graph cannot take in; the sentence says what."""


class DoesNotHold(Exception):
    """Python would decide something else for these inputs than it did for the trace; says where.

    ``place``: the line that reads another ``value``. ``found``: the lines that read data in a run and what they read,
    up to this one. ``submodule``: the path of the one in which it is decided, if that is known.
    """

    def __init__(
        self, reason: str, place: str = "", value: float | None = None, found: tuple[tuple[str, float], ...] = (),
        submodule: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(reason)
        self.place, self.value, self.found, self.submodule = place, value, found, submodule


# --- comparison with PyTorch ------------------------------------------------------------------------------------------


class Incomparable(Exception):
    """PyTorch and the engine cannot be compared; the sentence says why."""


class Unknown(Exception):
    """An operator, or a form of one, that the ONNX interpreter does not know; the sentence names it."""
