"""Products of many rows by packed codes: numbers are made in registers, or ahead of the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.products.bulk_tilings import bulk_candidates
from cuda_compiler.products.code_numbers import numbers_ahead
from cuda_compiler.products.coded_rows import coded_rows_microseconds, coded_rows_options, suits_coded_rows
from cuda_compiler.products.grouped_matvec import suits_codes
from cuda_compiler.products.product import are_along_k
from cuda_compiler.tiles.lowering import bytes_of_a_result
from cuda_compiler.tiles.tiling import Asked
from npu_compiler.artifact.plan import CallOption
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.forms import Dequantised, GroupedCodes
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product

__all__ = ["loads_packed", "packed_options"]

_UNIT, _ACCESS = 32, 16  # codes that a thread has of a line, and bytes that it loads at a time


def loads_packed(group: Group, position: int, operand: Operand) -> bool:
    """Whether an operand is packed codes that are made into numbers on their way into a product of many rows."""
    problem = group.problem
    if not isinstance(operand, GroupedCodes) or not isinstance(problem, Product) or position != 1:
        return False
    left = problem.a
    if isinstance(left.operand, Dequantised | GroupedCodes) or left.dtype not in (FLOAT16, BFLOAT16):
        return False
    found = problem.with_operand(position, operand)
    in_lines = are_along_k(found) and left.has_chunks(8, found.k, True)
    whole = operand.group >= found.k or operand.group % _UNIT == 0
    aligned = not any(number % _ACCESS for number in (found.b.along, operand.offset))
    fits = operand.bits in (4, 8) and 8 % operand.zero_bits == 0 and found.k % _UNIT == 0 and whole and aligned
    constant = operand.is_constant and all(part.is_constant for part in operand.parts)
    return suits_coded_rows(found) and in_lines and fits and constant and suits_codes(operand)


def packed_options(
    found: Product, around: AnchoredGroup, others: Callable[[Product, AnchoredGroup], list[CallOption]]
) -> list[CallOption]:
    """The launches worth trying.

    Args:
        found: The product.
        around: What follows it.
        others: Gives those of a product of numbers in memory, the last one for any device.
    """
    coded, lowering, device = coded_rows_options(found, around), around.lowering, around.device
    made, call = numbers_ahead(found, lowering)
    ahead = [replace(option, calls=(call, *option.calls)) for option in others(made, around)]
    asked = Asked(found.m, found.n, found.k, 1, bytes_of_a_result(found, around.group, lowering))
    if coded_rows_microseconds(found, device) <= _microseconds_ahead(asked, _code_bytes(found), device):
        return [*coded, *ahead]
    return [*ahead[:1], *coded, *ahead[1:]]


def _code_bytes(found: Product) -> float:
    """Of a code of the right matrix."""
    assert isinstance(found.b.operand, GroupedCodes)
    return found.b.operand.bits / 8


@dataclass(frozen=True)
class PackedCosts(FamilyConstants, family="packed_tiles"):
    """What decides whether numbers are made ahead.

    Attributes:
        made_ahead: The part of the memory's bandwidth that a kernel has which makes numbers ahead of the product.
    """

    made_ahead: float


def _microseconds_ahead(asked: Asked, code_bytes: float, device: DeviceModel) -> float:
    """What a product should take whose numbers are made ahead of it; infinite where no tiles are known."""
    costs = PackedCosts.of(device)
    plain = min((found.microseconds for found in bulk_candidates(asked, device)), default=inf)
    moved = asked.n * asked.k * (code_bytes + 2)
    return plain + device.microseconds(moved / (device.memory_a_clock * costs.made_ahead))
