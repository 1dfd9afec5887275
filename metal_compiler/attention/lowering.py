"""Lowers attention: one launch, or two where a long cache is shared out among threadgroups."""

from __future__ import annotations

from dataclasses import dataclass, replace

from metal_compiler.anchors import single_launch
from metal_compiler.attention.codes import CODE_MACROS, are_known_codes, code_inputs, code_macros, code_text
from metal_compiler.dialect import METAL
from metal_compiler.maps import lower_shared
from metal_compiler.skeleton import KERNELS
from metal_compiler.tiles.tiling import GROUP, TILE_THREADS, chunk_of
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import BOOL, FLOAT32, DType
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.cache_codes import is_coded, without_unlike_codes
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import traffic_of
from npu_compiler.lowering.paging import PAGE_MACROS, page_prologues, without_unlike_pages
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import InPages, Paged
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["ATTENTION", "ATTENTION_COMBINE", "ATTENTION_PART", "loads_pages", "lower_attention"]

_CODES_AT_A_TIME = 8
_PAGE_STEP = 32  # positions that pages have a multiple of, so that no block of positions lies in two

ATTENTION = KernelTemplate(
    "attention",
    params=(
        "int rows, length, heads, groups, part, all_rows, q_batch, q_head, q_row, q_step, k_batch, k_head, "
        "k_row, k_step, v_batch, v_head, v_row, v_step, mask_batch, mask_head, mask_row"
    ),
    macros=(
        "q_t k_t v_t tile_t HEAD_SIZE VALUE_SIZE TILE_M TILE_N BLOCK SIMDGROUPS DIRECT K_CHUNK V_CHUNK SCALE "
        "CAUSAL SOFT_CAP? MASK MASK_STEP? MASK_PERIOD? mask_t? SINK_STEP? sink_t? SINKS_AT? PARTIAL "
        f"{PAGE_MACROS} {CODE_MACROS}"
    ),
    inputs="q k v mask? sinks? k_scales? v_scales? pages?",
    threads=lambda macros: 32 * macros["SIMDGROUPS"],
    files="store.metal tile.metal",
    computed="pages",
)
ATTENTION_PART = replace(ATTENTION, files="tile.metal", outputs="out part_rows")
ATTENTION_COMBINE = KernelTemplate(
    "attention_combine",
    params="int rows, all_rows, parts",
    macros="VALUE_SIZE SINK_STEP? sink_t? SINKS?",
    inputs="part_sums part_rows sinks?",
    threads=TILE_THREADS,
    files="store.metal",
)

_MASK_NONE, _MASK_BOOLEAN, _MASK_ADDED = range(3)


@dataclass(frozen=True)
class _Costs(FamilyConstants, family="attention"):
    """What decides how the work is divided.

    Attributes:
        few_rows: So many that threadgroup memory holds their scores for large blocks.
        long: Positions from which on they are shared out.
        least_part: Positions that are worth a threadgroup.
        busy_groups: Threadgroups that keep a core busy.
    """

    few_rows: int
    long: int
    least_part: int
    busy_groups: int


@dataclass(frozen=True)
class _Division:
    """How the work is divided.

    Attributes:
        problem: What is to be computed.
        tile: Data type that operands are multiplied in.
        tile_rows, block: Query rows and positions of a step.
        direct: Whether keys and values are read as matrices where they lie.
        simdgroups: Simdgroups of a threadgroup.
        parts: Threadgroups that share the positions of a row.
    """

    problem: Attention
    tile: DType
    tile_rows: int
    block: int
    direct: bool
    simdgroups: int
    parts: int

    @property
    def all_rows(self) -> int:
        batch, heads, rows, _ = self.problem.q.shape
        return batch * heads * rows

    @property
    def part(self) -> int:
        """Positions of a part, whole blocks."""
        return ceil_div(self.problem.length, self.parts * self.block) * self.block


