"""Lists PyTorch's private names that are used here, each with its purpose and what happens without it.

No other module of this package or of `ortmodule.optim` names one (tests/core/test_torch_private.py); those that the
engine's C looks up in torch's libraries are in csrc/core/torch_lib.h. A version of PyTorch that lacks one is told of
once, in a sentence (:func:`tell`), and in `explain()`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from ortmodule import _core
from ortmodule.core.errors import MissingPrivate
from ortmodule.core.objects.interception import Replacement, replaced

#: What happens without a name that a capture needs.
CAPTURE = "PyTorch runs every module"
#: It is not needed there: torch does not have what it is about.
UNNEEDED = "nothing is to be done"
LOGITS = "logits are computed in forward, as with DEFER_LOGITS=0"


@dataclass(frozen=True)
class Private:
    """One name. ``path``: where torch has it. ``use``: what it is for. ``without``: what happens without it."""

    path: str
    use: str
    without: str
    found: bool

    def __str__(self) -> str:
        return f"torch {torch.__version__} has no {self.path} ({self.use}): {self.without}"


class _Absent:
    """Stands for a name that a capture needs and that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise MissingPrivate(str(TABLE[self._name]))

    def __getattr__(self, name: str) -> Any:
        return self()


TABLE: dict[str, Private] = {}
_warned = False


def _private(path: str, use: str, without: str = CAPTURE) -> Any:
    """What torch has under ``path``. Otherwise None where there is another way, and what raises where there is none."""
    try:
        found, there = resolve_name(path), True
    except (AttributeError, ImportError):
        found, there = _Absent(path) if without is CAPTURE else None, False
    TABLE[path] = Private(path, use, without, there)
    return found


def missing(without: str | None = None) -> list[str]:
    """A sentence for each name that this PyTorch lacks; of those without which that happens."""
    rows = [row for row in TABLE.values() if not row.found and row.without is not UNNEEDED]
    found = [str(row) for row in rows if without is None or row.without == without]
    symbols = [(name, use) for name, use, there in _core.torch_symbols() if not there] if without is None else []
    return found + [f"torch {torch.__version__} has no {name} in its libraries ({use})" for name, use in symbols]


def check_capture() -> None:
    """Raises MissingPrivate when something is missing that a capture needs."""
    if sentences := missing(CAPTURE):
        raise MissingPrivate("; ".join(sentences))


def tell(warn: Callable[[str], None]) -> None:
    """Gives ``warn`` these sentences, once in a process. (What stops a capture is said as any reason for that.)"""
    global _warned
    if not _warned:
        _warned, stops = True, set(missing(CAPTURE))
        for sentence in missing():
            if sentence not in stops:
                warn(sentence)


# --- traces: the graphs that TorchScript's tracer makes ---------------------------------------------------------------

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    from ortmodule.core.traced_types import GraphContext as GraphContext
    from ortmodule.core.traced_types import ListType as ListType
    from ortmodule.core.traced_types import OptionalType as OptionalType
    from ortmodule.core.traced_types import TensorType as TensorType
    from ortmodule.core.traced_types import TracedGraph as TracedGraph
    from ortmodule.core.traced_types import TracedNode as TracedNode
    from ortmodule.core.traced_types import TracedValue as TracedValue
    from ortmodule.core.traced_types import TupleType as TupleType
else:
    TracedGraph = _private("torch._C.Graph", "a trace")
    TracedNode = _private("torch._C.Node", "an operator of a trace")
    TracedValue = _private("torch._C.Value", "what operators of a trace are given and give")
    TensorType = _private("torch._C.TensorType", "element type and sizes of a traced tensor")
    ListType = _private("torch._C.ListType", "the type of traced lists")
    OptionalType = _private("torch._C.OptionalType", "the type of traced arguments that may be None")
    TupleType = _private("torch._C.TupleType", "the type of traced tuples")
