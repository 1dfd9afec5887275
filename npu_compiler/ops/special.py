"""Inverse functions of angles, of the error function, and gamma functions, as polynomials in float32.

The polynomials are interpolations at Chebyshev nodes on the intervals that are named, with errors below float32's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log, nan, pi, sqrt, tan

from npu_compiler.dtypes import FLOAT32, INT32, DType
from npu_compiler.ops.elementwise import as_float, clamp, maximum
from npu_compiler.ops.pointwise import log1p, round_, xlogy
from npu_compiler.ops.reduction import total
from npu_compiler.ops.registry import elementwise, op
from npu_compiler.tensor.expr import Call
from npu_compiler.tensor.reducing import reduce
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor, apply, full, where

_ATAN = (0.9999999994, -0.3333330749, 0.199982108, -0.1423998292, 0.1057281447, -0.06033241678)  # to tan(pi / 8)
_ASIN = (1.0, 0.1666665721, 0.07500591502, 0.044505242, 0.03188414307, 0.01419882758, 0.03780636207)  # to 1 / 2
_ERFC = (
    0.282086965, 0.282309959, 0.244315637, 0.192682372, 0.0191456125, 0.152093105, -0.273607838, 0.0662056206,
    0.0643728581, -0.0296305312,
)  # of 1 / (1 + x / 2), from 0.5 to 11 # fmt: skip
_ERFINV = (
    0.886226791, 0.23201804, 0.0115261032, -0.00228794455, -0.000175193474, 7.21480197e-05, -5.38252596e-06,
    -1.23191167e-07, 2.32858038e-08,
)  # of -log(1 - x * x) to 5 # fmt: skip
_ERFINV_TAIL = (
    2.53659857, -3.59830371, 3.36194648, -1.36816079, 0.333510618, -0.0484525469, 0.00386516808, -0.000129851793,
)  # of its root, from there on # fmt: skip


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Coefficients by rising powers, by Horner's rule."""
    result: Tensor | float = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        result = x * result + coefficient
    assert isinstance(result, Tensor)
    return result


def _sign_of(x: Tensor, size: Tensor) -> Tensor:
    return where(x < 0, -size, size)


def _bits(x: Tensor) -> Tensor:
    """Those of a float32, as int32: of which the sign of zero is one, too."""
    return x.with_expr(Call("bits", (x.cast(FLOAT32).expr,), INT32), INT32)


@elementwise("aten.atan.default", "aten.atan_.default", "aten.arctan.default", "aten.arctan_.default")
def atan(self: Tensor) -> Tensor:
    """The inverse of the tangent, from -pi / 2 to pi / 2 radians."""
    x = as_float(self)
    size = apply("abs", x)
    inverse = apply("div", -1.0, size)
    far, middle = size > tan(3 * pi / 8), size > tan(pi / 8)
    reduced = where(far, inverse, where(middle, (size - 1) / (size + 1), size))
    start = where(far, pi / 2, where(middle, pi / 4, full(x.trace, (), 0.0, x.dtype)))
    return _sign_of(x, start + reduced * _polynomial(reduced * reduced, _ATAN))


@elementwise("aten.atan2.default", "aten.atan2_.default", "aten.arctan2.default", "aten.arctan2_.default")
def atan2(self: Tensor, other: Tensor) -> Tensor:
    """The angle of the point (other, self), from -pi to pi radians."""
    y, x = as_float(self), as_float(other)
    a, b = apply("abs", y), apply("abs", x)
    both = apply("and", apply("eq", a, inf), apply("eq", b, inf))
    share = where(both, 1.0, where(apply("eq", a, b), where(apply("eq", a, 0), 0.0, 1.0), a / b))
    share = where(apply("ne", x, x), x, where(apply("ne", y, y), y, share))
    angle = atan(share)
    angle = where(_bits(x) < 0, pi - angle, angle)
    return where(_bits(y) < 0, -angle, angle)


