"""Norms of vectors, and what is made of them: distances and angles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from npu_compiler.dtypes import FLOAT32, dtype
from npu_compiler.ops.linear import product
from npu_compiler.ops.reduction import dims_of, greatest, least, row_op, total
from npu_compiler.ops.registry import op
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.reducing import reduce
from npu_compiler.tensor.shapes import normalize_dim
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor, apply, where

_INFINITY = float("inf")


def norm_of(x: Tensor, p: Number, dims: Any, keepdim: bool, name: Any = None) -> Tensor:
    """The p-norm over some dimensions, or over all: the root of the sum of powers; the number of nonzeros for p = 0.

    Raises:
        OpRefusal: The tensor holds no numbers of floating point, or there is nothing whose extremum could be taken.
    """
    if name is not None:
        x = x.cast(dtype(name))
    if not x.dtype.is_float:
        raise OpRefusal(f"given {x.dtype}, expected floating point")
    size, p = apply("abs", x), float(p)
    if abs(p) == _INFINITY:
        return reduce(size, greatest if p > 0 else least, dims, keepdim)[0]
    if p == 0:
        return reduce(apply("ne", x, 0.0).cast(x.dtype), total, dims, keepdim)[0]
    powers = size if p == 1 else x * x if p == 2 else apply("pow", size, p)

    def root(sum_: Tensor) -> tuple[Tensor]:
        return (sum_ if p == 1 else apply("sqrt", sum_) if p == 2 else apply("pow", sum_, 1 / p),)

    return reduce(powers, replace(total, finish=root), dims, keepdim)[0]


@row_op("aten.linalg_vector_norm.default")
def linalg_vector_norm(
    self: Tensor, ord: Number = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    """The norm of order `ord` over `dim`, or over all dimensions."""
    return norm_of(self, ord, dims_of(dim), keepdim, dtype)


@row_op("aten.norm.ScalarOpt_dim", "aten.norm.Scalar", "aten.norm.ScalarOpt_dim_dtype", "aten.norm.ScalarOpt_dtype")
def norm(self: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The p-norm over `dim`, or over all dimensions."""
    return norm_of(self, 2 if p is None else p, dims_of(dim), keepdim, dtype)


@row_op("aten.linalg_norm.default")
def linalg_norm(self: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The norm of vectors: of order `ord` along one dimension, or without an order the 2-norm of all elements."""
    along = range(len(self.shape)) if dim is None else dims_of(dim)
    if ord is not None and (len(along) != 1 or isinstance(ord, str)):
        raise OpRefusal(f"given ord={ord!r} over {len(along)} dimensions: the norm of a matrix is not supported")
    return norm_of(self, 2 if ord is None else ord, dims_of(dim), keepdim, dtype)


@op("aten.renorm.default", "aten.renorm_.default", work=Work.ROWS)
def renorm(self: Tensor, p: Number, dim: int, maxnorm: Number) -> Tensor:
    """Each slice along `dim` scaled to the norm `maxnorm` where it has a greater one."""
    dim = normalize_dim(dim, len(self.shape))
    size = norm_of(self.cast(FLOAT32), p, [d for d in range(len(self.shape)) if d != dim], True)
    return (self * where(size > maxnorm, apply("div", float(maxnorm), size + 1e-7), 1.0)).cast(self.dtype)


@op("aten.dist.default", work=Work.ROWS)
def dist(self: Tensor, other: Tensor, p: Number = 2) -> Tensor:
    """The p-norm of the difference."""
    return norm_of(self - other, p, (), False)


@op("aten.pairwise_distance.default", work=Work.ROWS)
def pairwise_distance(x1: Tensor, x2: Tensor, p: Number = 2, eps: Number = 1e-6, keepdim: bool = False) -> Tensor:
    """The p-norm of ``x1 - x2 + eps`` over the last dimension."""
    return norm_of(x1 - x2 + eps, p, (-1,), keepdim)


@op("aten.cosine_similarity.default", work=Work.ROWS)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: Number = 1e-8) -> Tensor:
    """The cosine of the angle between two tensors along `dim`, each of a norm of `eps` at the least."""
    both = x1 * x2
    dim = normalize_dim(dim, len(both.shape))
    x1, x2 = x1.expand(both.shape), x2.expand(both.shape)
    sizes = [apply("max", norm_of(x, 2, (dim,), False, FLOAT32), eps) for x in (x1, x2)]
    (result,) = reduce(both, total, (dim,), False, FLOAT32)
    return (result / sizes[0] / sizes[1]).cast(both.dtype)


_MANY = 25  # rows beyond which a product is the way to distances, as in PyTorch


@op("aten.cdist.default", "aten._cdist_forward.default", work=Work.ROWS)
def cdist(x1: Tensor, x2: Tensor, p: Number = 2, compute_mode: Any = None) -> Tensor:
    """The p-norm of the difference of each row of `x1` [..., P, M] and each of `x2` [..., R, M]: [..., P, R]."""
    if compute_mode not in (None, 0, 1, 2):
        raise OpRefusal(f"given compute_mode={compute_mode}, expected 0, 1 or 2")
    many = max(x1.shape[-2], x2.shape[-2]) > _MANY
    if p == 2 and x1.shape[-1] and (compute_mode == 1 or (many and compute_mode != 2)):
        squares = [reduce(x.cast(FLOAT32) * x, total, (-1,), True)[0].realize() for x in (x1, x2)]
        # of neighbours the terms nearly cancel, so that none is rounded to half precision
        apart = squares[0] + squares[1].swap(-1, -2) - product(x1, x2.swap(-1, -2), FLOAT32) * 2.0
        return apply("sqrt", apply("max", apart, 0.0)).cast(x1.dtype)
    left, right = (
        x.reshape((*x.shape[:-2], *rows, x.shape[-1])) for x, rows in ((x1, (x1.shape[-2], 1)), (x2, (1, x2.shape[-2])))
    )
    return norm_of(left - right, p, (-1,), False)
