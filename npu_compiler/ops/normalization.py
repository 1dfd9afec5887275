"""Normalisations: compositions of arithmetic and reductions that each become one fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from npu_compiler.dtypes import FLOAT32, dtype
from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops.reduction import greatest, pixel_parts, total
from npu_compiler.ops.registry import op
from npu_compiler.ops.rows import Passage, RowCall, apart_from_dim
from npu_compiler.ops.traits import Term, Work
from npu_compiler.tensor.reducing import reduce
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, arange, where

normalization = partial(op, work=Work.ROWS)


def _over_last(node: OpNode, graph: IRGraph) -> bool:
    rank = len(graph.tensors[node.outputs[0]].shape)
    return int(node.attrs["dim"]) % rank == rank - 1


@normalization(
    "aten.softmax.int", "aten._softmax.default", "aten.special_softmax.default",
    rows=apart_from_dim, term=Term("softmax", ("self",), holds=_over_last),
)  # fmt: skip
def softmax(self: Tensor, dim: int, dtype: Any = None, half_to_float: bool = False) -> Tensor:
    """``exp(self - max) / sum(exp(self - max))`` over `dim`, computed in float32."""
    x = _converted(self, dtype).move_last(dim)
    shifted = apply("exp", x - _greatest(x))
    return apply("quotient", shifted, _total(shifted)).move_from_last(dim)


@normalization("aten._safe_softmax.default", rows=apart_from_dim)
def safe_softmax(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """The softmax over `dim`, and zeros where everything is minus infinity."""
    x = _converted(self, dtype).move_last(dim)
    largest = _greatest(x)
    shifted = apply("exp", x - largest)
    result = apply("quotient", shifted, _total(shifted))
    return where(apply("eq", largest, float("-inf")), 0.0, result).move_from_last(dim)


@normalization(
    "aten.log_softmax.int", "aten._log_softmax.default", "aten.special_log_softmax.default", rows=apart_from_dim
)
def log_softmax(self: Tensor, dim: int, dtype: Any = None, half_to_float: bool = False) -> Tensor:
    """The logarithm of the softmax over `dim`."""
    x = _converted(self, dtype).move_last(dim)
    shifted = x - _greatest(x)
    return (shifted - apply("log", _total(apply("exp", shifted)))).move_from_last(dim)


def _total(x: Tensor) -> Tensor:
    return reduce(x, total, (-1,), True)[0]


def _greatest(x: Tensor) -> Tensor:
    return reduce(x, greatest, (-1,), True)[0]


def _converted(x: Tensor, name: Any) -> Tensor:
    return x if name is None else x.cast(dtype(name))


def _flat_last(x: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    """`x` with the normalised dimensions as one."""
    count = len(normalized_shape)
    if not count or list(x.shape[-count:]) != list(normalized_shape):
        raise OpRefusal(f"given normalized_shape={list(normalized_shape)} for a tensor of shape {list(x.shape)}")
    return x.reshape((*x.shape[:-count], -1)) if count > 1 else x


def _standard(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`x` brought to mean 0 and variance 1 over its last dimension; the mean, and one over the standard deviation."""
    size = x.shape[-1]
    mean = _total(x) * (1 / size)
    centred = x - mean
    variance = _total(centred * centred) * (1 / size)
    scale = apply("rsqrt", variance + eps)
    return centred * scale, mean, scale


def _rows_outside(call: RowCall) -> Passage | None:
    """Rows of dimensions ahead of those that are normalised."""
    inside = call.rank - len(call.node.attrs["normalized_shape"])
    return Passage({"input": call.dim}) if call.dim < inside else None


@normalization("aten.layer_norm.default", rows=_rows_outside)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimensions."""
    return native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


@normalization("aten.native_layer_norm.default", rows=_rows_outside)
def native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer norm, with the mean and one over the standard deviation."""
    _check_parameters(normalized_shape, weight, bias)
    result, mean, scale = _standard(_flat_last(input, normalized_shape), eps)
    rows = (*input.shape[: len(input.shape) - len(normalized_shape)], *(1,) * len(normalized_shape))
    return _affine(result, weight, bias).reshape(input.shape), mean.reshape(rows), scale.reshape(rows)


