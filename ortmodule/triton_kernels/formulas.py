"""Translates the formulas of pointwise operators, which are C, into expressions of Triton.

The formulas are those of ``csrc/ops/pointwise/operators.h``, from which the engine's own kernels come, too: of the
operands ``x, y, z, w``, whose type is ``real``, and of the parameters ``p0, p1``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ortmodule import _core
from ortmodule.core.errors import NotInTriton

#: What elements are computed in -> Triton's type, and the bits of an unsigned word as wide.
CLASSES = {
    "float32": "tl.float32",
    "float64": "tl.float64",
    "int64": "tl.int64",
    "int32": "tl.int32",
    "bool": "tl.int1",
}
_WORDS = {"int64": ("tl.uint64", 8), "int32": ("tl.uint32", 4), "bool": ("tl.uint8", 1)}
_C_TYPES = {"float": "tl.float32", "double": "tl.float64", "int64_t": "tl.int64", "int32_t": "tl.int32",
            "uint64_t": "tl.uint64", "uint32_t": "tl.uint32"}  # fmt: skip
#: Functions of C's -> of Triton's, where they are not libdevice's of the same name.
_FUNCTIONS = {"fabs": "tl.abs", "floor": "tl.floor", "ceil": "tl.ceil"}
_LIBDEVICE = frozenset((
    "exp", "log", "erf", "erfc", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh",
    "atanh", "expm1", "log1p", "lgamma", "pow", "fmod", "rint", "trunc", "atan2", "hypot", "copysign",
))  # fmt: skip
_TOKEN = re.compile(
    r"\s*(0x[0-9a-fA-F]+|\d+\.?\d*(?:[eE][+-]?\d+)?[fFuUlL]*|\w+|&&|\|\||[<>=!]=|<<|>>|[-+*/%&|^~!<>?:(),])"
)
_LEVELS = ("||", "&&", "|", "^", "&", "== !=", "< > <= >=", "<< >>", "+ -", "* / %")


class Term(NamedTuple):
    """A part of an expression. ``text``: Triton's; ``is_truth``: a condition, of one bit; ``value``: of a constant."""

    text: str
    is_truth: bool = False
    value: float | int | np.floating | None = None


def _constant(value: float | int | np.floating) -> Term:
    return Term(repr(float(value)) if isinstance(value, (float, np.floating)) else str(value), False, value)


