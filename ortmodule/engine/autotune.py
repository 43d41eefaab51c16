"""Measures which way a matmul goes fastest on this device, and keeps it in a file (``ORTMODULE_ENABLE_TUNING``).

The engine has several ways to multiply and an order among them that holds for a kind of CPU. When tuning is on and a
plan has been made, every class of its products (types, which operands are transposed, sizes rounded up to powers of
two, threads) that is not measured yet runs each way on memory of its own, and the fastest is taken from then on, by
all modules of the process. Ways differ in the order of their sums, so a choice may change the last bits of a result,
and nothing else; the same file gives the same choices.

On a GPU a product is cuBLASLt's, which has many algorithms and guesses which is the fastest. When tuning is on and a
plan has been made, each of its products (types, sizes, strides, alignments, epilogue) that has not run yet is computed
by those that the library thinks best, on memory of torch's allocator that goes back at once; the fastest is taken from
then on. What has run in this process stays as it is, and nothing is measured while a stream is captured. Convolutions,
which are cuDNN's, are measured in the same way with ``CONV_ALGO_SEARCH=EXHAUSTIVE``; what was chosen for them is kept
in no file. A Triton kernel that has not run is compiled in several cuts (elements or rows of a block, warps, stages),
which are measured in the same way; its class is its program, by a hash, and the room that a row takes.

``TUNING_RESULTS_PATH`` is a file (``*.json``) or a folder, which then has a file ``tuning_results.json``: an object
``{"results": [{"device", "engine", "torch", "products": {class: {"way", "seconds": {way: seconds}}}}, ...]}``. Only the
entry for this device and these versions is used (a GPU's device is its model and the version of cuBLASLt; there a class
is one product, and a way the algorithm as the library keeps it); all others are left as they are. What has been
measured is added at the end of each tuning: the file is read again, written under another name and put into place, one
process at a time; a process that waits for its turn too long says so, and goes on without keeping what it measured.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ortmodule import _core
from ortmodule.core.config import PREFIX, Config
from ortmodule.core.logger import ENGINE, warn_once
from ortmodule.core.names import VERSION
from ortmodule.core.settings import safe_files

FILE_NAME = "tuning_results.json"
#: {device: {class: entry}} of all that this process has measured.
_measured: dict[str, dict[str, dict[str, Any]]] = {}
_lock = threading.Lock()


def device_name() -> str:
    """The model of this CPU, with its numbers, since virtual machines shorten the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    said: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        said.setdefault(key.strip(), value.strip())
    if "model name" not in said:
        return platform.processor() or platform.machine()
    numbers = [f"{key} {said[key]}" for key in ("cpu family", "model", "stepping") if key in said]
    return f"{said['model name']} ({', '.join(numbers)})"


def _place(device: str | None = None) -> dict[str, str]:
    """What results hold for; ``device``: unless this CPU."""
    return {"device": device or device_name(), "engine": VERSION, "torch": torch.__version__}


# --- the file ---------------------------------------------------------------------------------------------------------


def _read(file: Path) -> dict[str, Any]:
    """What the file holds; without a file, nothing. Raises OSError, and ValueError for what is not such a file."""
    try:
        text = safe_files.read_regular(file).decode()
    except FileNotFoundError:
        return {"results": []}
    content = safe_files.parse_json(text)
    results = content.get("results") if isinstance(content, dict) else None
    if not isinstance(results, list):
        raise ValueError('it is no object with a list "results"')
    for result in results:
        if not isinstance(result, dict) or not isinstance(result.get("products"), dict):
            raise ValueError('one of its results is no object with "products"')
    return content


def _here(content: dict[str, Any], device: str | None = None) -> dict[str, Any]:
    """The entry for a device, this CPU if none is named, and these versions, added if there is none."""
    place = _place(device)
    for result in content["results"]:
        if all(result.get(key) == value for key, value in place.items()):
            return result
    content["results"].append({**place, "products": {}})
    return content["results"][-1]


