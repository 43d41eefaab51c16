"""The C engine (csrc/py): models, plans, optimizer steps, and what the process knows of CPUs, GPUs and libraries."""

from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, Final, Literal, NoReturn, TypeAlias, TypedDict, final

import torch
from typing_extensions import Buffer

#: ("float32", (2, 3)): the type of elements, and the sizes.
_Spec: TypeAlias = tuple[str, tuple[int, ...]]
_Tensors: TypeAlias = Sequence[torch.Tensor]
_Some: TypeAlias = Sequence[torch.Tensor | None]
#: (class of products, or product; fastest way, or algorithm; {way: seconds}) of each that was measured.
_Measured: TypeAlias = list[tuple[str, str, dict[str, float]]]
#: An object that runs the nodes of Python's: ortmodule/host/host_node.py.
_Host: TypeAlias = object
#: (device, stream, learning rate, scale, overflow, clipping factor, room for sums) of a step on a GPU.
_Place: TypeAlias = tuple[
    int, int, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None
]

class _Operator(TypedDict):
    name: str
    domain: str
    since: int
    dtypes: list[str]
    has_kernel: bool
    has_cuda: bool
    has_grad: bool
    has_lower: bool
    no_grad: bool
    flags: int
    checked: int
    owned: int
    plain: int

class _Memory(TypedDict):
    used: int
    kept: int
    peak: int

class _Chains(TypedDict):
    compiled: int
    read: int
    reason: str

#: Whether this build emulates a GPU, whose memory is the CPU's.
emulated: Final[bool]
#: How many sums a tensor's squares are added up in on a GPU: room for them is the caller's.
cuda_sum_parts: Final[int]
#: How many numbers are the digest of a tensor on a GPU.
cuda_digest_parts: Final[int]
#: How many times slower other kernels multiply than matrix products, and a file or a bus moves bytes than memory does.
slower_kernels: Final[int]
slower_files: Final[int]
slower_buses: Final[int]
#: In the name of a node that lies in a checkpoint: a step of its path, with the checkpoint's number behind it.
checkpoint_step: Final[str]

class Error(RuntimeError):
    """All errors of ortmodule derive from it."""

class EngineError(Error):
    """The engine failed, or cannot compute a graph."""

class UnsupportedError(EngineError):
    """A graph is well-formed, but only PyTorch can compute it."""

class InvalidModelError(EngineError, ValueError):
    """Bytes are not an ONNX model."""

class ArgumentError(Error, ValueError):
    """What was given has not the value or the shape that is wanted."""

class ArgumentTypeError(Error, TypeError):
    """What was given is of another type than is wanted."""

class OutOfMemoryError(Error, MemoryError):
    """There is not as much memory as is needed, or a budget does not allow it."""

class FileError(Error, OSError):
    """A file or a folder cannot be used."""

@final
class Model:
    """An ONNX model that was read once, from which plans are made; raises InvalidModelError, UnsupportedError."""

    def __init__(self, data: Buffer) -> None:
        """Reads the bytes of an ONNX model."""
    @property
    def inputs(self) -> list[str]:
        """Names of the inputs."""
    @property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
    @property
    def nodes(self) -> int:
        """Number of nodes that were read."""
    def plan(
        self,
        inputs: Sequence[_Spec],
        needs_grad: Sequence[bool],
        output_grads: Sequence[bool] | None = None,
        disabled_passes: int = 0,
        sizes: Sequence[int] = (),
        host: _Host | None = None,
        padding_unseen: bool = False,
        device: int = -1,
        recompute: int = 0,
        budget: int = 0,
        any_size: bool = False,
        clusters: Sequence[tuple[str, int, int]] | None = None,
        triton: tuple | None = None,
        offload: str | None = None,
        joint_from: int = 0,
        layers: int = 0,
        costs: tuple[float, float, float] = ...,
    ) -> Plan:
        """A plan for these types and shapes, with ``any_size`` also of more memory than there is; -1 is the CPU."""

