"""Attention of few rows over keys and values in codes of a byte: as in `decode`, with scales behind the products."""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.artifact.vocabulary import CLUSTERS
from cuda_compiler.attention.computed import functions_of
from cuda_compiler.attention.decode import (
    ATTENTION_DECODE,
    CLUSTER,
    DECODE_MACROS,
    WARPS,
    Division,
    are_fresh_rows,
    count_of_new,
    divide,
    division_macros,
    is_kept,
    launch_of,
)
from cuda_compiler.attention.mask import MaskBlocks
from cuda_compiler.attention.sizes import MAX_ROWS, PIECE, least_depth
from cuda_compiler.devices import cluster_cores, offers
from cuda_compiler.dialect import CUDA
from cuda_compiler.products.codes import number_macros
from cuda_compiler.rows import lower_rows
from cuda_compiler.shared import lower_shared
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.dtypes import FLOAT8_E4M3FN, FLOAT32, INT8, DType
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.cache_codes import SCALE_MACROS, Coded, is_coded, scale_macros, value_unit
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import CodedRows
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.target import Lowering
from npu_compiler.tensor.coded import LARGEST, LEAST_SCALE
from npu_compiler.tensor.view import View

__all__ = ["ATTENTION_CODES", "CODE_NUMBER_MACROS", "ROUNDING_MACROS", "are_fitting_codes", "code_number_macros"]
__all__ += ["loads_coded_rows", "lower_codes", "rounding_macros"]
__all__ += ["numbers_of_codes", "suits_codes", "written_codes"]

_MAX_SIZE = 128  # of a head: a lane holds its part of two pieces
_STEP = 32
_CHUNK = 16  # codes that a thread reads at a time
_DEPTH = 4  # pieces that a warp has on their way
_MAX_FRESH = 4  # new rows, whose numbers and codes lie in shared memory

CODE_NUMBER_MACROS = "vector_t BITS CODE_KIND FLOAT_MANTISSA FLOAT_SCALE CODEBOOK codebook_t ZEROS ZERO VALUE_UNIT"
"""What `code_number_macros` defines for a kernel's file."""
ROUNDING_MACROS = "LARGEST_CODE LEAST_SCALE"
"""What `rounding_macros` defines for a kernel's file."""

ATTENTION_CODES = replace(
    ATTENTION_DECODE,
    entry="attention_codes",
    macros=f"{DECODE_MACROS} KEPT {CODE_NUMBER_MACROS} {ROUNDING_MACROS} {SCALE_MACROS}",
    inputs="fresh k v k_scales v_scales mask sinks? states partial",
    files=(
        "mask.cuh tensor_cores.cuh grouped_codes.cuh float8_codes.cuh attention_blocks.cuh attention_common.cuh "
        "attention_warp.cuh attention_inputs.cuh attention_coded_rows.cuh attention_coded_stages.cuh barriers.cuh "
        "clusters.cuh attention_cluster.cuh attention_open.cuh attention_share.cuh"
    ),
)


def loads_coded_rows(group: Group, position: int, operand: Operand, device: DeviceModel) -> bool:
    """Whether the device's kernel reads keys or values as codes, and rounds what is new among them."""
    problem = group.problem
    if not isinstance(operand, CodedRows) or not isinstance(problem, Attention) or problem.causal:
        return False
    if not offers(device, CLUSTERS) or problem.shared * problem.rows > MAX_ROWS or not are_fitting_codes(operand):
        return False
    return operand.fresh is None or _are_fresh(operand)


def are_fitting_codes(operand: Coded) -> bool:
    """Whether a warp multiplies codes of this type and of heads of this size."""
    size = operand.shape[3]
    fits = size % _STEP == 0 and size <= _MAX_SIZE and operand.kind in (INT8, FLOAT8_E4M3FN)
    return fits and operand.has_chunks(_CHUNK)


def _are_fresh(operand: CodedRows) -> bool:
    """Whether codes and scales of whole rows of all heads are replaced."""
    fresh = operand.fresh
    assert fresh is not None
    whole = operand.view.same_elements(operand.tensor.view) and fresh.codes.shape[2] <= _MAX_FRESH
    scales, tensor = fresh.scales, operand.scale.tensor
    seen = operand.scale.view.same_elements(tensor.view.expand(operand.shape))
    strides = tensor.layout.strides
    apart = View(scales.shape, (strides[0], strides[1], 0, strides[3]))
    by_row = scales.index_stride == strides[2] and scales.view.same_elements(apart)
    return whole and seen and by_row and are_fresh_rows(fresh.codes, operand.tensor)