def _add(file: Path, products: dict[str, dict[str, Any]], device: str | None = None) -> None:
    """Adds to what the file holds. Raises OSError, and ValueError for a file that is something else."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with safe_files.locked(file.with_name(file.name + ".lock")):
        content = _read(file)
        _here(content, device)["products"].update(products)
        safe_files.write_whole(file, safe_files.json_bytes(content))


# --- a module's -------------------------------------------------------------------------------------------------------


class Tuning:
    """What one wrapped module measures and keeps.

    ``products``, ``convolutions``, ``seconds``: how many it has measured, and how long.
    """

    def __init__(self, measures: bool, limit_ms: int, path: str, measures_convolutions: bool = False) -> None:
        """``measures``: products. ``limit_ms``: about the longest for one class of products or one convolution; 0: as
        long as it takes. ``path``: "" keeps nothing. ``measures_convolutions``: those on a GPU."""
        self.measures, self.limit = measures, limit_ms / 1000
        self.measures_convolutions, self.convolutions = measures_convolutions, 0
        self.file = None if not path else Path(path) if path.endswith(".json") else Path(path) / FILE_NAME
        self.products, self.seconds = 0, 0.0
        self._gpus: dict[int, str] = {}  # those whose results have been read, and what they hold for
        self._load(device_name(), _core.tuning_set)

    @staticmethod
    def of(config: Config) -> Tuning | None:
        """None where the settings ask for nothing."""
        measures, path = config.enable_tuning, config.tuning_results_path
        convolutions = config.conv_algo_search == "EXHAUSTIVE"
        if not (measures or path or convolutions):
            return None
        return Tuning(measures, config.max_tuning_duration_ms, path, convolutions)

    def _warn(self, what: str, error: Exception | str) -> None:
        warn_once(f"{PREFIX}TUNING_RESULTS_PATH: {self.file} {what}: {error}")

    def _load(self, device: str, use: Callable[[str, str], None]) -> None:
        """``use``: is given the class and the way of each entry for that device."""
        if self.file is None:
            return
        if not self.measures and not self.file.exists():
            return self._warn("cannot be used", f"there is no such file, and {PREFIX}ENABLE_TUNING is off")
        try:
            products = _here(_read(self.file), device)["products"]
        except (OSError, ValueError) as error:
            return self._warn("cannot be used", error)
        for text, entry in products.items():
            try:
                if not isinstance(entry, dict) or not isinstance(entry.get("way"), str):
                    raise ValueError(f"'{text}' has no way")
                use(text, entry["way"])
            except (ValueError, MemoryError) as error:
                self._warn("holds an entry that is not used", error)
        ENGINE.info("tuning: %d classes of products from %s", len(products), self.file)

    def prepare(self, gpu: int) -> None:
        """Before a plan for this GPU is made: reads what has been measured for it."""
        if gpu in self._gpus:
            return
        self._gpus[gpu] = _core.cuda_place(gpu)
        self._load(self._gpus[gpu], lambda text, way: _core.cuda_tuning_set(gpu, text, way))

    def plan_made_for(
        self, gpu: int, plan: _core.Plan, math_mode: int, stream: int, empty: Callable[[int], Any]
    ) -> None:
        """Measures what is new in a plan for a GPU. ``empty``: makes a tensor there of so many bytes; ``math_mode``: as
        Plan.forward takes it."""
        kinds = self.measures, self.measures_convolutions
        if not any(kinds):
            return
        start = time.perf_counter()
        with _lock:
            needed, found, convolutions = _core.cuda_tune(plan, math_mode, self.limit, None, stream, *kinds)
            if needed:
                try:
                    memory = empty(needed)
                    _, found, convolutions = _core.cuda_tune(plan, math_mode, self.limit, memory, stream, *kinds)
                except (torch.OutOfMemoryError, MemoryError) as error:
                    setting = "ENABLE_TUNING=1" if self.measures else "CONV_ALGO_SEARCH=EXHAUSTIVE"
                    warn_once(f"{PREFIX}{setting} leaves out what {needed} bytes are missing for: {error}")
            self.convolutions += convolutions
            self._note(self._gpus[gpu], found, start)
            if convolutions:
                ENGINE.info("tuning: %d convolutions measured", convolutions)

    def plan_made(self, plan: _core.Plan) -> None:
        """Measures what is new in a plan for the CPU."""
        if not self.measures:
            return
        start = time.perf_counter()
        with _lock:
            self._note(device_name(), _core.tune(plan, self.limit), start)

    def _note(self, device: str, found: list[tuple[str, str, dict[str, float]]], start: float) -> None:
        """Keeps what has been measured since ``start``."""
        new: dict[str, dict[str, Any]] = {text: {"way": way, "seconds": seconds} for text, way, seconds in found}
        if new:
            _measured.setdefault(device, {}).update(new)
            if self.file is not None:
                self._keep(self.file, device)
        spent = time.perf_counter() - start
        self.products += len(new)
        self.seconds += spent
        if new and ENGINE.isEnabledFor(logging.INFO):
            ENGINE.info("tuning: %d classes of products measured in %.2f s", len(new), spent)
            for text, entry in new.items():
                times = ", ".join(f"{way} {1e6 * s:.1f} us" for way, s in entry["seconds"].items())
                ENGINE.info("tuning: %s: %s (%s)", text, entry["way"], times)

    def _keep(self, file: Path, device: str) -> None:
        try:
            _add(file, _measured[device], device)
        except (OSError, ValueError) as error:
            self._warn("cannot be written, so what was measured is not kept", error)