@normalization("aten.rms_norm.default", rows=_rows_outside)
def rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: Any = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimensions."""
    return fused_rms_norm(input, normalized_shape, weight, eps)[0]


@normalization("aten._fused_rms_norm.default", rows=_rows_outside)
def fused_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: Any
) -> tuple[Tensor, Tensor]:
    """The RMS norm, with one over the root of the mean square."""
    _check_parameters(normalized_shape, weight)
    x = _flat_last(input, normalized_shape)
    epsilon = eps if eps is not None else 2.0**-23  # float32's machine epsilon, in which PyTorch computes
    scale = apply("rsqrt", _total(x * x) * (1 / x.shape[-1]) + epsilon)
    rows = (*input.shape[: len(input.shape) - len(normalized_shape)], *(1,) * len(normalized_shape))
    return _affine(x * scale, weight, None).reshape(input.shape), scale.reshape(rows)


def _check_parameters(shape: Sequence[int], *parameters: Tensor | None) -> None:
    for parameter in parameters:
        if parameter is not None and list(parameter.shape) != list(shape):
            raise OpRefusal(f"given a weight or bias of shape {list(parameter.shape)}, expected {list(shape)}")


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * weight.reshape((-1,))
    return x if bias is None else x + bias.reshape((-1,))


def _affine_by_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * _by_channel(weight, x)
    return x if bias is None else x + _by_channel(bias, x)


def _by_channel(parameter: Tensor, x: Tensor) -> Tensor:
    """A value for each channel of `x` [N, C, ...], as a tensor that broadcasts to it."""
    if parameter.shape != x.shape[1:2]:
        raise OpRefusal(f"given {list(parameter.shape)} values for {x.shape[1]} channels")
    return parameter.reshape((-1, *(1,) * (len(x.shape) - 2)))


channel_norm = partial(
    normalization,
    images={"input": "image"},
    term=Term("batch_norm", ("input", "weight", "bias", "running_mean", "running_var")),
)


@channel_norm("aten.batch_norm.default")
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
    """``(input - mean) / sqrt(variance + eps) * weight + bias`` by channel, by the running statistics if it has any."""
    if len(input.shape) < 2:
        raise OpRefusal(f"given {len(input.shape)} dimensions, expected a batch and channels")
    if training and running_mean is None and running_var is None:
        return _affine_by_channel(_standard_by_channel(input, eps), weight, bias)
    if training or running_mean is None or running_var is None:
        raise OpRefusal("it updates its running statistics; call model.eval() before extraction")
    scale = apply("rsqrt", _by_channel(running_var, input) + eps)
    return _affine_by_channel((input - _by_channel(running_mean, input)) * scale, weight, bias)


def _standard_by_channel(x: Tensor, eps: float) -> Tensor:
    """Each channel brought to mean 0 and variance 1 over the whole batch; weights are standardised so, too."""
    order = [1, 0, *range(2, len(x.shape))]
    turned = x.permute(order)
    result, _, _ = _standard(turned.reshape((turned.shape[0], -1)), eps)
    return result.reshape(turned.shape).permute(order)


@channel_norm("aten.native_batch_norm.default")
def native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The batch norm, with the mean and one over the standard deviation that it used."""
    if running_mean is None or running_var is None:
        raise OpRefusal("it gives the statistics of the batch as well; call model.eval() before extraction")
    result = batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)
    return result, running_mean, apply("rsqrt", running_var + eps)


@channel_norm("aten._native_batch_norm_legit_no_training.default")
def native_batch_norm_no_training(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The batch norm with the running statistics, as `native_batch_norm` gives it."""
    return native_batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)


@normalization("aten.instance_norm.default")
def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Each channel of each example brought to mean 0 and variance 1, or by the running statistics; then scaled."""
    if not use_input_stats:
        return batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)
    if running_mean is not None or running_var is not None:
        raise OpRefusal("it updates its running statistics; call model.eval() before extraction")
    input = input.realize()
    if _has_pixels(input):
        return _group_norm_of_pixels(input, input.shape[1], weight, bias, eps)[0]
    result, _, _ = _standard(input.reshape((*input.shape[:2], -1)), eps)
    return _affine_by_channel(result.reshape(input.shape), weight, bias)


