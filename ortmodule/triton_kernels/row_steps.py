"""Writes the steps of a kernel that need whole rows: reductions, softmaxes, norms, and their gradients.

Each function is given a :class:`Rows` and the operands as names, None for one that is absent; it returns an
expression for each result. Elements beyond a row's end hold anything, so what is summed is chosen by ``is_there``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Rows(NamedTuple):
    """``put``: takes lines; ``prefix``: of names; ``kind``: what is computed in; ``given``: the name of epsilon."""

    put: Callable[..., None]
    prefix: str
    kind: str
    given: str

    def name(self, what: str, expression: str) -> str:
        """A name for the value of an expression."""
        self.put(f"{self.prefix}{what} = {expression}")
        return f"{self.prefix}{what}"

    def whole(self, text: str, beyond: str = "0.0") -> str:
        """A value as elements, with another one beyond the end of a row."""
        return f"tl.where(is_there, {text}, {beyond}).to(tl.{self.kind})"

    def sum(self, text: str) -> str:
        return f"tl.sum({self.whole(text)}, 1, keep_dims=True)"

    def quotient(self, a: str, b: str) -> str:
        return f"tl.div_rn({a}, {b})" if self.kind == "float32" else f"({a} / {b})"

    def mean(self, text: str) -> str:
        return self.quotient(self.sum(text), f"width.to(tl.{self.kind})")

    def root(self, text: str) -> str:
        return f"tl.sqrt_rn({text})" if self.kind == "float32" else f"tl.sqrt({text})"

    def extreme(self, which: str, text: str) -> str:
        """The largest or smallest of each row; NaN where there is one."""
        beyond = "float('-inf')" if which == "max" else "float('inf')"
        x = self.name("x", self.whole(text, beyond))
        most = self.name(which, f"tl.{which}({x}, 1, keep_dims=True)")
        is_nan = f"tl.max(({x} != {x}).to(tl.int32), 1, keep_dims=True) > 0"
        return f"tl.where({is_nan}, float('nan'), {most})"


def _sum(rows: Rows, x: str) -> list[str]:
    return [rows.sum(x)]


def _mean(rows: Rows, x: str) -> list[str]:
    return [rows.mean(x)]


def _max(rows: Rows, x: str) -> list[str]:
    return [rows.extreme("max", x)]


def _min(rows: Rows, x: str) -> list[str]:
    return [rows.extreme("min", x)]


def _l1(rows: Rows, x: str) -> list[str]:
    return [rows.sum(f"tl.abs({x})")]


def _l2(rows: Rows, x: str) -> list[str]:
    return [rows.root(rows.sum(f"{x} * {x}"))]


def _sum_square(rows: Rows, x: str) -> list[str]:
    return [rows.sum(f"{x} * {x}")]


def _log_sum(rows: Rows, x: str) -> list[str]:
    return [f"libdevice.log({rows.sum(x)})"]


def _exponentials(rows: Rows, x: str) -> tuple[str, str, str]:
    """Elements less the largest, their exponentials, and the sum of these."""
    held = rows.name("held", rows.whole(x, "float('-inf')"))
    less = rows.name("less", f"{held} - tl.max({held}, 1, keep_dims=True)")
    powers = rows.name("powers", rows.whole(f"libdevice.exp({less})"))
    return less, powers, rows.name("total", f"tl.sum({powers}, 1, keep_dims=True)")


def _softmax(rows: Rows, x: str) -> list[str]:
    _, powers, total = _exponentials(rows, x)
    return [rows.quotient(powers, total)]


def _log_softmax(rows: Rows, x: str) -> list[str]:
    less, _, total = _exponentials(rows, x)
    return [f"{less} - libdevice.log({total})"]


def _softmax_grad(rows: Rows, dy: str, y: str) -> list[str]:
    total = rows.name("total", rows.sum(f"{dy} * {y}"))
    return [f"({dy} - {total}) * {y}"]


def _log_softmax_grad(rows: Rows, dy: str, y: str) -> list[str]:
    total = rows.name("total", rows.sum(dy))
    return [f"{dy} - libdevice.exp({y}) * {total}"]


def _scaled(z: str, scale: str | None, bias: str | None = None) -> str:
    scaled = f"{z} * {scale}" if scale else z
    return f"{scaled} + {bias}" if bias else scaled


def _layer_norm(rows: Rows, x: str, scale: str | None = None, bias: str | None = None) -> list[str]:
    mean = rows.name("mean", rows.mean(x))
    centred = rows.name("centred", rows.whole(f"{x} - {mean}"))
    inverse = rows.name("inverse", _inverse(rows, centred))
    return [_scaled(f"{centred} * {inverse}", scale, bias), mean, inverse]


def _rms_norm(rows: Rows, x: str, scale: str | None = None) -> list[str]:
    inverse = rows.name("inverse", _inverse(rows, x))
    return [_scaled(f"{x} * {inverse}", scale), inverse]


def _inverse(rows: Rows, x: str) -> str:
    one = f"tl.full([], 1.0, tl.{rows.kind})"
    return rows.quotient(one, rows.root(f"{rows.mean(f'{x} * {x}')} + {rows.given}"))


def _norm_grad(
    rows: Rows, dy: str, x: str, scale: str | None, inverse: str, mean: str | None, addend: str | None
) -> list[str]:
    z = rows.name("z", f"({x} - {mean}) * {inverse}" if mean else f"{x} * {inverse}")
    g = rows.name("g", _scaled(dy, scale))
    along = rows.name("along", rows.mean(f"{g} * {z}"))
    rest = f"{g} - {rows.name('level', rows.mean(g))}" if mean else g
    dx = f"{inverse} * ({rest} - {z} * {along})"
    return [f"{dx} + {addend}" if addend else dx, f"{dy} * {z}", dy]


#: Operators of the engine's -> what writes them.
ROW_OPERATORS: dict[str, Callable[..., list[str]]] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceMax": _max,
    "ReduceMin": _min,
    "ReduceL1": _l1,
    "ReduceL2": _l2,
    "ReduceSumSquare": _sum_square,
    "ReduceLogSum": _log_sum,
    "Softmax": _softmax,
    "LogSoftmax": _log_softmax,
    "SoftmaxGrad": _softmax_grad,
    "LogSoftmaxGrad": _log_softmax_grad,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "LayerNormGrad": _norm_grad,
    "RMSNormGrad": _norm_grad,
}
