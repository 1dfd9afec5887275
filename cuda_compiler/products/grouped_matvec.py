"""Lowers products with up to 16 rows by a matrix in packed codes with groups, which is read once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.dialect import CUDA
from cuda_compiler.early_launches import EarlyLaunch
from cuda_compiler.products.codes import number_macros
from cuda_compiler.products.vectors import VECTOR_MACROS, vectors_of
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.codings import SmallFloat
from npu_compiler.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, UINT8, DType
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.candidates import THE_BEST, Candidate, best_candidates
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.forms import Computed, Dequantised, GroupedCodes
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.templates import KernelTemplate

__all__ = ["GROUPED_MATVEC", "MAX_ROWS", "PART_INPUTS", "PART_MACROS", "loads_grouped_codes", "lower_grouped_vectors"]
__all__ += ["computes_rows", "part_inputs", "part_macros", "part_rows", "suits_codes"]

MAX_ROWS = 16
_WARPS, _TILE, _QUAD = 8, 16, 4
_MAX_COMPUTED_ROWS = 8  # beyond which every block would compute for longer than a launch of its own takes
_SHARED_BYTES = 64 * 1024  # of a block, which every device has
_PART_ROW, _COLUMNS = 20, 8
_WIDE_DEPTH = 5  # beyond which registers do not hold the spans beside the sums of more than eight columns
_SCALES = (FLOAT16, BFLOAT16, FLOAT32)
_MOST_ZERO = 127  # beyond which a number less its zero point is not exact in bfloat16

PART_INPUTS = "matrix scales zeros biases entries"
"""What `part_inputs` binds, in order."""
PART_MACROS = (
    "scale_t zero_t bias_t codebook_t BITS ROWS SCALE_GROUP ZERO_GROUP BIAS_GROUP CODE_KIND FLOAT_MANTISSA FLOAT_SCALE "
    "CODEBOOK ZEROS ZERO_BITS ZERO BIASES"
)
"""What `part_macros` defines for a kernel's file."""

GROUPED_MATVEC = KernelTemplate(
    "grouped_matvec",
    params=("int outputs, tiles, matrix_row, vector_row, scale_row, zero_row, bias_row"),
    macros=(
        f"{PART_MACROS} COMMON VECTORS GROUP ONE_GROUP CHUNK ACCESS WARPS_K DEPTH RESIDENT STAGED STAGES VECTOR_PACKS "
        f"MATRIX_CONSTANT HURRIES {VECTOR_MACROS}"
    ),
    inputs=f"{PART_INPUTS} vector",
    files="tensor_cores.cuh grouped_codes.cuh streamed_loads.cuh",
    threads=32 * _WARPS,
    shared_bytes=None,
    computed="vector",
)


@dataclass(frozen=True)
class _Costs(FamilyConstants, family="grouped_vectors"):
    """What decides how threads share the work.

    Attributes:
        blocks: Blocks of a multiprocessor.
        in_flight: Loads of 16 bytes that a thread has on their way.
        alone_in_flight: The same where each multiprocessor has one block, and that one tile for each of its teams.
        share_cost: What it costs to put the parts of several warps together, in loads.
    """

    blocks: int
    in_flight: int
    alone_in_flight: int
    share_cost: int


@dataclass(frozen=True)
class _Geometry:
    """How a row of codes is divided among lanes.

    Attributes:
        chunk: Neighbouring codes of a lane.
        access: Bytes that it loads at a time.
        group: Codes of a group, a multiple of a span or a part of one.
        span_groups: Groups of a span, the chunks of four lanes.
        stages: Spans of the vectors that a warp holds at a time; 0 where a block holds whole vectors.
        shared: Bytes of shared memory of a block.
    """

    chunk: int
    access: int
    group: int
    span_groups: int
    stages: int
    shared: int

    @property
    def span(self) -> int:
        return _QUAD * self.chunk


@dataclass(frozen=True)
class _Work:
    """What threads share.

    Attributes:
        tiles: Of 16 rows.
        spans: Of each.
        lane_bytes: Of a lane's part of a span.
        is_wide: Whether the vectors, once for each group of a span, are more than eight columns.
    """

    tiles: int
    spans: int
    lane_bytes: int
    is_wide: bool


@dataclass(frozen=True)
class _Shape:
    """How threads share the work.

    Attributes:
        warps_k: Warps that share a tile.
        depth: Spans of a tile that each has on their way.
        resident: Blocks of a multiprocessor.
    """

    warps_k: int
    depth: int
    resident: int