class _Parser:
    """One expression. ``names``: what the formula's names are in Triton; ``kind``: the class of ``real``."""

    def __init__(self, text: str, names: Mapping[str, Term], kind: str) -> None:
        self.tokens = _TOKEN.findall(text)
        if "".join(self.tokens) != re.sub(r"\s+", "", text):
            raise NotInTriton(f"there is no Triton for {text}")
        self.at, self.names, self.kind = 0, names, kind
        self.is_float = kind.startswith("float")

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if expected is not None and token != expected:
            raise NotInTriton(f"{expected} expected, {token or 'nothing'} found in {' '.join(self.tokens)}")
        self.at += 1
        return token

    # --- the grammar --------------------------------------------------------------------------------------------------

    def whole(self) -> Term:
        found = self.choice()
        if self.peek():
            raise NotInTriton(f"{self.peek()} is left of {' '.join(self.tokens)}")
        return found

    def choice(self) -> Term:
        condition = self.binary(0)
        if self.peek() != "?":
            return condition
        self.take()
        then = self.choice()
        self.take(":")
        other = self.choice()
        if then.is_truth != other.is_truth:
            then, other = self.number(then), self.number(other)
        return Term(f"tl.where({self.truth(condition)}, {self.text(then)}, {self.text(other)})", then.is_truth)

    def binary(self, level: int) -> Term:
        if level == len(_LEVELS):
            return self.unary()
        left, operators = self.binary(level + 1), _LEVELS[level].split()
        while self.peek() in operators:
            operator = self.take()
            left = self.joined(operator, left, self.binary(level + 1))
        return left

    def unary(self) -> Term:
        token = self.peek()
        if token == "-":
            self.take()
            operand = self.unary()
            if operand.value is not None:
                return _constant(-operand.value)
            return Term(f"(-{self.text(self.number(operand))})")
        if token == "!":
            self.take()
            return Term(f"({self.text(self.unary())} == 0)", True)
        if token == "~":
            self.take()
            return Term(f"(~{self.text(self.unary())})")
        if token == "(" and self.peek(2) == ")" and self.peek(1) in {"real", "word", "void", *_C_TYPES}:
            self.take()
            kind = self.take()
            self.take()
            return self.cast(kind, self.unary())
        return self.primary()

    def cast(self, kind: str, operand: Term) -> Term:
        if kind == "void":
            return operand
        if operand.value is not None and kind == "real":
            of_float = np.float32 if self.kind == "float32" else float
            return _constant(of_float(operand.value) if self.is_float else operand.value)
        to = CLASSES[self.kind] if kind == "real" else _WORDS[self.kind][0] if kind == "word" else _C_TYPES[kind]
        return Term(f"{self.number(operand).text}.to({to})")

    def primary(self) -> Term:
        token = self.take()
        if token == "(":
            found = self.choice()
            while self.peek() == ",":
                self.take()
                found = self.choice()
            self.take(")")
            return found
        if token[:1].isdigit():
            return self.literal(token)
        if token == "INFINITY":
            return _constant(float("inf"))
        if token == "sizeof":
            for part in ("(", "word", ")"):
                self.take(part)
            return _constant(_WORDS[self.kind][1])
        if self.peek() == "(":
            return self.call(token)
        if token not in self.names:
            raise NotInTriton(f"{token or 'the end'} has no meaning in {' '.join(self.tokens)}")
        return self.names[token]

    @staticmethod
    def literal(token: str) -> Term:
        number = token.rstrip("uUlL") if token.startswith("0x") else token.rstrip("fFuUlL")
        if token[-1] in "fF" and not token.startswith("0x"):
            return _constant(np.float32(number))
        return _constant(int(number, 0) if number.isdigit() or number.startswith("0x") else float(number))

    def call(self, name: str) -> Term:
        self.take("(")
        operands = [self.choice()]
        while self.peek() == ",":
            self.take()
            operands.append(self.choice())
        self.take(")")
        given = ", ".join(self.typed(operand) for operand in operands)
        if name == "sqrt":
            return Term(f"tl.sqrt_rn({given})" if self.kind == "float32" else f"tl.sqrt({given})")
        if name == "signbit":
            return Term(f"({given}.to(tl.int{self.kind[-2:]}, bitcast=True) < 0)", True)
        if name in _FUNCTIONS:
            return Term(f"{_FUNCTIONS[name]}({given})")
        if name in _LIBDEVICE:
            return Term(f"libdevice.{name}({given})")
        raise NotInTriton(f"there is no {name} in Triton")

    # --- parts --------------------------------------------------------------------------------------------------------

    def joined(self, operator: str, left: Term, right: Term) -> Term:
        if left.value is not None and right.value is not None and operator in "+-*/":
            return _constant(_folded(operator, left.value, right.value))
        if operator in ("&&", "||"):
            return Term(f"({self.truth(left)} {operator[0]} {self.truth(right)})", True)
        both = left.is_truth and right.is_truth
        if operator in ("==", "!=", "&", "|", "^") and both:
            return Term(f"({left.text} {operator} {right.text})", True)
        a, b = self.text(self.number(left)), self.text(self.number(right))
        if operator in _LEVELS[5].split() + _LEVELS[6].split():
            return Term(f"({a} {operator} {b})", True)
        if operator == "/" and self.is_float:
            return Term(f"tl.div_rn({a}, {b})" if self.kind == "float32" else f"({a} / {b})")
        if operator in "/%":
            raise NotInTriton("integers are not divided in Triton, where that rounds in another way")
        return Term(f"({a} {operator} {b})")

    def text(self, term: Term) -> str:
        """As an operand: constants among floats are floats."""
        if self.is_float and term.value is not None:
            return repr(float(term.value)).replace("inf", "float('inf')")
        return term.text

    def typed(self, term: Term) -> str:
        """As an argument of a function, which takes no literals."""
        if term.value is not None:
            return f"tl.full([], {self.text(term)}, {CLASSES[self.kind]})"
        return self.number(term).text

    @staticmethod
    def number(term: Term) -> Term:
        return Term(f"{term.text}.to(tl.int32)") if term.is_truth else term

    @staticmethod
    def truth(term: Term) -> str:
        return term.text if term.is_truth else f"({term.text} != 0)"