get_trace_graph = _private("torch.jit._get_trace_graph", "traces a module without a copy of it")
make_subclass = _private("torch.Tensor._make_subclass", "numbers that know their tensors")
no_torch_function = _private("torch._C._disabled_torch_function_impl", "keeps such numbers out of torch functions")
get_tracing_state = _private("torch._C._get_tracing_state", "the trace that a thread is in")
set_tracing_state = _private("torch._C._set_tracing_state", "leaves and enters a trace")
get_value_trace = _private("torch._C._get_value_trace", "the traced value of a tensor")
set_value_trace = _private("torch._C._set_value_trace", "gives a tensor another traced value")
jit_pass_dce = _private("torch._C._jit_pass_dce", "removes what of a trace has no use")
jit_pass_inline = _private("torch._C._jit_pass_inline", "puts scripted functions into a trace")
jit_pass_lower_all_tuples = _private("torch._C._jit_pass_lower_all_tuples", "removes tuples from a trace")
parse_schema = _private("torch._C.parse_schema", "the parameters of a traced operator")
schemas_for_operator = _private("torch._C._jit_get_schemas_for_operator", "the parameters of an operator's overloads")
dispatch_has_kernel = _private("torch._C._dispatch_has_kernel", "has an operator a kernel?")
DispatchKey = _private("torch._C.DispatchKey", "is an operator a composition of others?")
use_count = _private("torch.Tensor._use_count", "is it autograd alone that holds a tensor?", "captures take longer")
decomposition_table = _private("torch._decomp.decomposition_table", "operators as compositions of others")
DisableTorchFunction = _private("torch._C.DisableTorchFunction", "looks at tensors without being traced")
validate_sample = _private(
    "torch.distributions.Distribution._validate_sample",
    "a sample is taken whose probability is computed in the same forward",
    "PyTorch runs the modules that do so",
)
checkpoint_inputs = _private(
    "torch.utils.checkpoint._NoopSaveInputs", "keeps what a checkpoint is given; a trace keeps nothing", UNNEEDED
)
pack_padded_sequence = _private("torch._pack_padded_sequence", "is met in a trace: its lengths are compared in a run")
pad_packed_sequence = _private("torch._pad_packed_sequence", "is met in a trace: its length may be a size")
pad_sequence = _private("torch._C._nn.pad_sequence", "is met in a trace: its longest member may be a size")
CHECK = "torch._check_with"
_private(
    CHECK, "is met in a trace: a condition on sizes is a tensor there", "modules that check sizes so are PyTorch's"
)
_DISPATCH = "torch.utils._python_dispatch.TorchDispatchMode"
if not TYPE_CHECKING:
    TorchDispatchMode = _private(_DISPATCH, "sees each operator while a graph is checked")
    if not TABLE[_DISPATCH].found:
        TorchDispatchMode = object  # a base of classes
swap_tensors = _private("torch._C._swap_tensor_impl", "a copy takes the place of a tensor that a capture would change")
set_versions = _private(
    "torch._C._autograd._unsafe_set_version_counter", "a tensor that a capture has changed is as it was before"
)

_INLINE = "_torchdynamo_inline"  # where scripted functions have the Python that they were made of
_compiled_as = _private(
    "torch.jit._state._try_get_jit_cached_function", "was a scripted function made of this one?",
    "PyTorch runs scripted functions that branch or loop",
)  # fmt: skip


def python_of(scripted: torch.jit.ScriptFunction) -> types.FunctionType | None:
    """The Python that a scripted function was made of, or that was traced; None: it is not known."""
    found = getattr(scripted, _INLINE, None)
    return found if isinstance(found, types.FunctionType) else None


def is_scripted_from(scripted: torch.jit.ScriptFunction | None, function: types.FunctionType) -> bool:
    """Was ``function`` scripted, and is that ``scripted`` (None: whichever)?"""
    found = None if _compiled_as is None else _compiled_as(function)
    return found is not None and (scripted is None or found.qualified_name == scripted.qualified_name)


# --- the exporter: a trace as ONNX ------------------------------------------------------------------------------------

