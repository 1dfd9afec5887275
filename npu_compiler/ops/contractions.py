"""Sums of products over any dimensions, by matrix products: einsum and what it generalises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from npu_compiler.ops.linear import flops, flops_beside_sum, matmul, product
from npu_compiler.ops.padding import along
from npu_compiler.ops.reduction import total
from npu_compiler.ops.registry import op
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.reducing import reduce
from npu_compiler.tensor.shapes import normalize_dim
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor

contraction = partial(op, work=Work.ANCHOR)


def _weighed(result: Tensor, added: Tensor, beta: Number, alpha: Number) -> Tensor:
    """``beta * added + alpha * result``; what is multiplied by 0 does not count, whatever it is."""
    scaled = result if alpha == 1 else result * alpha
    return scaled if beta == 0 else scaled + (added if beta == 1 else added * beta)


@contraction("aten.addmv.default", "aten.addmv_.default", flops=flops_beside_sum)
def addmv(self: Tensor, mat: Tensor, vec: Tensor, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * self + alpha * mat @ vec``."""
    return _weighed(matmul(mat, vec), self, beta, alpha)


@op("aten.addr.default", "aten.addr_.default")
def addr(self: Tensor, vec1: Tensor, vec2: Tensor, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * self + alpha *`` the products of each element of `vec1` with each of `vec2`."""
    return _weighed(vec1.reshape((-1, 1)) * vec2, self, beta, alpha)


@contraction("aten.addbmm.default", "aten.addbmm_.default", flops=flops_beside_sum)
def addbmm(self: Tensor, batch1: Tensor, batch2: Tensor, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * self + alpha *`` the sum of a batch of products: [B, M, K] by [B, K, N] gives [M, N]."""
    if len(batch1.shape) != 3 or len(batch2.shape) != 3 or batch1.shape[0] != batch2.shape[0]:
        raise OpRefusal(f"given {list(batch1.shape)} and {list(batch2.shape)}, expected batches of matrices")
    return _weighed(_contracted("bmk,bkn->mn", (batch1, batch2)), self, beta, alpha)


@contraction("aten.inner.default", flops=flops)
def inner(self: Tensor, other: Tensor) -> Tensor:
    """The sums of products over the last dimension of both, for each row of one with each of the other."""
    if not self.shape or not other.shape:
        return self * other
    return tensordot(self, other, [len(self.shape) - 1], [len(other.shape) - 1])


@contraction("aten.linalg_vecdot.default")
def vecdot(x: Tensor, y: Tensor, dim: int = -1) -> Tensor:
    """The sums of products along a dimension of both, which broadcast."""
    return reduce(x * y, total, (dim,), False)[0]


@contraction("aten.tensordot.default", flops=None)
def tensordot(self: Tensor, other: Tensor, dims_self: Sequence[int], dims_other: Sequence[int]) -> Tensor:
    """The sums of products over pairs of dimensions; what is left of `self`, then what is left of `other`."""
    mine = [normalize_dim(dim, len(self.shape)) for dim in dims_self]
    theirs = [normalize_dim(dim, len(other.shape)) for dim in dims_other]
    sizes = [[x.shape[dim] for dim in dims] for x, dims in ((self, mine), (other, theirs))]
    if sizes[0] != sizes[1]:
        raise OpRefusal(f"given dimensions of {sizes[0]} and {sizes[1]} elements, expected the same")
    free_mine = [dim for dim in range(len(self.shape)) if dim not in mine]
    free_theirs = [dim for dim in range(len(other.shape)) if dim not in theirs]
    shape = [*(self.shape[dim] for dim in free_mine), *(other.shape[dim] for dim in free_theirs)]
    left = self.permute([*free_mine, *mine]).reshape((prod(self.shape[dim] for dim in free_mine), prod(sizes[0])))
    right = other.permute([*theirs, *free_theirs]).reshape((prod(sizes[0]), -1) if prod(sizes[0]) else (0, prod(shape)))
    return product(left, right).reshape(shape)


def _chain(matrices: Sequence[Tensor]) -> Tensor:
    """The product of matrices in the order that takes the least arithmetic, by dynamic programming."""
    count = len(matrices)
    sizes = [matrices[0].shape[0], *(matrix.shape[1] for matrix in matrices)]
    best: dict[tuple[int, int], tuple[int, int]] = {(i, i): (0, i) for i in range(count)}
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            best[i, j] = min(
                (best[i, k][0] + best[k + 1, j][0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k) for k in range(i, j)
            )

    def multiplied(i: int, j: int) -> Tensor:
        return matrices[i] if i == j else product(multiplied(i, best[i, j][1]), multiplied(best[i, j][1] + 1, j))

    return multiplied(0, count - 1)


@contraction("aten.chain_matmul.default")
def chain_matmul(matrices: Sequence[Tensor]) -> Tensor:
    """The product of several matrices."""
    if any(len(matrix.shape) != 2 for matrix in matrices):
        raise OpRefusal(f"given {[list(matrix.shape) for matrix in matrices]}, expected matrices")
    return _chain(matrices)


@contraction("aten.linalg_multi_dot.default")
def multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    """The product of several matrices, of which the first and the last may be vectors."""
    first, last = tensors[0], tensors[-1]
    ends = len(first.shape) in (1, 2) and len(last.shape) in (1, 2)
    if len(tensors) < 2 or not ends or any(len(x.shape) != 2 for x in tensors[1:-1]):
        raise OpRefusal(f"given {[list(x.shape) for x in tensors]}, expected matrices, or vectors at the ends")
    left = first if len(first.shape) == 2 else first.reshape((1, -1))
    right = last if len(last.shape) == 2 else last.reshape((-1, 1))
    shape = [*first.shape[:-1], *last.shape[1:]]
    return _chain([left, *tensors[1:-1], right]).reshape(shape)


@op("aten.kron.default")
def kron(self: Tensor, other: Tensor) -> Tensor:
    """Kronecker's product: every element of `self` times all of `other`."""
    rank = max(len(self.shape), len(other.shape))
    a, b = ((1,) * (rank - len(x.shape)) + x.shape for x in (self, other))
    apart = self.reshape([n for size in a for n in (size, 1)]) * other.reshape([n for size in b for n in (1, size)])
    return apart.reshape([m * n for m, n in zip(a, b, strict=True)])


@contraction("aten.bilinear.default", is_learned=True)
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input1 @ weight[o] @ input2`` for each output o: [..., I], [..., J] and [O, I, J] give [..., O]."""
    rows, (outputs, left, right) = input1.shape[:-1], weight.shape
    if input2.shape != (*rows, right) or input1.shape[-1] != left:
        raise OpRefusal(f"{list(input1.shape)}, {list(input2.shape)} and {list(weight.shape)} do not fit together")
    pairs = input1.reshape((-1, left, 1)) * input2.reshape((-1, 1, right))
    result = product(pairs.realize().reshape((-1, left * right)), weight.reshape((outputs, left * right)).swap(0, 1))
    result = result if bias is None else result + bias
    return result.realize().reshape((*rows, outputs))


def _labels(equation: str, tensors: Sequence[Tensor]) -> tuple[list[str], str]:
    """The dimensions of each operand and of the result, a letter each; those of an ellipsis get letters of their own.

    Raises:
        OpRefusal: The equation does not fit the operands.
    """
    given, arrow, wanted = equation.replace(" ", "").partition("->")
    parts = given.split(",")
    if len(parts) != len(tensors):
        raise OpRefusal(f"given the equation '{equation}' for {len(tensors)} tensors")
    spare = [chr(code) for code in range(0x3B1, 0x3B1 + 24)]  # letters that no equation has
    apart = [len(x.shape) - len(part) + 3 for part, x in zip(parts, tensors, strict=True) if "..." in part]
    hidden = max(apart, default=0)
    around = "".join(spare[:hidden])
    operands = []
    for part, x in zip(parts, tensors, strict=True):
        own = len(x.shape) - len(part) + 3
        full = part.replace("...", around[hidden - own :] if own > 0 else "")
        if len(full) != len(x.shape) or "." in full or own < 0:
            raise OpRefusal(f"given the equation '{equation}', whose '{part}' does not fit {list(x.shape)}")
        operands.append(full)
    if arrow:
        result = wanted.replace("...", around)
    else:
        counts = Counter("".join(operands))
        result = around + "".join(sorted(label for label in counts if counts[label] == 1 and label not in around))
    if len(set(result)) != len(result) or not set(result) <= set("".join(operands)):
        raise OpRefusal(f"given the equation '{equation}', whose result no operand has")
    return operands, result


def _diagonal(x: Tensor, labels: str) -> tuple[Tensor, str]:
    """Of dimensions with the same label, the elements at the same positions."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            first, second = labels.index(label), labels.rindex(label)
            if x.shape[first] != x.shape[second]:
                raise OpRefusal(f"given {x.shape[first]} and {x.shape[second]} elements for the label '{label}'")
            x = x.at({second: along(x, first, x.shape[first])})
            x = x.reshape((*x.shape[:second], *x.shape[second + 1 :]))
            labels = labels[:second] + labels[second + 1 :]
    return x, labels


def _summed(x: Tensor, labels: str, kept: set[str]) -> tuple[Tensor, str]:
    """A tensor without the dimensions that nothing else has."""
    dims = [dim for dim, label in enumerate(labels) if label not in kept]
    if not dims:
        return x, labels
    return reduce(x, total, dims, False)[0], "".join(label for label in labels if label in kept)


def _spread(x: Tensor, labels: str, every: Sequence[str]) -> Tensor:
    """A tensor over all labels: of size 1 along those that it lacks."""
    turned = x.permute([labels.index(label) for label in every if label in labels])
    sizes = dict(zip(labels, x.shape, strict=True))
    return turned.reshape([sizes.get(label, 1) for label in every])


def _pair(a: Tensor, mine: str, b: Tensor, theirs: str, kept: set[str]) -> tuple[Tensor, str]:
    """Two operands as one, summed over the labels that neither the result nor another operand has."""
    a, mine = _summed(a, mine, {*theirs, *kept})
    b, theirs = _summed(b, theirs, {*mine, *kept})
    common = [label for label in mine if label in theirs]
    size = {**dict(zip(theirs, b.shape, strict=True)), **{k: n for k, n in zip(mine, a.shape, strict=True) if n != 1}}
    for x, labels in ((a, mine), (b, theirs)):
        if any(n not in (1, size[label]) for label, n in zip(labels, x.shape, strict=True)):
            raise OpRefusal(f"given {list(a.shape)} for '{mine}' and {list(b.shape)} for '{theirs}', which differ")
    batch = [label for label in common if label in kept]
    inner = [label for label in common if label not in kept]
    left = [label for label in mine if label not in common]
    right = [label for label in theirs if label not in common]

    def seen(x: Tensor, labels: str, *order: list[str]) -> Tensor:
        wanted = [label for part in order for label in part]
        turned = x.permute([labels.index(label) for label in wanted]).expand([size[label] for label in wanted])
        return turned.reshape([prod(size[label] for label in part) for part in order])

    every = [*batch, *left, *right]
    if not inner:
        return _spread(a, mine, every) * _spread(b, theirs, every), "".join(every)
    if batch:
        result = product(seen(a, mine, batch, left, inner), seen(b, theirs, batch, inner, right))
    else:
        result = product(seen(a, mine, left, inner), seen(b, theirs, inner, right))
    return result.reshape([size[label] for label in every]), "".join(every)


def _contracted(equation: str, tensors: Sequence[Tensor]) -> Tensor:
    operands, wanted = _labels(equation, tensors)
    waiting = [_diagonal(x, labels) for x, labels in zip(tensors, operands, strict=True)]
    result, labels = waiting.pop(0)
    while waiting:
        later = {label for _, others in waiting[1:] for label in others}
        result, labels = _pair(result, labels, *waiting.pop(0), {*wanted, *later})
    result, labels = _summed(result, labels, set(wanted))
    return result.permute([labels.index(label) for label in wanted])


@contraction("aten.einsum.default")
def einsum(equation: str, tensors: Sequence[Tensor], path: Any = None) -> Tensor:
    """The sums of products that an equation of labelled dimensions names; operands are multiplied in their order."""
    if path:
        raise OpRefusal(f"given path={path}, expected none")
    return _contracted(equation, tensors)
