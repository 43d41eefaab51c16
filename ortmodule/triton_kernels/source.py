"""Writes the source of a Triton kernel from a program and the way that its operands are read.

A kernel of rows takes ``BLOCK`` rows at a time, each of which is in registers as a whole: ``ROOM`` is a power of two
that has room for one. A kernel of elements takes ``BLOCK`` elements.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from ortmodule.triton_kernels.formulas import CLASSES, Term, formulas, translated
from ortmodule.triton_kernels.program import KernelStep, Program, StepResult, read_program
from ortmodule.triton_kernels.row_steps import ROW_OPERATORS, Rows

#: The engine's types -> Triton's for a pointer to them. Booleans are bytes.
POINTERS = {"float32": "*fp32", "float64": "*fp64", "bfloat16": "*bf16", "float16": "*fp16", "int64": "*i64",
            "int32": "*i32", "int16": "*i16", "int8": "*i8", "uint8": "*u8", "bool": "*u8"}  # fmt: skip
#: What elements of a type are computed in.
COMPUTED = {"bfloat16": "float32", "float16": "float32", "int16": "int32", "int8": "int32", "uint8": "int32"}
_NARROW = {
    "bfloat16": "tl.bfloat16",
    "float16": "tl.float16",
    "int16": "tl.int16",
    "int8": "tl.int8",
    "uint8": "tl.uint8",
}

#: The engine's random words.
_DRAW = "from ortmodule.triton_kernels.device_functions import word_of\n\n"


class KernelSource(NamedTuple):
    """``arguments``: a type of Triton's for each argument, in order; ``pointers``: which of them are addresses."""

    text: str
    name: str
    arguments: dict[str, str]
    pointers: tuple[str, ...]


NAME = "chain"


@functools.lru_cache(maxsize=1024)
def source_of(text: str, how: str) -> KernelSource:
    """The kernel of a program, for operands that are read so. ``how``: as csrc/ops/chains/triton.h describes it."""
    return _Writer(read_program(text), *how.split("|")).source()


