"""Reads settings from a JSON file, the environment and `DebugOptions`, in this order of precedence.

Every variable is declared once, in :data:`VARIABLES`: parsing, the errors, and `docs/configuration.md` come from there
(``python -m scripts.settings_page docs/configuration.md`` writes the page). Values are read when a module is wrapped.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ortmodule.core.errors import ArgumentTypeError, SettingError
from ortmodule.core.logger import LogLevel, warn_once
from ortmodule.core.names import DEFAULT_OPSET, OLDEST_OPSET, OPSETS
from ortmodule.core.settings.original_keys import from_original
from ortmodule.core.settings.safe_files import parse_json
from ortmodule.core.settings.setting_types import (
    AUTO_FLAG,
    BYTES,
    CLUSTERS,
    FALLBACK_POLICY,
    FILE,
    FLAG,
    FOLDER,
    LEVEL,
    PASSES,
    PATH,
    PRIVATE_FOLDER,
    SHARE,
    SKIPCHECK_POLICY,
    Kind,
    check_folder,
    number_from,
    one_of,
    version_from,
)

PREFIX = "ORTMODULE_"
_Settings = TypeVar("_Settings")


class DebugOptions:
    """How a wrapped module reports what it does.

    ``log_level``: a :class:`LogLevel`; ``ORTMODULE_LOG_LEVEL`` beats it. ``save_onnx``: write the graphs to
    ``<save_path>/<onnx_prefix>_*.onnx``; needs ``onnx_prefix``. ``save_path``: a folder that exists, the current one if
    empty; ``ORTMODULE_SAVE_ONNX_PATH`` beats it. ``config``: accepted for old scripts, and not used.

    Raises TypeError for a log level of another type, ValueError for saving without a prefix, OSError for a folder that
    cannot be written.
    """

    def __init__(
        self,
        log_level: LogLevel = LogLevel.WARNING,
        save_onnx: bool = False,
        onnx_prefix: str = "",
        save_path: str = "",
        config: Any = None,
    ) -> None:
        if not isinstance(log_level, LogLevel):
            raise ArgumentTypeError(f"log_level is a LogLevel, not {type(log_level).__name__}")
        if not isinstance(onnx_prefix, str):
            raise ArgumentTypeError(f"onnx_prefix is text, not {type(onnx_prefix).__name__}")
        if save_onnx and not onnx_prefix:
            raise SettingError("save_onnx=True needs an onnx_prefix")
        if save_onnx and os.path.basename(onnx_prefix) != onnx_prefix:
            raise SettingError(f"onnx_prefix={onnx_prefix} names a folder: that is what save_path is for")
        if save_onnx:
            by_environment = os.environ.get(f"{PREFIX}SAVE_ONNX_PATH")
            name = f"{PREFIX}SAVE_ONNX_PATH" if by_environment else "save_path"
            check_folder(by_environment or save_path or ".", name)
        self.log_level, self.config = log_level, config
        self.save_onnx, self.onnx_prefix, self.save_path = save_onnx, onnx_prefix, save_path


# --- the table --------------------------------------------------------------------------------------------------------


_UNSUPPORTED = ("DEVICE", "DATA", "TORCH_MODEL", "ONNX_MODEL")


def _setting(kind: Kind, default: Any, doc: str, exists: bool = True) -> Any:
    """A field of :class:`Config`. ``exists``: it does something; otherwise it is accepted only, and any value but the
    default gets a warning."""
    return field(default=default, metadata={"kind": kind, "doc": doc, "exists": exists})


def _remembering(cls: type[_Settings]) -> type[_Settings]:
    """The settings' class with an attribute ``given``: the names of the fields that its maker was given."""
    make: Any = cls.__init__

    @functools.wraps(make)
    def remember(self: Any, **given: Any) -> None:
        object.__setattr__(self, "given", frozenset(given))
        make(self, **given)

    cls.__init__ = remember  # type: ignore[method-assign]  # the same parameters
    return cls