def _folded(operator: str, a: float | int | np.floating, b: float | int | np.floating) -> float | int | np.floating:
    if operator == "/":
        return a / b if isinstance(a, (float, np.floating)) or isinstance(b, (float, np.floating)) else a // b
    return a + b if operator == "+" else a - b if operator == "-" else a * b


class Formula(NamedTuple):
    """Of an operator for one class of operands. ``to``: the class of its result."""

    operands: int
    kind: str
    to: str
    expression: str
    before: str


@functools.cache
def formulas() -> dict[tuple[str, str, str], Formula]:
    """{(operator, class of the last operand, class of the result): its formula}."""
    return {
        (name, kind, to): Formula(operands, kind, to, expression, before)
        for name, kind, to, operands, expression, before in _core.pointwise_formulas()
    }


def translated(formula: Formula, operands: list[Term], parameters: list[str], prefix: str) -> tuple[list[str], str]:
    """Lines that come before, and the expression of the result, in the class that it has.

    ``operands``: values in the formula's class; ``parameters``: p0 and p1, as names of numbers in that class;
    ``prefix``: of names that the lines may define. NotInTriton where there is no Triton for it.
    """
    names = dict(zip("xyzw", operands, strict=False)) | {
        f"p{i}": Term(parameter) for i, parameter in enumerate(parameters)
    }
    lines = []
    if not formula.expression:
        return [], f"tl.where({', '.join(operand.text for operand in operands)})"
    if formula.expression.startswith("TRUNCATED"):
        least = -(2**63) if formula.to == "int64" else -(2**31)
        inside = f"(({operands[0].text} >= {float(least)!r}) & ({operands[0].text} < {-float(least)!r}))"
        inner = f"tl.where({inside}, {operands[0].text}, 0.0).to({CLASSES[formula.to]})"
        return [], f"tl.where({inside}, {inner}, tl.full([], {least}, {CLASSES[formula.to]}))"
    for declaration in filter(None, map(str.strip, formula.before.split(";"))):
        name, _, value = declaration.removeprefix("const real ").partition(" = ")
        term = _Parser(value, names, formula.kind).whole()
        lines.append(f"{prefix}{name} = {_as(term, formula.kind)}")
        names[name] = Term(f"{prefix}{name}")
    return lines, _as(_Parser(formula.expression, names, formula.kind).whole(), formula.to)


def _as(term: Term, kind: str) -> str:
    if term.value is not None:
        return f"tl.full([], {term.text}, {CLASSES[kind]})"
    if kind == "bool":
        return _Parser.truth(term)
    return f"{term.text}.to({CLASSES[kind]})"


@functools.cache
def pointwise_operators() -> dict[str, frozenset[str]]:
    """{operator: the classes of its last operand for which its formula can be translated}."""
    found: dict[str, set[str]] = {}
    for (name, kind, _), formula in formulas().items():
        operands = [Term(c, kind == "bool") for c in "abcd"[: formula.operands]]
        try:
            if name != "DropoutTrain":
                translated(formula, operands, ["p", "q"], "s_")
        except NotInTriton:
            continue
        found.setdefault(name, set()).add(kind)
    return {name: frozenset(kinds) for name, kinds in found.items()}
