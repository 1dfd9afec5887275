"""Normalisations: compositions of arithmetic and reductions that each become one fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_compiler.dtypes import dtype
from npu_compiler.ops.registry import op
from npu_compiler.symbolic import OpRefusal, Tensor, apply, where


@op("aten.softmax.int", "aten._softmax.default")
def softmax(self: Tensor, dim: int, dtype: Any = None, half_to_float: bool = False) -> Tensor:
    """``exp(self - max) / sum(exp(self - max))`` over `dim`, computed in float32."""
    x = _converted(self, dtype).move_last(dim)
    shifted = apply("exp", x - x.reduce("max", (-1,), True))
    return apply("quotient", shifted, shifted.reduce("sum", (-1,), True)).move_from_last(dim)


@op("aten._safe_softmax.default")
def safe_softmax(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """The softmax over `dim`, and zeros where everything is minus infinity."""
    x = _converted(self, dtype).move_last(dim)
    largest = x.reduce("max", (-1,), True)
    shifted = apply("exp", x - largest)
    result = apply("quotient", shifted, shifted.reduce("sum", (-1,), True))
    return where(apply("eq", largest, float("-inf")), 0.0, result).move_from_last(dim)


@op("aten.log_softmax.int", "aten._log_softmax.default")
def log_softmax(self: Tensor, dim: int, dtype: Any = None, half_to_float: bool = False) -> Tensor:
    """The logarithm of the softmax over `dim`."""
    x = _converted(self, dtype).move_last(dim)
    shifted = x - x.reduce("max", (-1,), True)
    total = apply("exp", shifted).reduce("sum", (-1,), True)
    return (shifted - apply("log", total)).move_from_last(dim)


def _converted(x: Tensor, name: Any) -> Tensor:
    return x if name is None else x.cast(dtype(name))


def _flat_last(x: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    """`x` with the normalised dimensions as one."""
    count = len(normalized_shape)
    if not count or list(x.shape[-count:]) != list(normalized_shape):
        raise OpRefusal(f"given normalized_shape={list(normalized_shape)} for a tensor of shape {list(x.shape)}")
    return x.reshape((*x.shape[:-count], -1)) if count > 1 else x


@op("aten.layer_norm.default")
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimensions."""
    x = _flat_last(input, normalized_shape)
    size = x.shape[-1]
    centred = x - x.reduce("sum", (-1,), True) * (1 / size)
    variance = (centred * centred).reduce("sum", (-1,), True) * (1 / size)
    result = centred * apply("rsqrt", variance + eps)
    return _affine(result, weight, bias).reshape(input.shape)


@op("aten.rms_norm.default")
def rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: Any = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimensions."""
    x = _flat_last(input, normalized_shape)
    epsilon = eps if eps is not None else 2.0**-23  # float32's machine epsilon, in which PyTorch computes
    square = (x * x).reduce("sum", (-1,), True) * (1 / x.shape[-1])
    return _affine(x * apply("rsqrt", square + epsilon), weight, None).reshape(input.shape)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * weight.reshape((-1,))
    return x if bias is None else x + bias.reshape((-1,))


@op("aten.batch_norm.default")
def batch_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """``(input - mean) / sqrt(variance + eps) * weight + bias`` by channel, with the running statistics."""
    if training or running_mean is None or running_var is None:
        raise OpRefusal("it uses the statistics of the batch; call model.eval() before extraction")
    if len(input.shape) < 2:
        raise OpRefusal(f"given {len(input.shape)} dimensions, expected a batch and channels")

    def by_channel(statistic: Tensor) -> Tensor:
        return statistic.reshape((-1, *(1,) * (len(input.shape) - 2)))

    scale = apply("rsqrt", by_channel(running_var) + eps)
    result = (input - by_channel(running_mean)) * scale
    if weight is not None:
        result = result * by_channel(weight)
    return result if bias is None else result + by_channel(bias)


@op("aten.group_norm.default")
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Each of `num_groups` groups of channels brought to mean 0 and variance 1, then scaled by channel."""
    batch, channels, *rest = input.shape
    if num_groups < 1 or channels % num_groups:
        raise OpRefusal(f"given num_groups={num_groups}, which does not divide {channels} channels")
    x = input.reshape((batch, num_groups, -1))
    size = x.shape[-1]
    centred = x - x.reduce("sum", (-1,), True) * (1 / size)
    variance = (centred * centred).reduce("sum", (-1,), True) * (1 / size)
    result = (centred * apply("rsqrt", variance + eps)).reshape(input.shape)
    ones = (1,) * len(rest)
    if weight is not None:
        result = result * weight.reshape((-1, *ones))
    return result if bias is None else result + bias.reshape((-1, *ones))
