"""Arithmetic, activations and choices: one element of the result from one element of each operand."""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

from npu_compiler.dtypes import BOOL, FLOAT32, UINT8, dtype
from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops import lenses
from npu_compiler.ops.registry import elementwise
from npu_compiler.ops.rows import Passage, RowCall
from npu_compiler.ops.traits import Memory, Term
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor, apply, full, where


def as_float(x: Tensor) -> Tensor:
    """Integers and booleans become float32, as in PyTorch's floating-point functions."""
    return x if x.dtype.is_float else x.cast(FLOAT32)


def _adds_unscaled(node: OpNode, graph: IRGraph) -> bool:
    return bool(node.attrs.get("alpha", 1) == 1)


def _scaled(other: Tensor | Number, alpha: Number) -> Tensor | Number:
    return other if alpha == 1 else other * alpha


@elementwise(
    "aten.add.Tensor", "aten.add_.Tensor", "aten.add.Scalar", "aten.add_.Scalar",
    term=Term("add", ("self", "other"), commutes=True, holds=_adds_unscaled), keeps_whole=True,
)  # fmt: skip
def add(self: Tensor, other: Tensor | Number, alpha: Number = 1) -> Tensor:
    """``self + alpha * other``."""
    return self + _scaled(other, alpha)


@elementwise(
    "aten.sub.Tensor", "aten.sub_.Tensor", "aten.sub.Scalar", "aten.sub_.Scalar",
    "aten.subtract.Tensor", "aten.subtract_.Tensor", "aten.subtract.Scalar", "aten.subtract_.Scalar",
    term=Term("sub", ("self", "other"), holds=_adds_unscaled), keeps_whole=True,
)  # fmt: skip
def sub(self: Tensor, other: Tensor | Number, alpha: Number = 1) -> Tensor:
    """``self - alpha * other``."""
    return self - _scaled(other, alpha)


@elementwise("aten.rsub.Tensor", "aten.rsub.Scalar", keeps_whole=True)
def rsub(self: Tensor, other: Tensor | Number, alpha: Number = 1) -> Tensor:
    """``other - alpha * self``."""
    return apply("sub", other, self if alpha == 1 else self * alpha)


@elementwise(
    "aten.mul.Tensor", "aten.mul_.Tensor", "aten.mul.Scalar", "aten.mul_.Scalar",
    "aten.multiply.Tensor", "aten.multiply_.Tensor", "aten.multiply.Scalar", "aten.multiply_.Scalar",
    term=Term("mul", ("self", "other"), commutes=True), keeps_whole=True, factors=("other",),
)  # fmt: skip
def mul(self: Tensor, other: Tensor | Number) -> Tensor:
    """``self * other``."""
    if self.dtype == BOOL and (isinstance(other, bool) or (isinstance(other, Tensor) and other.dtype == BOOL)):
        return apply("and", self, other)
    return self * other


@elementwise(
    "aten.div.Tensor", "aten.div_.Tensor", "aten.div.Scalar", "aten.div_.Scalar",
    "aten.divide.Tensor", "aten.divide_.Tensor", "aten.divide.Scalar", "aten.divide_.Scalar",
    "aten.true_divide.Tensor", "aten.true_divide_.Tensor", "aten.true_divide.Scalar", "aten.true_divide_.Scalar",
    term=Term("div", ("self", "other")),
)  # fmt: skip
def div(self: Tensor, other: Tensor | Number) -> Tensor:
    """``self / other``, in floating point."""
    return apply("div", as_float(self), as_float(other) if isinstance(other, Tensor) else float(other))


@elementwise(
    "aten.div.Tensor_mode", "aten.div_.Tensor_mode", "aten.div.Scalar_mode", "aten.div_.Scalar_mode",
    "aten.divide.Tensor_mode", "aten.divide_.Tensor_mode", "aten.divide.Scalar_mode", "aten.divide_.Scalar_mode",
)  # fmt: skip
def div_mode(self: Tensor, other: Tensor | Number, rounding_mode: Any = None) -> Tensor:
    """``self / other``, as it is, rounded down (``floor``) or towards zero (``trunc``), in floating point."""
    quotient = div(self, other)
    if rounding_mode is None:
        return quotient
    integers = not self.dtype.is_float and not (
        other.dtype.is_float if isinstance(other, Tensor) else isinstance(other, float)
    )
    if rounding_mode not in ("floor", "trunc"):
        raise OpRefusal(f"given rounding_mode='{rounding_mode}', expected 'floor' or 'trunc'")
    if integers:
        whole = whole_quotient(self, other)
        return floored(self, other, whole) if rounding_mode == "floor" else whole
    if rounding_mode == "floor":
        return _floor_divide(as_float(self), other)
    return where(quotient < 0, apply("ceil", quotient), apply("floor", quotient))