def suits_codes(problem: Attention, device: DeviceModel, block: int) -> bool:
    """Whether `lower_codes` takes it: keys and values are codes of one type, as many of both are new, or none."""
    k, v = problem.k, problem.v
    if not isinstance(k, CodedRows) or not isinstance(v, CodedRows) or k.kind != v.kind:
        return False
    return count_of_new(problem) is not None and divide(problem, block, device, parted=False) is not None


def numbers_of_codes(problem: Attention, lowering: Lowering) -> list[KernelCall]:
    """Launches that store the numbers of keys and values in codes, once what is new among them is there."""
    return _staged(problem, lowering, True)


def written_codes(problem: Attention, lowering: Lowering) -> list[KernelCall]:
    """Launches that store what is new among keys and values in codes."""
    return _staged(problem, lowering, False)


def _staged(problem: Attention, lowering: Lowering, with_numbers: bool) -> list[KernelCall]:
    stages: dict[int, list[Group]] = {}
    for operand in (operand for operand in (problem.k, problem.v) if is_coded(operand)):
        ahead = () if operand.fresh is None else operand.fresh.stages
        last = ((operand.made,),) if with_numbers else ()
        for number, stage in enumerate((*ahead, *last), -len(ahead)):
            stages.setdefault(number, []).extend(stage)
    calls: list[KernelCall] = []
    for number in sorted(stages):
        alone = [group for group in stages[number] if not group.is_elementwise]
        together = [group for group in stages[number] if group.is_elementwise]
        calls += [call for group in alone for call in lower_rows(group, lowering)]
        calls += lower_shared(together, lowering)
    return calls


def lower_codes(problem: Attention, around: AnchoredGroup, blocks: MaskBlocks) -> KernelCall:
    """One launch, for what `suits_codes` takes; arguments as those of `decode.lower_decode`."""
    k, v, lowering = problem.k, problem.v, around.lowering
    division = divide(problem, blocks.positions, around.device, parted=False)
    assert isinstance(k, CodedRows)
    assert isinstance(v, CodedRows)
    assert division is not None
    division = _with_all_on_their_way(division, lowering.device)
    fresh, functions = count_of_new(problem), functions_of(problem, lowering, one_place=False, elements=True)
    early = blocks.ready and all(is_kept(part, lowering, bool(fresh)) for part in (k, v, k.scale, v.scale))
    caches = {"k": k.argument, "v": v.argument, "k_scales": k.scale.argument, "v_scales": v.scale.argument}
    macros = {
        **division_macros(division),
        "FRESH": fresh,
        "EARLY": int(early),
        **functions.macros,
        "KEPT": "" if fresh else "const",
        **code_number_macros(k, v, problem.q.dtype),
        **rounding_macros(k.kind),
        **scale_macros(k, v, CUDA),
    }
    launch = launch_of(ATTENTION_CODES, division, functions, macros, caches, blocks, early, lowering)
    return around.of_problem(problem.with_operand(0, problem.q.in_memory)).launch(launch, around.pack_size(2))


def _with_all_on_their_way(division: Division, device: DeviceModel) -> Division:
    """The division whose warps have up to four pieces on their way, in blocks that are alone on their multiprocessor.

    Where blocks are more than that, two share one, with half as many pieces.
    """
    pieces = ceil_div(division.problem.length, division.block) * division.block // PIECE
    held, blocks = cluster_cores(device)[CLUSTER], division.tiles * division.cluster
    clusters = min(division.clusters, max(1, held // blocks))
    depth = _DEPTH if blocks <= held else _DEPTH // 2
    needed = ceil_div(pieces, clusters * division.cluster * WARPS)
    least = least_depth(division.problem, division.rows)
    return replace(division, clusters=clusters, depth=max(least, min(depth, needed)))


def rounding_macros(kind: DType) -> dict[str, object]:
    """What a kernel's file is told of how rows are rounded to codes."""
    return {"LARGEST_CODE": CUDA.literal(LARGEST[kind], FLOAT32), "LEAST_SCALE": CUDA.literal(LEAST_SCALE, FLOAT32)}


def code_number_macros(k: Coded, v: Coded, dtype: DType) -> dict[str, object]:
    """What a kernel's file is told of codes that become numbers of a half precision."""
    return {
        **number_macros(k.kind, dtype),
        "vector_t": CUDA.storage[dtype.name],
        "BITS": 8,
        "CODEBOOK": 0,
        "codebook_t": "uint8",  # of none
        "ZEROS": 0,
        "ZERO": 0,
        "VALUE_UNIT": CUDA.literal(value_unit(v.kind), FLOAT32),
    }