_EXPORTER = "torch.onnx._internal.torchscript_exporter"
EXPORTER_GLOBALS = _private(f"{_EXPORTER}.utils.GLOBALS", "the exporter's settings: its opset, whether it runs")
setup_trace_module_map = _private(f"{_EXPORTER}.utils._setup_trace_module_map", "gives nodes the names of submodules")
reset_trace_module_map = _private(f"{_EXPORTER}.utils._reset_trace_module_map", "ends that")
tracer = _private("torch.jit._trace", "has these names while a trace runs")
scope_name = _private("torch._C._jit_onnx_create_full_scope_name", "a name as the exporter expects it")
_TRACE_FOR_EXPORT = f"{_EXPORTER}.utils._trace_and_get_graph_from_model"
_private(_TRACE_FOR_EXPORT, "the exporter's way to a trace: it is given ours")
_SYMBOLIC_FUNCTION = f"{_EXPORTER}.utils._run_symbolic_function"
run_symbolic_function = _private(_SYMBOLIC_FUNCTION, "translates one operator: ours come first")
register_symbolics = _private(f"{_EXPORTER}.utils._trigger_symbolic_function_registration", "loads the translations")
symbolic_registry = _private(f"{_EXPORTER}.registration.registry", "which operators the exporter translates")
_PARAMETERS = f"{_EXPORTER}.utils._params_dict"
_private(_PARAMETERS, "the parameters of an export: a translation's context has them")
if not TYPE_CHECKING:
    GraphContext = _private(f"{_EXPORTER}.jit_utils.GraphContext", "what a translation is given")
prepare_onnx_paddings = _private(f"{_EXPORTER}.symbolic_opset11._prepare_onnx_paddings", "pads in ONNX's order")
generic_rnn = _private(f"{_EXPORTER}.symbolic_opset9._generic_rnn", "translates recurrent layers")
get_const = _private(f"{_EXPORTER}.symbolic_helper._get_const", "the number that a traced value is")
maybe_get_const = _private(f"{_EXPORTER}.symbolic_helper._maybe_get_const", "the same, where it may be no number")
get_tensor_rank = _private(f"{_EXPORTER}.symbolic_helper._get_tensor_rank", "the rank of a traced tensor")
get_tensor_sizes = _private(f"{_EXPORTER}.symbolic_helper._get_tensor_sizes", "the sizes of a traced tensor")
is_none = _private(f"{_EXPORTER}.symbolic_helper._is_none", "is a traced value None?")
is_tensor_list = _private(f"{_EXPORTER}.symbolic_helper._is_tensor_list", "is a traced value a list of tensors?")
parse_arg = _private(f"{_EXPORTER}.symbolic_helper._parse_arg", "an argument of a traced operator")
squeeze_helper = _private(f"{_EXPORTER}.symbolic_helper._squeeze_helper", "Squeeze in each opset")
vf_split = _private("torch._VF.split", "cuts a tensor by a traced length, of which torch.split makes a plain number")
unpack_list = _private(f"{_EXPORTER}.symbolic_helper._unpack_list", "the items of a traced list")
_SLOWER = "each export takes several times as long"
_SHAPES, _LINT = "torch._C._jit_pass_onnx_graph_shape_type_inference", "torch._C._jit_pass_lint"
_private(_SHAPES, "shape inference of a whole export, which is left out: the engine has its own", _SLOWER)
_private(_LINT, "the exporter's checks of its own passes, which are left out", _SLOWER)
_LOG = "torch._C._jit_onnx_log"
_private(_LOG, "the exporter's own remarks, which are left out", "the exporter prints remarks")
_TYPES = "torch._C._jit_pass_onnx_scalar_type_analysis"
_private(_TYPES, "the exporter's types of operands: onnx_types.py takes its place")
_REMARKS = "traces give warnings"
_BATCH_SIZE = "torch.nn.functional._verify_batch_size"
_private(_BATCH_SIZE, "a check of a normalization's input, which is done without what a trace warns of", _REMARKS)
_UNPOOL = "torch.nn.functional._check_unpool_output_size"
_private(_UNPOOL, "a check of numbers that are tensors in a trace, which is left out", UNNEEDED)

# --- running ----------------------------------------------------------------------------------------------------------

