"""Ops that choose elements by position or by the values of an integer tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from npu_compiler.dtypes import BOOL, promote
from npu_compiler.ir import OpNode, TensorSpec
from npu_compiler.ops.registry import op
from npu_compiler.ops.rows import Passage, RowCall, Rows, Selection, apart_from_dim
from npu_compiler.ops.traits import Memory
from npu_compiler.tensor.shapes import normalize_dim
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, arange, full, where


def picked(node: OpNode) -> str | None:
    """The tensor of a list that a node picks; the definition refuses an index that is out of range."""
    items, index = tuple(node.tensors()), node.attrs.get("index")
    return items[index] if type(index) is int and -len(items) <= index < len(items) else None


def _rows_of_item(call: RowCall) -> Passage:
    items = range(len(call.node.inputs["self"]))
    return Passage({"self": call.dim}, item=items[int(call.node.attrs["index"])])


@op("getitem", memory=Memory.OPERAND, picks=True, is_silent=True, rows=_rows_of_item)
def getitem(self: Sequence[Tensor], index: int) -> Tensor:
    """One result of an op that has several."""
    return self[index]


@op("aten._assert_tensor_metadata.default", is_silent=True, asserts=True)
def assert_tensor_metadata(
    a: Tensor, size: Any = None, stride: Any = None, dtype: Any = None, device: Any = None, layout: Any = None
) -> tuple[Tensor, ...]:
    """Nothing: shapes and data types were checked when the model was extracted."""
    return ()


def _rows_of_parts(call: RowCall) -> Passage | None:
    parts = [call.tensors[name].shape for name in call.node.inputs["tensors"]]
    fits = call.along() != call.dim and all(len(part) == call.rank for part in parts)
    return Passage({"tensors": call.dim}) if fits else None


@op("aten.cat.default", "aten.concat.default", rows=_rows_of_parts)
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors one after another along `dim`."""
    parts = [t for t in tensors if t.shape != (0,)]  # PyTorch ignores empty vectors
    if not parts:
        return tensors[0]
    dim = normalize_dim(dim, len(parts[0].shape))
    kind = parts[0].dtype
    for part in parts[1:]:
        kind = promote(kind, part.dtype)
    total = sum(part.shape[dim] for part in parts)
    shape = (*parts[0].shape[:dim], total, *parts[0].shape[dim + 1 :])
    position = arange(parts[0].trace, total).reshape((total, *(1,) * (len(shape) - dim - 1)))
    end = total
    result: Tensor | None = None
    for part in reversed(parts):
        start = end - part.shape[dim]
        shifted = part.realize().slice(dim, -start, total).cast(kind)  # read only where the position is inside
        result = shifted if result is None else where(position < end, shifted, result)
        end = start
    assert result is not None
    return result


def _rows_of_stacked(call: RowCall) -> Passage | None:
    new = call.along()
    return None if new == call.dim else Passage({"tensors": call.dim - (call.dim > new)})