# fmt: off
@_remembering
@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a wrapped module: ``ORTModule(model, config=Config(verify=1))``; docs/configuration.md lists all.

    A field is the variable ``ORTMODULE_<NAME>`` in lower case. Flags are ``True`` or ``False``, names joined by ``|``
    may be a collection of texts. The environment beats what is given here, and a JSON file beats both. What is given,
    be it the default, beats :class:`DebugOptions`.

    Raises ValueError, with the nearest valid value, for a value that cannot be understood.
    """

    onnx_opset_version: int = _setting(
        version_from(OPSETS, OLDEST_OPSET), DEFAULT_OPSET,
        f"the ONNX opset to export with; {OLDEST_OPSET} to {OPSETS.start - 1}, which older scripts name, "
        f"are {OPSETS.start}",
    )
    fallback_policy: frozenset[str] = _setting(
        FALLBACK_POLICY, frozenset(f"FALLBACK_UNSUPPORTED_{what}" for what in _UNSUPPORTED),
        "when PyTorch may run the module instead of the engine: for a device, for data, for a module, or for "
        "a graph that the engine does not take (errors of gradients and kernels are among the last); "
        "`FALLBACK_FORCE_TORCH_FORWARD` and `FALLBACK_FORCE_TORCH_BACKWARD` let it run always; "
        "`FALLBACK_DISABLE` beats all others and raises the original exception",
    )
    fallback_retry: bool = _setting(
        FLAG, False,
        "try the engine again at every call after PyTorch had to run one",
    )
    strict: bool = _setting(
        FLAG, False,
        "what goes past the engine is an error (`ortmodule.BypassError`): a call or a submodule that PyTorch would "
        "have to run, and a step of an optimizer although the wrapped module was not called. Beats `FALLBACK_POLICY`",
    )
    skipcheck_policy: frozenset[str] = _setting(
        SKIPCHECK_POLICY, frozenset({"SKIP_CHECK_DISABLED"}),
        "accepted for old scripts: checks cost microseconds, so none is skipped",
    )
    log_level: LogLevel = _setting(
        LEVEL, LogLevel.WARNING,
        "how much is reported; beats `DebugOptions(log_level=...)`",
    )
    save_onnx: bool = _setting(
        FLAG, False,
        "save the graphs as ONNX files, as `DebugOptions(save_onnx=True)` does; needs `ONNX_PREFIX`",
    )
    onnx_prefix: str = _setting(
        PATH, "",
        "what the names of these files begin with, as `DebugOptions(onnx_prefix=...)`",
    )
    save_onnx_path: str = _setting(
        FOLDER, "",
        "where `DebugOptions(save_onnx=True)` puts its files, the current folder if it is empty; beats "
        "`DebugOptions(save_path=...)`",
    )
    cache_dir: str = _setting(
        PRIVATE_FOLDER, "",
        "keeps exported graphs, and kernels compiled for a GPU, there for later runs, which then only trace "
        "the module; off if it is empty",
    )
    capture_share: float = _setting(
        SHARE, 0.1,
        "how much of the time in steps (forward and backward, in the engine or in PyTorch) captures may take, the "
        "first graph of training, of evaluation and of each autocast type aside; a call that needs another graph "
        "runs in PyTorch meanwhile, see [capture budget](architecture/capture-budget.md). `inf`: every graph is "
        "captured at once; `0`: none but the first",
    )
    verify: int = _setting(
        number_from(0), 0,
        "1: every call also runs in PyTorch, with the engine's dropout masks, and outputs, buffers and "
        "gradients are compared; the first operator that differs is named. N: so at every Nth call. 0: never",
    )
    json_config_path: str = _setting(
        FILE, "",
        "a file with an object {name: value} of these settings, with or without the prefix",
    )
    allow_autograd_checkpoint: bool = _setting(
        FLAG, False,
        "no warning about a `torch.utils.checkpoint` inside the module that PyTorch runs, as its function is not pure",
    )
    deepcopy_before_model_export: bool = _setting(
        FLAG, True,
        "accepted for old scripts: capture works on the module itself and leaves it as it was, so nothing is "
        "copied",
    )
    enable_zero_stage3: bool = _setting(
        FLAG, False,
        "accepted for old scripts: DeepSpeed's ZeRO stage 3 needs no setting",
    )
    aten_sdpa_fallback: bool = _setting(
        FLAG, False,
        "accepted for old scripts: attention by torch's operator is captured as operators, and the engine chooses how "
        "to compute it; `USE_EFFICIENT_ATTENTION` takes its part",
    )
    is_deterministic: bool = _setting(
        FLAG, False,
        "accepted for old scripts: the engine follows `torch.use_deterministic_algorithms`",
    )
    external_torch_cpp_extension_dir: str = _setting(
        PATH, "",
        "accepted for old scripts: there are no extensions that are compiled after installation",
    )
    print_input_density: bool = _setting(
        FLAG, False,
        "every 10 steps a table: how much of the token and label inputs is not padding",
    )
    print_memory_stats: bool = _setting(
        FLAG, False,
        "memory of every step, before and after forward and backward: allocated, peak, cached, inactive",
    )
    conv_algo_search: str = _setting(
        one_of("HEURISTIC", "EXHAUSTIVE"), "HEURISTIC",
        "how a convolution on a GPU gets its algorithm. `HEURISTIC`: the first that cuDNN's heuristic names, gives "
        "the same bits every time and fits into the workspace; `EXHAUSTIVE`: the one of these that is measured to be "
        "the fastest, once a process for each convolution, when its plan is made. The CPU has one algorithm",
    )
    enable_cuda_graphs: bool = _setting(
        FLAG, True,
        "on a GPU a step whose memory comes back at the same addresses is started as CUDA graphs, forward and "
        "backward; off: kernel by kernel",
    )
    exporter: str = _setting(
        one_of("torchscript", "dynamo", "auto"), "torchscript",
        "which exporter of PyTorch captures the module; `torchscript` always does", exists=False,
    )
    enable_custom_autograd: bool = _setting(
        FLAG, True,
        "a `torch.autograd.Function` inside the module becomes a node of the graph, which PyTorch runs; off: "
        "the module that uses it is left to PyTorch",
    )
    enable_compute_optimizer: bool = _setting(
        FLAG, True,
        "where a module selects rows (the first token, the last one), compute only these, as far up as "
        "operators work row by row",
    )
    enable_sparse_optimizer: bool = _setting(
        FLAG, True,
        "do not compute what padding and ignored labels make unnecessary",
    )
    enable_label_sparse_optimizer: bool = _setting(
        FLAG, True,
        "the part of it for labels: rows whose label is ignored are not computed, where only the loss sees "
        "them",
    )
    enable_embedding_sparse_optimizer: str = _setting(
        AUTO_FLAG, "auto",
        "the part of it for padding: between embedding and results only tokens that attention's mask shows "
        "are computed. `auto`: where nothing that is seen depends on the others; `1`: outputs with a row for "
        "each token, too, which are 0 for padding",
    )
    defer_logits: str = _setting(
        AUTO_FLAG, "auto",
        "logits that only the loss reads are computed when the script reads them, with the weights that their "
        "forward had; backward goes through them all the same. `auto`: where that saves work, or much "
        "memory, once the script has not read them in two calls; `1`: always",
    )
    memory_opt_level: int = _setting(
        number_from(0, 2), 0,
        "what backward computes again instead of keeping it. 0: what lies in checkpoints of the module, or else what "
        "costs next to nothing (3 % of a step's work, estimated), or what `MEMORY_BUDGET` takes; 1: each layer, from "
        "what the layer before gives to it; 2: all that needs less memory",
    )
    memory_opt_layers: int = _setting(
        number_from(0), 0,
        "of `MEMORY_OPT_LEVEL=1`: the first so many of each row of layers are computed again; 0: all",
    )
    memory_budget: int = _setting(
        BYTES, 0,
        "bytes that a step may take: parameters, buffers, inputs, their gradients, results, activations and "
        "workspace (not the optimizer's states). Backward computes again what it has to for that, the least work "
        "first; MemoryError, with the least that can be reached, where that is more. 0: no limit",
    )
    memory_offload: bool = _setting(
        FLAG, False,
        "activations may wait for backward outside of the memory that a step takes: on the CPU in a file, on a GPU in "
        "pinned memory of the host, with copies beside computation and without CUDA graphs. Of what `MEMORY_BUDGET` "
        "and `MEMORY_OPT_LEVEL=2` take each goes the way that costs less time; without both all go there that lower "
        "the peak, and nothing is computed again. No effect at level 1",
    )
    memory_offload_path: str = _setting(
        FOLDER, "",
        "the folder of that file, which has no name and is gone with the process; the folder for temporary files if "
        "empty",
    )
    keep_memory: bool = _setting(
        FLAG, True,
        "on the CPU, the memory that a step is done with is kept for the next one; off: after each backward it goes "
        "back to the system, so that the optimizer's step may take as much, and the next step is given fresh pages, "
        "which costs some percent of its time. On a GPU memory is torch's: no effect",
    )
    memory_opt_config: str = _setting(
        CLUSTERS, "",
        "what backward computes again, beside what `MEMORY_BUDGET` takes: a list of `<cluster>:<strategy>:<count>` "
        "with clusters of the table that log level `INFO` prints; strategy 0: nothing, 1: again from what is kept "
        "anyway, 2: from something smaller that is kept for it; the first so many places of the cluster, -1: all. For "
        "`MEMORY_OPT_LEVEL=0`: a level decides alone",
    )
    enable_mem_efficient_grad_mgmt: str = _setting(
        AUTO_FLAG, "auto",
        "gradients of parameters are handed over while backward goes on. `auto`: in segments of about 25 MB, "
        "where parameters have hooks or gradients to add to, or `torch.distributed` is initialised; `1`: each as "
        "soon as it is computed; `0`: together at its end",
    )
    use_efficient_attention: bool = _setting(
        FLAG, False,
        "attention is one operator that never holds its scores wherever its pattern is found; off: only where "
        "that is measured to be faster, or sequences are long",
    )
    disabled_passes: frozenset[str] = _setting(
        PASSES, frozenset(),
        "passes that leave the graph as it is, to find what a result or a time comes from",
    )
    use_triton: bool = _setting(
        FLAG, False,
        "on a GPU from compute capability 8.0 on, parts of the graph (pointwise operators, reductions, softmaxes and "
        "norms of rows, and their gradients) are kernels that Triton compiles, see [Triton](architecture/triton.md); "
        "on the CPU only with Triton's interpreter (`TRITON_INTERPRET=1`), for tests",
    )
    triton_config_file: str = _setting(
        PATH, "",
        "a JSON file that says which operators become Triton kernels: `{\"ops\": {\"Add\": {\"versions\": [13, 14]}, "
        "\"ReduceSum\": {\"versions\": [13], \"conditions\": {\"axes\": \"[-1]\"}}}, \"initializer\": \"scalar\", "
        "\"min_nodes\": 2}`; all that there is a kernel for if it is empty",
    )
    triton_debug: bool = _setting(
        FLAG, False,
        "save each part that became a Triton kernel, its program and its source to `triton_debug/`",
    )
    use_flash_attention: bool = _setting(
        FLAG, False,
        "attention is a flash attention written in Triton, forward and backward, with masks, biases, dropout and "
        "groups of heads; needs `USE_TRITON`",
    )
    enable_tuning: bool = _setting(
        FLAG, False,
        "matrix products go the way that is measured to be the fastest on this CPU, for all modules of the "
        "process: each class of products (types, transposes, sizes up to a power of two, threads) is timed "
        "when a plan first has it; on a GPU cuBLASLt's algorithms are timed, for each product that is new in "
        "its types and sizes; may change the last bits of results",
    )
    max_tuning_duration_ms: int = _setting(
        number_from(0), 0,
        "about how long to measure one class of products; 0: as long as it takes",
    )
    tuning_results_path: str = _setting(
        PATH, "",
        "a file (`*.json`), or a folder for `tuning_results.json`, made if it is missing: what was measured "
        "is added there, and read when a module is wrapped, also with tuning off; entries for another device "
        "or version are left alone and not used",
    )
# fmt: on

    #: The names of the fields that were given. (No field itself: an attribute of each instance.)
    given: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        for variable in VARIABLES.values():
            name = variable.name.lower()
            value = getattr(self, name)
            if type(value) is not type(variable.default) or value != variable.default:
                object.__setattr__(self, name, variable.parse(_text("Config", name, value), "Config"))

    @property
    def passes_off(self) -> frozenset[str]:
        """The engine's passes that are switched off."""
        off = (False, "0")
        verified = _PASSES_OFF_IN_VERIFICATION if self.verify else frozenset()
        return self.disabled_passes | verified | {
            name for name, settings in _PASSES.items() if any(getattr(self, s) in off for s in settings)
        }

    @property
    def padding_unseen(self) -> bool:
        """The user says that results for padding are not read."""
        return self.enable_embedding_sparse_optimizer == "1"