@normalization("aten.group_norm.default")
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Each of `num_groups` groups of channels brought to mean 0 and variance 1, then scaled by channel."""
    return _group_norm(input, num_groups, weight, bias, eps)[0]


@normalization("aten.native_group_norm.default")
def native_group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The group norm, with the mean and one over the standard deviation of each group."""
    return _group_norm(input, group, weight, bias, eps)


def _group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, channels = x.shape[:2]
    if groups < 1 or channels % groups:
        raise OpRefusal(f"given num_groups={groups}, which does not divide {channels} channels")
    x = x.realize()
    if _has_pixels(x):
        return _group_norm_of_pixels(x, groups, weight, bias, eps)
    result, mean, scale = _standard(x.reshape((batch, groups, -1)), eps)
    by_group = (mean.reshape((batch, groups)), scale.reshape((batch, groups)))
    return _affine_by_channel(result.reshape(x.shape), weight, bias), *by_group


def _has_pixels(x: Tensor) -> bool:
    """Whether a tensor in memory is an image [N, C, ...] with the channels of a pixel side by side, and some pixels."""
    return len(x.shape) > 2 and x.shape[1] > 1 and x.placed().view.strides[1] == 1 and prod(x.shape[2:]) > 1


def _group_norm_of_pixels(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where the channels of a pixel lie side by side: sums by channel, which make those of a group.

    The image stays as it lies, and is read once for the sums; these stay in float32.
    """
    (batch, channels), rest = x.shape[:2], (1,) * (len(x.shape) - 2)
    parts, each = pixel_parts(x), channels // groups
    _, count, _, length = parts.shape
    first = x.slice(2, 0, 1)
    for dim in range(3, len(x.shape)):
        first = first.slice(dim, 0, 1)
    first = first.reshape((batch, channels)).cast(FLOAT32)
    # sums, and sums of squares, of what is left without the first pixel, which is near the mean
    left = parts.cast(FLOAT32) - first.reshape((batch, 1, channels, 1))
    left = left.reshape((batch, count, 1, channels, length))
    both = where(arange(x.trace, 2).reshape((2, 1, 1)) < 1, left, left * left)
    (sums,) = reduce(both, total, (-1,), False, scale=1 / (count * length))
    if count > 1:
        (sums,) = reduce(sums, total, (1,), True)
    own, squares = (sums.slice(2, item, 1).reshape((batch, groups, each)) for item in (0, 1))
    means = own + first.reshape((batch, groups, each))
    mean = _total(means) * (1 / each)
    apart = means - mean
    variance = _total(squares - own * own + apart * apart) * (1 / each)
    mean, scale = mean.realize(), apply("rsqrt", apply("max", variance, 0.0) + eps).realize()
    by_channel = [part.expand((batch, groups, each)).reshape((batch, channels, *rest)) for part in (mean, scale)]
    result = _affine_by_channel((x - by_channel[0]) * by_channel[1], weight, bias)
    by_group = (mean.reshape((batch, groups)).cast(x.dtype), scale.reshape((batch, groups)).cast(x.dtype))
    return result.cast(x.dtype), *by_group


@normalization("aten._weight_norm.default")
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """``g * v / norm(v)``, the norm over all dimensions but `dim`."""
    return weight_norm_interface(v, g, dim)[0]


@normalization("aten._weight_norm_interface.default")
def weight_norm_interface(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """The weight norm, with the norms."""
    rank = len(v.shape)
    kept = {dim % rank} if dim != -1 else set()
    wide = v.cast(FLOAT32)
    (squares,) = reduce(wide * wide, total, [d for d in range(rank) if d not in kept], True)
    norm = apply("sqrt", squares)
    return (wide * (g.cast(FLOAT32) / norm)).cast(v.dtype), norm.cast(v.dtype)