def whole_quotient(dividend: Tensor, divisor: Tensor | Number) -> Tensor:
    """``dividend / divisor`` of integers, rounded towards zero; 0 where the divisor is 0."""
    if BOOL in (dividend.dtype, divisor.dtype if isinstance(divisor, Tensor) else dividend.dtype):
        raise OpRefusal("a division of booleans is not supported")
    if not isinstance(divisor, Tensor):
        divisor = full(dividend.trace, (), divisor, dividend.dtype)
    # neither 0 nor -1 reaches the division, which a processor may not survive
    safe = where(apply("or", apply("eq", divisor, 0), _is_one_below(divisor)), 1, divisor)
    plain = apply("whole_quotient", dividend, safe)
    return where(apply("eq", divisor, 0), 0, where(_is_one_below(divisor), -dividend, plain))


def _is_one_below(x: Tensor) -> Tensor:
    return apply("eq", x, -1) if x.dtype != UINT8 else apply("ne", x, x)


def floored(dividend: Tensor, divisor: Tensor | Number, quotient: Tensor) -> Tensor:
    """A quotient of integers that is rounded towards zero, rounded down."""
    rest = dividend - quotient * divisor
    crosses = apply("and", apply("ne", rest, 0), apply("ne", rest < 0, apply("lt", _as_tensor(divisor, rest), 0)))
    return where(crosses, quotient - 1, quotient)