def loads_pages(group: Group, position: int, operand: Operand) -> bool:
    """Whether keys or values, numbers or codes, lie in pages that `attention.metal` reads."""
    if not isinstance(operand, InPages) or not isinstance(group.problem, Attention):
        return False
    reads = are_known_codes(operand) if is_coded(operand) else isinstance(operand, Paged) and operand.fresh is None
    return reads and operand.page % _PAGE_STEP == 0


@lowering_of(Attention)
def lower_attention(problem: Attention, group: Group, lowering: Lowering) -> list[KernelCall]:
    """``softmax(q @ k.T * scale + mask) @ v`` for each head, without storing the scores."""
    copied = without_unlike_pages(problem) or without_unlike_codes(problem)
    if copied:
        group = replace(group, problem=problem.stored())
        return [*lower_shared(copied, lowering), *lower_attention(problem.stored(), group, lowering)]
    division = _divide(problem, lowering.device)
    if division.parts > 1:
        return _lower_parts(division, group, lowering)
    return [single_launch(_launch(ATTENTION, division, lowering, {}), group, lowering)]


def _launch(template: KernelTemplate, division: _Division, lowering: Lowering, outputs: dict[str, Argument]) -> Launch:
    problem = division.problem
    return Launch(
        template,
        grid=_grid(division),
        values=_values(division),
        macros={**_macros(division), "PARTIAL": int(division.parts > 1)},
        inputs={**problem.arguments, **code_inputs(problem)},
        outputs=outputs,
        flops=problem.flops,
        text=code_text(problem),
        prologues=page_prologues(problem, lowering, METAL),
    )


def _divide(problem: Attention, device: DeviceModel) -> _Division:
    costs = _Costs.of(device)
    tile = problem.q.dtype if len(problem.dtypes) == 1 else FLOAT32
    rows, value_size = problem.shared * problem.rows, problem.value_size
    matrices = _is_matrices(problem.k, tile) and _is_matrices(problem.v, tile)
    direct = rows <= costs.few_rows and value_size % 64 == 0 and matrices
    tile_rows, block = _tile(rows, max(problem.size, value_size) * tile.size)
    simdgroups = TILE_THREADS // 32
    if direct:  # as many as there are matrices side by side in the result, and in the scores
        simdgroups = 16 if value_size % 128 == 0 else 8
        block = 8 * simdgroups
    if isinstance(problem.k, InPages) and problem.k.page % block:
        direct, simdgroups = False, TILE_THREADS // 32
        _, block = _tile(rows, max(problem.size, value_size) * tile.size)
    threadgroups = problem.batch * problem.groups * ceil_div(rows, tile_rows)
    parts = _parts(problem.length, threadgroups, device)
    return _Division(problem, tile, tile_rows, block, direct, simdgroups, parts)


def _is_matrices(operand: Operand, tile: DType) -> bool:
    """Whether it can be loaded as 8x8 matrices of `tile`, and nothing but that."""
    _, _, rows, size = operand.shape
    return operand.dtype == tile and operand.strides[3] == 1 and rows % 8 == 0 and size % 8 == 0


def _chunk(operand: Operand, tile: DType) -> int:
    """Elements that the kernel copies at a time along a row."""
    if is_coded(operand):
        return _CODES_AT_A_TIME if operand.has_chunks(_CODES_AT_A_TIME) else 1
    return chunk_of(operand.dtype, tile, operand.strides[-1], (*operand.across(-1), operand.shape[-1]))


def _tile(rows: int, row_bytes: int) -> tuple[int, int]:
    """Query rows and positions of a step that threadgroup memory holds, given the bytes of a head."""
    most, block = (32, 32) if row_bytes <= 256 else (16, 32) if row_bytes <= 512 else (8, 16)
    return min(most, ceil_div(rows, 8) * 8), block