_SAFE = "more memory is kept until a graph is freed"
_keep_graph = _private(
    "torch._C._autograd._get_current_graph_task_keep_graph", "is another backward to follow (retain_graph)?", _SAFE
)
_saving_hooks = _private(
    "torch._C._autograd._top_saved_tensors_default_hooks", "are there hooks on what autograd saves, as a checkpoint's?",
    "backward is planned for all results, and hands its gradients over at its end",
)  # fmt: skip
_interpreters = _private(
    "torch._C._functorch.peek_interpreter_stack", "does a transform of torch.func look at a module?", CAPTURE
)
_private(
    "torch.autograd.forward_ad._current_level", "is forward-mode differentiation on, which the engine has not?", CAPTURE
)
_is_batched = _private(
    "torch._C._functorch.is_legacy_batchedtensor", "are gradients a batch of gradients (is_grads_batched)?",
    "such gradients are an error",
)  # fmt: skip
_VMAPPED = "PyTorch runs a module that asks for sizes inside of torch.vmap"
_is_vmapped = _private("torch._C._functorch.is_batchedtensor", "is a tensor one that torch.vmap has made?", _VMAPPED)
_vmapped_of = _private("torch._C._functorch.get_unwrapped", "of which tensor has torch.vmap made one?", _VMAPPED)
_vmapped_dim = _private("torch._C._functorch.maybe_get_bdim", "which dimension does torch.vmap hide?", _VMAPPED)
_vmap_result = _private(
    "torch._functorch.vmap._remove_batch_dim", "notes the results of torch.vmap",
    "PyTorch runs a module that writes into what torch.vmap returns",
)  # fmt: skip
#: Modules, and the names there of the function that makes the results of `torch.vmap`.
VMAP_RESULTS = [(sys.modules["torch._functorch.vmap"], "_remove_batch_dim")] if _vmap_result is not None else []
_RERUN = "a batch of gradients through random numbers is an error"
_pop_interpreter = _private(
    "torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack", "runs forward again outside of torch.func", _RERUN
)
_enter_vmap = _private("torch._C._vmapmode_increment_nesting", "runs forward again outside of a batch", _RERUN)
_leave_vmap = _private("torch._C._vmapmode_decrement_nesting", "runs forward again outside of a batch", _RERUN)
_graph_task = _private(
    "torch._C._current_graph_task_id", "is a backward under way in this thread, as where a checkpoint runs forward?",
    "calls of a module inside of a checkpoint that PyTorch has run it runs again, also in later steps",
)  # fmt: skip
_queue_callback = _private(
    "torch.autograd.Variable._execution_engine.queue_callback", "how long backward takes where PyTorch runs it",
    "it counts as nothing, and graphs wait longer for their capture",
)  # fmt: skip
_fake_work = _private(
    "torch._C._distributed_c10d.FakeWork", "what a collective gives to wait for while a graph is captured", UNNEEDED
)


_private(
    "torch.nn.utils.parametrize._cache_enabled", "is a call inside of parametrize.cached()?",
    "graphs compute parametrized tensors in each call, where PyTorch would keep them",
)  # fmt: skip


#: ``PARAMETRIZE.get(KEEPS)``: is this inside of `torch.nn.utils.parametrize.cached()`?
PARAMETRIZE: dict[str, Any] = vars(parametrize)
KEEPS = "_cache_enabled"


_operators = tuple(
    _private(f"torch._ops.{name}", "an operator that is called by its name")
    for name in ("OpOverload", "OpOverloadPacket")
)


def operator_name(function: Any) -> str:
    """Of an operator of `torch.ops` with its namespace, as "aten::add"; "": it is another function."""
    if not isinstance(function, _operators):
        return ""
    name: str = getattr(function, "_qualified_op_name", "") or function.name()
    return name.partition(".")[0]


