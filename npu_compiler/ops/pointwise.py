"""Pointwise mathematics beyond plain arithmetic: roundings, tests of numbers, and functions made of others.

A function is made of those that every target has such that it keeps its digits where the obvious formula loses them:
near zero, and where a step on the way would be too large.
"""

from __future__ import annotations

from math import log, pi

from npu_compiler.dtypes import BOOL
from npu_compiler.ops.elementwise import as_float, clamp_tensor, floored, maximum, minimum, whole_quotient
from npu_compiler.ops.registry import elementwise
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor, apply, full, where

_INFINITY = float("inf")


def _floating(x: Tensor) -> Tensor:
    """Refuses integers, whose rules differ."""
    if not x.dtype.is_float:
        raise OpRefusal(f"given {x.dtype}, expected floating point")
    return x


def _is_nan(x: Tensor) -> Tensor:
    return apply("ne", x, x)


@elementwise("aten.square.default", "aten.square_.default")
def square(self: Tensor) -> Tensor:
    """``self * self``."""
    return self * self


@elementwise("aten.reciprocal.default", "aten.reciprocal_.default")
def reciprocal(self: Tensor) -> Tensor:
    """``1 / self``."""
    return 1 / as_float(self)


@elementwise("aten.sign.default", "aten.sign_.default", "aten.sgn.default", "aten.sgn_.default")
def sign(self: Tensor) -> Tensor:
    """1 where positive, -1 where negative, else 0, NaN included."""
    if self.dtype == BOOL:
        return self
    return (self > 0).cast(self.dtype) - (self < 0).cast(self.dtype)


@elementwise("aten.trunc.default", "aten.trunc_.default", "aten.fix.default", "aten.fix_.default")
def trunc(self: Tensor) -> Tensor:
    """Rounded towards zero."""
    return where(self < 0, apply("ceil", self), apply("floor", self)) if self.dtype.is_float else self


@elementwise("aten.frac.default", "aten.frac_.default")
def frac(self: Tensor) -> Tensor:
    """What is behind the point, with the sign of `self`."""
    return _floating(self) - trunc(self)


@elementwise("aten.round.default", "aten.round_.default")
def round_(self: Tensor) -> Tensor:
    """Rounded to the nearest whole number, and from halfway between two to the even one."""
    return apply("rint", self) if self.dtype.is_float else self


@elementwise("aten.isnan.default")
def isnan(self: Tensor) -> Tensor:
    """True where `self` is no number."""
    return _is_nan(self)


@elementwise("aten.isinf.default")
def isinf(self: Tensor) -> Tensor:
    """True where `self` is infinite."""
    return apply("eq", apply("abs", _floating(self)), _INFINITY)


@elementwise("aten.isfinite.default")
def isfinite(self: Tensor) -> Tensor:
    """True where `self` is a number, and finite."""
    return apply("abs", _floating(self)) < _INFINITY


@elementwise("aten.isposinf.default")
def isposinf(self: Tensor) -> Tensor:
    """True where `self` is plus infinity."""
    return apply("eq", _floating(self), _INFINITY)


@elementwise("aten.isneginf.default")
def isneginf(self: Tensor) -> Tensor:
    """True where `self` is minus infinity."""
    return apply("eq", _floating(self), -_INFINITY)


@elementwise("aten.logical_xor.default")
def logical_xor(self: Tensor, other: Tensor) -> Tensor:
    """True where one of two is nonzero, and the other is not."""
    return apply("xor", apply("ne", self, 0), apply("ne", other, 0))


@elementwise("aten.logical_xor_.default")
def logical_xor_in_place(self: Tensor, other: Tensor) -> Tensor:
    """1 where one of two is nonzero, and the other is not, else 0, in the data type of `self`."""
    return logical_xor(self, other).cast(self.dtype)


@elementwise("aten.clamp_max.default", "aten.clamp_max_.default")
def clamp_max(self: Tensor, max: Number) -> Tensor:
    """`self`, and `max` where that is less."""
    return apply("min", self, max)


@elementwise("aten.clamp_min.Tensor", "aten.clamp_min_.Tensor")
def clamp_min_tensor(self: Tensor, min: Tensor) -> Tensor:
    """`self`, and `min` where that is greater; NaN where either is."""
    return clamp_tensor(self, min)


@elementwise("aten.clamp_max.Tensor", "aten.clamp_max_.Tensor")
def clamp_max_tensor(self: Tensor, max: Tensor) -> Tensor:
    """`self`, and `max` where that is less; NaN where either is."""
    return clamp_tensor(self, None, max)