@final
class Plan:
    """Instructions over one arena, for fixed shapes. Made by :meth:`Model.plan`."""

    @property
    def outputs(self) -> list[_Spec]:
        """Type and shape of each output."""
    @property
    def output_grads(self) -> list[_Spec | None]:
        """Of each output's gradient, or None."""
    @property
    def input_grads(self) -> list[_Spec | None]:
        """Of each input's gradient, or None."""
    @property
    def differentiates(self) -> bool:
        """Whether any input gets a gradient."""
    @property
    def gradient_lives(self) -> list[tuple[int, int] | None]:
        """(first, last) instruction that uses the memory of each input's gradient, or None."""
    @property
    def writes(self) -> list[tuple[int, _Spec]]:
        """Inputs whose memory forward changes: (index, type and shape)."""
    @property
    def reads_input(self) -> list[bool]:
        """For each input: does backward read it?"""
    @property
    def reads_output(self) -> list[bool]:
        """For each output: does backward read it?"""
    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena that a run needs."""
    @property
    def joint_bytes(self) -> int:
        """Bytes of an arena that holds the gradients, too; 0: there is none."""
    @property
    def torch_bytes(self) -> int:
        """The most bytes that torch takes for itself in one instruction (a convolution), on the CPU; about."""
    @property
    def offload_bytes(self) -> int:
        """Bytes that a run needs elsewhere, for activations that are offloaded."""
    @property
    def offloaded(self) -> int:
        """How many activations forward writes elsewhere, for backward to read them back."""
    @property
    def recomputed(self) -> tuple[int, float]:
        """How many values backward computes again, and by which share that adds to a step's work, estimated."""
    @property
    def order(self) -> str:
        """Which of `orders` its instructions have: as written, where no other takes less."""
    @property
    def orders(self) -> dict[str, int]:
        """{order: the most bytes that values need at one time}: as written, and in other orders."""
    @property
    def work(self) -> tuple[float, float, float, float, float]:
        """(of products, of those in 16 bits, of other kernels, bytes, bytes moved elsewhere), all estimated"""
    @property
    def compiles(self) -> int:
        """How often the model was compiled until the plan was within its budget."""
    @property
    def clusters(self) -> list[tuple[str, int, int, tuple[int, ...]]]:
        """(operators, strategy, places made again, bytes of each place) of what backward can compute again."""
    @property
    def constant_bytes(self) -> int:
        """Bytes of the constants that a plan for a GPU keeps there."""
    @property
    def graphs(self) -> tuple[int, int, int]:
        """(recorded, updated, started): how often a CUDA graph was made, replaced an older one, and ran."""
    @property
    def profiled(self) -> tuple[int, int]:
        """(forward, backward) runs that were measured since ``profile(True)``."""
    @property
    def host_bytes(self) -> int:
        """Bytes that the plan itself takes."""
    @property
    def nodes(self) -> tuple[int, int]:
        """(forward, backward) instructions."""
    @property
    def fired(self) -> dict[str, int]:
        """{name of a pass: how often it changed something}."""
    @property
    def through_torch(self) -> set[str]:
        """ATen operators that instructions run through torch."""
    @property
    def pending_keys(self) -> list[int]:
        """Of a prologue, a key for each of its sizes, as sizes= of plan takes it."""
    @property
    def prologue(self) -> bool:
        """Whether this only computes the next sizes that data decides."""
    @property
    def bounded(self) -> bool:
        """Whether that size is a bound: a plan for a larger one is right, too."""
    @property
    def probe(self) -> bool:
        """Whether it is a prologue for what the host does not know yet."""
    @property
    def random(self) -> bool:
        """Whether a run needs a seed."""
    def forward(
        self,
        arena: torch.Tensor | None,
        inputs: _Tensors,
        outputs: _Tensors,
        writes: _Tensors,
        seed: int,
        host: _Host | None = None,
        stream: int = 0,
        math_mode: int = 0,
        graphs: bool = False,
        seed_at: int = 0,
        /,
        *,
        room: OffloadRoom | None = None,
        joint: bool = False,
    ) -> None:
        """Fills ``outputs`` and ``writes``; what follows ``stream`` is for plans on a GPU."""
    def backward(
        self,
        arena: torch.Tensor | None,
        inputs: _Some,
        outputs: _Some,
        output_grads: _Some,
        input_grads: _Some,
        seed: int,
        host: _Host | None = None,
        stream: int = 0,
        math_mode: int = 0,
        graphs: bool = False,
        seed_at: int = 0,
        /,
        *,
        room: OffloadRoom | None = None,
        joint: bool = False,
    ) -> None:
        """Fills ``input_grads``, after forward with the same arena; entries that it does not read may be None."""
    def backward_part(
        self,
        first: int,
        last: int,
        arena: torch.Tensor | None,
        inputs: _Some,
        outputs: _Some,
        output_grads: _Some,
        input_grads: _Some,
        seed: int,
        host: _Host | None = None,
        stream: int = 0,
        math_mode: int = 0,
        graphs: bool = False,
        seed_at: int = 0,
        /,
        *,
        room: OffloadRoom | None = None,
        joint: bool = False,
    ) -> None:
        """Instructions [first, last) of backward, after all before them."""
    def reads(self, first: int, last: int, /) -> tuple[list[int], list[int]]:
        """Indices of the inputs and of the outputs that instructions [first, last) use."""
    def empty_outputs(self, tensor_type: type[torch.Tensor], has_arena: bool = False, /) -> list[torch.Tensor]:
        """A new tensor for each output, not filled. MemoryError where a run has no room, unless it has its arena."""
    def empty_input_grads(
        self, tensor_type: type[torch.Tensor], arena: torch.Tensor | None = None, /
    ) -> list[torch.Tensor | None]:
        """For each input a new tensor for its gradient, not filled, or None; in the arena of ``joint_arena``."""
    def joint_arena(self, tensor_type: type[torch.Tensor], another: bool = False, /) -> torch.Tensor | None:
        """Memory for a run with ``joint=True``. None: there is none, or one of this model's is in use."""
    def no_memory(self) -> NoReturn:
        """MemoryError for an arena that cannot be had, with the largest of what it would hold."""
    def take_room(self) -> OffloadRoom:
        """Where a run offloads activations to. MemoryError, or OSError, where ``offload_bytes`` have no room."""
    def give_room(self, room: OffloadRoom, /) -> None:
        """No backward will read it any more: the next run may have it."""
    def keep(self, memory: torch.Tensor, stream: int = 0, /) -> None:
        """A tensor of ``constant_bytes`` on the plan's GPU, which gets its constants."""
    def profile(self, on: bool, /) -> None:
        """Measures each instruction from now on, or stops."""
    def code(self) -> list[tuple[str, str, Literal["forward", "backward"], float, _Spec | None]]:
        """(operator, name, part, seconds, type and shape) of each instruction, in the order of execution."""
    # Operands are numbers of results, names of inputs, or None (constants, what is not there). Instruction -1: a view.
    # Pass "": none made it. Again: backward computes again what forward has not kept.
    def graph(
        self,
    ) -> list[
        tuple[
            str,
            str,
            Literal["forward", "backward"],
            list[int | str | None],
            list[int | None],
            _Spec | None,
            int,
            str,
            bool,
        ]
    ]:
        """(operator, name, part, operands, results, type and shape, instruction, pass, again) of each node."""
    def blocks(
        self, joint: bool = False, /
    ) -> list[tuple[int, int, int, int, tuple[str, str, str, Literal["forward", "backward"], _Spec | None]]]:
        """(offset, bytes, first and last instruction, what it is for) of each block of an arena."""
    def peak(self, joint: bool = False, /) -> tuple[int, int]:
        """(instruction, bytes): when the arena's blocks have the most bytes in all, and how many."""
    def text(self) -> str:
        """The graph, one node a line."""
    def onnx(self) -> bytes:
        """The graph as the bytes of an ONNX model."""

