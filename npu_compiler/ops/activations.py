"""Activations beyond those that every model has: one element of the result from one element of each operand."""

from __future__ import annotations

from npu_compiler.ops.elementwise import clamp, sigmoid
from npu_compiler.ops.pointwise import log1p
from npu_compiler.ops.registry import elementwise, op
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor, apply, where


def _check_float(x: Tensor) -> None:
    if not x.dtype.is_float:
        raise OpRefusal(f"given {x.dtype}, expected floating point")


@elementwise("aten.leaky_relu.default", "aten.leaky_relu_.default")
def leaky_relu(self: Tensor, negative_slope: Number = 0.01) -> Tensor:
    """`self`, and where it is negative ``negative_slope * self``."""
    _check_float(self)
    return where(self > 0, self, self * negative_slope)


@op("aten.prelu.default")
def prelu(self: Tensor, weight: Tensor) -> Tensor:
    """`self`, and where it is negative ``weight * self``, with one weight for each channel or for all."""
    channels = (1,) if len(self.shape) < 2 else (-1, *(1,) * (len(self.shape) - 2))
    return where(self > 0, self, self * weight.reshape(channels))


@elementwise("aten.elu.default", "aten.elu_.default")
def elu(self: Tensor, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Tensor:
    """``scale`` times: `self` where positive, else ``alpha * (exp(input_scale * self) - 1)``."""
    _check_float(self)
    negative = (apply("exp", self * input_scale) - 1) * (float(alpha) * float(scale))
    return where(self > 0, self * scale, negative)


@elementwise("aten.celu.default", "aten.celu_.default")
def celu(self: Tensor, alpha: Number = 1.0) -> Tensor:
    """`self` where positive, else ``alpha * (exp(self / alpha) - 1)``."""
    if alpha == 0:
        raise OpRefusal("given alpha=0, expected another number")
    return elu(self, alpha, 1, 1 / float(alpha))


@elementwise("aten.selu.default", "aten.selu_.default")
def selu(self: Tensor) -> Tensor:
    """ELU with the scales of self-normalising networks (Klambauer and others, 2017)."""
    return elu(self, 1.6732632423543772848, 1.0507009873554804934)


@elementwise("aten.softplus.default")
def softplus(self: Tensor, beta: Number = 1, threshold: Number = 20) -> Tensor:
    """``log(1 + exp(beta * self)) / beta``, and `self` where ``beta * self`` is above the threshold."""
    _check_float(self)
    scaled = self * beta
    return where(scaled > threshold, self, log1p(apply("exp", scaled)) / float(beta))


@elementwise("aten.log_sigmoid.default")
def log_sigmoid(self: Tensor) -> Tensor:
    """``log(1 / (1 + exp(-self)))``."""
    _check_float(self)
    return apply("min", self, 0) - log1p(apply("exp", -apply("abs", self)))


@elementwise("aten.mish.default", "aten.mish_.default")
def mish(self: Tensor) -> Tensor:
    """``self * tanh(softplus(self))``."""
    return self * apply("tanh", softplus(self))


@elementwise("aten.relu6.default", "aten.relu6_.default")
def relu6(self: Tensor) -> Tensor:
    """`self` limited to [0, 6]."""
    return clamp(self, 0, 6)


@elementwise("aten.rrelu.default", "aten.rrelu_.default")
def rrelu(
    self: Tensor, lower: Number = 0.125, upper: Number = 1 / 3, training: bool = False, generator: None = None
) -> Tensor:
    """`self`, and where it is negative, the mean of two slopes times `self`: as in evaluation mode."""
    if training:
        raise OpRefusal("given training=True, which draws slopes; call model.eval() before extraction")
    return leaky_relu(self, (float(lower) + float(upper)) / 2)


@elementwise("aten.hardsigmoid.default", "aten.hardsigmoid_.default")
def hardsigmoid(self: Tensor) -> Tensor:
    """``(self + 3) / 6`` limited to [0, 1]."""
    _check_float(self)
    return clamp(self + 3, 0, 6) * (1 / 6)


@elementwise("aten.hardswish.default", "aten.hardswish_.default")
def hardswish(self: Tensor) -> Tensor:
    """``self * (self + 3) / 6``, zero from -3 down, and `self` from 3 on."""
    return self * hardsigmoid(self)


@elementwise("aten.hardshrink.default")
def hardshrink(self: Tensor, lambd: Number = 0.5) -> Tensor:
    """`self`, and zero within `lambd` of zero."""
    _check_float(self)
    return where(apply("abs", self) <= lambd, 0.0, self)


@elementwise("aten.softshrink.default")
def softshrink(self: Tensor, lambd: Number = 0.5) -> Tensor:
    """`self` moved towards zero by `lambd`, and zero within `lambd` of it."""
    _check_float(self)
    inner = where(self < -float(lambd), self + lambd, self * 0)
    return where(self > lambd, self - lambd, inner)


@elementwise("aten.threshold.default", "aten.threshold_.default")
def threshold(self: Tensor, threshold: Number, value: Number) -> Tensor:
    """`self` where it is above the threshold, else `value`."""
    _check_float(self)
    return where(self <= threshold, float(value), self)


@op("aten.glu.default")
def glu(self: Tensor, dim: int = -1) -> Tensor:
    """The first half of a dimension times the sigmoid of the second."""
    size = self.shape[dim]
    if size % 2:
        raise OpRefusal(f"given {size} elements in dimension {dim}, expected an even number")
    half = size // 2
    return self.slice(dim % len(self.shape), 0, half) * sigmoid(self.slice(dim % len(self.shape), half, half))
