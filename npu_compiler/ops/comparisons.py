"""Comparisons, logic and bits: booleans, or whole numbers bit by bit, from one element of each operand."""

from __future__ import annotations

from typing import Any

from npu_compiler.dtypes import BOOL
from npu_compiler.ops.registry import elementwise
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor, apply


def _comparison(name: str) -> Any:
    def compare(self: Tensor, other: Tensor | Number) -> Tensor:
        return apply(name, self, other)

    compare.__doc__ = f"``self`` {name} ``other``, as booleans."
    return compare


def _in_place(name: str) -> Any:
    def compare(self: Tensor, other: Tensor | Number) -> Tensor:
        return apply(name, self, other).cast(self.dtype)

    compare.__doc__ = f"``self`` {name} ``other``, as 0 and 1 in the data type of `self`."
    return compare


_COMPARISONS = {
    "eq": ["eq"],
    "ne": ["ne", "not_equal"],
    "lt": ["lt", "less"],
    "le": ["le", "less_equal"],
    "gt": ["gt", "greater"],
    "ge": ["ge", "greater_equal"],
}
for _name, _spellings in _COMPARISONS.items():
    _kinds = ("Tensor", "Scalar")
    elementwise(*(f"aten.{word}.{kind}" for word in _spellings for kind in _kinds))(_comparison(_name))
    elementwise(*(f"aten.{word}_.{kind}" for word in _spellings for kind in _kinds))(_in_place(_name))


def _boolean(x: Tensor) -> Tensor:
    return x if x.dtype == BOOL else apply("ne", x, 0)


@elementwise("aten.logical_not.default")
def logical_not(self: Tensor) -> Tensor:
    """True where `self` is zero."""
    return apply("not", _boolean(self))


@elementwise("aten.logical_and.default")
def logical_and(self: Tensor, other: Tensor) -> Tensor:
    """True where both are nonzero."""
    return apply("and", _boolean(self), _boolean(other))


@elementwise("aten.logical_or.default")
def logical_or(self: Tensor, other: Tensor) -> Tensor:
    """True where either is nonzero."""
    return apply("or", _boolean(self), _boolean(other))


@elementwise("aten.logical_not_.default")
def logical_not_in_place(self: Tensor) -> Tensor:
    """1 where `self` is zero, else 0, in its data type."""
    return logical_not(self).cast(self.dtype)


@elementwise("aten.logical_and_.default")
def logical_and_in_place(self: Tensor, other: Tensor) -> Tensor:
    """1 where both are nonzero, else 0, in the data type of `self`."""
    return logical_and(self, other).cast(self.dtype)


@elementwise("aten.logical_or_.default")
def logical_or_in_place(self: Tensor, other: Tensor) -> Tensor:
    """1 where either is nonzero, else 0, in the data type of `self`."""
    return logical_or(self, other).cast(self.dtype)


@elementwise("aten.bitwise_not.default", "aten.bitwise_not_.default")
def bitwise_not(self: Tensor) -> Tensor:
    """The complement; of booleans, the negation."""
    return apply("not", self) if self.dtype == BOOL else -self - 1


def _bitwise(name: str) -> Any:
    def combine(self: Tensor, other: Tensor | Number) -> Tensor:
        if self.dtype.is_float or (isinstance(other, Tensor) and other.dtype.is_float):
            raise OpRefusal("bitwise operations take integers and booleans")
        return apply(name, self, other)

    combine.__doc__ = f"Bitwise ``self`` {name} ``other``."
    return combine


for _name in ("and", "or", "xor"):
    _bits = (f"bitwise_{_name}", f"bitwise_{_name}_", f"__{_name}__", f"__i{_name}__")
    elementwise(*(f"aten.{word}.{kind}" for word in _bits for kind in ("Tensor", "Scalar")))(_bitwise(_name))
