"""What products of tiles share, whether of matrices or of images."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from cuda_compiler.anchors import anchor_source
from cuda_compiler.tiles import Tiling
from cuda_compiler.wgmma import warpgroup_product
from npu_compiler.codegen.grouping import Group
from npu_compiler.codegen.loops import traffic_of
from npu_compiler.codegen.operands import TensorArg
from npu_compiler.codegen.target import Choice, Launch, Library, Lowering, Option
from npu_compiler.dtypes import DType

__all__ = ["bytes_of_a_result", "first_on_warpgroups", "partial_argument", "product_function"]

_WARPGROUPS = "sm_90a"


def bytes_of_a_result(group: Group, lowering: Lowering) -> float:
    """What the epilogue reads and stores for each of the product's results, in bytes."""
    operands = [lowering.tensors[ref.tensor] for ref in anchor_source(group).operands]
    product = sum(prod(tensor.shape) * tensor.dtype.size for tensor in operands)
    return (traffic_of(group, lowering.tensors) - product) / (prod(group.shape) * group.pairs)


def partial_argument(tiling: Tiling, tiles: int, otherwise: TensorArg, lowering: Lowering) -> TensorArg:
    """Where blocks that share a tile leave their parts; `otherwise` where none do."""
    if tiling.splits == 1 or tiling.clustered:
        return otherwise
    nbytes = tiles * tiling.splits * tiling.rows * tiling.columns * 4
    return TensorArg(lowering.scratch(nbytes), writes=True)


def product_function(tiling: Tiling, dtype: DType) -> str:
    """The function that `tile_warpgroups.cuh` multiplies with; nothing for tiles that need none."""
    return warpgroup_product(tiling.columns // tiling.warps_n, dtype.name) if tiling.by_warpgroups else ""


def first_on_warpgroups(launch: Launch, otherwise: Sequence[Launch | Library]) -> Choice:
    """A launch of tiles for warpgroups, where the device has those."""
    return Choice((Option(_WARPGROUPS, (launch,)), Option("", tuple(otherwise))))