@elementwise("aten.asin.default", "aten.asin_.default", "aten.arcsin.default", "aten.arcsin_.default")
def asin(self: Tensor) -> Tensor:
    """The inverse of the sine, from -pi / 2 to pi / 2 radians; NaN beyond 1."""
    x = as_float(self)
    return _sign_of(x, _arc(apply("abs", x), pi / 2, -2.0, 1.0))


@elementwise("aten.acos.default", "aten.acos_.default", "aten.arccos.default", "aten.arccos_.default")
def acos(self: Tensor) -> Tensor:
    """The inverse of the cosine, from 0 to pi radians; NaN beyond 1."""
    x = as_float(self)
    size = apply("abs", x)
    large = 2 * _arcsine(apply("sqrt", (1 - size) * 0.5))
    small = pi / 2 - _arcsine(x)
    return where(size > 0.5, where(x < 0, pi - large, large), small)


def _arcsine(x: Tensor) -> Tensor:
    """Of numbers from -1 / 2 to 1 / 2."""
    return x * _polynomial(x * x, _ASIN)


def _arc(size: Tensor, start: float, outer: float, inner: float) -> Tensor:
    return where(size > 0.5, start + outer * _arcsine(apply("sqrt", (1 - size) * 0.5)), inner * _arcsine(size))


@elementwise("aten.erfc.default", "aten.erfc_.default", "aten.special_erfc.default")
def erfc(self: Tensor) -> Tensor:
    """1 less the error function, with the digits that the difference would lose."""
    x = as_float(self)
    size = apply("abs", x)
    share = 1 / (1 + size * 0.5)
    tail = apply("exp", -size * size) * share * _polynomial(share, _ERFC)
    return where(size < 0.5, 1 - apply("erf", x), where(x < 0, 2 - tail, tail))


@elementwise("aten.erfinv.default", "aten.erfinv_.default", "aten.special_erfinv.default")
def erfinv(self: Tensor) -> Tensor:
    """The inverse of the error function, from -1 to 1; NaN beyond."""
    x = as_float(self)
    depth = -apply("log", (1 - x) * (1 + x))
    result = x * where(
        depth < 5, _polynomial(depth, _ERFINV), _polynomial(apply("sqrt", apply("max", depth, 5.0)), _ERFINV_TAIL)
    )
    limit = where(x < 0, full(x.trace, (), -inf, x.dtype), inf)
    return where(apply("eq", apply("abs", x), 1), limit, result)


@elementwise("aten.special_ndtr.default")
def ndtr(self: Tensor) -> Tensor:
    """The share of a standard normal distribution below a number."""
    return 0.5 * erfc(as_float(self) * -sqrt(0.5))


_SHIFT = 8  # from which on series in 1 / x are exact in float32


