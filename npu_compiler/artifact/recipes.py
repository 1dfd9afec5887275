"""Weight recipes: how a tensor on the device is made from the tensors of the model's file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from npu_compiler.artifact.stages import Stage, run_stages
from npu_compiler.errors import ProgramFormatError, WeightError
from npu_compiler.tensor.layout import BufferSpec

__all__ = ["EXPRESSIONS", "IN_TURNS", "ONE_AFTER_ANOTHER", "TRANSFORMS", "Run", "WeightInput", "WeightRecipe"]

EXPRESSIONS = "expressions"
"""The transform of recipes that have stages."""

Array = NDArray[Any]
Shape = tuple[int, ...]


class Run(NamedTuple):
    """Where a tensor lies in a row-major result: in order, `length` elements at `offset` in each `stride` elements."""

    offset: int
    length: int
    stride: int

    def of(self, flat: Array) -> Array:
        """The tensor's place in a result of at least one element, as a view [result's size / stride, length]."""
        return flat.reshape(-1, self.stride)[:, self.offset : self.offset + self.length]


@dataclass(frozen=True)
class WeightInput:
    """A tensor that must be in the weight file: its name there, shape and dtype (as PyTorch names it)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightRecipe:
    """Makes one device tensor.

    Attributes:
        spec: The result, in name, dtype and layout. Its name may be one that the model never had.
        inputs: The tensors of the weight file, in the order that the transform takes them.
        transform: A name in `TRANSFORMS`, or ``expressions``.
        attrs: Numbers that the transform needs, such as the epsilon of a BatchNorm.
        data: For a constant that the program carries itself: its elements, row-major, in the spec's host dtype.
        stages: For ``expressions``, the tensors that are computed, one from another; the last is the result.
    """

    spec: BufferSpec
    inputs: tuple[WeightInput, ...]
    transform: str = "identity"
    attrs: tuple[tuple[str, float], ...] = ()
    data: bytes = b""
    stages: tuple[Stage, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the result is a tensor of the weight file as it is there, so that other recipes may start from it."""
        return self.transform == "identity" and not self.data

    @property
    def runs(self) -> tuple[Run, ...] | None:
        """Where each of `inputs` lies in the result, if the transform only puts them in their place; else None."""
        if self.transform not in _PLACES or not self.inputs or self.attrs:
            return None
        try:
            shape, runs = _PLACES[self.transform]([item.shape for item in self.inputs])
        except ValueError:
            return None
        return runs if shape == self.spec.shape else None

    def compute(self, arrays: Sequence[Array]) -> Array:
        """The tensor of shape `spec.shape`, in the precision that the transform computes in.

        Args:
            arrays: The tensors of `inputs`, in that order.

        Raises:
            ProgramFormatError: The transform is not known, or does not give what the recipe says.
            WeightError: A tensor has values that it cannot have, such as a negative variance.
        """
        if self.transform == EXPRESSIONS:
            return self._held(self._of_its_shape(run_stages(self.spec.name, self.stages, arrays)))
        if not self.inputs:
            return self._constant()
        transform = TRANSFORMS.get(self.transform)
        if transform is None:
            known = ", ".join((*TRANSFORMS, EXPRESSIONS))
            raise ProgramFormatError(f"weight '{self.spec.name}': unknown transform '{self.transform}', known: {known}")
        try:
            result = transform(*arrays, **dict(self.attrs))
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            raise ProgramFormatError(
                f"weight '{self.spec.name}': '{self.transform}' cannot take its inputs ({error}); compile it again"
            ) from error
        return self._of_its_shape(result)

    def _held(self, value: Array) -> Array:
        """What a kernel would have stored: infinity in place of numbers that the data type on the device has not."""
        kind = self.spec.dtype
        if not kind.is_float or kind.coding is not None or value.dtype.itemsize <= kind.size:
            return value
        largest = float(ml_dtypes.finfo(kind.numpy).max)  # type: ignore[no-untyped-call]
        return np.where(np.abs(value) > largest, np.copysign(value.dtype.type(np.inf), value), value)

    def _of_its_shape(self, result: Array) -> Array:
        if result.shape != self.spec.shape:
            raise ProgramFormatError(
                f"weight '{self.spec.name}': its recipe gives shape {result.shape}, the program says "
                f"{self.spec.shape}; compile the model again"
            )
        return result

    def apply(self, arrays: Sequence[Array]) -> Array:
        """The flat array for the device, from `inputs` as numpy arrays; raises as `compute` does."""
        return self.spec.encode(self.compute(arrays))

    def _constant(self) -> Array:
        expected = prod(self.spec.shape) * self.spec.host_dtype.size
        if len(self.data) != expected:
            raise ProgramFormatError(
                f"weight '{self.spec.name}': a constant of {len(self.data)} bytes, expected {expected} of shape "
                f"{self.spec.shape} and dtype {self.spec.host_dtype}; compile the model again"
            )
        return np.frombuffer(self.data, self.spec.host_dtype.numpy).reshape(self.spec.shape)


def _identity(tensor: Array) -> Array:
    return tensor


def _check_vectors(channels: int, *vectors: Array | None) -> None:
    """Refuses what numpy would broadcast to more than a file holds."""
    for vector in vectors:
        if vector is not None and vector.shape != (channels,):
            raise ValueError(f"given a tensor of shape {vector.shape} for {channels} channels")


def _scale(channels: int, variance: Array, gamma: Array | None, eps: float) -> Array:
    """The factor [O] of a BatchNorm of O `channels`; `gamma` is None for one without affine parameters."""
    _check_vectors(channels, variance, gamma)
    least = float(variance.min(initial=np.inf))
    if not least + eps > 0:
        raise WeightError(f"given a variance of {least:g} and an epsilon of {eps:g}, expected a sum above 0")
    scale: Array = 1.0 / np.sqrt(variance.astype(np.float64) + eps)
    return scale if gamma is None else scale * gamma.astype(np.float64)


def _fold_weight(weight: Array, variance: Array, gamma: Array | None = None, *, eps: float) -> Array:
    """Weight [O, ...] of a convolution, times the scale of the BatchNorm [O] that follows it."""
    scale = _scale(weight.shape[0], variance, gamma, eps).reshape(-1, *[1] * (weight.ndim - 1))
    return (weight.astype(np.float64) * scale).astype(np.float32)


def _fold_spread_weight(
    weight: Array, variance: Array, gamma: Array | None = None, *, eps: float, groups: float
) -> Array:
    """Weight [I, O / groups, ...] of a transposed convolution, times the scale of the BatchNorm [O] that follows it."""
    channels = int(groups) * weight.shape[1]
    scale = _scale(channels, variance, gamma, eps).reshape(int(groups), 1, -1, *[1] * (weight.ndim - 2))
    apart = weight.astype(np.float64).reshape(int(groups), -1, *weight.shape[1:])
    return (apart * scale).astype(np.float32).reshape(weight.shape)


def _fold_bias(
    mean: Array, variance: Array, gamma: Array | None = None, beta: Array | None = None, *, eps: float
) -> Array:
    """Bias [O] that a convolution without one gets from the BatchNorm [O] that follows it."""
    return _fold_given_bias(np.zeros_like(mean), mean, variance, gamma, beta, eps=eps)


def _fold_given_bias(
    bias: Array, mean: Array, variance: Array, gamma: Array | None = None, beta: Array | None = None, *, eps: float
) -> Array:
    """Bias [O] of a convolution, taken through the BatchNorm [O] that follows it."""
    _check_vectors(bias.size, bias, mean, beta)
    shifted = (bias.astype(np.float64) - mean.astype(np.float64)) * _scale(bias.size, variance, gamma, eps)
    return (shifted if beta is None else shifted + beta.astype(np.float64)).astype(np.float32)


def _as_it_is(shapes: Sequence[Shape]) -> tuple[Shape, tuple[Run, ...]]:
    (shape,) = shapes
    return shape, (Run(0, prod(shape), prod(shape)),)


def _one_after_another(shapes: Sequence[Shape]) -> tuple[Shape, tuple[Run, ...]]:
    """Of weights [N_i, ...]: those of the first, then those of the second."""
    row, sizes = _row(shapes), [prod(shape) for shape in shapes]
    ends = list(accumulate(sizes))
    runs = (Run(end - size, size, ends[-1]) for size, end in zip(sizes, ends, strict=True))
    return (sum(shape[0] for shape in shapes), *row), tuple(runs)


def _in_turns(shapes: Sequence[Shape]) -> tuple[Shape, tuple[Run, ...]]:
    """Of weights [N, ...]: the first row of each, then the second row of each."""
    row, count = _row(shapes), len(shapes)
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"rows of {', '.join(map(str, shapes))} cannot take turns")
    length = prod(row)
    runs = (Run(number * length, length, count * length) for number in range(count))
    return (count * shapes[0][0], *row), tuple(runs)


def _row(shapes: Sequence[Shape]) -> Shape:
    """The shape of one row, which all weights have in common."""
    if not all(shapes) or len({shape[1:] for shape in shapes}) != 1:
        raise ValueError(f"{', '.join(map(str, shapes))} are not rows of one shape")
    return shapes[0][1:]


ONE_AFTER_ANOTHER, IN_TURNS = "concatenate", "interleave"
"""Transforms that put rows behind each other: all of the first tensor ahead of the next, or a row of each in turn."""

_PLACES: dict[str, Callable[[Sequence[Shape]], tuple[Shape, tuple[Run, ...]]]] = {
    "identity": _as_it_is,
    ONE_AFTER_ANOTHER: _one_after_another,
    IN_TURNS: _in_turns,
}


def _placed(transform: str, *tensors: Array) -> Array:
    shape, runs = _PLACES[transform]([tensor.shape for tensor in tensors])
    result: Array = np.empty(shape, np.result_type(*(tensor.dtype for tensor in tensors)))
    if result.size:
        for tensor, run in zip(tensors, runs, strict=True):
            run.of(result.reshape(-1)).reshape(tensor.shape)[...] = tensor
    return result


TRANSFORMS: dict[str, Callable[..., Array]] = {
    "identity": _identity,
    "fold_weight": _fold_weight,
    "fold_spread_weight": _fold_spread_weight,
    "fold_bias": _fold_bias,
    "fold_given_bias": _fold_given_bias,
    ONE_AFTER_ANOTHER: partial(_placed, ONE_AFTER_ANOTHER),
    IN_TURNS: partial(_placed, IN_TURNS),
}