@final
class OffloadRoom:
    """Where activations of one run wait for backward. Made by :meth:`Plan.take_room`."""

@final
class Number:
    """An int64 on its way from a GPU. Made by :func:`read`."""

    def value(self) -> int:
        """The number; waits until it is there, not for what the stream was given since."""

@final
class Watch:
    """Remembers what dicts and lists contain, attributes of classes, and the classes of objects."""

    def __new__(
        cls,
        containers: list[Any],
        exact: list[Any],
        names: list[tuple[Any, str, Any]],
        objects: list[tuple[Any, type]],
        tensor_classes: tuple[type, ...],
        /,
    ) -> Watch:
        """In ``containers`` a tensor of one of these classes may be replaced by one of its kind, in ``exact`` not."""
    def changed(self) -> bool:
        """Is anything not as it was when this was made?"""
    def holds(self, tensors: list[Any], /) -> bool:
        """Is one of these there, by the latest look?"""

# --- memory of tensors ------------------------------------------------------------------------------------------------

def empty(tensor_type: type[torch.Tensor], dtype: str, sizes: Sequence[int], /) -> torch.Tensor:
    """A new CPU tensor with memory of its own, not filled; no ATen operator runs."""

def zero(tensor: torch.Tensor, /) -> None:
    """All bytes of a contiguous tensor become 0."""