def _parts(length: int, threadgroups: int, device: DeviceModel) -> int:
    """In how many parts the positions are computed: a few rows over a long cache leave a GPU idle otherwise."""
    costs = _Costs.of(device)
    if length < costs.long:
        return 1
    return max(1, min(length // costs.least_part, device.cores * costs.busy_groups // threadgroups))


def _macros(division: _Division) -> dict[str, object]:
    problem, tile = division.problem, division.tile
    macros: dict[str, object] = {
        "q_t": METAL.storage[problem.q.dtype.name],
        "k_t": METAL.storage[problem.k.dtype.name],
        "v_t": METAL.storage[problem.v.dtype.name],
        "tile_t": METAL.storage[tile.name],
        "HEAD_SIZE": problem.size,
        "VALUE_SIZE": problem.value_size,
        "TILE_M": division.tile_rows,
        "TILE_N": ceil_div(problem.value_size, 32) * 32,
        "BLOCK": division.block,
        "SIMDGROUPS": division.simdgroups,
        "DIRECT": int(division.direct),
        "K_CHUNK": _chunk(problem.k, tile),
        "V_CHUNK": _chunk(problem.v, tile),
        "SCALE": METAL.literal(problem.scale, FLOAT32),
        "CAUSAL": int(problem.causal),
        "MASK": _MASK_NONE,
    }
    if problem.cap:
        macros["SOFT_CAP"] = METAL.literal(problem.cap, FLOAT32)
    if problem.mask is not None:
        kind = problem.mask.dtype
        macros["MASK"] = _MASK_BOOLEAN if kind == BOOL else _MASK_ADDED
        macros["MASK_STEP"] = problem.mask.strides[3]
        macros["mask_t"] = METAL.storage[kind.name]
    if problem.mask_period:
        macros["MASK_PERIOD"] = problem.mask_period
    if problem.sinks is not None:
        macros |= {**_sink_macros(problem.sinks), "SINKS_AT": 3 if problem.mask is None else 4}
    return {**macros, **code_macros(problem)}


def _sink_macros(sinks: Operand) -> dict[str, object]:
    return {"SINK_STEP": sinks.strides[0], "sink_t": METAL.storage[sinks.dtype.name]}


def _values(division: _Division) -> dict[str, int]:
    problem = division.problem
    known = {
        "rows": problem.rows,
        "length": problem.length,
        "heads": problem.shared,
        "groups": problem.groups,
        "part": division.part,
        "all_rows": division.all_rows,
        **problem.strides("q", "k", "v", "mask"),
    }
    return ATTENTION.values_among(known)


def _grid(division: _Division) -> tuple[int, int, int]:
    problem = division.problem
    rows = problem.shared * problem.rows
    return ceil_div(rows, division.tile_rows), problem.batch * problem.groups, ceil_div(problem.length, division.part)


def _lower_parts(division: _Division, group: Group, lowering: Lowering) -> list[KernelCall]:
    """Each part stores its sums, its largest score and the sum of its weights; a second launch puts them together."""
    problem, grid = division.problem, _grid(division)
    part_rows = grid[2] * division.all_rows
    scratch = lowering.scratch(part_rows * (problem.value_size + 2) * FLOAT32.size)
    rows = part_rows * problem.value_size * FLOAT32.size
    stored = {"out": Argument(scratch, writes=True), "part_rows": Argument(scratch, rows, writes=True)}
    part = _launch(ATTENTION_PART, division, lowering, stored)
    sinks = problem.sinks
    told = {} if sinks is None else {**_sink_macros(sinks), "SINKS": sinks.shape[0]}
    combine = Launch(
        ATTENTION_COMBINE,
        grid=(ceil_div(division.all_rows * ceil_div(problem.value_size, GROUP), TILE_THREADS), 1, 1),
        values={"rows": problem.rows, "all_rows": division.all_rows, "parts": grid[2]},
        macros={"VALUE_SIZE": problem.value_size, **told},
        inputs={
            "part_sums": Argument(scratch),
            "part_rows": Argument(scratch, rows),
            **({} if sinks is None else {"sinks": sinks.argument}),
        },
        flops=4 * part_rows * problem.value_size,
    )
    return [
        KERNELS.launch_alone(part, " + ".join(group.nodes), traffic_of(group, lowering.tensors), lowering),
        single_launch(combine, group, lowering),
    ]
