"""Ops that give the same elements another shape or order: strides where they can say it, a copy where they can't."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, TypeVar

from npu_compiler.integers import ceil_div
from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops import lenses
from npu_compiler.ops.registry import spelled, view
from npu_compiler.ops.rows import MALFORMED, Passage, RowCall, Turn, apart_from_dim, of_known_rows, turned
from npu_compiler.ops.traits import Memory, Term
from npu_compiler.tensor.shapes import normalize_dim
from npu_compiler.tensor.symbolic import OpRefusal, Tensor

F = TypeVar("F", bound=Callable[..., Any])
_MOST_PIECES = 1 << 16


@view(
    "aten.alias.default", "aten.detach.default", "aten.detach_.default", "aten.lift_fresh.default",
    lenses=lenses.itself, keeps_order=True, is_silent=True,
)  # fmt: skip
def alias(self: Tensor) -> Tensor:
    """The tensor itself: aliasing changes no value."""
    return self


@view(
    "aten.contiguous.default",
    memory=Memory.OPERAND_IF_CONTIGUOUS, lenses=lenses.itself, keeps_order=True, is_silent=True,
)  # fmt: skip
def contiguous(self: Tensor, memory_format: Any = None) -> Tensor:
    """The tensor itself: memory format changes no value."""
    return self


@view("aten.clone.default", "aten.lift_fresh_copy.default", memory=Memory.OWN, keeps_order=True, is_silent=True)
def clone(self: Tensor, memory_format: Any = None) -> Tensor:
    """The same elements in memory of their own."""
    return self


@view(
    "aten.dropout.default", "aten.dropout_.default", "aten.feature_dropout.default",
    lenses=lenses.itself, keeps_order=True, is_silent=True, unless="train",
)  # fmt: skip
def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """The tensor itself, in evaluation mode."""
    if train and p:
        raise OpRefusal(f"given train=True with p={p}, expected evaluation mode; call model.eval() before extraction")
    return input


def _swapping(first: str, second: str) -> Turn:
    """Two dimensions, which attributes name, exchanged."""

    def turn(attrs: Mapping[str, Any], rank: int) -> Sequence[int]:
        order = list(range(rank))
        a, b = (int(attrs.get(key, 0)) % max(rank, 1) for key in (first, second))
        order[a], order[b] = order[b], order[a]
        return order

    return turn


def _reversed(attrs: Mapping[str, Any], rank: int) -> Sequence[int]:
    return range(rank - 1, -1, -1)


def _last_two(attrs: Mapping[str, Any], rank: int) -> Sequence[int]:
    return [*range(rank - 2), rank - 1, rank - 2] if rank > 1 else range(rank)


def _permuted(attrs: Mapping[str, Any], rank: int) -> Sequence[int]:
    return [int(dim) % rank for dim in attrs["dims"]]


def _moved(attrs: Mapping[str, Any], rank: int) -> Sequence[int]:
    source, destination = (int(attrs[key]) % rank for key in ("source", "destination"))
    order = [dim for dim in range(rank) if dim != source]
    order.insert(destination, source)
    return order


def _turning(*names: str, turn: Turn) -> Callable[[F], F]:
    """Registers an op that puts the dimensions of `self` in another order."""

    def swaps_last(node: OpNode, graph: IRGraph) -> bool:
        rank = len(graph.tensors[node.outputs[0]].shape)
        try:
            return rank > 1 and list(turn(node.attrs, rank)) == [*range(rank - 2), rank - 1, rank - 2]
        except MALFORMED:
            return False

    lens = lenses.turned(turn)
    return view(*names, turn=turn, lenses=lens, rows=turned(turn), term=Term("transpose", ("self",), holds=swaps_last))


def _reshaped_rows(call: RowCall) -> Passage | None:
    """A dimension survives where one of the same size has as many elements in front of it, and so behind it."""
    given, made, dim = call.shape("self"), call.output, call.dim
    for own, size in enumerate(given):
        if size == made[dim] and prod(given[:own]) == prod(made[:dim]):
            return Passage({"self": own}, {"shape": call.resized()}, spelled(reshape))
    return None


_reshaping = partial(
    view, lenses=lenses.reshaped, keeps_order=True, rows=_reshaped_rows, term=Term("reshape", ("self",))
)


def _expanded_rows(call: RowCall) -> Passage:
    return Passage(call.broadcast("self"), {"size": call.resized()}, spelled(expand))


_repeating = partial(
    view, lenses=lenses.expanded, keeps_order=True, rows=_expanded_rows, term=Term("expand", ("self",))
)


def _rows_of_one(call: RowCall) -> Passage:
    """One position of another dimension, which is gone."""
    gone = call.along(rank=call.rank + 1)
    return Passage({"self": call.dim + (call.dim >= gone)})


def _taken(attrs: Mapping[str, Any], size: int) -> range:
    """Positions `start` to `end`, `step` apart, as Python counts them."""
    return range(*slice(attrs.get("start"), attrs.get("end"), int(attrs.get("step", 1))).indices(size))


def _taken_from(key: str) -> Callable[[Mapping[str, Any], int], range]:
    """`length` positions, or one, from that on which an attribute names."""

    def taken(attrs: Mapping[str, Any], size: int) -> range:
        start = int(attrs[key])
        start += size if start < 0 else 0
        return range(start, start + int(attrs.get("length", 1)))

    return taken


@_turning("aten.transpose.int", "aten.transpose_.default", turn=_swapping("dim0", "dim1"))
def transpose(self: Tensor, dim0: int, dim1: int) -> Tensor:
    """Two dimensions exchanged."""
    return self.swap(dim0, dim1)


@_turning("aten.swapaxes.default", "aten.swapaxes_.default", turn=_swapping("axis0", "axis1"))
def swapaxes(self: Tensor, axis0: int, axis1: int) -> Tensor:
    """Two dimensions exchanged."""
    return self.swap(axis0, axis1)


@_turning("aten.swapdims.default", "aten.swapdims_.default", turn=_swapping("dim0", "dim1"))
def swapdims(self: Tensor, dim0: int, dim1: int) -> Tensor:
    """Two dimensions exchanged."""
    return self.swap(dim0, dim1)


@_turning("aten.mT.default", "aten.mH.default", "aten.adjoint.default", turn=_last_two)
def m_t(self: Tensor) -> Tensor:
    """The last two dimensions exchanged."""
    return self.swap(-1, -2)


@_turning("aten.t.default", "aten.t_.default", "aten.numpy_T.default", turn=_reversed)
def t(self: Tensor) -> Tensor:
    """A matrix transposed; a vector as it is."""
    if len(self.shape) > 2:
        raise OpRefusal(f"given {len(self.shape)} dimensions, expected at most 2")
    return self.swap(0, 1) if len(self.shape) == 2 else self


@_turning("aten.permute.default", turn=_permuted)
def permute(self: Tensor, dims: Sequence[int]) -> Tensor:
    """The dimensions in another order."""
    return self.permute(dims)


@_turning("aten.movedim.int", turn=_moved)
def movedim(self: Tensor, source: int, destination: int) -> Tensor:
    """One dimension moved to another place."""
    rank = len(self.shape)
    order = [d for d in range(rank) if d != normalize_dim(source, rank)]
    order.insert(normalize_dim(destination, rank), normalize_dim(source, rank))
    return self.permute(order)


@_reshaping("aten.reshape.default", memory=Memory.OPERAND_IF_STRIDED)
def reshape(self: Tensor, shape: Sequence[int]) -> Tensor:
    """Another shape of the same elements."""
    return self.reshape(shape)


@_reshaping("aten.view.default", "aten._unsafe_view.default")
def view_(self: Tensor, size: Sequence[int]) -> Tensor:
    """Another shape of the same elements."""
    return self.reshape(size)


@_reshaping("aten.reshape_as.default", memory=Memory.OPERAND_IF_STRIDED)
@_reshaping("aten.view_as.default")
def view_as(self: Tensor, other: Tensor) -> Tensor:
    """The shape of another tensor."""
    return self.reshape(other.shape)


@_reshaping("aten.flatten.using_ints", memory=Memory.OPERAND_IF_STRIDED)
def flatten(self: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """The dimensions from `start_dim` to `end_dim` as one."""
    if not self.shape:
        return self.reshape((1,))
    first, last = normalize_dim(start_dim, len(self.shape)), normalize_dim(end_dim, len(self.shape))
    if first > last:
        raise OpRefusal(f"given start_dim={start_dim} after end_dim={end_dim}")
    return self.reshape((*self.shape[:first], prod(self.shape[first : last + 1]), *self.shape[last + 1 :]))


@_reshaping("aten.unflatten.int")
def unflatten(self: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """One dimension as several."""
    dim = normalize_dim(dim, len(self.shape))
    own = list(sizes)
    if -1 in own:
        own[own.index(-1)] = self.shape[dim] // prod(size for size in own if size != -1)
    return self.reshape((*self.shape[:dim], *own, *self.shape[dim + 1 :]))


@_reshaping("aten.unsqueeze.default", "aten.unsqueeze_.default")
def unsqueeze(self: Tensor, dim: int) -> Tensor:
    """A new dimension of size 1."""
    dim = normalize_dim(dim, len(self.shape) + 1)
    return self.reshape((*self.shape[:dim], 1, *self.shape[dim:]))


@_reshaping(
    "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
    "aten.squeeze_.default", "aten.squeeze_.dim", "aten.squeeze_.dims",
)  # fmt: skip
def squeeze(self: Tensor, dim: Any = None) -> Tensor:
    """Without the dimensions of size 1: all of them, or those that `dim` names."""
    rank = len(self.shape)
    chosen = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    dropped = {normalize_dim(d, rank) for d in chosen}
    return self.reshape([size for d, size in enumerate(self.shape) if not (size == 1 and d in dropped)])


@_repeating("aten.expand.default")
def expand(self: Tensor, size: Sequence[int], implicit: bool = False) -> Tensor:
    """Repeated along dimensions of size 1, and along new leading ones."""
    return self.expand(size)


@_repeating("aten.expand_as.default")
def expand_as(self: Tensor, other: Tensor) -> Tensor:
    """Repeated to the shape of another tensor."""
    return self.expand(other.shape)


@_repeating("aten.broadcast_to.default")
def broadcast_to(self: Tensor, size: Sequence[int]) -> Tensor:
    """Repeated to a shape."""
    return self.expand(size)


def _leaves_the_last(node: OpNode, graph: IRGraph) -> bool:
    shape = graph.tensors[str(node.inputs["self"])].shape
    start, end, step = slice(*(node.attrs.get(name) for name in ("start", "end", "step"))).indices(shape[-1])
    of_last = int(node.attrs.get("dim", 0)) % len(shape) == len(shape) - 1
    return of_last and (start, end, step) == (0, shape[-1] - 1, 1)


@view(
    "aten.slice.Tensor", lenses=lenses.along(_taken), rows=apart_from_dim, selects=of_known_rows(_taken),
    term=Term("all_but_last", ("self",), holds=_leaves_the_last),
)  # fmt: skip
def slice_(self: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    """Elements `start` to `end` of a dimension, `step` apart; negative bounds count from the end."""
    size = self.shape[normalize_dim(dim, len(self.shape))]
    if step < 1:
        raise OpRefusal(f"given step={step}, expected at least 1")
    first, last, _ = slice(start, end, step).indices(size)
    return self.slice(dim, first, max(0, ceil_div(last - first, step)), step)


@view(
    "aten.narrow.default",
    lenses=lenses.along(_taken_from("start")), rows=apart_from_dim, selects=of_known_rows(_taken_from("start")),
)  # fmt: skip
def narrow(self: Tensor, dim: int, start: int, length: int) -> Tensor:
    """`length` elements of a dimension."""
    size = self.shape[normalize_dim(dim, len(self.shape))]
    first = start + size if start < 0 else start
    if not 0 <= first <= first + length <= size:
        raise OpRefusal(f"given start={start} and length={length}, which leave a dimension of {size}")
    return self.slice(dim, first, length)


@view("aten.select.int", lenses=lenses.position, rows=_rows_of_one, selects=of_known_rows(_taken_from("index")))
def select(self: Tensor, dim: int, index: int) -> Tensor:
    """One position of a dimension, which is dropped."""
    dim = normalize_dim(dim, len(self.shape))
    size = self.shape[dim]
    if not -size <= index < size:
        raise OpRefusal(f"given index={index}, expected one of {size}")
    return self.slice(dim, index % size, 1).reshape((*self.shape[:dim], *self.shape[dim + 1 :]))


def check_pieces(count: int) -> None:
    """Refuses to divide a tensor into more pieces than any model has, before a list is made of them."""
    if not 0 <= count <= _MOST_PIECES:
        raise OpRefusal(f"given {count} pieces, expected at most {_MOST_PIECES}")


def _pieces(x: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    check_pieces(len(sizes))
    *starts, end = accumulate(sizes, initial=0)
    if end != x.shape[normalize_dim(dim, len(x.shape))]:
        raise OpRefusal(f"given pieces of {reprlib.repr(list(sizes))}, which do not add up to the dimension")
    return tuple(x.slice(dim, start, size) for start, size in zip(starts, sizes, strict=True))


@view("aten.split.Tensor", lenses=lenses.pieces, rows=apart_from_dim)
def split(self: Tensor, split_size: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces of `split_size` along a dimension; the last may be smaller."""
    size = self.shape[normalize_dim(dim, len(self.shape))]
    if split_size < 1:
        raise OpRefusal(f"given split_size={split_size}, expected at least 1")
    check_pieces(ceil_div(size, split_size))
    return _pieces(self, [min(split_size, size - start) for start in range(0, size, split_size)], dim)


@view("aten.split_with_sizes.default", lenses=lenses.pieces, rows=apart_from_dim)
def split_with_sizes(self: Tensor, split_sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces of the given sizes along a dimension."""
    return _pieces(self, split_sizes, dim)


@view("aten.chunk.default", lenses=lenses.pieces, rows=apart_from_dim)
def chunk(self: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """At most `chunks` pieces of equal size along a dimension."""
    size = self.shape[normalize_dim(dim, len(self.shape))]
    return split(self, max(1, ceil_div(size, max(1, chunks))), dim)


@view("aten.unbind.int", lenses=lenses.positions, rows=_rows_of_one)
def unbind(self: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Every position of a dimension as a tensor of its own."""
    size = self.shape[normalize_dim(dim, len(self.shape))]
    check_pieces(size)
    return tuple(select(self, dim, i) for i in range(size))
