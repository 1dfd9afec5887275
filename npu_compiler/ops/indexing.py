"""Ops that choose elements by position or by the values of an integer tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npu_compiler.dtypes import BOOL, promote
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.registry import op
from npu_compiler.ops.rows import Passage, RowCall, Rows, Selection, apart_from_dim
from npu_compiler.ops.traits import Memory, Term
from npu_compiler.tensor.shapes import broadcast_shapes, normalize_dim
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, arange, full, where

_MOST_DIFFERENCES = 64  # each is taken from the one before


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


def _lengthens_rows(node: OpNode, graph: IRGraph) -> bool:
    rank = len(graph.tensors[node.outputs[0]].shape)
    return len(node.inputs["tensors"]) == 2 and int(node.attrs.get("dim", 0)) % rank == rank - 1


@op(
    "aten.cat.default", "aten.concat.default", "aten.concatenate.default",
    rows=_rows_of_parts, term=Term("longer_rows", ("tensors",), holds=_lengthens_rows),
)  # fmt: skip
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
    if n > _MOST_DIFFERENCES:
        raise OpRefusal(f"given n={n}, expected at most {_MOST_DIFFERENCES}")
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
    dims = node.attrs.get("_dims")
    if dims is None:
        return _chosen(node, tensors, "self", "indices", wraps=True)
    return _chosen(node, tensors, "self", "indices", int(dims[0]), wraps=True) if len(dims) == 1 else None


def _rows_of_indices(call: RowCall) -> Passage | None:
    return Passage({"indices": call.dim}) if call.dim < call.rank - 1 else None


@op("aten.embedding.default", rows=_rows_of_indices, selects=_embedded, is_learned=True)
def embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """Rows of `weight` [V, D] by `indices` [...]: [..., D]."""
    return weight.gather(0, indices_of(indices))


@op("aten.index_select.default", rows=apart_from_dim, selects=_index_selected)
def index_select(self: Tensor, dim: int, index: Tensor, _wraps: bool = False) -> Tensor:
    """Positions of a dimension by an integer tensor."""
    # _wraps is the compiler's own: this stands for rows that an `index` takes, where negative ones count from the end.
    places = indices_of(index)
    return self.gather(dim, places.within(self.shape[dim], wraps=True) if _wraps else places)


@dataclass(frozen=True)
class Indexed:
    """What a list of index tensors, some of them None, names of a tensor.

    Attributes:
        before, after: The dimensions that are walked, and come before and behind those of the indices.
        common: The shape that the indices broadcast to. It takes the place of the indexed dimensions; where these are
            not neighbours, it comes first.
        places: By indexed dimension the positions along it, which broadcast with ``common`` and what comes behind.
    """

    before: tuple[int, ...]
    common: tuple[int, ...]
    after: tuple[int, ...]
    places: Mapping[int, Tensor]

    @classmethod
    def of(cls, x: Tensor, indices: Sequence[Tensor], dims: Sequence[int] | None, otherwise: int = 0) -> Indexed:
        """Reads the indices of `x`.

        Args:
            x: The tensor.
            indices: Those that are not None.
            dims: The dimension that each of them is for; all the leading ones when None.
            otherwise: What stands for an index beyond its dimension, see `Tensor.within`.

        Raises:
            OpRefusal: There are more indices than dimensions, or one is no tensor of integers.
        """
        dims = range(len(indices)) if dims is None else dims
        known = sorted({dim for dim in dims if 0 <= dim < len(x.shape)})
        if not indices or known != list(dims) or len(dims) != len(indices):
            raise OpRefusal(f"given {len(indices)} indices for the dimensions {list(dims)} of {len(x.shape)}")
        pairs = list(zip(indices, dims, strict=True))
        positions = [indices_of(i).within(x.shape[d], wraps=True, otherwise=otherwise) for i, d in pairs]
        common = broadcast_shapes(*(place.shape for place in positions))
        walked = [dim for dim in range(len(x.shape)) if dim not in dims]
        apart = dims[-1] - dims[0] >= len(dims)
        before = () if apart else tuple(dim for dim in walked if dim < dims[0])
        after = tuple(walked[len(before) :])
        trailing = (1,) * len(after)
        places = {d: p.reshape((*p.shape, *trailing)) for d, p in zip(dims, positions, strict=True)}
        return cls(before, common, after, places)

    def shape(self, sizes: Sequence[int], common: Sequence[int] | None = None) -> tuple[int, ...]:
        """The shape of what is named of a tensor of these sizes; `common` may stand for that of the indices."""
        middle = self.common if common is None else common
        return (*(sizes[dim] for dim in self.before), *middle, *(sizes[dim] for dim in self.after))

    @property
    def walks(self) -> tuple[int, ...]:
        """For each dimension of what is named the tensor's own, or -1 for those of the indices."""
        return (*self.before, *(-1 for _ in self.common), *self.after)


