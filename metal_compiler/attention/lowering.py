"""Lowers attention: one launch, or two where a long cache is shared out among threadgroups."""

from __future__ import annotations

from dataclasses import dataclass

from metal_compiler.anchors import KernelText, anchor_kernel
from metal_compiler.dialect import METAL
from metal_compiler.skeleton import assemble, kernel_file
from metal_compiler.tiles.tiling import GROUP, TILE_THREADS, chunk_of
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import BOOL, FLOAT32, DType
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import traffic_of
from npu_compiler.lowering.params import ParamStruct
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.target import Lowering, lowering_of

__all__ = ["ATTENTION_FIELDS", "COMBINE_FIELDS", "lower_attention"]

ATTENTION_FIELDS = (
    *("rows", "length", "heads", "groups", "part", "all_rows"),
    *("q_batch", "q_head", "q_row", "q_step"),
    *("k_batch", "k_head", "k_row", "k_step"),
    *("v_batch", "v_head", "v_row", "v_step"),
    *("mask_batch", "mask_head", "mask_row"),
)
COMBINE_FIELDS = ("rows", "all_rows", "parts")

_MASK_NONE, _MASK_BOOLEAN, _MASK_ADDED = range(3)


@dataclass(frozen=True)
class _Costs:
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


@lowering_of(Attention)
def lower_attention(problem: Attention, group: Group, lowering: Lowering) -> list[KernelCall]:
    """``softmax(q @ k.T * scale + mask) @ v`` for each head, without storing the scores."""
    division = _divide(problem, lowering.device)
    if division.parts > 1:
        return _lower_parts(division, group, lowering)
    inputs = _inputs(problem)
    text = KernelText(
        "attention",
        len(inputs),
        ATTENTION_FIELDS,
        {**_definitions(division), "PARTIAL": 0},
        ("store.metal", "tile.metal"),
    )
    kernel = anchor_kernel(text, group, lowering)
    return [kernel.launch(inputs, _values(division), _grid(division), 32 * division.simdgroups, problem.flops)]


def _divide(problem: Attention, device: DeviceModel) -> _Division:
    costs = device.constants("attention", _Costs)
    tile = problem.q.dtype if len(problem.dtypes) == 1 else FLOAT32
    rows, value_size = problem.shared * problem.rows, problem.value_size
    matrices = _is_matrices(problem.k, tile) and _is_matrices(problem.v, tile)
    direct = rows <= costs.few_rows and value_size % 64 == 0 and matrices
    tile_rows, block = _tile(rows, max(problem.size, value_size) * tile.size)
    simdgroups = TILE_THREADS // 32
    if direct:  # as many as there are matrices side by side in the result, and in the scores
        simdgroups = 16 if value_size % 128 == 0 else 8
        block = 8 * simdgroups
    threadgroups = problem.batch * problem.groups * ceil_div(rows, tile_rows)
    parts = _parts(problem.length, threadgroups, device)
    return _Division(problem, tile, tile_rows, block, direct, simdgroups, parts)


def _is_matrices(operand: Operand, tile: DType) -> bool:
    """Whether it can be loaded as 8x8 matrices of `tile`, and nothing but that."""
    _, _, rows, size = operand.shape
    return operand.dtype == tile and operand.strides[3] == 1 and rows % 8 == 0 and size % 8 == 0


def _chunk(operand: Operand, tile: DType) -> int:
    """Elements that the kernel copies at a time along a row."""
    return chunk_of(operand.dtype, tile, operand.strides[-1], (*operand.across(-1), operand.shape[-1]))


def _tile(rows: int, row_bytes: int) -> tuple[int, int]:
    """Query rows and positions of a step that threadgroup memory holds, given the bytes of a head."""
    most, block = (32, 32) if row_bytes <= 256 else (16, 32) if row_bytes <= 512 else (8, 16)
    return min(most, ceil_div(rows, 8) * 8), block


def _parts(length: int, threadgroups: int, device: DeviceModel) -> int:
    """In how many parts the positions are computed: a few rows over a long cache leave a GPU idle otherwise."""
    costs = device.constants("attention", _Costs)
    if length < costs.long:
        return 1
    return max(1, min(length // costs.least_part, device.cores * costs.busy_groups // threadgroups))


def _inputs(problem: Attention) -> list[Argument]:
    return [operand.argument for operand in problem.operands]


def _definitions(division: _Division) -> dict[str, object]:
    problem, tile = division.problem, division.tile
    definitions: dict[str, object] = {
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
    if problem.mask is not None:
        kind = problem.mask.dtype
        definitions["MASK"] = _MASK_BOOLEAN if kind == BOOL else _MASK_ADDED
        definitions["MASK_STEP"] = problem.mask.strides[3]
        definitions["mask_t"] = METAL.storage[kind.name]
    return definitions


def _values(division: _Division) -> dict[str, int]:
    problem = division.problem
    mask = {"mask_batch": 0, "mask_head": 0, "mask_row": 0}
    if problem.mask is not None:
        mask = {name: stride for name, stride in problem.strides("mask").items() if name in mask}
    return {
        "rows": problem.rows,
        "length": problem.length,
        "heads": problem.shared,
        "groups": problem.groups,
        "part": division.part,
        "all_rows": division.all_rows,
        **problem.strides("q", "k", "v"),
        **mask,
    }


def _grid(division: _Division) -> tuple[int, int, int]:
    problem = division.problem
    rows = problem.shared * problem.rows
    return ceil_div(rows, division.tile_rows), problem.batch * problem.groups, ceil_div(problem.length, division.part)


def _lower_parts(division: _Division, group: Group, lowering: Lowering) -> list[KernelCall]:
    """Each part stores its sums, its largest score and the sum of its weights; a second launch puts them together."""
    problem, grid = division.problem, _grid(division)
    part_rows = grid[2] * division.all_rows
    scratch = lowering.scratch(part_rows * (problem.value_size + 2) * FLOAT32.size)
    sums, rows = scratch, part_rows * problem.value_size * FLOAT32.size
    inputs = _inputs(problem)
    bindings = {name: len(inputs) + i for i, name in enumerate(("OUT_BUFFER", "PART_ROWS_BUFFER", "PARAMS_BUFFER"))}
    macros = {"GENERATED": "", **_definitions(division), "PARTIAL": 1, **bindings}
    defined = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    params = ParamStruct("Params", tuple(("int", name) for name in ATTENTION_FIELDS))
    body = "\n".join(map(kernel_file, ("tile.metal", "attention.metal")))
    first = KernelCall(
        label=" + ".join(group.nodes),
        kernel=lowering.kernel(assemble("attention", params, body, defined)),
        args=(*inputs, Argument(sums, writes=True), Argument(scratch, rows, writes=True)),
        params=params.pack(_values(division)),
        grid=grid,
        block=(32 * division.simdgroups, 1, 1),
        flops=problem.flops,
        nbytes=traffic_of(group, lowering.tensors),
    )
    text = KernelText("attention_combine", 2, COMBINE_FIELDS, {"VALUE_SIZE": problem.value_size}, ("store.metal",))
    combine = anchor_kernel(text, group, lowering)
    values = {"rows": problem.rows, "all_rows": division.all_rows, "parts": grid[2]}
    threads = division.all_rows * ceil_div(problem.value_size, GROUP)
    flops = 4 * part_rows * problem.value_size
    arguments = [Argument(sums), Argument(scratch, rows)]
    return [first, combine.launch(arguments, values, (ceil_div(threads, TILE_THREADS), 1, 1), TILE_THREADS, flops)]