def _reflected(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a number is below 1 / 2, and else itself, or 1 less it: there gamma functions mirror."""
    below = x < 0.5
    return below, where(below, 1 - x, x)


@elementwise("aten.lgamma.default", "aten.lgamma_.default", "aten.special_gammaln.default")
def lgamma(self: Tensor) -> Tensor:
    """The logarithm of the size of the gamma function: Stirling's series, 8 further on."""
    x = as_float(self)
    below, positive = _reflected(x)
    product = positive
    for step in range(1, _SHIFT):
        product = product * (positive + step)
    near = positive < _SHIFT
    shifted = where(near, positive + _SHIFT, positive)
    series = (1 / shifted) * _polynomial(1 / (shifted * shifted), (1 / 12, -1 / 360, 1 / 1260))
    large = (shifted - 0.5) * apply("log", shifted) - shifted + (0.5 * log(2 * pi)) + series
    result = where(near, large - apply("log", where(near, product, 1.0)), large)
    turned = apply("abs", apply("sin", pi * (x - apply("floor", x))))
    result = where(below, log(pi) - apply("log", turned) - result, result)
    return where(apply("eq", apply("abs", x), inf), inf, result)


@elementwise(
    "aten.digamma.default", "aten.digamma_.default", "aten.special_digamma.default", "aten.special_psi.default"
)
def digamma(self: Tensor) -> Tensor:
    """The derivative of `lgamma`: its series, 8 further on."""
    x = as_float(self)
    below, positive = _reflected(x)
    sums = 1 / positive
    for step in range(1, _SHIFT):
        sums = sums + 1 / (positive + step)
    shifted = positive + _SHIFT
    inverse = 1 / (shifted * shifted)
    large = apply("log", shifted) - 0.5 / shifted - inverse * _polynomial(inverse, (1 / 12, -1 / 120, 1 / 252))
    turn = pi * (x - apply("floor", x))
    result = large - sums - where(below, pi * apply("cos", turn) / apply("sin", turn), 0.0)
    pole = where(apply("eq", apply("floor", x), x), full(x.trace, (), nan, x.dtype), result)
    return where(apply("eq", x, 0), -1 / x, where(x < 0, pole, result))


@elementwise("aten.sinc.default", "aten.sinc_.default", "aten.special_sinc.default")
def sinc(self: Tensor) -> Tensor:
    """``sin(pi * self) / (pi * self)``, and 1 at 0."""
    angle = as_float(self) * pi
    return where(apply("eq", angle, 0), 1.0, apply("sin", angle) / angle)


@elementwise("aten.logit.default", "aten.logit_.default", "aten.special_logit.default")
def logit(self: Tensor, eps: float | None = None) -> Tensor:
    """``log(self / (1 - self))``; `self` is first limited to [eps, 1 - eps], where that is given."""
    x = as_float(self)
    x = x if eps is None else clamp(x, float(eps), 1 - float(eps))
    return apply("log", x / (1 - x))


@elementwise("aten.signbit.default")
def signbit(self: Tensor) -> Tensor:
    """True where the sign is negative, that of zero included."""
    return _bits(self) < 0 if self.dtype.is_float else self < 0


@elementwise("aten.copysign.Tensor", "aten.copysign_.Tensor", "aten.copysign.Scalar", "aten.copysign_.Scalar")
def copysign(self: Tensor, other: Tensor | Number) -> Tensor:
    """The size of `self` with the sign of `other`, that of zero included."""
    size = apply("abs", as_float(self))
    sign = other if isinstance(other, Tensor) else full(self.trace, (), float(other), FLOAT32)
    return where(signbit(sign), -size, size)


@elementwise("aten.nan_to_num.default", "aten.nan_to_num_.default")
def nan_to_num(
    self: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """Numbers in place of NaN and infinities: 0, and the largest that the data type holds, unless others are given."""
    if not self.dtype.is_float:
        return self
    largest = _largest(self.dtype)
    high, low = largest if posinf is None else float(posinf), -largest if neginf is None else float(neginf)
    result = where(apply("eq", self, inf), high, where(apply("eq", self, -inf), low, self))
    return where(apply("ne", self, self), 0.0 if nan is None else float(nan), result)


def _largest(kind: DType) -> float:
    return {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}.get(kind.name, 3.4028234663852886e38)


@elementwise("aten.round.decimals", "aten.round_.decimals", "aten.special_round.default")
def round_decimals(self: Tensor, decimals: int = 0) -> Tensor:
    """Rounded to so many places behind the point; to tens, hundreds and so on where that is negative."""
    if not self.dtype.is_float or decimals == 0:
        return round_(self)
    scale = 10.0 ** abs(decimals)
    return round_(self * scale) / scale if decimals > 0 else round_(self / scale) * scale


@elementwise("aten.addcmul.default", "aten.addcmul_.default")
def addcmul(self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Number = 1) -> Tensor:
    """``self + value * tensor1 * tensor2``."""
    product = tensor1 * tensor2
    return self + (product if value == 1 else product * value)


@elementwise("aten.xlogy.Scalar_Other", "aten.xlogy_.Scalar_Other", "aten.special_xlogy.other_scalar")
def xlogy_of_number(self: Tensor, other: Number) -> Tensor:
    """``self * log(other)``, and 0 where `self` is 0 and `other` a number."""
    return xlogy(self, full(self.trace, (), float(other), FLOAT32).cast(as_float(self).dtype))


@elementwise("aten.special_xlog1py.default")
def xlog1py(self: Tensor, other: Tensor) -> Tensor:
    """``self * log(1 + other)``, and 0 where `self` is 0 and `other` a number."""
    y = as_float(other)
    return where(apply("eq", self, 0), where(apply("ne", y, y), y, 0.0), self * log1p(y))


@elementwise("aten.special_entr.default")
def entropy(self: Tensor) -> Tensor:
    """``-self * log(self)``, 0 at 0, and minus infinity below."""
    x = as_float(self)
    below = where(x < 0, full(x.trace, (), -inf, x.dtype), -x * apply("log", x))
    return where(apply("eq", x, 0), 0.0, below)


@elementwise("aten.logaddexp2.default")
def logaddexp2(self: Tensor, other: Tensor) -> Tensor:
    """``log2(2 ** self + 2 ** other)``, where the powers are too large, too."""
    a, b = as_float(self), as_float(other)
    apart = where(apply("eq", a, b), 0.0, apply("abs", a - b))
    return maximum(a, b) + log1p(apply("exp", apart * -log(2))) * (1 / log(2))


@elementwise("aten.ldexp.Tensor", "aten.ldexp_.default")
def ldexp(self: Tensor, other: Tensor) -> Tensor:
    """``self * 2 ** other``."""
    return as_float(self) * apply("pow", 2.0, as_float(other))


@op("aten.isin.Tensor_Tensor")
def isin(elements: Tensor, test_elements: Tensor, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Whether each element is among `test_elements`; whether it is not, with `invert`."""
    listed = test_elements.reshape((-1,))
    same = apply("eq", elements.reshape((*elements.shape, 1)), listed).cast(INT32)
    (count,) = reduce(same, total, (-1,), False)
    return count <= 0 if invert else count > 0


@elementwise("aten.isin.Tensor_Scalar")
def isin_number(elements: Tensor, test_element: Number, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Whether each element is that number; whether it is not, with `invert`."""
    return apply("ne" if invert else "eq", elements, test_element)


@op("aten.isclose.default")
def isclose(self: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
    """Whether two numbers are equal within a share of the second, and a number."""
    a, b = as_float(self), as_float(other)
    near = apply("and", apply("abs", a - b) <= atol + rtol * apply("abs", b), apply("abs", b) < inf)
    close = apply("or", apply("eq", a, b), near)
    nans = apply("and", apply("ne", a, a), apply("ne", b, b))
    return apply("or", close, nans) if equal_nan else close


def _shift(name: str) -> None:
    @elementwise(
        f"aten.bitwise_{name}_shift.Tensor", f"aten.bitwise_{name}_shift_.Tensor",
        f"aten.bitwise_{name}_shift.Tensor_Scalar", f"aten.bitwise_{name}_shift_.Tensor_Scalar",
        f"aten.__{name[0]}shift__.Tensor", f"aten.__{name[0]}shift__.Scalar",
        f"aten.__i{name[0]}shift__.Tensor", f"aten.__i{name[0]}shift__.Scalar",
    )  # fmt: skip
    def shift(self: Tensor, other: Tensor | Number) -> Tensor:
        """Bits moved; what would move further than there are bits is refused where it is known, and else undefined."""
        if self.dtype.is_float or (isinstance(other, Tensor) and other.dtype.is_float) or self.dtype.name == "bool":
            raise OpRefusal("shifts take integers")
        bits = 8 * self.dtype.size
        if not isinstance(other, Tensor) and not 0 <= other < bits:
            raise OpRefusal(f"given a shift by {other}, expected 0 to {bits - 1}")
        if isinstance(other, Tensor):
            other = apply("min", apply("max", other, 0), min(bits, 64) - 1)
        return apply("shl" if name == "left" else "shr", self, other)


_shift("left")
_shift("right")