def wait_tensor(tensor: Any) -> Any:
    """``tensor``, which a functional collective returned, when it is there."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


def loss_is_parallel() -> bool:
    """Is this inside of `torch.distributed.tensor.parallel.loss_parallel()`?"""
    dispatcher = getattr(torch.distributed.tensor.DTensor, "_op_dispatcher", None)
    return torch.ops.aten.nll_loss_forward.default in getattr(dispatcher, "_custom_op_handlers", ())


def local_part(whole: Any) -> torch.Tensor:
    """What this rank has of a DTensor, the very tensor."""
    part: torch.Tensor = whole._local_tensor
    return part


def finished_work() -> Any:
    """What an operator of `torch.distributed` returns for a collective that is over."""
    return _fake_work().boxed()


#: The types of process groups, and of what reduces: each is what it was when it was made.
of_process_groups: tuple[type, ...] = ()
if torch.distributed.is_available():
    _reduce = torch.distributed.ReduceOp
    of_process_groups = (torch.distributed.ProcessGroup, _reduce, type(_reduce.SUM))
_raw_stream = _private(
    "torch._C._cuda_getCurrentRawStream", "torch's stream on a GPU",
    "a slower call of torch's is used" if torch.version.cuda else UNNEEDED,
)  # fmt: skip
make_wrapper_subclass = _private(
    "torch.Tensor._make_wrapper_subclass", "logits that wait: a tensor without memory", LOGITS
)
DisableTorchFunctionSubclass = _private(
    "torch._C.DisableTorchFunctionSubclass", "logits that wait: their own type", LOGITS
)
tree_map_only = _private("torch.utils._pytree.tree_map_only", "tensors among arguments: logits that wait", LOGITS)
_registered_nodes = _private(
    "torch.utils._pytree.SUPPORTED_NODES",
    "how users' own types are taken apart",
    "PyTorch runs calls that are given some",
)
native_batch_norms = [
    _private(path, "is left to PyTorch where its indices or sizes would be trusted", UNNEEDED)
    for path in (
        "torch._native_batch_norm_legit", "torch.ops.aten._native_batch_norm_legit",
        "torch.ops.aten._batch_norm_with_update",
    )
]  # fmt: skip

_PROFILED = "torch.autograd.profiler._is_profiler_enabled"
_private(_PROFILED, "is torch's profiler on, which the engine's operators are shown to?", "it does not see them")
if TABLE[_PROFILED].found:
    _core.profiled_by(vars(torch.autograd.profiler), _PROFILED.rpartition(".")[2])

_COMPILED = "torch.compile takes the module in, and PyTorch runs it"
_set_strategy = _private(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy", "torch.compile around a module calls the engine", _COMPILED
)
_Strategy = _private("torch._C._dynamo.eval_frame._FrameExecStrategy", "what torch.compile leaves as it is", _COMPILED)
_Action = _private("torch._C._dynamo.eval_frame._FrameAction", "what torch.compile leaves as it is", _COMPILED)

# --- optimizers -------------------------------------------------------------------------------------------------------

_FUNCTIONS_OF_C = _private("torch._C", "settings that forward asks for are compared from call to call")
_MODULE_OF_SETTINGS = _private("torch.backends.PropModule", "settings that are variables of a module", UNNEEDED)
_ONE_BY_ONE = "tensors are taken one after the other"
_foreach_mul = _private("torch._foreach_mul_", "scales many gradients at once", _ONE_BY_ONE)
_foreach_copy = _private("torch._foreach_copy_", "copies many gradients at once", _ONE_BY_ONE)
_foreach_norm = _private("torch._foreach_norm", "norms of many gradients at once, on a GPU", _ONE_BY_ONE)
amp_unscale = _private(
    "torch._amp_foreach_non_finite_check_and_unscale_", "unscales the gradients of Apex's amp at once",
    "Apex unscales them by itself",
)  # fmt: skip
_is_fx_tracing = _private(
    "torch.fx._symbolic_trace.is_fx_symbolic_tracing", "does torch.fx trace?", "torch.fx cannot trace a wrapped module"
)
_PYTHONS = "torch's functions of Python's are asked, which take longer"
_deterministic = _private(
    "torch._C._get_deterministic_algorithms", "are deterministic algorithms wished for?", _PYTHONS
)
_warns_only = _private(
    "torch._C._get_deterministic_algorithms_warn_only", "does what is not deterministic warn?", _PYTHONS
)
global_step_hooks = _private(
    "torch.optim.optimizer._global_optimizer_pre_hooks", "are there hooks on the steps of all optimizers?",
    "gradients of DeepSpeed's ZeRO are scaled before a step, not in it",
)  # fmt: skip


# --- with another way where a name may be missing ---------------------------------------------------------------------


# Asked in every call, so these are torch's own functions where there are such.

#: `keeps_graph()`, inside of backward: is another one to follow?
keeps_graph: Callable[[], bool] = (lambda: True) if _keep_graph is None else _keep_graph
#: `in_backward()`: does it run inside of a backward? Where that cannot be told, as if it did.
in_backward: Callable[[], bool] = (lambda: True) if _graph_task is None else (lambda: _graph_task() != -1)
#: `at_end_of_backward(function)`, inside of backward: it is called when that is over.
at_end_of_backward: Callable[[Callable[[], None]], None]
at_end_of_backward = (lambda function: None) if _queue_callback is None else _queue_callback
#: `saving_hooks()`: the hooks on what autograd saves, or None. Where that cannot be told, as if there were some.
saving_hooks: Callable[[], Any] = (lambda: "unknown") if _saving_hooks is None else partial(_saving_hooks, True)
#: `peek_transform()`: the transform of torch.func that looks at what runs, or None. (Where that cannot be told nothing
#: is captured.)
peek_transform: Callable[[], Any] = (lambda: None) if isinstance(_interpreters, _Absent) else _interpreters
#: By class: how objects of a registered class are taken apart.
registered_nodes: dict[type, Any] = {} if _registered_nodes is None else _registered_nodes
#: `is_fx_tracing()`: does torch.fx trace?
is_fx_tracing: Callable[[], bool] = (lambda: False) if _is_fx_tracing is None else _is_fx_tracing
#: `deterministic()`: are deterministic algorithms wished for? `warns_only()`: does what is none warn, or raise?
deterministic: Callable[[], bool] = _deterministic or torch.are_deterministic_algorithms_enabled
warns_only: Callable[[], bool] = _warns_only or torch.is_deterministic_algorithms_warn_only_enabled
#: `traced()`: true while TorchScript traces in this thread.
traced: Callable[[], Any] = get_tracing_state
if isinstance(get_tracing_state, _Absent):
    traced = torch.jit.is_tracing  # type: ignore[attr-defined]  # torch does not list it


@contextmanager
def untraced() -> Iterator[None]:
    """Inside, in this thread, TorchScript traces nothing."""
    state = get_tracing_state()
    set_tracing_state(None)
    try:
        yield
    finally:
        set_tracing_state(state)


#: `is_batched(tensor)`: is it a batch of gradients, of `torch.autograd.grad(..., is_grads_batched=True)`?
is_batched: Callable[[torch.Tensor], bool] = (lambda tensor: False) if _is_batched is None else _is_batched
#: `forward_level()`: the level of `torch.autograd.forward_ad` that is open, whose tangents PyTorch alone computes; -1:
#: none is. (Where that cannot be told nothing is captured.)
forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", -1)


def is_vmapped(tensor: torch.Tensor) -> bool:
    """Is it one that `torch.vmap` has made, of which it hides a dimension? The tracer knows no such tensor."""
    return _is_vmapped is not None and _is_vmapped(tensor)


def unbatched(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]] | None:
    """The tensor that `torch.vmap` has made this one of, and which of its dimensions this one has; None: of none."""
    if _vmapped_of is None or _vmapped_dim is None or not is_vmapped(tensor):
        return None
    places = list(range(tensor.dim()))
    while is_vmapped(tensor):
        hidden = _vmapped_dim(tensor)
        places = [place + (place >= hidden) for place in places]
        tensor = _vmapped_of(tensor)
    return tensor, places


def uncompiled(function: Any, message: str) -> None:
    """From now on torch.compile calls ``function`` as it is, with all that it calls; ``message``: for who reads why.

    As `torch.compiler.disable`, without another Python frame at each call, and without the import of the compiler.
    """
    if _set_strategy is not None and _Strategy is not None and _Action is not None:
        function._torchdynamo_disable, function._torchdynamo_disable_msg = True, message
        _set_strategy(function.__code__, _Strategy(_Action.SKIP, _Action.SKIP))


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Inside, torch.func and `is_grads_batched` do not see what runs."""
    with ExitStack() as stack:
        while _pop_interpreter is not None and peek_transform() is not None:
            stack.enter_context(_pop_interpreter())
        if _enter_vmap is not None and _leave_vmap is not None:
            for _ in range(_enter_vmap() - 1):
                _leave_vmap()
                stack.callback(_enter_vmap)
            _leave_vmap()
        yield


