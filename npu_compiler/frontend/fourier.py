"""Fourier transforms of few points as products with their matrices; complex numbers are pairs.

A transform of n points along a dimension multiplies by ``exp(-2 pi i j k / n)``, or its conjugate for the way back. The
matrix depends on no input, so that it is computed when a model is compiled; of j * k only what is left by n counts,
which keeps angles exact. Several dimensions are transformed one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import pi
from typing import Any, NamedTuple

from npu_compiler.frontend.pair_writer import PairWriter, Unspelled
from npu_compiler.graph.ir_builder import IRTensor

__all__ = ["TRANSFORMS", "transformed"]

_MOST = 1024  # points, beyond which a product is no match for a fast transform
_PLAIN = {f"fft_{inverse}{real}fft{rank}" for inverse in ("", "i") for real in ("", "r") for rank in ("", "2", "n")}
TRANSFORMS = frozenset({*_PLAIN, "_fft_r2c", "_fft_c2c", "_fft_c2r"})
"""Names of the transforms, without overload."""

_EACH, _ROOT, _ALL = 0.0, -0.5, -1.0  # powers of n that results are multiplied by
_NORMS = {"backward": (_EACH, _ALL), "ortho": (_ROOT, _ROOT), "forward": (_ALL, _EACH)}


class _Asked(NamedTuple):
    """What a node asks for.

    Attributes:
        dims: Which dimensions are transformed.
        sizes: Points along each; None for as many as there are.
        inverse: Whether it is the way back.
        power: Of the points, that results are multiplied by.
        real_result: Whether the last dimension comes back to real numbers, of which half the points are given.
        one_sided: Whether half the points of the last dimension are wanted, as others are their conjugates.
    """

    dims: list[int]
    sizes: list[int | None]
    inverse: bool
    power: float
    real_result: bool
    one_sided: bool


def transformed(writer: PairWriter, name: str, given: IRTensor, is_pairs: bool, attrs: Mapping[str, Any]) -> IRTensor:
    """Spells a transform.

    Args:
        writer: Takes the nodes.
        name: One of `TRANSFORMS`.
        given: Real numbers, or pairs.
        is_pairs: Which of them.
        attrs: The node's attributes.

    Raises:
        Unspelled: It has too many points, or none, or asks for what PyTorch refuses too.
    """
    rank = len(given["shape"]) - is_pairs
    asked = _asked(name, attrs, rank)
    if not asked.dims or len(asked.sizes) != len(asked.dims) or (asked.one_sided and is_pairs):
        raise Unspelled
    order = list(zip(asked.dims, asked.sizes, strict=True))
    if not asked.real_result:
        order.reverse()  # a transform of real numbers takes the last dimension first
    for number, (dim, size) in enumerate(order):
        last = asked.real_result and number == len(order) - 1
        points = given["shape"][dim] if size is None else size
        if last and size is None:
            points = 2 * (given["shape"][dim] - 1)
        kind = _Kind(is_pairs, not last, asked.one_sided and number == 0)
        given = _along(writer, given, dim, points, kind, 1 if asked.inverse else -1, asked.power)
        is_pairs = not last
    return given


def _asked(name: str, attrs: Mapping[str, Any], rank: int) -> _Asked:
    if name.startswith("_fft"):
        power = {0: _EACH, 1: _ROOT, 2: _ALL}.get(attrs.get("normalization", 0))
        back = name == "_fft_c2r" or (name == "_fft_c2c" and not attrs.get("forward"))
        dims = _numbers(attrs.get("dim"))
        if power is None or not rank:
            raise Unspelled
        sizes: list[int | None] = [None] * len(dims)
        if name == "_fft_c2r" and sizes:
            (sizes[-1],) = _numbers([attrs.get("last_dim_size")])
        one_sided = name == "_fft_r2c" and bool(attrs.get("onesided"))
        return _Asked([dim % rank for dim in dims], sizes, back, power, name == "_fft_c2r", one_sided)
    inverse, real, norm = "_i" in name, "rfft" in name, attrs.get("norm") or "backward"
    if norm not in _NORMS or not rank:
        raise Unspelled
    if name.endswith(("2", "n")):
        dims, sizes = _several(attrs, rank, [-2, -1] if name.endswith("2") else None)
    else:
        dims, sizes = _numbers([attrs.get("dim", -1)]), [attrs.get("n")]
    if any(size is not None and type(size) is not int for size in sizes):
        raise Unspelled
    power = _NORMS[norm][inverse]
    return _Asked([dim % rank for dim in dims], sizes, inverse, power, real and inverse, real and not inverse)


def _several(attrs: Mapping[str, Any], rank: int, usual: list[int] | None) -> tuple[list[int], list[int | None]]:
    """Dimensions and points of a transform of several dimensions."""
    given, sizes = attrs.get("dim", usual), attrs.get("s")
    if given is None:
        count = rank if sizes is None else len(sizes)
        given = list(range(rank - count, rank))
    dims = _numbers(given)
    return dims, [None] * len(dims) if sizes is None else [None if size == -1 else size for size in sizes]


def _numbers(given: Any) -> list[int]:
    if not isinstance(given, (list, tuple)) or any(type(number) is not int for number in given):
        raise Unspelled
    return list(given)


class _Kind(NamedTuple):
    """Whether a transform takes pairs, whether it gives pairs, and whether half of them are enough."""

    takes_pairs: bool
    gives_pairs: bool
    one_sided: bool


def _along(
    writer: PairWriter, given: IRTensor, dim: int, points: int, kind: _Kind, sign: int, power: float
) -> IRTensor:
    """The transform along one dimension."""
    wanted = points // 2 + 1 if kind.one_sided else points
    useful = points if kind.gives_pairs else points // 2 + 1
    if not 1 <= points <= _MOST or 0 in given["shape"]:
        raise Unspelled
    if given["shape"][dim] > useful:  # fewer than there are count; beyond those that there are follow zeros
        shape = [useful if axis == dim else size for axis, size in enumerate(given["shape"])]
        given = writer.op("slice.Tensor", shape, given, dim=dim, start=0, end=useful)
    rows = given["shape"][dim]
    matrix = _matrix(writer, rows, wanted, points, kind, sign, float(points) ** power)
    rank = len(given["shape"]) - kind.takes_pairs
    outer = [axis for axis in range(rank) if axis != dim]
    sizes = [given["shape"][axis] for axis in outer]
    moved = _permuted(writer, given, [*outer, dim, *([rank] if kind.takes_pairs else [])])
    flat = writer.view(_contiguous(writer, moved), (*sizes, matrix["shape"][0]))
    made = writer.op("matmul.default", (*sizes, matrix["shape"][1]), flat, matrix)
    if kind.gives_pairs:
        made = writer.view(made, (*sizes, wanted, 2))
    back = [*range(dim), rank - 1, *range(dim, rank - 1)]
    return _permuted(writer, made, [*back, *([rank] if kind.gives_pairs else [])])


def _permuted(writer: PairWriter, given: IRTensor, dims: Sequence[int]) -> IRTensor:
    if list(dims) == sorted(dims):
        return given
    return writer.op("permute.default", [given["shape"][dim] for dim in dims], given, dims=list(dims))


def _contiguous(writer: PairWriter, given: IRTensor) -> IRTensor:
    return writer.same("contiguous.default", given)


def _matrix(
    writer: PairWriter, rows: int, columns: int, points: int, kind: _Kind, sign: int, factor: float
) -> IRTensor:
    """What numbers, or pairs one after another, are multiplied by."""
    numbers = writer.arange((rows, 1), rows), writer.arange((1, columns), columns)
    turns = writer.add("mul.Tensor", "int64", (rows, columns), *numbers)
    turns = writer.same("remainder.Scalar", turns, other=points)
    angle = writer.op("mul.Tensor", (rows, columns), turns, other=sign * 2 * pi / points)
    cosine, sine = (writer.same(f"{function}.default", angle) for function in ("cos", "sin"))
    if not kind.gives_pairs:  # conjugates are left out: what stands for two counts twice
        both = writer.stack(1, cosine, writer.same("neg.default", sine))
        shares = writer.op("full.default", (rows, 1, 1), size=[rows, 1, 1], fill_value=2.0)
        for alone in {0, points // 2} if points % 2 == 0 else {0}:
            place = writer.compare("eq.Scalar", (rows, 1, 1), writer.arange((rows, 1, 1), rows), other=alone)
            shares = writer.binary("sub", shares, writer.op("mul.Tensor", (rows, 1, 1), place, other=1.0))
        matrix = writer.view(writer.binary("mul", both, shares), (2 * rows, columns))
    else:
        matrix = writer.stack(2, cosine, sine)
        if kind.takes_pairs:
            turned = writer.stack(2, writer.same("neg.default", sine), cosine)
            matrix = writer.stack(1, matrix, turned)
        matrix = writer.view(matrix, ((2 if kind.takes_pairs else 1) * rows, 2 * columns))
    return matrix if factor == 1.0 else writer.same("mul.Tensor", matrix, other=factor)