def _other_of_nan(a: Tensor, b: Tensor, both: Tensor) -> Tensor:
    """`both`, but where one of the two is NaN the other."""
    if a.dtype.is_float:
        both = where(_is_nan(a), b, both)
    return where(_is_nan(b), a, both) if b.dtype.is_float else both


@elementwise("aten.fmax.default")
def fmax(self: Tensor, other: Tensor) -> Tensor:
    """The greater of two; the other one where one is NaN."""
    return _other_of_nan(self, other, maximum(self, other))


@elementwise("aten.fmin.default")
def fmin(self: Tensor, other: Tensor) -> Tensor:
    """The lesser of two; the other one where one is NaN."""
    return _other_of_nan(self, other, minimum(self, other))


@elementwise("aten.fmod.Scalar", "aten.fmod_.Scalar", "aten.fmod.Tensor", "aten.fmod_.Tensor")
def fmod(self: Tensor, other: Tensor | Number) -> Tensor:
    """The remainder with the sign of `self`."""
    if _are_whole(self, other):
        return self - whole_quotient(self, other) * other
    return apply("fmod", as_float(self), _divisor(as_float(self), other))


@elementwise("aten.remainder.Scalar", "aten.remainder_.Scalar", "aten.remainder.Tensor", "aten.remainder_.Tensor")
def remainder(self: Tensor, other: Tensor | Number) -> Tensor:
    """The remainder with the sign of `other`."""
    if _are_whole(self, other):
        return self - floored(self, other, whole_quotient(self, other)) * other
    divisor = _divisor(as_float(self), other)
    rest = apply("fmod", as_float(self), divisor)
    crosses = where(divisor < 0, rest > 0, where(divisor > 0, rest < 0, False))
    return where(crosses, rest + divisor, rest)


def _divisor(x: Tensor, other: Tensor | Number) -> Tensor:
    return as_float(other) if isinstance(other, Tensor) else full(x.trace, (), float(other), x.dtype)


def _are_whole(x: Tensor, other: Tensor | Number) -> bool:
    return not x.dtype.is_float and (not other.dtype.is_float if isinstance(other, Tensor) else isinstance(other, int))


@elementwise("aten.remainder.Scalar_Tensor")
def remainder_of_number(self: Number, other: Tensor) -> Tensor:
    """The remainder of a number, with the sign of `other`."""
    whole = isinstance(self, int) and not other.dtype.is_float
    kind = other.dtype if whole else as_float(other).dtype
    return remainder(full(other.trace, (), self, kind), other)


@elementwise("aten.lerp.Scalar", "aten.lerp_.Scalar", "aten.lerp.Tensor", "aten.lerp_.Tensor")
def lerp(self: Tensor, end: Tensor, weight: Tensor | Number) -> Tensor:
    """``self + weight * (end - self)``, exact at both ends."""
    way = end - self
    from_start, from_end = self + weight * way, end - way * (1 - weight)
    if isinstance(weight, Tensor):
        return where(apply("abs", weight) < 0.5, from_start, from_end)
    return from_start if abs(weight) < 0.5 else from_end


@elementwise("aten.addcdiv.default", "aten.addcdiv_.default")
def addcdiv(self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Number = 1) -> Tensor:
    """``self + value * tensor1 / tensor2``."""
    quotient = _floating(tensor1) / tensor2
    return self + (quotient if value == 1 else quotient * value)


@elementwise("aten.log1p.default", "aten.log1p_.default", "aten.special_log1p.default")
def log1p(self: Tensor) -> Tensor:
    """``log(1 + self)``, exact for small numbers too: the quotient takes away what rounding adds in the sum (Kahan)."""
    x = as_float(self)
    total = 1 + x
    exact = apply("log", total) * x / (total - 1)
    return where(apply("eq", total, 1), x, where(apply("eq", total, _INFINITY), total, exact))


@elementwise("aten.expm1.default", "aten.expm1_.default", "aten.special_expm1.default")
def expm1(self: Tensor) -> Tensor:
    """``exp(self) - 1``, exact for small numbers too, as `log1p`."""
    x = as_float(self)
    power = apply("exp", x)
    exact = (power - 1) * x / apply("log", power)
    large = apply("or", apply("abs", x) > 1, _is_nan(x))
    return where(apply("eq", power, 1), x, where(large, power - 1, exact))


@elementwise("aten.exp2.default", "aten.exp2_.default", "aten.special_exp2.default")
def exp2(self: Tensor) -> Tensor:
    """``2 ** self``."""
    return apply("pow", 2.0, as_float(self))