def copy(to: torch.Tensor, source: torch.Tensor, /) -> None:
    """The bytes of one contiguous tensor into another of the same size."""

def digest(tensor: torch.Tensor, /) -> int:
    """64 bits of a contiguous tensor's bytes, others when they have changed."""

def cuda_digests(tensors: _Tensors, found: torch.Tensor, device: int, stream: int, /) -> None:
    """The same of contiguous tensors on a GPU: `cuda_digest_parts` int64 for each, into a tensor there."""

def objects(types: tuple[type, ...], generation: int = -1, /) -> list[Any]:
    """Those that the garbage collector knows, frozen ones too, of these types and subtypes; or the young alone."""

def referrers(objects: list[Any], /) -> list[Any]:
    """What the garbage collector knows to refer to one of these, frozen ones (`gc.freeze`) too, this list aside."""

def noting(types: tuple[type, ...], found: list[Any], oldest: int, /) -> Callable[[str, dict[str, int]], None]:
    """For `gc.callbacks`: before a collection of ``oldest`` or more makes objects old, appends those of these types."""

def look_at_calls(
    called: Callable[[FrameType, Any, Any], None],
    began: Callable[[FrameType], None],
    functions: set[Any],
    owners: tuple[type, ...],
    bases: tuple[type, ...],
    seen: dict[int, Any],
    ran: dict[CodeType, dict[str, Any]],
    is_traced: Callable[[], object],
    /,
) -> None:
    """Looks at all calls of this thread until ``sys.setprofile(None)``, and tells ``called`` and ``began`` of some."""

def memory() -> _Memory:
    """Bytes of large blocks: in use, kept for the next use, most in use at one time."""

def memory_most() -> int:
    """Bytes of large blocks, the most in use at one time since this was asked last."""

def memory_trim() -> None:
    """Large blocks that are kept for the next use go back to the system."""

def memory_limits() -> dict[str, int]:
    """Bytes that this process may use at all ("most"), and besides what is in use now ("room")."""

def fail_memory(count: int, /) -> None:
    """For tests: so many blocks of memory can be had from now on, then none; -1: any number."""

def read(tensor: torch.Tensor, device: int, stream: int = 0, /) -> Number:
    """An int64 scalar of a GPU's, on its way to the host as soon as the stream gets there."""

# --- optimizers -------------------------------------------------------------------------------------------------------

def optimize(
    rule: str,
    rows: Sequence[Sequence[torch.Tensor | None]],
    settings: Sequence[float],
    grad_factor: float,
    clear_gradients: bool,
    place: _Place | None = None,
    /,
) -> None:
    """One step of all rows (parameter, gradient, step, float32 weights, states) by adam, sgd, adagrad or lamb."""

