"""Weights in codes of a few bits with a scale for each group along k: which expressions those are.

However a graph spells them, such numbers are ``(number of a code - zero) * scale + bias``, where codes lie side by
side along k, and the rest is the same for a group of neighbours. Where each is read is an expression of the position,
which is evaluated here along k and compared with where the form has it: every spelling of the same places is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from npu_compiler.dtypes import ALL, INT8, UINT8, DType
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.problems.forms import Computed, GroupedCodes
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.tensor.coded import decoded
from npu_compiler.tensor.evaluate import evaluate
from npu_compiler.tensor.expr import Call, Checked, Const, Expr, Iota, Load, Ref, leaves, reindex, varies, walk
from npu_compiler.tensor.rounded import under_casts
from npu_compiler.tensor.trace import TracedTensor
from npu_compiler.tensor.view import Step, View

__all__ = ["as_grouped_codes"]

_Places = NDArray[np.int64]
_BITS = range(2, 9)


def as_grouped_codes(computed: Computed, position: int, tensors: Sequence[TracedTensor]) -> GroupedCodes | None:
    """An operand of a product as packed codes with groups, where that is what computes it; else None.

    Args:
        computed: The operand.
        position: 0 for the left matrix, [..., m, k], 1 for the right one, [..., k, n].
        tensors: The trace's tensors.
    """
    if computed.is_of_rows or not computed.expr.dtype.is_float:
        return None
    return _Reader(computed, len(computed.shape) - 1 - position, tensors).form()


@dataclass(frozen=True)
class _Part:
    """What is the same for a group: the load of a row's first, and which elements, along k and rows."""

    load: Load
    places: _Places
    rows: _Places
    bits: int = 8