@elementwise("aten.log2.default", "aten.log2_.default")
def log2(self: Tensor) -> Tensor:
    """The logarithm to the base 2."""
    return apply("log", as_float(self)) * (1 / log(2))


@elementwise("aten.log10.default", "aten.log10_.default")
def log10(self: Tensor) -> Tensor:
    """The logarithm to the base 10."""
    return apply("log", as_float(self)) * (1 / log(10))


@elementwise("aten.tan.default", "aten.tan_.default", takes_angle=True)
def tan(self: Tensor) -> Tensor:
    """The tangent; `self` in radians."""
    x = as_float(self)
    return apply("sin", x) / apply("cos", x)


@elementwise("aten.sinh.default", "aten.sinh_.default")
def sinh(self: Tensor) -> Tensor:
    """The hyperbolic sine."""
    size = apply("abs", as_float(self))
    grown = expm1(size)
    result = where(apply("eq", grown, _INFINITY), grown, (grown + grown / (grown + 1)) * 0.5)
    return where(self < 0, -result, result)


@elementwise("aten.cosh.default", "aten.cosh_.default")
def cosh(self: Tensor) -> Tensor:
    """The hyperbolic cosine."""
    power = apply("exp", apply("abs", as_float(self)))
    return (power + 1 / power) * 0.5


@elementwise("aten.asinh.default", "aten.asinh_.default", "aten.arcsinh.default", "aten.arcsinh_.default")
def asinh(self: Tensor) -> Tensor:
    """The inverse of the hyperbolic sine."""
    size = apply("abs", as_float(self))
    result = log1p(size + size * (size / (1 + apply("sqrt", size * size + 1))))
    return where(self < 0, -result, result)


@elementwise("aten.acosh.default", "aten.acosh_.default", "aten.arccosh.default", "aten.arccosh_.default")
def acosh(self: Tensor) -> Tensor:
    """The inverse of the hyperbolic cosine, from 1 on; NaN below."""
    over = as_float(self) - 1
    return log1p(over + apply("sqrt", over) * apply("sqrt", over + 2))


@elementwise("aten.atanh.default", "aten.atanh_.default", "aten.arctanh.default", "aten.arctanh_.default")
def atanh(self: Tensor) -> Tensor:
    """The inverse of the hyperbolic tangent, from -1 to 1; NaN beyond."""
    size = apply("abs", as_float(self))
    result = log1p(2 * size / (1 - size)) * 0.5
    return where(self < 0, -result, result)


@elementwise("aten.hypot.default", "aten.hypot_.default")
def hypot(self: Tensor, other: Tensor) -> Tensor:
    """``sqrt(self ** 2 + other ** 2)``, where the squares are too large, too."""
    a, b = apply("abs", as_float(self)), apply("abs", as_float(other))
    longer, shorter = maximum(a, b), minimum(a, b)
    share = where(apply("eq", longer, 0), 0, shorter / longer)
    return where(apply("eq", longer, _INFINITY), longer, longer * apply("sqrt", 1 + share * share))


@elementwise("aten.logaddexp.default")
def logaddexp(self: Tensor, other: Tensor) -> Tensor:
    """``log(exp(self) + exp(other))``, where the powers are too large, too."""
    a, b = as_float(self), as_float(other)
    greater = maximum(a, b)
    apart = where(apply("eq", a, b), 0, apply("abs", a - b))
    return greater + log1p(apply("exp", -apart))


@elementwise("aten.xlogy.Tensor", "aten.xlogy_.Tensor", "aten.special_xlogy.default")
def xlogy(self: Tensor, other: Tensor) -> Tensor:
    """``self * log(other)``, and 0 where `self` is 0 and `other` a number."""
    y = as_float(other)
    return where(apply("eq", self, 0), where(_is_nan(y), y, 0), self * apply("log", y))


@elementwise("aten.heaviside.default", "aten.heaviside_.default")
def heaviside(self: Tensor, values: Tensor) -> Tensor:
    """1 where `self` is positive, `values` where it is 0, else 0, NaN included."""
    return where(apply("eq", self, 0), values, (self > 0).cast(values.dtype))


@elementwise("aten.deg2rad.default", "aten.deg2rad_.default")
def deg2rad(self: Tensor) -> Tensor:
    """Degrees as radians."""
    return as_float(self) * (pi / 180)


@elementwise("aten.rad2deg.default", "aten.rad2deg_.default")
def rad2deg(self: Tensor) -> Tensor:
    """Radians as degrees."""
    return as_float(self) * (180 / pi)