class _Writer:
    def __init__(self, program: Program, reach: str, wanted: str, flags: str) -> None:
        self.program, self.reach, self.wanted = program, reach, wanted
        self.is_wide, self.seed_there = "w" in flags, "s" in flags
        self.index = "tl.int64" if self.is_wide else "tl.int32"
        #: Of a single number: a block, since the interpreter makes floats of conditions that are none.
        self.one = "[1, 1]" if program.has_rows else "[1]"
        self.lines: list[str] = []
        self.values: dict[int, Term] = {}
        self.sums = [r for step in program.steps for r in step.results if r and r.letter == "C"]

    def put(self, *lines: str) -> None:
        self.lines += lines

    # --- arguments ----------------------------------------------------------------------------------------------------

    def arguments(self) -> dict[str, str]:
        """{name: type}, in the order of csrc/ops/chains/triton.c."""
        program = self.program
        found = {f"in{i}": POINTERS[kind] for i, kind in enumerate(program.operands)}
        for i, how in enumerate(self.reach):
            if how.isdigit():
                found |= {f"in{i}_size{d}": "i64" for d in range(1, int(how))}
                found |= {f"in{i}_stride{d}": "i64" for d in range(int(how))}
        for i, number in enumerate(program.results):
            if self.wanted[i] == "y":
                found[f"out{i}"] = POINTERS[self.stored_as(number)]
        found |= {"rows": "i64", "width": "i64"}
        for i in range(program.n_params):
            found |= {f"param{i}_0": "i64", f"param{i}_1": "i64"}
        if program.draws:
            found |= {"seed_at": "*i64"} if self.seed_there else {"seed_low": "i64", "seed_high": "i64"}
        return found

    def stored_as(self, number: int) -> str:
        """The type that a result is stored as: sums of blocks are added up once more."""
        kind = self.program.types[number]
        is_sum = any(r.number == number for r in self.sums)
        return ("float64" if kind == "float64" else "float32") if is_sum else kind

    # --- the kernel ---------------------------------------------------------------------------------------------------

    def source(self) -> KernelSource:
        arguments = self.arguments()
        needed = self.needed()
        constants = ", ".join(["BLOCK: tl.constexpr"] + ["ROOM: tl.constexpr"] * self.program.has_rows)
        self.put(f"rows = rows.to({self.index})", f"width = width.to({self.index})")
        self.parameters(needed)
        before, self.lines = self.lines, []
        self.places()
        for i in range(len(self.program.operands)):
            if i in needed:
                self.load(i)
        self.constants()
        for step in self.program.steps:
            if any(r is not None and r.number in needed for r in step.results):
                self.step(step, needed)
        for i, number in enumerate(self.program.results):
            if self.wanted[i] == "y":
                self.store(i, number)
        body = self.looped(before)
        text = "import triton\nimport triton.language as tl\nfrom triton.language.extra.cuda import libdevice\n\n"
        text += _DRAW * self.program.draws
        text += f"\n@triton.jit\ndef {NAME}({', '.join(arguments)}, {constants}):\n"
        text += "".join(f"    {line}\n" for line in body)
        return KernelSource(text, NAME, arguments, tuple(name for name, kind in arguments.items() if kind[0] == "*"))

    def needed(self) -> set[int]:
        """Numbers of the values that the wanted results are made from."""
        found = {n for i, n in enumerate(self.program.results) if self.wanted[i] == "y"}
        for step in reversed(self.program.steps):
            if any(r is not None and r.number in found for r in step.results):
                found |= {n for n in step.operands if n >= 0}
        return found

    def looped(self, before: list[str]) -> list[str]:
        """Where rows are summed over, a block of the kernel walks over several blocks of rows."""
        sums = [r for r in self.sums if any(n == r.number for n in self.wanted_results())]
        if not sums:
            return [*before, f"block = tl.program_id(0).to({self.index})", *self.lines]
        zeros = [f"sum{r.number} = tl.zeros([1, ROOM], tl.{self.stored_as(r.number)})" for r in sums]
        stores = [
            f"tl.store(out{i} + tl.program_id(0).to({self.index}) * width + columns, sum{n}, mask=columns < width)"
            for i, n in enumerate(self.program.results)
            if self.wanted[i] == "y" and any(n == r.number for r in sums)
        ]
        blocks = "for turn in range(tl.program_id(0), tl.cdiv(rows, BLOCK), tl.num_programs(0)):"
        inner = [f"block = tl.full([], 0, {self.index}) + turn", *self.lines]
        columns = f"columns = tl.arange(0, ROOM)[None, :].to({self.index})"
        return [*before, columns, *zeros, blocks, *(f"    {line}" for line in inner), *stores]

    def wanted_results(self) -> list[int]:
        return [n for i, n in enumerate(self.program.results) if self.wanted[i] == "y"]

    def parameters(self, needed: set[int]) -> None:
        for step in self.program.steps:
            if step.params is None or not any(r is not None and r.number in needed for r in step.results):
                continue
            first, second = (f"param{step.params}_{i}" for i in (0, 1))
            kind = self.computed_class(step)
            of_bits = ".to(tl.int64).to(tl.float64, bitcast=True)"
            self.put(f"p{step.params}_0 = tl.broadcast_to({first}{of_bits}.to({CLASSES[kind]}), {self.one})")
            if step.draws:
                self.put(f"key{step.params} = ({second}.to(tl.int64) & 0xFFFFFFFF).to(tl.uint32)")
                self.put(f"least{step.params} = ({second}.to(tl.int64) >> 32).to(tl.uint32)")
            else:
                self.put(f"p{step.params}_1 = tl.broadcast_to({second}{of_bits}.to({CLASSES[kind]}), {self.one})")
        if self.program.draws and self.seed_there:
            self.put("seed = tl.load(seed_at)", "low = seed.to(tl.uint32)", "high = (seed >> 32).to(tl.uint32)")
        elif self.program.draws:
            self.put("low = seed_low.to(tl.uint32)", "high = seed_high.to(tl.uint32)")

    def computed_class(self, step: KernelStep) -> str:
        kind = self.program.types[step.operands[0 if step.operator in ROW_OPERATORS else -1]]
        return COMPUTED.get(kind, kind)

    def places(self) -> None:
        """Which elements a block has, and whether they are there."""
        if self.program.has_rows:
            self.put(
                "row = block * BLOCK + tl.arange(0, BLOCK)[:, None]",
                f"columns = tl.arange(0, ROOM)[None, :].to({self.index})",
                "is_row = row < rows",
                "is_column = columns < width",
                "is_there = is_row & is_column",
                "at = row * width + columns",
            )
        else:
            self.put("at = block * BLOCK + tl.arange(0, BLOCK)", "is_there = at < width")

    def load(self, i: int) -> None:
        kind, how, name = self.program.operands[i], self.reach[i], f"v{i}"
        place, mask = {
            "D": ("at", "is_there"),
            "R": ("row", "is_row"),
            "C": ("columns", "is_column"),
        }.get(how, ("", "is_there"))
        if how == "S":
            loaded = f"tl.broadcast_to(tl.load(in{i}), {self.one})"
        else:
            if how.isdigit():
                place = self.offset(i, int(how))
            loaded = f"tl.load(in{i} + {place}, mask={mask}, other=0)"
        if kind == "bool":
            self.values[i] = Term(name, True)
            self.put(f"{name} = {loaded} != 0")
            return
        self.values[i] = Term(name)
        wider = COMPUTED.get(kind)
        self.put(f"{name} = {loaded}" + (f".to({CLASSES[wider]})" if wider else ""))

    def offset(self, i: int, rank: int) -> str:
        """The name of where the elements of an operand with several dimensions are."""
        self.put(f"rest{i} = at", f"offset{i} = tl.zeros_like(at)")
        for d in range(rank - 1, 0, -1):
            size = f"in{i}_size{d}.to({self.index})"
            self.put(
                f"offset{i} += rest{i} % {size} * in{i}_stride{d}.to({self.index})", f"rest{i} = rest{i} // {size}"
            )
        self.put(f"offset{i} += rest{i} * in{i}_stride0.to({self.index})")
        return f"offset{i}"

    def constants(self) -> None:
        for j, (kind, value) in enumerate(self.program.constants):
            number = len(self.program.operands) + j
            written = repr(value).replace("inf", "float('inf')").replace("nan", "float('nan')")
            if kind == "bool":
                self.values[number] = Term(f"v{number}", True)
                self.put(f"v{number} = tl.full({self.one}, {value != 0}, tl.int1)")
            else:
                self.values[number] = Term(f"v{number}")
                self.put(f"v{number} = tl.full({self.one}, {written}, {CLASSES[COMPUTED.get(kind, kind)]})")

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, step: KernelStep, needed: set[int]) -> None:
        operands = [self.values[n] if n >= 0 else None for n in step.operands]
        if step.operator in ROW_OPERATORS:
            kind = self.computed_class(step)
            given = f"p{step.params}_0" if step.params is not None else ""
            rows = Rows(self.put, f"s{len(self.lines)}_", kind, given)
            texts = [None if term is None else term.text for term in operands]
            made = ROW_OPERATORS[step.operator](rows, *texts)
            for result, text in zip(step.results, made, strict=False):
                if result is not None and result.number in needed:
                    self.make(result, text, computed=kind)
            return
        result = step.results[0]
        assert result is not None
        present = [term for term in operands if term is not None]
        if step.draws:
            word = f"word_of(low, high, key{step.params}, at)"
            self.make(result, f"{present[0].text} * tl.where({word} >= least{step.params}, p{step.params}_0, 0)")
            return
        last = self.program.types[step.operands[-1]]
        to = COMPUTED.get(result.dtype, result.dtype)
        formula = formulas()[step.operator, COMPUTED.get(last, last), to]
        given_params = [] if step.params is None else [f"p{step.params}_{i}" for i in (0, 1)]
        lines, text = translated(formula, present, given_params, f"s{result.number}_")
        self.put(*lines)
        self.make(result, text)

    def make(self, result: StepResult, text: str, computed: str = "") -> None:
        """Names a value, rounded as if it had been stored."""
        name = f"v{result.number}"
        if result.letter == "C":
            kind = f"tl.{self.stored_as(result.number)}"
            self.put(f"sum{result.number} += tl.sum(tl.where(is_there, {text}, 0.0), 0, keep_dims=True).to({kind})")
            return
        narrow, wide = _NARROW.get(result.dtype), COMPUTED.get(result.dtype, result.dtype)
        if narrow:
            text = f"({text}).to({narrow}).to({CLASSES[wide]})"
        elif computed and computed != wide:
            text = f"({text}).to({CLASSES[wide]})"
        self.put(f"{name} = {text}")
        self.values[result.number] = Term(name, result.dtype == "bool")

    def store(self, i: int, number: int) -> None:
        result = next(r for step in self.program.steps for r in step.results if r and r.number == number)
        if result.letter == "C":
            return
        place, mask = ("row", "is_row") if result.letter == "r" else ("at", "is_there")
        value = self.values[number].text
        kind = _NARROW.get(result.dtype, "tl.uint8" if result.dtype == "bool" else CLASSES.get(result.dtype, ""))
        shape = "[BLOCK]" if not self.program.has_rows else "[BLOCK, 1]" if place == "row" else "[BLOCK, ROOM]"
        self.put(f"tl.store(out{i} + {place}, tl.broadcast_to({value}, {shape}).to({kind}), mask={mask})")