class _Reader:
    def __init__(self, computed: Computed, k: int, tensors: Sequence[TracedTensor]) -> None:
        self.computed, self.shape, self.tensors = computed, computed.shape, tensors
        self.k, self.row = k, 2 * len(computed.shape) - 3 - k

    def form(self) -> GroupedCodes | None:
        """The operand, if every part of its expression is one of the form's."""
        expr, biases = self._factor(under_casts(self.computed.expr), "add")
        expr, scales = self._factor(under_casts(expr), "mul")
        if scales is None or not scales.load.dtype.is_float:
            return None
        expr, zero, zeros = self._zero(under_casts(expr))
        codes = self._codes(expr)
        if codes is None:
            return None
        load, bits, number, codebook = codes
        parts = [part for part in (scales, zeros, biases) if part is not None]
        group, rows = self._group(parts, self.k), self._group(parts, self.row)
        view = self._view(load)
        if group is None or rows is None or view is None or view.strides[self.k] not in (0, 1):
            return None
        if zeros is not None and zeros.bits not in (8, bits):
            return None
        strides = tuple(1 if dim == self.k else stride for dim, stride in enumerate(view.strides))
        scale, zero_points, added = (
            None if part is None else self._operand(part, group, rows) for part in (scales, zeros, biases)
        )
        if scale is None or (zero_points is None) != (zeros is None) or (added is None) != (biases is None):
            return None
        return GroupedCodes(
            self.tensors[load.ref.tensor],
            Ref(load.ref.tensor, View(self.shape, strides, view.offset)),
            self.computed.expr,
            bits,
            number,
            group,
            rows,
            scale,
            zero_points,
            8 if zeros is None else zeros.bits,
            zero,
            added,
            codebook,
        )

    def _factor(self, expr: Expr, fn: str) -> tuple[Expr, _Part | None]:
        """A sum or product without the part that is the same for a group, and that part."""
        if isinstance(expr, Call) and expr.fn == fn and expr.dtype.is_float:
            for rest, other in (expr.args, expr.args[::-1]):
                part = self._part(other)
                if part is not None and part.load.dtype.is_float:
                    return rest, part
        return expr, None

    def _zero(self, expr: Expr) -> tuple[Expr, float, _Part | None]:
        """A number without what is subtracted from it: a constant, or a part."""
        if isinstance(expr, Call) and expr.fn == "sub" and expr.dtype.is_float:
            rest, zero = expr.args
            if isinstance(zero, Const):
                return rest, float(zero.value), None
            part = self._part(zero)
            if part is not None:
                return rest, 0.0, part
        return expr, 0.0, None

    def _part(self, expr: Expr) -> _Part | None:
        """A load that moves along k by groups, or packed codes that do."""
        bare = _bare(expr)
        if isinstance(bare, Load):
            found = self._places(bare)
            return None if found is None else _Part(bare, *found)
        packed = self._packed(bare)
        if packed is None:
            return None
        load, bits, places, rows = packed
        return _Part(load, places, rows, bits)

    def _codes(self, expr: Expr) -> tuple[Load, int, DType, Operand | None] | None:
        """The load of codes, their bits, what they are numbers of, and their codebook."""
        bare, codebook = _bare(expr), None
        if isinstance(bare, Load) and bare.index is not None and not any(bare.ref.view.strides):
            if bare.index_stride != 1 or not bare.dtype.is_float:
                return None
            entries = self.tensors[bare.ref.tensor].layout.size - bare.ref.view.offset
            book = Ref(bare.ref.tensor, View((entries,), (1,), bare.ref.view.offset))
            codebook, index = Operand(self.tensors[bare.ref.tensor], book), bare.index
            if isinstance(index, Checked) and index.extent >= 1 << 8:  # no code is beyond
                index = index.index
            bare = _bare(index)
        for kind in ALL if isinstance(bare, Call) and codebook is None else ():
            loads = [*leaves(bare)]
            if kind.coding is not None and len(loads) == 1 and decoded(loads[0], kind) is bare:
                return (loads[0], 8, kind, None) if self._is_whole(loads[0]) else None
        if isinstance(bare, Load):
            return (bare, 8, bare.dtype, codebook) if bare.dtype in (UINT8, INT8) and self._is_whole(bare) else None
        packed = self._packed(bare)
        if packed is None:
            return None
        load, bits, places, rows = packed
        in_order = np.array_equal(places, np.arange(self.shape[self.k])) and not rows.any()
        return (load, bits, UINT8, codebook) if in_order else None

    def _is_whole(self, load: Load) -> bool:
        """Whether a load takes neighbours along k as they lie."""
        view = self._view(load)
        return load.index is None and view is not None and (view.strides[self.k] == 1 or self.shape[self.k] == 1)

    def _packed(self, expr: Expr) -> tuple[Load, int, _Places, _Places] | None:
        """``bytes[first >> 3] >> (first & 7) & mask``, of one byte or two: the load, the bits of a code, and codes."""
        match expr:
            case Call("and", (Call("shr", (word, shift)), Const(mask))) if isinstance(mask, int):
                bits, bit = mask.bit_length(), self._along(shift, self.k)
            case _:
                return None
        loads = self._bytes(_bare(word))
        if loads is None or bit is None or mask != (1 << bits) - 1 or bits not in _BITS:
            return None
        (load, place, rows), *others = loads
        places, odd = np.divmod(8 * place + bit, bits)
        crosses = bit + bits > 8
        for other, place_behind, rows_behind in others:
            beside = np.array_equal(place_behind[crosses], place[crosses] + 1)
            if not beside or other.ref is not load.ref or not np.array_equal(rows, rows_behind):
                return None
        if odd.any() or load.dtype != UINT8 or (crosses.any() and not others):
            return None
        return load, bits, places, rows

    def _bytes(self, word: Expr) -> list[tuple[Load, _Places, _Places]] | None:
        """The loads of a byte, or of two in a word, the lower first, with the bytes along k and along rows."""
        match word:
            case Call("or", (low, Call("shl", (high, Const(8))))):
                loads = [_bare(low), _bare(high)]
            case _:
                loads = [word]
        found = []
        for load in loads:
            places = self._places(load) if isinstance(load, Load) else None
            if not isinstance(load, Load) or places is None:
                return None
            found.append((load, *places))
        return found

    def _places(self, load: Load) -> tuple[_Places, _Places] | None:
        """What a load adds to its first place, along k and along rows, beside what its view moves along rows."""
        view = self._view(load)
        if view is None or (view.strides[self.k] and self.shape[self.k] > 1):
            return None
        none = [np.zeros(self.shape[dim], np.int64) for dim in (self.k, self.row)]
        if load.index is None:
            return none[0], none[1]
        for term in _terms(load.index):
            for number, dim in enumerate((self.k, self.row)):
                along = self._along(term, dim)
                if along is not None:
                    none[number] = none[number] + along * load.index_stride
                    break
            else:
                return None
        return none[0], none[1]

    def _along(self, expr: Expr, dim: int) -> _Places | None:
        """An expression that depends on the position along one dimension alone, at each of these."""
        others = [d for d in range(len(self.shape)) if d != dim]
        if not all(isinstance(node, Iota | Call | Const) for node in walk(expr)) or varies(expr, self.shape, others):
            return None
        steps: list[Step] = [("slice", (d, 0, 1, 1)) for d in others]
        line = reindex(expr, self.shape, (*steps, ("reshape", (self.shape[dim],))))
        if line is None:
            return None
        return evaluate(line, (self.shape[dim],), lambda index: np.empty(0)).astype(np.int64)

    def _view(self, load: Load) -> View | None:
        view = load.ref.view
        return view if view.shape == self.shape else view.expand(self.shape)

    def _group(self, parts: Sequence[_Part], dim: int) -> int | None:
        """How many neighbours along k, or how many rows, share what parts hold; None where parts differ in that."""
        extent, sizes = self.shape[dim], set[int]()
        for part in parts:
            places = part.places if dim == self.k else part.rows
            if dim == self.row and not places.any() and self._moves_along_rows(part):
                sizes.add(1)
                continue
            changes = np.flatnonzero(places != places[0])
            size = int(changes[0]) if len(changes) else extent
            unit = int(places[changes[0]]) if len(changes) else 1
            if not np.array_equal(places, np.arange(extent) // size * unit):
                return None
            if len(changes):
                sizes.add(size)
        if len(sizes) > 1:
            return None
        return sizes.pop() if sizes else (extent if dim == self.k else 1)

    def _moves_along_rows(self, part: _Part) -> bool:
        view = self._view(part.load)
        return view is not None and view.strides[self.row] != 0

    def _operand(self, part: _Part | None, group: int, rows: int) -> Operand | None:
        """A part as an operand over [..., groups, rows], in the order of the dimensions here."""
        if part is None:
            return None
        view = self._view(part.load)
        assert view is not None
        shape, strides = [*self.shape], [*view.strides]
        for dim, size, places in ((self.k, group, part.places), (self.row, rows, part.rows)):
            if dim == self.row and not places.any() and (rows == 1 or not self._moves_along_rows(part)):
                shape[dim] = ceil_div(shape[dim], size)
                continue
            if dim == self.row and self._moves_along_rows(part):
                return None  # one of its own for each row, and others for several
            shape[dim] = ceil_div(shape[dim], size)
            strides[dim] = int(places[size]) if size < len(places) else 0
        tensor = self.tensors[part.load.ref.tensor]
        return Operand(tensor, Ref(tensor.index, View(tuple(shape), tuple(strides), view.offset)))


def _bare(expr: Expr) -> Expr:
    """What an expression is before conversions that keep every number: of codes, and of floating point."""
    while isinstance(expr, Call) and expr.fn == "cast":
        (inner,) = expr.args
        keeps = expr.dtype.is_float or (inner.dtype.is_integer and inner.dtype.size < expr.dtype.size)
        if not keeps and not (inner.dtype.is_integer and inner.dtype == expr.dtype):
            break
        expr = inner
    return expr


def _terms(expr: Expr) -> list[Expr]:
    """What a sum adds up."""
    if isinstance(expr, Call) and expr.fn == "add":
        return [term for arg in expr.args for term in _terms(arg)]
    return [expr]