@op("aten.stack.default", rows=_rows_of_stacked)
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape along a new dimension."""
    dim = normalize_dim(dim, len(tensors[0].shape) + 1)
    return cat([t.reshape((*t.shape[:dim], 1, *t.shape[dim:])) for t in tensors], dim)


@op("aten.diff.default")
def diff(
    self: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    """Differences of neighbours along `dim`, taken `n` times; of booleans, whether they differ."""
    parts = [part for part in (prepend, self, append) if part is not None]
    result = cat(parts, dim) if len(parts) > 1 else self
    for _ in range(n):
        size = result.shape[normalize_dim(dim, len(result.shape))]
        result = result.realize()
        later, sooner = (result.slice(dim, start, max(0, size - 1)) for start in (1, 0))
        result = apply("ne", later, sooner) if result.dtype == BOOL else later - sooner
    return result


def _chosen(
    node: OpNode, tensors: Mapping[str, TensorSpec], of: str, by: str, dim: int | None = None, wraps: bool = False
) -> Selection | None:
    """What a node takes by a tensor of positions; of dimensions of one position ahead, there is nothing to choose.

    Args:
        node: The node.
        tensors: Those that it reads.
        of, by: Parameters: what it takes positions of, and the positions, or a list of them for the leading dimensions.
        dim: Along which, where it is not the last one that a list names.
        wraps: Whether negative positions count from the end.
    """
    source, given = str(node.inputs[of]), node.inputs[by]
    *ahead, index = (given,) if isinstance(given, str) else given
    shape, positions = tensors[source].shape, tensors[index].shape
    dim = len(ahead) if dim is None else dim % len(shape)
    alone = all(shape[i : i + 1] == (1,) and tensors[name].shape in ((1,), positions) for i, name in enumerate(ahead))
    fits = len(positions) == 1 and dim < len(shape) and alone and tensors[index].dtype.is_integer
    if not fits or source in (index, *ahead):
        return None
    return Selection(source, dim, Rows(positions[0], shape[dim], index=index, wraps=wraps))


def _embedded(node: OpNode, tensors: Mapping[str, TensorSpec]) -> Selection | None:
    return _chosen(node, tensors, "weight", "indices")


def _index_selected(node: OpNode, tensors: Mapping[str, TensorSpec]) -> Selection | None:
    return _chosen(node, tensors, "self", "index", int(node.attrs["dim"]))


def _indexed(node: OpNode, tensors: Mapping[str, TensorSpec]) -> Selection | None:
    return _chosen(node, tensors, "self", "indices", wraps=True)


def _rows_of_indices(call: RowCall) -> Passage | None:
    return Passage({"indices": call.dim}) if call.dim < call.rank - 1 else None


@op("aten.embedding.default", rows=_rows_of_indices, selects=_embedded, is_learned=True)
def embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """Rows of `weight` [V, D] by `indices` [...]: [..., D]."""
    return weight.gather(0, _indices(indices))


@op("aten.index_select.default", rows=apart_from_dim, selects=_index_selected)
def index_select(self: Tensor, dim: int, index: Tensor, _wraps: bool = False) -> Tensor:
    """Positions of a dimension by an integer tensor."""
    # _wraps is the compiler's own: this stands for rows that an `index` takes, where negative ones count from the end.
    places = _indices(index)
    return self.gather(dim, places.within(self.shape[dim], wraps=True) if _wraps else places)


@op("aten.index.Tensor", selects=_indexed)
def index(self: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """``self[indices[0], indices[1], ...]``: integer tensors, broadcast together, for as many leading dimensions."""
    if len(indices) > len(self.shape):
        raise OpRefusal(f"given {len(indices)} indices for {len(self.shape)} dimensions")
    sizes = self.shape[: len(indices)]
    return _at(self, [_indices(i).within(size, wraps=True) for i, size in zip(indices, sizes, strict=True)])


@op("aten.gather.default")
def gather(self: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    """``result[i, j, ...] = self[i, index[i, j, ...], ...]`` along `dim`; the shape is that of `index`."""
    if len(index.shape) != len(self.shape):
        raise OpRefusal(
            f"given an index of {len(index.shape)} dimensions, expected the {len(self.shape)} of the tensor"
        )
    if not self.shape:
        return self
    dim, rank = normalize_dim(dim, len(self.shape)), len(self.shape)
    if any(i > size for d, (i, size) in enumerate(zip(index.shape, self.shape, strict=True)) if d != dim):
        raise OpRefusal(f"the index {list(index.shape)} does not fit into {list(self.shape)} beside dimension {dim}")
    places = [arange(self.trace, size).reshape((size, *(1,) * (rank - d - 1))) for d, size in enumerate(index.shape)]
    places[dim] = _indices(index).within(self.shape[dim])
    return _at(self, places)


def _at(x: Tensor, places: Sequence[Tensor]) -> Tensor:
    """The elements of `x` at positions inside of each of its leading dimensions; the positions broadcast."""
    count = len(places)
    row = places[0]
    for place, size in zip(places[1:], x.shape[1:count], strict=True):
        row = row * size + place
    return x.reshape((prod(x.shape[:count]), *x.shape[count:])).gather(0, row)


@op("aten.index_copy.default", "aten.index_copy_.default")
def index_copy(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """`self` with the slices of `source` at the positions `index` of dimension `dim`."""
    dim = normalize_dim(dim, len(self.shape))
    count = index.shape[0] if index.shape else 1
    if source.shape != (*self.shape[:dim], count, *self.shape[dim + 1 :]) or len(index.shape) > 1:
        raise OpRefusal(f"{list(source.shape)} does not fit {list(self.shape)} at {count} positions of dimension {dim}")
    return self.trace.scatter(self, dim, _indices(index), source)


def _indices(index: Tensor) -> Tensor:
    if index.dtype.is_float or index.dtype.name == "bool":
        raise OpRefusal(f"given indices of {index.dtype}, expected integers")
    return index


@op("aten.tril.default")
def tril(self: Tensor, diagonal: int = 0) -> Tensor:
    """The lower triangle of the last two dimensions, zero above."""
    return where(_below(self, diagonal), self, _filler(self, 0))


@op("aten.triu.default")
def triu(self: Tensor, diagonal: int = 0) -> Tensor:
    """The upper triangle of the last two dimensions, zero below."""
    return where(_below(self, diagonal - 1), _filler(self, 0), self)


def _filler(x: Tensor, value: Any) -> Tensor:
    """A number in the data type of `x`, so that it changes no other's."""
    return full(x.trace, (), value, x.dtype)


def _below(x: Tensor, diagonal: int) -> Tensor:
    rows, columns = x.shape[-2:]
    return arange(x.trace, columns) <= arange(x.trace, rows).reshape((rows, 1)) + diagonal
