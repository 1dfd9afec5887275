"""Tensors whose memory holds codes: their numbers, as expressions that every kernel can evaluate."""

from __future__ import annotations

from dataclasses import dataclass

from npu_compiler.dtypes import BOOL, FLOAT8_E4M3FN, FLOAT32, INT8, INT32, DType
from npu_compiler.tensor.expr import Call, Const, Expr, walk

__all__ = ["LARGEST", "LEAST_SCALE", "decoded", "encoded", "encoded_number", "size_bits", "size_of"]

LARGEST = {INT8: 127.0, FLOAT8_E4M3FN: 448.0}
"""The greatest number of each type of codes with a scale for each row, which the largest of a row becomes."""
LEAST_SCALE = 1e-12
"""Of a row of zeros: anything that has an inverse."""
_MAGNITUDE = Const(0x7FFFFFFF, INT32)


def decoded(code: Expr, kind: DType) -> Expr:
    """The number, a float32, that a code stands for.

    Args:
        code: An integer.
        kind: A data type with a coding.
    """
    assert kind.coding is not None
    made = kind.coding.decode(_Number(Call("cast", (code,), INT32)), _Arithmetic())
    return _expr(made, FLOAT32)


def encoded(number: Expr, kind: DType) -> Expr:
    """The code, as `kind.stored`, of the number of a data type with a coding that is nearest to a float32."""
    assert kind.coding is not None
    return Call("cast", (_expr(kind.coding.encode(_Number(number), _Arithmetic()), INT32),), kind.stored)


def encoded_number(code: Expr, kind: DType) -> Expr | None:
    """The number that an expression is the code of, by `encoded`; None where it is no such expression."""
    if not isinstance(code, Call) or code.fn != "cast" or code.dtype != kind.stored:
        return None
    numbers = (node.args[0] for node in walk(code) if isinstance(node, Call) and node.fn == "bits")
    return next((number for number in numbers if encoded(number, kind) == code), None)


def size_bits(number: Expr) -> Expr:
    """The bits of a float32 without its sign, an integer: those of all numbers are in the order of these, NaN last."""
    return Call("and", (Call("bits", (number,), INT32), _MAGNITUDE), INT32)


def size_of(bits: Expr) -> Expr | None:
    """The number that an expression is the `size_bits` of; None where it is no such expression."""
    if not isinstance(bits, Call) or bits.fn != "and" or bits.args[1] != _MAGNITUDE:
        return None
    of = bits.args[0]
    return of.args[0] if isinstance(of, Call) and of.fn == "bits" else None


def _expr(value: object, dtype: DType) -> Expr:
    if isinstance(value, _Number):
        return value.expr
    assert isinstance(value, bool | int | float)
    return Const(float(value) if dtype.is_float else int(value), dtype)


@dataclass(frozen=True)
class _Number:
    """An expression with Python's operators; a number beside it is of its own data type."""

    expr: Expr

    def _call(self, fn: str, other: object, dtype: DType | None = None) -> _Number:
        own = self.expr.dtype
        return _Number(Call(fn, (self.expr, _expr(other, own)), dtype or own))

    def __add__(self, other: object) -> _Number:
        return self._call("add", other)

    def __sub__(self, other: object) -> _Number:
        return self._call("sub", other)

    def __mul__(self, other: object) -> _Number:
        return self._call("mul", other)

    def __and__(self, other: object) -> _Number:
        return self._call("and", other)

    def __or__(self, other: object) -> _Number:
        return self._call("or", other)

    def __lshift__(self, other: object) -> _Number:
        return self._call("shl", other)

    def __rshift__(self, other: object) -> _Number:
        return self._call("shr", other)

    def __lt__(self, other: object) -> _Number:
        return self._call("lt", other, BOOL)

    def __gt__(self, other: object) -> _Number:
        return self._call("gt", other, BOOL)

    def __neg__(self) -> _Number:
        return _Number(Call("neg", (self.expr,), self.expr.dtype))


class _Arithmetic:
    """`codings.Arithmetic` over expressions."""

    def where(self, condition: _Number, a: object, b: object) -> _Number:
        dtype = next(side.expr.dtype for side in (a, b) if isinstance(side, _Number))
        return _Number(Call("where", (condition.expr, _expr(a, dtype), _expr(b, dtype)), dtype))

    def bits(self, number: object) -> _Number:
        return _Number(Call("bits", (_expr(number, FLOAT32),), INT32))

    def of_bits(self, bits: object) -> _Number:
        return _Number(Call("of_bits", (_expr(bits, INT32),), FLOAT32))
