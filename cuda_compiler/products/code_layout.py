"""How packed codes, and what belongs to them, must lie for kernels that copy them to shared memory."""

from __future__ import annotations

from cuda_compiler.products.integer_rows_sizes import BUNDLE
from npu_compiler.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, UINT8
from npu_compiler.lowering.problems.forms import GroupedCodes
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering

__all__ = ["group_of", "is_constant", "lies_in_rows", "unit_of"]

_GROUPS, _UNITS = (32, 64, 128), (64, 32)
_ALIGNED = 16  # bytes of a copy
_COPIED = (4, 8, 16)  # bytes that are copied of a bundle's scales


def group_of(found: Product, codes: GroupedCodes) -> int:
    """Codes that share a scale; 0 where a row has but one."""
    return 0 if codes.group >= found.k else codes.group


def unit_of(found: Product, codes: GroupedCodes) -> int | None:
    """Codes along k that are in one group, in whole bundles of a row; None where there are no such."""
    group = group_of(found, codes)
    units = (unit for unit in _UNITS if not found.k % (BUNDLE * unit) and group % unit == 0)
    return next(units, None)


def is_constant(codes: GroupedCodes, lowering: Lowering) -> bool:
    """Whether no kernel of the plan writes the codes, or what belongs to them."""
    return all(lowering.tensors[index].source is None for index in codes.reads())


def lies_in_rows(found: Product, codes: GroupedCodes, unit: int) -> bool:
    """Whether codes of four or eight bits, scales and zero points lie row behind row, in parts that can be copied."""
    scale, zeros, group = codes.scale, codes.zeros, group_of(found, codes)
    groups = found.k // group if group else 1
    if codes.bits not in (4, 8) or codes.bias is not None or codes.rows != 1 or (group and group not in _GROUPS):
        return False
    in_rows = found.b.along * 8 == found.k * codes.bits and not codes.offset % _ALIGNED
    scaled = scale.dtype in (FLOAT16, BFLOAT16, FLOAT32) and scale.strides[-1] == groups
    scaled = scaled and (not group or scale.strides[-2] == 1) and not scale.offset * scale.dtype.size % _ALIGNED
    copied = not group or BUNDLE * unit // group * scale.dtype.size in _COPIED
    if zeros is None or not (in_rows and scaled and copied):
        return in_rows and scaled and copied
    packed = codes.zero_bits in (4, 8) and zeros.dtype in (INT8, UINT8) and zeros.strides[-2] == 1
    return bool(group) and packed and not zeros.offset % 4 and found.n * zeros.strides[-1] < 1 << 31
