"""Lowers products of groups of rows, each by a matrix of its own."""

from __future__ import annotations

from metal_compiler.anchors import single_launch
from metal_compiler.dialect import METAL
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.grouped_product import GroupedProduct
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch
from npu_compiler.tensor.symbolic import OpRefusal

__all__ = ["GROUPED_MATMUL", "lower_grouped"]

_SIMDGROUPS = 4
GROUPED_MATMUL = KernelTemplate(
    "grouped_matmul",
    params="int n, k, groups, a_row, a_k, b_group, b_k, b_col, end_step",
    macros="a_t end_t K_FIRST SIMDGROUPS",
    inputs="a b ends",
    threads=32 * _SIMDGROUPS,
    files="store.metal",
)
_MAX_ROWS = 65535  # what a grid counts along its later dimensions


@lowering_of(GroupedProduct)
def lower_grouped(found: GroupedProduct, group: Group, lowering: Lowering) -> list[KernelCall]:
    """A simdgroup for a result, or for neighbouring ones of a row.

    Raises:
        OpRefusal: There are too many rows, or a tensor that the epilogue reads is too large.
    """
    if found.m > _MAX_ROWS:
        raise OpRefusal(f"given {found.m} rows of groups, expected at most {_MAX_ROWS}")
    k_first = found.matrices.strides[1] == 1 and found.matrices.strides[2] != 1
    columns = _SIMDGROUPS * (1 if k_first else 32)
    launch = Launch(
        GROUPED_MATMUL,
        grid=(ceil_div(found.n, columns), found.m, 1),
        values=GROUPED_MATMUL.values_among(found.values()),
        macros={
            "a_t": METAL.storage[found.rows.dtype.name],
            "end_t": METAL.storage[found.ends.dtype.name],
            "K_FIRST": int(k_first),
            "SIMDGROUPS": _SIMDGROUPS,
        },
        inputs={"a": found.rows.argument, "b": found.matrices.argument, "ends": found.ends.argument},
        flops=found.flops,
    )
    return [single_launch(launch, group, lowering)]