@dataclass(frozen=True)
class Variable:
    """One setting, by its name in the environment without the prefix."""

    name: str
    kind: Kind
    default: Any
    doc: str
    exists: bool

    def parse(self, text: str, source: str) -> Any:
        """The value that ``text`` means; ValueError naming the variable, where it was set, and what would be right."""
        try:
            return self.kind.parse(text)
        except ValueError as error:
            raise SettingError(f"{PREFIX}{self.name}={text} ({source}): this setting {error}") from None


VARIABLES = {
    name: Variable(name, each.metadata["kind"], each.default, each.metadata["doc"], each.metadata["exists"])
    for name, each in ((each.name.upper(), each) for each in fields(Config))
}
#: Passes, and the settings that all have to be on for them.
_PASSES = {
    "row_selection": ("enable_compute_optimizer",),
    "label_sparsity": ("enable_sparse_optimizer", "enable_label_sparse_optimizer"),
    "padding_removal": ("enable_sparse_optimizer", "enable_embedding_sparse_optimizer"),
    "efficient_attention": ("use_efficient_attention",),
}
#: Switched off where steps are compared with PyTorch: what torch's kernels draw is not known.
_PASSES_OFF_IN_VERIFICATION = frozenset(("flash_dropout",))

#: Defaults that this process uses instead of the table's.
_DEFAULTS: dict[str, Any] = {}