def sums_of_squares(tensors: _Tensors, /) -> list[float]:
    """The sum of the squares of each tensor on the CPU."""

def cuda_sums_of_squares(
    tensors: _Tensors, sums: torch.Tensor, room: torch.Tensor, device: int, stream: int, /
) -> None:
    """The same of tensors on a GPU, into a float64 tensor there."""

# --- tuning -----------------------------------------------------------------------------------------------------------

def tune(plan: Plan, seconds: float = 0.0, /) -> _Measured:
    """Measures the products of a plan that are new, at most so long for a class of them."""

def tuning_set(product_class: str, way: str, /) -> None:
    """Products of that class go that way from now on, where they can; ValueError for other names."""

def tuning_clear() -> None:
    """Forgets the table of ways, algorithms of cuBLASLt and cuDNN, and which of torch's attention kernels failed."""

def tuning_uses() -> dict[str, int]:
    """{way: how many products of this process went it because the table says so}."""

def cuda_tune(
    plan: Plan,
    math_mode: int,
    seconds: float = 0.0,
    memory: torch.Tensor | None = None,
    stream: int = 0,
    products: bool = True,
    convolutions: bool = False,
    /,
) -> tuple[int, _Measured, int]:
    """Bytes needed, the products of a plan that were measured in ``memory``, and how many convolutions were."""

def cuda_tuning_set(device: int, product: str, algorithm: str, /) -> None:
    """That product is computed so from now on; ValueError for texts that are none of :func:`cuda_tune`'s."""

def cuda_place(device: int, /) -> str:
    """What algorithms hold for: the GPU's model and the version of cuBLASLt."""

# --- what there is ----------------------------------------------------------------------------------------------------

def operators() -> list[_Operator]:
    """One record for each operator."""

def pointwise_operators() -> list[tuple[str, str, int]]:
    """Of our domain and without attributes: (name, name in ATen, operands)."""

def pointwise_formulas() -> list[tuple[str, str, str, int, str, str]]:
    """Of operators that chains have: (name, class of operands, of the result, operands, formula, declarations)."""

def triton_maker(maker: object, interprets: bool, /) -> None:
    """Who makes Triton kernels from now on."""

def recompute(
    steps: Sequence[tuple[Sequence[int], Sequence[int], float, int, bool]],
    values: Sequence[tuple[int, bool]],
    n_forward: int,
    target: int,
    moving: Sequence[float] | None = None,
    /,
) -> tuple[list[int], int, int, float, float, list[int]]:
    """(made again, peak before, peak, cost, its bound, offloaded), for what each step and value takes and costs."""

def passes() -> dict[str, int]:
    """{name: the bit that disables it}, in the order in which they run."""

def profiled_by(dictionary: dict[str, Any], name: str, /) -> None:
    """Its entry of this name is True while torch's profiler is on; it sees instructions then."""

def module_path(name: str, /) -> str:
    """ "/layers/layers.0/norm/Add" -> "layers.0.norm": the path of the submodule that a node of this name is of."""

def torch_symbols() -> list[tuple[str, str, bool]]:
    """(name, what it is for, whether torch's libraries have it)."""

def nccl_version() -> int:
    """22809 is NCCL 2.28.9; Error with the reason where it cannot be used."""

def cuda_devices() -> int:
    """How many GPUs there are; Error with the reason where none can be used."""

def cuda_chains(folder: str = ..., /) -> _Chains:
    """Fused chains compiled for GPUs and read from ``folder``, where they are kept from now on ("": nowhere)."""

def cuda_captured(stream: int, /) -> bool:
    """Whether that stream is being captured into a CUDA graph."""

def cuda_graphs() -> tuple[int, int]:
    """CUDA graphs that the plans of this process keep, and about how many kernels these start."""

def cuda_refusals(known: int, /) -> tuple[int, list[tuple[str, str]]] | None:
    """How many of them there are, and (library, sentence) of those since ``known``; None where there are no more."""
