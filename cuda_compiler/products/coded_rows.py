"""Products of many rows by packed codes, which are made into numbers in registers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.artifact.extensions import TensorMap, cluster_along_x
from cuda_compiler.artifact.vocabulary import TENSOR_CORES
from cuda_compiler.devices import offers
from cuda_compiler.dialect import CUDA
from cuda_compiler.products.coded_rows_sizes import ByWarpgroups, ByWarps, CodedRows, Work, coded_rows_candidates
from cuda_compiler.products.grouped_matvec import (
    MAX_ROWS,
    PART_INPUTS,
    PART_MACROS,
    part_inputs,
    part_macros,
    part_rows,
)
from cuda_compiler.products.row_followers import stored_together, stores_followers, without_followers
from cuda_compiler.row_values import with_row_value
from cuda_compiler.tiles.wgmma import LINE, warpgroup_product
from npu_compiler.artifact.plan import Argument, CallOption, KernelCall
from npu_compiler.dtypes import FLOAT16
from npu_compiler.lowering.candidates import THE_BEST, Candidate, Kept, best_candidates
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.problems.forms import GroupedCodes
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["CODED_ROWS", "WARPGROUP_CODES", "coded_rows_microseconds", "coded_rows_options", "suits_coded_rows"]

_ZERO_BYTES = 2  # of a zero point in shared memory
_KEPT = Kept(close=1.1, most=2)
_PARAMS = "int outputs, vectors, tiles, scale_row, zero_row, bias_row"
_MACROS = f"{PART_MACROS} vector_t COMMON VECTORS GROUP ONE_GROUP SPAN TILE_N PART_N STAGES CLUSTER"
_INPUTS = f"{PART_INPUTS} vector"
_FILES = "tensor_cores.cuh grouped_codes.cuh scaled_codes.cuh clusters.cuh coded_rows_parts.cuh"

CODED_ROWS = KernelTemplate(
    "coded_rows",
    params=f"{_PARAMS}, matrix_row, vector_row",
    macros=f"{_MACROS} SETS",
    inputs=_INPUTS,
    shared_bytes=None,
    files=_FILES,
)
WARPGROUP_CODES = KernelTemplate(
    "warpgroup_codes",
    params=f"{_PARAMS}, tiles_m",
    macros=f"{_MACROS} ROW_VALUES",
    inputs=_INPUTS,
    shared_bytes=None,
    files=f"{_FILES} warpgroups.cuh barriers.cuh ring.cuh copy_engine.cuh",
)


@dataclass(frozen=True)
class _Way:
    """What a kernel has of its own.

    Attributes:
        template: The kernel.
        values, macros: Parameters and macros of sizes.
        seen: Inputs that it does not get by their addresses.
        text: A function that it calls.
    """

    template: KernelTemplate
    values: dict[str, int]
    seen: dict[str, Argument] = field(default_factory=dict)
    macros: dict[str, object] = field(default_factory=dict)
    text: str = ""


def suits_coded_rows(found: Product) -> bool:
    """Whether the kernels take a product of packed codes that `loads_packed` has looked at."""
    whole = found.batches == 1 and found.n > 0
    return whole and found.m > MAX_ROWS and min(found.a.along, found.b.along) > 0


def coded_rows_options(found: Product, around: AnchoredGroup) -> list[CallOption]:
    """The launches worth trying, the best first, each for devices with tensor cores or with more."""
    work, (alone, behind), options = _work(found), without_followers(around), list[CallOption]()
    whole, alone = with_row_value(around), with_row_value(alone)
    for each in _ranked(work, around.device):
        if isinstance(each.sizes, ByWarpgroups) and stores_followers(around):
            calls = [_lower(found, work, whole, each.sizes)]
        else:
            calls = [_lower(found, work, alone, each.sizes), *behind]
        options.append(CallOption(each.requires, tuple(calls)))
    return options


def coded_rows_microseconds(found: Product, device: DeviceModel) -> float:
    """What the best launch should take; infinite where there is none."""
    return min((each.microseconds for each in _ranked(_work(found), device)), default=inf)


def _work(found: Product) -> Work:
    codes = found.b.operand
    assert isinstance(codes, GroupedCodes)
    return Work(found.m, found.n, found.k, codes.bits, codes.group, _group_bytes(codes, found.k))


@lru_cache(maxsize=1024)  # a model has the same product in many layers
def _ranked(work: Work, device: DeviceModel) -> tuple[Candidate[CodedRows], ...]:
    """The candidates worth timing: the best first, and the best of those for more devices."""
    candidates = [*coded_rows_candidates(work, device)] if offers(device, TENSOR_CORES) else []
    found = best_candidates(candidates, _KEPT)
    by_warps = [each for each in candidates if isinstance(each.sizes, ByWarps)]
    if by_warps and all(isinstance(each.sizes, ByWarpgroups) for each in found):
        return (*found, *best_candidates(by_warps, THE_BEST))
    return found


def _lower(found: Product, work: Work, around: AnchoredGroup, sizes: CodedRows) -> KernelCall:
    codes, vector = found.b.operand, found.a
    assert isinstance(codes, GroupedCodes)
    way = _by_warpgroups(found, work, sizes) if isinstance(sizes, ByWarpgroups) else _by_warps(found, sizes)
    launch = Launch(
        way.template,
        grid=(sizes.clusters(work, around.device) * sizes.cluster, 1, 1),
        values={
            "outputs": found.n,
            "vectors": found.m,
            "tiles": sizes.tiles(work),
            **part_rows(codes),
            **way.values,
        },
        macros={
            **part_macros(codes, vector.dtype),
            "vector_t": CUDA.storage[vector.dtype.name],
            "COMMON": found.k,
            "VECTORS": min(found.m, sizes.columns(work)),
            "GROUP": codes.group,
            "ONE_GROUP": int(_is_scaled_last(codes, found.k)),
            "SPAN": sizes.span(work),
            "TILE_N": sizes.tile,
            "PART_N": sizes.part,
            "STAGES": sizes.stages,
            "CLUSTER": sizes.cluster,
            **way.macros,
        },
        inputs={**part_inputs(codes), "vector": vector.argument, **way.seen},
        flops=found.flops,
        text=way.text,
        block=(sizes.threads, 1, 1),
        shared_bytes=sizes.shared_bytes(work),
        extension=cluster_along_x(sizes.cluster),
    )
    return around.launch(launch, stored_together(around))


def _is_scaled_last(codes: GroupedCodes, k: int) -> bool:
    """Whether the sums of a row are scaled, not its numbers."""
    return codes.group >= k and codes.bias is None


def _group_bytes(codes: GroupedCodes, k: int) -> int:
    """Bytes that a group has in shared memory; as in the kernel's file."""
    scale = 0 if _is_scaled_last(codes, k) else codes.scale.dtype.size
    bias = 0 if codes.bias is None else codes.bias.dtype.size
    return scale + bias + (0 if codes.zeros is None else _ZERO_BYTES)