class ShardingTypes(NamedTuple):
    """What FSDP2 does to a module's tensors. Types are those of floats; None: as they are."""

    parameters: torch.dtype | None
    inputs: torch.dtype | None
    outputs: torch.dtype | None
    dimensions: int  #: of the mesh that it shards over


def sharding_types(module: Any) -> ShardingTypes:
    """What `fully_shard` was told for ``module``."""
    state = module._get_fsdp_state()
    policy, groups = state._mp_policy, state._fsdp_param_groups
    inputs = policy.param_dtype if policy.cast_forward_inputs else None
    dimensions = groups[0].mesh_info.mesh.ndim if groups else 1
    return ShardingTypes(policy.param_dtype, inputs, policy.output_dtype, dimensions)


def raw_stream(index: int) -> int:
    """torch's current stream on a GPU, for kernels of ours to run in order with torch's."""
    return torch.cuda.current_stream(index).cuda_stream if _raw_stream is None else _raw_stream(index)


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Scales all ``tensors`` in place."""
    if _foreach_mul is not None:
        _foreach_mul(tensors, factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor)


def foreach_copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each of ``sources`` to its target, whatever their types."""
    if _foreach_copy is not None:
        _foreach_copy(targets, sources)
    else:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def foreach_norm(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The Euclidean norm of each, a float64 scalar where it is."""
    if _foreach_norm is not None:
        return list(_foreach_norm(tensors, 2, dtype=torch.float64))
    return [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]


def module_behind(module: types.ModuleType) -> types.ModuleType:
    """The one that holds the variables of a module: some of torch's stand for another one."""
    inner = vars(module).get("m")
    stands = _MODULE_OF_SETTINGS is not None and isinstance(module, _MODULE_OF_SETTINGS)
    return inner if stands and isinstance(inner, types.ModuleType) else module


def functions_of_c() -> list[types.BuiltinFunctionType]:
    """torch's functions of C code that belong to no operator."""
    return [each for each in vars(_FUNCTIONS_OF_C).values() if isinstance(each, types.BuiltinFunctionType)]


def places(path: str) -> list[tuple[Any, str]]:
    """Where to replace what is under ``path``: what holds it, and its name; none where torch lacks it."""
    owner, _, name = path.rpartition(".")
    return [(resolve_name(owner), name)] if TABLE[path].found else []


def exporter_parameters() -> Any:
    """Of the export that runs."""
    return resolve_name(_PARAMETERS)


def in_place_of(functions: dict[str, Any]) -> list[Replacement]:
    """These under the names of the table; for those that torch lacks there is none."""
    return [Replacement(owner, name, function) for path, function in functions.items() for owner, name in places(path)]


def exporting_trace(given: Callable) -> AbstractContextManager[None]:
    """Inside, the exporter gets its trace from ``given``."""
    return replaced(in_place_of({_TRACE_FOR_EXPORT: given}))


def translating(run: Callable) -> AbstractContextManager[None]:
    """Inside, the exporter translates an operator with ``run``, whose parameters are those of run_symbolic_function."""
    return replaced(in_place_of({_SYMBOLIC_FUNCTION: run}))


def quiet_exporter(settle_types: Callable, check_batch_size: Callable) -> AbstractContextManager[None]:
    """Inside, the exporter leaves out what the engine does by itself, and its types are those of ``settle_types``."""
    names = {_LOG: _nothing, _SHAPES: _nothing, _LINT: _nothing, _UNPOOL: _nothing}
    return replaced(in_place_of(names | {_TYPES: settle_types, _BATCH_SIZE: check_batch_size}))


def _nothing(*args: Any) -> None:
    return None


fake_tensor_mode: Any = _private(
    "torch._subclasses.fake_tensor.FakeTensorMode", "sizes of what a stage of a pipeline gives, before it runs",
    "ORTTrainer has no pipelines",
)  # fmt: skip


def unvalidated(met: Callable[[Callable], Callable]) -> AbstractContextManager[None]:
    """Inside, distributions validate samples by what ``met`` makes of the function that does it."""
    if validate_sample is None:
        return nullcontext()
    return replaced([Replacement.around(torch.distributions.Distribution, "_validate_sample", met)])