@op("aten.index.Tensor", selects=_indexed)
def index(self: Tensor, indices: Sequence[Tensor], _dims: Sequence[int] | None = None) -> Tensor:
    """Elements by integer tensors, broadcast together, for some dimensions; None stands for a whole one.

    The dimensions of the indices come where the indexed ones were, or first where these are not neighbours.
    """
    # _dims is the reader's own: which dimensions the indices are for, where the list has None in it.
    found = Indexed.of(self, indices, _dims)
    return self.pick(found.places, found.shape(self.shape, (1,) * len(found.common)))


@op("aten.gather.default")
def gather(self: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    """``result[i, j, ...] = self[i, index[i, j, ...], ...]`` along `dim`; the shape is that of `index`."""
    if len(index.shape) != len(self.shape):
        raise OpRefusal(
            f"given an index of {len(index.shape)} dimensions, expected the {len(self.shape)} of the tensor"
        )
    if not self.shape:
        return self
    dim = normalize_dim(dim, len(self.shape))
    if any(i > size for d, (i, size) in enumerate(zip(index.shape, self.shape, strict=True)) if d != dim):
        raise OpRefusal(f"the index {list(index.shape)} does not fit into {list(self.shape)} beside dimension {dim}")
    places = {dim: indices_of(index).within(self.shape[dim])}
    for other, size in enumerate(index.shape):
        self = self if other == dim else self.slice(other, 0, size)
    return self.pick(places)


@op("aten.index_copy.default", "aten.index_copy_.default")
def index_copy(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """`self` with the slices of `source` at the positions `index` of dimension `dim`."""
    dim = normalize_dim(dim, len(self.shape))
    count = index.shape[0] if index.shape else 1
    if source.shape != (*self.shape[:dim], count, *self.shape[dim + 1 :]) or len(index.shape) > 1:
        raise OpRefusal(f"{list(source.shape)} does not fit {list(self.shape)} at {count} positions of dimension {dim}")
    along = indices_of(index).within(self.shape[dim], otherwise=-1)
    return self.trace.scatter(self, {dim: along.reshape((count, *(1,) * (len(self.shape) - dim - 1)))}, source)


def indices_of(index: Tensor) -> Tensor:
    if index.dtype == BOOL:
        raise OpRefusal(
            "given indices of bool, which give a shape that depends on their values, expected integers; "
            "torch.where keeps the shape"
        )
    if index.dtype.is_float:
        raise OpRefusal(f"given indices of {index.dtype}, expected integers")
    return index


@op("aten.tril.default", "aten.tril_.default")
def tril(self: Tensor, diagonal: int = 0) -> Tensor:
    """The lower triangle of the last two dimensions, zero above."""
    return where(_below(self, diagonal), self, _filler(self, 0))


@op("aten.triu.default", "aten.triu_.default")
def triu(self: Tensor, diagonal: int = 0) -> Tensor:
    """The upper triangle of the last two dimensions, zero below."""
    return where(_below(self, diagonal - 1), _filler(self, 0), self)


def _filler(x: Tensor, value: Any) -> Tensor:
    """A number in the data type of `x`, so that it changes no other's."""
    return full(x.trace, (), value, x.dtype)


def _below(x: Tensor, diagonal: int) -> Tensor:
    rows, columns = x.shape[-2:]
    return arange(x.trace, columns) <= arange(x.trace, rows).reshape((rows, 1)) + diagonal
