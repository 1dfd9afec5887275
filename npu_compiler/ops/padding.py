"""Padding: constants, reflections, repeated borders and rounds about a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from npu_compiler.dtypes import FLOAT32, INT32
from npu_compiler.ops.registry import op
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, arange, full, where


def along(x: Tensor, dim: int, size: int) -> Tensor:
    """0, 1, ... `size` - 1 along a dimension of a tensor of the rank of `x`, as int32."""
    return arange(x.trace, size).cast(INT32).reshape((size, *(1,) * (len(x.shape) - dim - 1)))


def divided(x: Tensor, divisor: int) -> Tensor:
    """``x // divisor`` of int32 from 0 to some millions: half of one more keeps the quotient off whole numbers."""
    return apply("floor", (x.cast(FLOAT32) + 0.5) * (1 / divisor)).cast(INT32) if divisor > 1 else x


def surrounded(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    """`x` with zeros ahead of and behind a dimension; fewer elements where a number is negative."""
    around = [0] * (2 * (len(x.shape) - dim))
    around[-2:] = before, after
    return pad(x, around) if before or after else x


@op("aten.constant_pad_nd.default", "aten.pad.default", fills=("value",))
def pad(self: Tensor, pad: Sequence[int], value: Any = None, mode: str = "constant") -> Tensor:
    """A tensor with `value` around it, or in another mode; `pad` counts from the last dimension, two numbers each."""
    if len(pad) % 2 or len(pad) > 2 * len(self.shape) or any(type(number) is not int for number in pad):
        raise OpRefusal(f"given pad={list(pad)}, expected two numbers for each of at most {len(self.shape)} dimensions")
    if mode != "constant":
        if mode not in _MODES:
            raise OpRefusal(f"given mode='{mode}', expected 'constant', {', '.join(map(repr, _MODES))}")
        return _padded_by_place(self, pad, mode)
    result, filler = self.realize(), full(self.trace, (), 0 if value is None else value, self.dtype)
    rank = len(self.shape)
    inside: Tensor | None = None
    for i in range(len(pad) // 2):
        before, after = pad[2 * i], pad[2 * i + 1]
        dim = rank - 1 - i
        size = self.shape[dim]
        if size + before + after < 0:
            raise OpRefusal(f"given pad={list(pad)}, which takes more than the {size} elements of dimension {dim}")
        result = result.slice(dim, -before, size + before + after)
        if before > 0 or after > 0:
            position = arange(self.trace, size + before + after).reshape((-1, *(1,) * i))
            valid = apply("and", position >= before, position < size + before)
            inside = valid if inside is None else apply("and", inside, valid)
    if prod(result.shape) == 0:
        raise OpRefusal(f"given pad={list(pad)}, which leaves no element")
    return result if inside is None else where(inside, result, filler)


def _reflected(position: Tensor, size: int) -> Tensor:
    """Back from the borders, which are not repeated."""
    return (size - 1) - apply("abs", (size - 1) - apply("abs", position))


def _replicated(position: Tensor, size: int) -> Tensor:
    return position  # limited to the tensor below, which is all


def _round_about(position: Tensor, size: int) -> Tensor:
    return where(position < 0, position + size, where(position >= size, position - size, position))


_MODES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "reflect": _reflected,
    "replicate": _replicated,
    "circular": _round_about,
}


def _padded_by_place(x: Tensor, pad: Sequence[int], mode: str) -> Tensor:
    """Each element of the result from the place in `x` that its mode says."""
    rank, places = len(x.shape), {}
    most = {"reflect": -1, "circular": 0}
    for i in range(len(pad) // 2):
        before, after, dim = pad[2 * i], pad[2 * i + 1], rank - 1 - i
        size = x.shape[dim]
        if mode in most and max(before, after) > size + most[mode]:
            raise OpRefusal(f"given pad={list(pad)} with mode='{mode}', more than dimension {dim} of {size} has")
        if size + before + after < 1 or size < 1:
            raise OpRefusal(f"given pad={list(pad)}, which leaves no element")
        if before or after:
            place = _MODES[mode](along(x, dim, size + before + after) - before, size)
            places[dim] = apply("min", apply("max", place, 0), size - 1)
    return x.at(places).realize() if places else x


def _padding(mode: str, rank: int) -> Callable[..., Tensor]:
    def compute(self: Tensor, padding: Sequence[int]) -> Tensor:
        if len(padding) != 2 * rank or len(self.shape) not in (rank + 1, rank + 2):
            given = f"padding={list(padding)} for {len(self.shape)} dimensions"
            raise OpRefusal(f"given {given}, expected {2 * rank} numbers for {rank + 1} or {rank + 2}")
        return _padded_by_place(self, padding, mode)

    compute.__doc__ = f"{_WORDS[mode]} around {('lines', 'images', 'volumes')[rank - 1]}, with or without a batch."
    return compute


_WORDS = {"reflect": "What borders reflect", "replicate": "Repeated borders"}
for _name, _mode in (("reflection", "reflect"), ("replication", "replicate")):
    for _rank in (1, 2, 3):
        op(f"aten.{_name}_pad{_rank}d.default")(_padding(_mode, _rank))