def _by_warps(found: Product, sizes: CodedRows) -> _Way:
    rows = {"matrix_row": found.b.along, "vector_row": found.a.along}
    return _Way(CODED_ROWS, rows, macros={"SETS": sizes.sets})


def _by_warpgroups(found: Product, work: Work, sizes: ByWarpgroups) -> _Way:
    """The copy engine sees codes and vectors as elements of 16 bits."""
    codes, vector, columns = found.b, found.a, sizes.columns(work)
    units, row = FLOAT16.size * 8 // work.bits, vector.along * vector.dtype.size
    boxes = (sizes.span(work) // units, sizes.tile), (LINE, columns)
    maps = {
        "matrix": TensorMap(FLOAT16, (found.k // units, found.n), (codes.along,), boxes[0]),
        "vector": TensorMap(vector.dtype, (found.k, found.m), (row,), boxes[1]),
    }
    arguments = {"matrix": codes.argument, "vector": vector.argument}
    seen = {name: replace(arguments[name], extension=each) for name, each in maps.items()}
    text = warpgroup_product(columns, vector.dtype.name, a_in_registers=True)
    macros: dict[str, object] = {"ROW_VALUES": sizes.row_values(work)}
    return _Way(WARPGROUP_CODES, {"tiles_m": sizes.turns(work)}, seen, macros, text)