def loads_grouped_codes(group: Group, position: int, operand: Operand) -> bool:
    """Whether an operand is packed codes that the kernel for a few rows loads."""
    problem = group.problem
    if not isinstance(operand, GroupedCodes) or not isinstance(problem, Product) or position != 1:
        return False
    if isinstance(problem.a.operand, Dequantised | GroupedCodes):
        return False
    found = problem.with_operand(position, operand)
    vector_fits = found.a.dtype in (FLOAT16, BFLOAT16) and found.a.k == 1
    few = 0 < found.m <= MAX_ROWS and found.batches == 1 and found.k > 0
    return few and vector_fits and suits_codes(operand) and _geometry(found, operand) is not None


def computes_rows(found: Product) -> bool:
    """Whether each block of the kernel can compute the rows that meet codes, those of a norm say."""
    codes, few = found.b.operand, found.m <= _MAX_COMPUTED_ROWS
    return few and isinstance(codes, GroupedCodes) and suits_codes(codes) and _geometry(found, codes) is not None


def suits_codes(codes: GroupedCodes) -> bool:
    """Whether the kernel makes numbers of such codes, exactly but for the rounding of 8-bit floats' and codebooks'."""
    parts = [part for part in (codes.scale, codes.bias, codes.codebook) if part is not None]
    if any(part.dtype not in _SCALES for part in parts):
        return False
    if codes.codebook is not None:
        return codes.bits == 4 and codes.codebook.shape[0] >= 16 and codes.zeros is None and codes.zero == 0
    if codes.number not in (UINT8, INT8):
        plain = codes.zeros is None and codes.zero == 0
        return plain and isinstance(codes.number.coding, SmallFloat) and codes.number.coding.mantissa in (2, 3)
    if codes.zeros is not None and codes.zeros.dtype not in (UINT8, INT8):
        return False
    return codes.zeros is not None or (codes.zero == int(codes.zero) and abs(codes.zero) <= _MOST_ZERO + 1)


