"""The GPUs that programs are compiled for: their facts, and the constants of the kernels' costs.

A file is what `npu_compiler.lowering.device_model` says. Instructions are ``tensor_cores`` (products of a warp, of all
16-bit types), ``clusters`` (blocks that reach each other's shared memory), ``warpgroups`` (products of 128 threads
straight from there) and ``tensor_maps`` (tiles that the copy engine brings). ``benchmarks/tile_costs`` measures and
fits the constants of tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cuda_compiler.artifact.vocabulary import CLUSTERS, TENSOR_CORES, WARPGROUPS
from npu_compiler.lowering.candidates import Kept
from npu_compiler.lowering.device_model import DeviceModel, DeviceModels, FamilyConstants

__all__ = ["DEVICES", "brings_boxes", "busy_threads", "cluster_cores", "kept_candidates", "offers"]

DEVICES = DeviceModels("cuda_compiler.devices", default="sm_90")

_INSTRUCTIONS = {TENSOR_CORES: {"tensor_cores"}, CLUSTERS: {"clusters"}, WARPGROUPS: {"clusters", "warpgroups"}}


def offers(device: DeviceModel, requires: str) -> bool:
    """Whether a device has the instructions of options that require this."""
    return device.instructions >= _INSTRUCTIONS[requires]


def brings_boxes(device: DeviceModel) -> bool:
    """Whether a device has warpgroups, and a copy engine that brings their operands."""
    return offers(device, WARPGROUPS) and "tensor_maps" in device.instructions


@dataclass(frozen=True)
class _Clusters(FamilyConstants, family="clusters_held"):
    cores: Mapping[int, int]


def cluster_cores(device: DeviceModel) -> Mapping[int, int]:
    """Multiprocessors that clusters can fill, by the blocks of a cluster: a cluster lies within a part of the GPU."""
    return _Clusters.of(device).cores


@dataclass(frozen=True)
class _Busy:
    busy_threads: int


def busy_threads(device: DeviceModel, family: str) -> int:
    """Threads of a family of kernels that keep all multiprocessors busy."""
    return device.cores * device.constants(family, _Busy).busy_threads


@dataclass(frozen=True)
class _Rules(FamilyConstants, family="kept"):
    tiles: Kept
    bulk_tiles: Kept


def kept_candidates(device: DeviceModel, *, bulk: bool) -> Kept:
    """How many candidates are worth timing: of tiles that the copy engine brings, or of those that threads copy."""
    rules = _Rules.of(device)
    return rules.bulk_tiles if bulk else rules.tiles
