"""Products by codes that warps read from shared memory, 16 rows of the matrix at a time: what their kernels share."""

from __future__ import annotations

from dataclasses import dataclass

from cuda_compiler.packing import CHUNK
from npu_compiler.lowering.problems.forms import Computed, GroupedCodes
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering

__all__ = ["BUNDLE", "TILE", "CodedTiles", "are_constant", "group_of", "unit_of"]

TILE = 16
"""Rows of the matrix that a warp has at a time."""

BUNDLE = 4
"""Units that are the least that a warp has of a row."""

_LINE = 128  # bytes of shared memory that eight rows are read from at a time


@dataclass(frozen=True)
class CodedTiles:
    """A matrix of codes as warps see it.

    Attributes:
        outputs, k: Rows of the matrix, and codes of each.
        bits: Of a code.
        unit: Codes along k whose products add up before they are scaled.
        group: Codes that share a scale; 0 where a row has but one.
        scale_bytes: Of a scale.
        zero_bits: Of a zero point in memory; 0 where there are none.
    """

    outputs: int
    k: int
    bits: int
    unit: int
    group: int
    scale_bytes: int
    zero_bits: int

    @property
    def tiles(self) -> int:
        """Of the matrix."""
        return self.outputs // TILE

    @property
    def bundles(self) -> int:
        """Of a row."""
        return self.k // self.unit // BUNDLE

    @property
    def step(self) -> int:
        """Bundles that a warp takes at a time, whole lines of shared memory."""
        return max(1, _LINE // (BUNDLE * self.unit * self.bits // 8))


def group_of(found: Product, codes: GroupedCodes) -> int:
    """Codes that share a scale; 0 where a row has but one."""
    return 0 if codes.group >= found.k else codes.group


def unit_of(found: Product, codes: GroupedCodes, units: tuple[int, ...]) -> int | None:
    """The first of some units that divides rows and groups; None where the product is not one for such tiles.

    The vectors must be computed or in whole chunks.
    """
    vector, group = found.a, group_of(found, codes)
    is_plain = type(vector.operand) is Operand and vector.has_chunks(CHUNK, found.k, True)
    if found.batches != 1 or found.n % TILE or not (isinstance(vector.operand, Computed) or is_plain):
        return None
    return next((unit for unit in units if not found.k % (BUNDLE * unit) and group % unit == 0), None)


def are_constant(codes: GroupedCodes, lowering: Lowering) -> bool:
    """Whether no kernel writes codes or what belongs to them, so that they may be read ahead of a wait."""
    return all(lowering.tensors[index].source is None for index in codes.reads())
