"""Sums, means and extrema over some dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from npu_compiler.dtypes import FLOAT32, INT32, INT64, UINT8, DType, dtype
from npu_compiler.ops.registry import op
from npu_compiler.ops.rows import Passage, RowCall
from npu_compiler.ops.traits import Work
from npu_compiler.symbolic import Tensor, apply, full, normalize_dim


def _rows_kept(call: RowCall) -> Passage | None:
    """Rows of what is left, where the op names what it reduces."""
    dim, rank = call.node.attrs.get("dim"), len(call.shape("self"))
    reduced = {int(d) % rank for d in ([dim] if isinstance(dim, int) else dim or ())}
    if not reduced:
        return None
    kept = range(rank) if call.node.attrs.get("keepdim") else [d for d in range(rank) if d not in reduced]
    own = kept[call.dim]
    return None if own in reduced else Passage({"self": own})


reduction = partial(op, work=Work.ROWS, rows=_rows_kept)


def _dims(dim: Any) -> Sequence[int]:
    return () if dim is None else (dim,) if isinstance(dim, int) else dim


@reduction("aten.sum.default", "aten.sum.dim_IntList")
def sum_(self: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The sum over `dim`, or over all dimensions. Integers and booleans add up in int64."""
    kind = _accumulator(self, dtype)
    return self.cast(kind).reduce("sum", _dims(dim), keepdim, kind)


@reduction("aten.mean.default", "aten.mean.dim")
def mean(self: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The mean over `dim`, or over all dimensions."""
    rank = len(self.shape)
    dims = [normalize_dim(d, rank) for d in _dims(dim) if rank] or list(range(rank))
    kind = _accumulator(self, dtype) if self.dtype.is_float or dtype is not None else FLOAT32
    count = prod(self.shape[d] for d in dims)
    total = self.reduce("sum", dims, keepdim, kind, 1 / count if count else None)
    return total if count else full(self.trace, total.shape, float("nan"), kind)


def _accumulator(x: Tensor, name: Any) -> DType:
    if name is not None:
        return dtype(name)
    return x.dtype if x.dtype.is_float else INT64


@reduction("aten.amax.default")
def amax(self: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    """The maximum over `dim`, or over all dimensions."""
    return self.reduce("max", _dims(dim), keepdim)


@reduction("aten.amin.default")
def amin(self: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    """The minimum over `dim`, or over all dimensions."""
    return self.reduce("min", _dims(dim), keepdim)


@reduction("aten.max.default")
def max_(self: Tensor) -> Tensor:
    """The maximum of all elements."""
    return self.reduce("max", (), False)


@reduction("aten.min.default")
def min_(self: Tensor) -> Tensor:
    """The minimum of all elements."""
    return self.reduce("min", (), False)


@reduction("aten.any.default", "aten.any.dim")
def any_(self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Whether any element over `dim` is nonzero; of no elements, none is."""
    return _as_truth(_count("ne", self, _dims(dim), keepdim) > 0, self)


@reduction("aten.all.default", "aten.all.dim")
def all_(self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Whether all elements over `dim` are nonzero; of no elements, all are."""
    return _as_truth(_count("eq", self, _dims(dim), keepdim) <= 0, self)


@reduction("aten.any.dims")
def any_dims(self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Whether any element over several dimensions is nonzero; over an empty list of them, whether each element is."""
    return _as_truth(apply("ne", self, False), self) if _is_empty(dim) else any_(self, dim, keepdim)


@reduction("aten.all.dims")
def all_dims(self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Whether all elements over several dimensions are nonzero; over an empty list of them, whether each element is."""
    return _as_truth(apply("ne", self, False), self) if _is_empty(dim) else all_(self, dim, keepdim)


def _count(comparison: str, x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """How many elements over `dims` compare so with zero."""
    return apply(comparison, x, False).cast(INT32).reduce("sum", dims, keepdim)


def _is_empty(dim: Any) -> bool:
    return dim is not None and not isinstance(dim, int) and len(dim) == 0


def _as_truth(result: Tensor, x: Tensor) -> Tensor:
    """Booleans; as numbers 0 and 1 for uint8, as in PyTorch."""
    return result.cast(UINT8) if x.dtype == UINT8 else result
