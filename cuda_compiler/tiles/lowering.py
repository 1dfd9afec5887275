"""What products of tiles share, whether of matrices or of images."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from cuda_compiler.devices import kept_candidates
from cuda_compiler.tiles.clusters import cluster_candidates
from cuda_compiler.tiles.teams import team_candidates
from cuda_compiler.tiles.tiling import Asked, Tiling
from cuda_compiler.tiles.warps import warp_candidates
from npu_compiler.artifact.plan import Argument
from npu_compiler.lowering.candidates import THE_BEST, Candidate, best_candidates
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import traffic_of
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.lowering.target import Lowering

__all__ = ["bytes_of_a_result", "close_tilings", "partial_argument", "tiles_microseconds"]


def bytes_of_a_result(problem: Problem, group: Group, lowering: Lowering) -> float:
    """What the epilogue reads and stores for each of the product's results, in bytes."""
    product = sum(prod(operand.tensor.shape) * operand.dtype.size for operand in problem.operands)
    return (traffic_of(group, lowering.tensors) - product) / prod(problem.shape)


def partial_argument(tiling: Tiling, tiles: int, otherwise: Argument, lowering: Lowering) -> Argument:
    """Where blocks that share a tile leave their parts; `otherwise` where none do."""
    nbytes = tiling.partial_bytes(tiles)
    return Argument(lowering.scratch(nbytes), writes=True) if nbytes else otherwise


@lru_cache(maxsize=1024)  # a model has the same product in many layers
def close_tilings(asked: Asked, device: DeviceModel, warpgroups: bool) -> tuple[Tiling, ...]:
    """Tilings that are worth timing, the best by the models of their cost first; one at least is for any device.

    Args:
        asked: The product.
        device: What it is computed on.
        warpgroups: Whether warpgroups can multiply the operands.
    """
    best = best_candidates(_candidates(asked, device, warpgroups), kept_candidates(device, bulk=False))
    return tuple(candidate.sizes for candidate in best)


@lru_cache(maxsize=1024)
def tiles_microseconds(asked: Asked, device: DeviceModel, warpgroups: bool) -> float:
    """What the best of `close_tilings` takes, by the models of their cost."""
    return best_candidates(_candidates(asked, device, warpgroups), THE_BEST)[0].microseconds


def _candidates(asked: Asked, device: DeviceModel, warpgroups: bool) -> Iterator[Candidate[Tiling]]:
    families = (team_candidates, cluster_candidates, warp_candidates) if warpgroups else (warp_candidates,)
    return (found for candidates in families for found in candidates(asked, device))