def _geometry(found: Product, codes: GroupedCodes) -> _Geometry | None:
    """The largest chunks of which four make up groups, or of whose spans groups are made, and whose vectors fit; None
    where there are none.
    """
    whole = codes.group >= found.k
    largest = 16 if codes.bits == 8 else 32
    for chunk in (largest, largest // 2, largest // 4):
        span = _QUAD * chunk
        group = ceil_div(found.k, span) * span if whole else codes.group
        if chunk < 8 or (group % span and (span % group or group < chunk)):
            continue
        row_bytes = ceil_div(found.k * codes.bits, 8)
        access = gcd(chunk * codes.bits // 8, found.b.along, codes.offset, row_bytes, 16)
        for stages, shared in _shared_bytes(found, span, max(1, span // group)):
            if shared <= _SHARED_BYTES or (found.m == 1 and isinstance(found.a.operand, Computed)):
                return _Geometry(chunk, access, group, max(1, span // group), stages, shared)
    return None


def _shared_bytes(found: Product, span: int, span_groups: int) -> Iterator[tuple[int, int]]:
    """Ways to hold vectors, the best first: the spans of them that each warp holds at a time, 0 for all of them, and
    the bytes of a block's shared memory.
    """
    blocks = ceil_div(span_groups * _columns(found), _COLUMNS)
    parts = 4 * _WARPS * max(2, blocks) * _COLUMNS * _PART_ROW
    row = ceil_div(found.k, span) * span + 32
    computed = ceil_div(found.k, 8) * 8 if isinstance(found.a.operand, Computed) else 0
    yield 0, parts + 2 * found.m * (row + computed)
    if not computed and found.k % 8 == 0 and not any(n % 8 for n in found.a.across(along_k=True)):
        for stages in (3, 2):
            yield stages, parts + 2 * _WARPS * stages * found.m * (span + 32)


def lower_grouped_vectors(found: Product, around: AnchoredGroup) -> KernelCall:
    """One launch, of as many blocks as the device has room for, or fewer."""
    codes, vector, lowering, device = found.b.operand, found.a, around.lowering, around.device
    assert isinstance(codes, GroupedCodes)
    geometry = _geometry(found, codes)
    assert geometry is not None
    tiles, spans = ceil_div(found.n, _TILE), ceil_div(found.k, geometry.span)
    is_wide = _columns(found) * geometry.span_groups > _COLUMNS
    shape = _shape(_Work(tiles, spans, 2 * geometry.chunk * codes.bits // 8, is_wide), device)
    is_constant = all(lowering.tensors[index].source is None for index in codes.reads())
    blocks = min(ceil_div(tiles, _WARPS // shape.warps_k), device.cores * shape.resident)
    hurries = is_constant and blocks <= device.cores
    one_group = codes.group >= found.k and codes.bias is None
    vectors = vectors_of(vector, lowering, 32 * _WARPS, blocks)
    macros: dict[str, object] = {
        **part_macros(codes, vector.dtype),
        "vector_t": CUDA.storage[vector.dtype.name],
        "COMMON": found.k,
        "VECTORS": found.m,
        "GROUP": geometry.group,
        "ONE_GROUP": int(one_group),
        "CHUNK": geometry.chunk,
        "ACCESS": geometry.access,
        "WARPS_K": shape.warps_k,
        "DEPTH": shape.depth,
        "RESIDENT": shape.resident,
        "STAGED": int(not geometry.stages),
        "STAGES": geometry.stages,
        "VECTOR_PACKS": int(bool(vectors.prologues) or not any(n % 8 for n in vector.across(along_k=True))),
        "MATRIX_CONSTANT": int(is_constant),
        "HURRIES": int(hurries),
        **vectors.macros,
    }
    values = {
        "outputs": found.n,
        "tiles": tiles,
        "matrix_row": found.b.along,
        "vector_row": vector.along,
        **part_rows(codes),
    }
    launch = EarlyLaunch(
        GROUPED_MATVEC,
        grid=(blocks, 1, 1),
        values=values,
        macros=macros,
        inputs={**part_inputs(codes), **vectors.inputs},
        flops=found.flops,
        prologues=vectors.prologues,
        shared_bytes=geometry.shared,
        hurries=hurries,
    )
    return around.launch(launch, around.pack_size(2))


def part_inputs(codes: GroupedCodes) -> dict[str, Argument]:
    """What is bound for codes and their parts; the codes, which nobody reads there, for a part that is none."""
    parts = {"scales": codes.scale, "zeros": codes.zeros, "biases": codes.bias, "entries": codes.codebook}
    bound = {name: codes.argument if part is None else part.argument for name, part in parts.items()}
    return {"matrix": codes.argument, **bound}


def part_rows(codes: GroupedCodes) -> dict[str, int]:
    """Elements of scales, zero points and biases from one row to the next, as parameters of a kernel."""
    parts = {"scale": codes.scale, "zero": codes.zeros, "bias": codes.bias}
    return {f"{name}_row": 0 if part is None else part.strides[-1] for name, part in parts.items()}


def part_macros(codes: GroupedCodes, vector: DType) -> dict[str, object]:
    """What the kernel's file needs to be told of codes and of what belongs to them."""

    def storage(part: Operand | None) -> str:
        return CUDA.storage[(UINT8 if part is None else part.dtype).name]

    return {
        "scale_t": storage(codes.scale),
        "zero_t": storage(codes.zeros),
        "bias_t": "float" if codes.bias is None else storage(codes.bias),
        "codebook_t": storage(codes.codebook),
        "BITS": codes.bits,
        "ROWS": codes.rows,
        "SCALE_GROUP": codes.scale.strides[-2],
        "ZERO_GROUP": 0 if codes.zeros is None else codes.zeros.strides[-2],
        "BIAS_GROUP": 0 if codes.bias is None else codes.bias.strides[-2],
        **number_macros(codes.number, vector),
        "CODEBOOK": int(codes.codebook is not None),
        "ZEROS": int(codes.zeros is not None),
        "ZERO_BITS": codes.zero_bits,
        "ZERO": int(codes.zero),
        "BIASES": int(codes.bias is not None),
    }


def _columns(found: Product) -> int:
    """Columns of a product on tensor cores for each group of a span."""
    return next(size for size in (2, 4, 8, 16) if found.m <= size)


def _shape(work: _Work, device: DeviceModel) -> _Shape:
    return best_candidates(_candidates(work, device), THE_BEST)[0].sizes


def _candidates(work: _Work, device: DeviceModel) -> Iterator[Candidate[_Shape]]:
    """Tiles shared by one warp or several: as long as the loads of one thread take, at the pace of the memory."""
    costs = _Costs.of(device)
    for warps_k in (8, 4, 2, 1):
        passes, alone = ceil_div(work.spans, warps_k), ceil_div(work.tiles, _WARPS // warps_k) <= device.cores
        most = (costs.alone_in_flight if alone else costs.in_flight) * 16 // work.lane_bytes
        most = max(1, min(most, _WIDE_DEPTH) if work.is_wide else most)
        depth = ceil_div(passes, ceil_div(passes, most))
        shape = _Shape(warps_k, depth, 1 if alone else costs.blocks)
        each = ceil_div(work.tiles, device.cores * costs.blocks * (_WARPS // warps_k))
        loads = each * (passes * work.lane_bytes / 16 + costs.share_cost)
        loaded_bytes = device.cores * costs.blocks * 32 * _WARPS * 16  # by one load of all threads
        clocks = loads * (loaded_bytes / device.memory_a_clock)
        yield Candidate(costs.family, shape, device.microseconds(clocks))
