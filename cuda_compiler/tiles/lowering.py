"""What products of tiles share, whether of matrices or of images."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.tiles.clusters import ranked_cluster_tilings
from cuda_compiler.tiles.teams import ranked_team_tilings
from cuda_compiler.tiles.tiling import Tiling, ranked_tilings
from cuda_compiler.tiles.wgmma import warpgroup_product
from npu_compiler.artifact.plan import Argument, CallOption, KernelCall
from npu_compiler.dtypes import DType
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import traffic_of
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.lowering.target import Lowering

__all__ = ["bytes_of_a_result", "close_tilings", "option_of", "partial_argument", "product_function"]

_CLOSE = 1.15  # of the best tiling's clocks; the models are off by a tenth
_MOST = 4  # tilings of a product that are worth timing


def bytes_of_a_result(problem: Problem, group: Group, lowering: Lowering) -> float:
    """What the epilogue reads and stores for each of the product's results, in bytes."""
    product = sum(prod(operand.tensor.shape) * operand.dtype.size for operand in problem.operands)
    return (traffic_of(group, lowering.tensors) - product) / prod(problem.shape)


def partial_argument(tiling: Tiling, tiles: int, otherwise: Argument, lowering: Lowering) -> Argument:
    """Where blocks that share a tile leave their parts; `otherwise` where none do."""
    if tiling.splits == 1 or tiling.clustered:
        return otherwise
    nbytes = tiles * tiling.splits * tiling.rows * tiling.columns * 4
    return Argument(lowering.scratch(nbytes), writes=True)


def product_function(tiling: Tiling, dtype: DType) -> str:
    """The function that warpgroups multiply with; nothing for tiles that need none."""
    return warpgroup_product(tiling.columns // tiling.warps_n, dtype.name) if tiling.by_warpgroups else ""


@lru_cache(maxsize=1024)  # a model has the same product in many layers
def close_tilings(m: int, n: int, k: int, batch: int, moved: float, warpgroups: bool) -> tuple[Tiling, ...]:
    """Tilings that are worth timing, the best by the models of their cost first; one at least is for any device.

    Args:
        m, n, k, batch: A product [m, k] by [k, n], `batch` times.
        moved: Bytes that the epilogue reads and stores for each of the product's results.
        warpgroups: Whether warpgroups can multiply the operands.
    """
    by_warps = ranked_tilings(m, n, k, batch)
    product = m, n, k, batch, moved
    by_warpgroups = [*ranked_team_tilings(*product), *ranked_cluster_tilings(*product)] if warpgroups else []
    ranked = sorted([*by_warpgroups, *by_warps], key=lambda pair: pair[0])[:_MOST]
    close = tuple(tiling for clocks, tiling in ranked if clocks <= _CLOSE * ranked[0][0])
    return (*close, by_warps[0][1]) if all(tiling.by_warpgroups for tiling in close) else close


def option_of(launch: KernelCall, tiling: Tiling) -> CallOption:
    """A launch of tiles as an option."""
    return CallOption(WARPGROUPS if tiling.by_warpgroups else "", (launch,))