def set_default(name: str, value: Any) -> None:
    """Another default, for modules that are wrapped from now on. ``name``: of a variable; KeyError if there is none."""
    _DEFAULTS[VARIABLES[name].name] = value


#: Names with the prefix that belong to the build and the tests of ortmodule itself.
_BUILD = {"BUILD", "CPU", "CUDA", "WERROR", "BROKEN", "TEST_DEVICE", "RED_ZONES"}


# --- reading ----------------------------------------------------------------------------------------------------------


def read_config(config: Config | None = None, debug: DebugOptions | None = None) -> Config:
    """The settings of a module that is wrapped now: a JSON file's, else the environment's, else those of ``config``,
    else those of ``debug``, else the defaults.

    Raises TypeError for arguments of other types, ValueError for a value that cannot be understood. A name that there
    is not, and one whose capability does not exist yet, get a warning each.
    """
    if debug is not None and not isinstance(debug, DebugOptions):
        raise ArgumentTypeError(f"debug_options is a DebugOptions, not {type(debug).__name__}")
    if config is not None and not isinstance(config, Config):
        raise ArgumentTypeError(f"config is a Config, not {type(config).__name__}")
    debug, config = debug or DebugOptions(), config or Config()
    values: dict[str, Any] = {"LOG_LEVEL": debug.log_level, "SAVE_ONNX_PATH": debug.save_path}
    values |= {"SAVE_ONNX": debug.save_onnx, "ONNX_PREFIX": debug.onnx_prefix} | _DEFAULTS
    values |= {name.upper(): getattr(config, name) for name in config.given}
    sources = dict.fromkeys(values, "Config")
    given = _from_environment()
    if file := given.get("JSON_CONFIG_PATH", (config.json_config_path, "Config") if config.json_config_path else None):
        given |= _from_json(VARIABLES["JSON_CONFIG_PATH"].parse(*file))
    for name, (text, source) in given.items():
        values[name], sources[name] = VARIABLES[name].parse(text, source), source
    for name, value in values.items():
        if not VARIABLES[name].exists and value != VARIABLES[name].default:
            warn_once(f"{PREFIX}{name} ({sources[name]}) is accepted, but has no effect yet: {VARIABLES[name].doc}")
    if values.get("MEMORY_OPT_CONFIG") and values.get("MEMORY_OPT_LEVEL"):
        level = f"{PREFIX}MEMORY_OPT_LEVEL={values['MEMORY_OPT_LEVEL']} decides"
        warn_once(f"{PREFIX}MEMORY_OPT_CONFIG ({sources['MEMORY_OPT_CONFIG']}) has no effect: {level}")
    return Config(**{name.lower(): value for name, value in values.items()})