def _as_tensor(x: Tensor | Number, like: Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else full(like.trace, (), x, like.dtype)


@elementwise(
    "aten.floor_divide.default", "aten.floor_divide_.Tensor", "aten.floor_divide.Scalar", "aten.floor_divide_.Scalar"
)
def floor_divide(self: Tensor, other: Tensor | Number) -> Tensor:
    """``self / other`` rounded down."""
    return div_mode(self, other, "floor")


def _floor_divide(dividend: Tensor, other: Tensor | Number) -> Tensor:
    """The quotient rounded down, by PyTorch's own rule.

    It goes by the remainder, which is exact, where a quotient just below a whole number may round up to it:
    ``0.5 / 0.1`` gives 4. An infinite dividend gives NaN.
    """
    divisor = as_float(other) if isinstance(other, Tensor) else full(dividend.trace, (), float(other), dividend.dtype)
    rest = apply("fmod", dividend, divisor)
    quotient = (dividend - rest) / divisor
    quotient = where(where(divisor < 0, rest > 0, rest < 0), quotient - 1, quotient)
    down = apply("floor", quotient)  # whole already, but for the rounding of the two operations above
    nearest = where(quotient - down > 0.5, down + 1, down)
    return where(apply("eq", divisor, 0), dividend / divisor, nearest)


@elementwise("aten.neg.default", "aten.neg_.default", "aten.negative.default", "aten.negative_.default")
def neg(self: Tensor) -> Tensor:
    """``-self``."""
    return -self


@elementwise("aten.abs.default", "aten.abs_.default", "aten.absolute.default", "aten.absolute_.default")
def absolute(self: Tensor) -> Tensor:
    """The absolute value."""
    return apply("abs", self)


@elementwise("aten.relu.default", "aten.relu_.default")
def relu(self: Tensor) -> Tensor:
    """``max(self, 0)``; NaN stays NaN."""
    return where(self < 0, 0, self)


@elementwise("aten.sigmoid.default", "aten.sigmoid_.default", "aten.special_expit.default")
def sigmoid(self: Tensor) -> Tensor:
    """``1 / (1 + exp(-self))``."""
    return apply("quotient", 1, 1 + apply("exp", -as_float(self)))


@elementwise("aten.silu.default", "aten.silu_.default")
def silu(self: Tensor) -> Tensor:
    """``self / (1 + exp(-self))``."""
    return apply("quotient", self, 1 + apply("exp", -self))


@elementwise("aten.gelu.default", "aten.gelu_.default")
def gelu(self: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit: by the error function, or by its tanh approximation."""
    if approximate == "none":
        return self * 0.5 * (1 + apply("erf", self * (1 / sqrt(2))))
    if approximate != "tanh":
        raise OpRefusal(f"given approximate='{approximate}', expected 'none' or 'tanh'")
    return self * 0.5 * (1 + apply("tanh", sqrt(2 / pi) * (self + 0.044715 * self * self * self)))


@elementwise("aten.hardtanh.default", "aten.hardtanh_.default")
def hardtanh(self: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """`self` limited to [min_val, max_val]; ReLU6 is ``hardtanh(self, 0, 6)``."""
    return clamp(self, min_val, max_val)


@elementwise("aten.clamp.default", "aten.clamp_.default", "aten.clip.default", "aten.clip_.default")
def clamp(self: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """`self` limited to [min, max], either of which may be absent."""
    result = self if min is None else apply("max", self, min)
    return result if max is None else apply("min", result, max)


@elementwise("aten.clamp_min.default", "aten.clamp_min_.default")
def clamp_min(self: Tensor, min: Number) -> Tensor:
    """`self`, and `min` where that is greater."""
    return clamp(self, min)


def _extremum(fn: str, a: Tensor, b: Tensor) -> Tensor:
    """The table's functions keep a NaN of their first operand; here the second's counts as well."""
    result = apply(fn, a, b)
    return where(apply("ne", b, b), b, result) if b.dtype.is_float else result


@elementwise("aten.maximum.default", "aten.max.other")
def maximum(self: Tensor, other: Tensor) -> Tensor:
    """The greater of two; NaN where either is."""
    return _extremum("max", self, other)


@elementwise("aten.minimum.default", "aten.min.other")
def minimum(self: Tensor, other: Tensor) -> Tensor:
    """The lesser of two; NaN where either is."""
    return _extremum("min", self, other)


@elementwise("aten.clamp.Tensor", "aten.clamp_.Tensor", "aten.clip.Tensor", "aten.clip_.Tensor")
def clamp_tensor(self: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    """`self` limited by two tensors, either of which may be absent; NaN where any is."""
    result = self if min is None else maximum(self, min)
    return result if max is None else minimum(result, max)


_FUNCTIONS = {
    "exp": "``e ** self``.",
    "log": "The natural logarithm.",
    "sqrt": "The square root.",
    "rsqrt": "``1 / sqrt(self)``.",
    "sin": "The sine; `self` in radians.",
    "cos": "The cosine; `self` in radians.",
    "tanh": "The hyperbolic tangent.",
    "erf": "The error function.",
}
_OF_ANGLES = ("sin", "cos")


def _function(name: str, documentation: str) -> Any:
    """A definition that is nothing but an entry of the expression table."""

    def compute(self: Tensor) -> Tensor:
        return apply(name, as_float(self))

    compute.__doc__ = documentation
    return compute


for _name, _documentation in _FUNCTIONS.items():
    elementwise(
        f"aten.{_name}.default", f"aten.{_name}_.default",
        takes_angle=_name in _OF_ANGLES, term=Term(_name, ("self",)),
    )(_function(_name, _documentation))  # fmt: skip


def _rounding(name: str, documentation: str) -> Any:
    def compute(self: Tensor) -> Tensor:
        return apply(name, self) if self.dtype.is_float else self

    compute.__doc__ = documentation
    return compute


elementwise("aten.floor.default", "aten.floor_.default")(_rounding("floor", "The greatest integer not above `self`."))
elementwise("aten.ceil.default", "aten.ceil_.default")(_rounding("ceil", "The least integer not below `self`."))


@elementwise("aten.pow.Tensor_Scalar", "aten.pow_.Scalar")
def pow_scalar(self: Tensor, exponent: Number) -> Tensor:
    """``self ** exponent``; small whole exponents and halves become products and roots."""
    base = as_float(self) if isinstance(exponent, float) else self
    if exponent == 2:
        return base * base
    if exponent == 3:
        return base * base * base
    if not base.dtype.is_float:
        if not isinstance(exponent, int) or not 0 <= exponent < 64 or base.dtype == BOOL:
            raise OpRefusal(f"given {base.dtype} to the power of {exponent}, expected integers, and one from 0 to 63")
        result: Tensor | None = None
        for bit in bin(exponent)[2:]:
            square = result if result is None else result * result
            result = square if bit == "0" else base if square is None else square * base
        return base * 0 + 1 if result is None else result
    if exponent == 0.5:
        return apply("sqrt", base)
    if exponent == -0.5:
        return apply("rsqrt", base)
    if exponent == -1:
        return 1 / base
    return _signed_pow(base, float(exponent))


def _signed_pow(base: Tensor, exponent: float) -> Tensor:
    """The power with the sign that a whole exponent gives a negative base; kernels' ``pow`` takes no negative base."""
    magnitude = apply("pow", apply("abs", base), exponent)
    if not exponent.is_integer():
        return where(_is_negative(base), float("nan"), magnitude)
    return where(base < 0, -magnitude, magnitude) if exponent % 2 else magnitude


def _is_negative(base: Tensor) -> Tensor:
    """Negative and finite: minus infinity has powers with any exponent."""
    return apply("and", base < 0, base > float("-inf"))


@elementwise("aten.pow.Tensor_Tensor", "aten.pow_.Tensor")
def pow_tensor(self: Tensor, exponent: Tensor) -> Tensor:
    """``self ** exponent``; a negative base with a whole exponent keeps its sign rule."""
    if not self.dtype.is_float and not exponent.dtype.is_float:
        raise OpRefusal(f"given {self.dtype} to the power of {exponent.dtype}, expected floating point")
    base, power = as_float(self), as_float(exponent)
    magnitude = apply("pow", apply("abs", base), power)
    whole = apply("eq", apply("floor", power), power)
    odd = apply("ne", apply("floor", power * 0.5) * 2, power)
    negative = where(whole, where(odd, -magnitude, magnitude), where(_is_negative(base), float("nan"), magnitude))
    return where(base < 0, negative, magnitude)


@elementwise("aten.pow.Scalar")
def pow_base(self: Number, exponent: Tensor) -> Tensor:
    """A number to the power of a tensor."""
    if isinstance(self, int) and not exponent.dtype.is_float:
        raise OpRefusal(f"given {self} to the power of {exponent.dtype}, expected floating point")
    if not self > 0:
        return pow_tensor(full(exponent.trace, (), float(self), as_float(exponent).dtype), exponent)
    return apply("pow", float(self), as_float(exponent))


@elementwise(
    "aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar", fills=("self", "other")
)
def where_(condition: Tensor, self: Tensor | Number, other: Tensor | Number) -> Tensor:
    """`self` where the condition holds, else `other`."""
    return where(condition, self, other)


@elementwise(
    "aten.masked_fill.Scalar", "aten.masked_fill_.Scalar", "aten.masked_fill.Tensor", "aten.masked_fill_.Tensor",
    fills=("value",),
)  # fmt: skip
def masked_fill(self: Tensor, mask: Tensor, value: Tensor | Number) -> Tensor:
    """`value` where `mask` holds, else `self`."""
    filler = value if isinstance(value, Tensor) else full(self.trace, (), value, self.dtype)
    return where(mask, filler.cast(self.dtype), self)


_CAST = Term("cast", ("self",))


@elementwise("aten._to_copy.default", keeps_order=True, term=_CAST, keeps_whole=True)
@elementwise(
    "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device",
    memory=Memory.OPERAND_OF_SAME_DTYPE, lenses=lenses.itself, keeps_order=True, unless="copy", term=_CAST,
    keeps_whole=True,
)  # fmt: skip
def to(
    self: Tensor,
    device: Any = None,
    dtype: Any = None,
    layout: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: Any = None,
) -> Tensor:
    """The values in another data type. Device, copying and memory format change no value."""
    return self if dtype is None else _convert(self, dtype)


def _rows_of_self(call: RowCall) -> Passage:
    return Passage({"self": call.dim})  # of the other tensor only the data type is asked for


@elementwise(
    "aten.type_as.default",
    memory=Memory.OPERAND_OF_SAME_DTYPE, lenses=lenses.itself, keeps_order=True, rows=_rows_of_self, term=_CAST,
)  # fmt: skip
def type_as(self: Tensor, other: Tensor) -> Tensor:
    """The values in the data type of `other`."""
    return self.cast(other.dtype)


def _convert(x: Tensor, name: Any) -> Tensor:
    kind = dtype(name)
    return apply("ne", x, 0) if kind == BOOL and x.dtype != BOOL else x.cast(kind)