def _from_environment() -> dict[str, tuple[str, str]]:
    """{name: (text, where it was set)} of what the environment sets."""
    names = [name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX)]
    found = {name: (os.environ[PREFIX + name].strip(), "environment") for name in _known(names, "environment")}
    return {name: given for name, given in found.items() if given[0]}


def _from_json(path: str) -> dict[str, tuple[str, str]]:
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"{PREFIX}JSON_CONFIG_PATH={path}: {error}") from None
    if not isinstance(content, dict):
        raise SettingError(f"{PREFIX}JSON_CONFIG_PATH={path}: it holds an object with a name for each value")
    content = from_original(content)
    named = {name.upper().removeprefix(PREFIX): value for name, value in content.items()}
    return {name: (_text(path, name, named[name]), path) for name in _known(named, path) if named[name] is not None}


def _text(path: str, name: str, value: Any) -> str:
    """A value of JSON as it would be written in the environment."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, LogLevel):
        return value.name
    if isinstance(value, (int, float, str)):
        return str(value)
    if isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(item, str) for item in value):
        return "|".join(sorted(value))
    raise SettingError(f"{path}: {name} is a text, a number, true, false, or a list of texts, not {json.dumps(value)}")


def _known(names: Iterable[str], source: str) -> list[str]:
    """Those of ``names`` that exist; the others get a warning."""
    known = []
    for name in names:
        if name in VARIABLES:
            known.append(name)
        elif name not in _BUILD:
            near = difflib.get_close_matches(name, VARIABLES, 1, 0.7)
            advice = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            warn_once(f"there is no setting {PREFIX}{name} ({source}){advice}")
    return known
