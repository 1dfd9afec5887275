"""Lowers attention: one launch, after one that sums up the mask for all layers that share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.artifact.vocabulary import CLUSTERS, WARPGROUPS
from cuda_compiler.attention.coded_pages import (
    PAGE_CODE_MACROS,
    are_coded_pages,
    page_code_macros,
    scale_inputs,
    suits_coded_pages,
)
from cuda_compiler.attention.codes import lower_codes, numbers_of_codes, suits_codes, written_codes
from cuda_compiler.attention.decode import lower_decode
from cuda_compiler.attention.mask import MASK_MACROS, MaskBlocks, has_states, mask_macros, mask_states
from cuda_compiler.attention.paged import lower_paged, suits_fresh
from cuda_compiler.attention.pages import PAGE_MACROS, pages
from cuda_compiler.attention.prefill import is_for_warpgroups, lower_prefill
from cuda_compiler.attention.sizes import SIZE_MACROS, bindings, operand_values, padded, size_macros
from cuda_compiler.early_launches import is_settled
from cuda_compiler.packing import CHUNK
from cuda_compiler.shared import lower_shared
from npu_compiler.artifact.plan import Argument, CallOption, KernelCall, Step, choice_of
from npu_compiler.dtypes import BFLOAT16, FLOAT16, FLOAT32
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.cache_codes import is_coded
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.paging import share_fresh_rows, without_unlike_pages
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import CodedPages, Computed, InPages, Paged, Scattered
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch
from npu_compiler.tensor.symbolic import OpRefusal

__all__ = ["ATTENTION", "lower_attention"]

_STAGES = 3  # as in attention_tile.cuh

ATTENTION = KernelTemplate(
    "attention",
    params=(
        "int rows, q_batch, q_head, q_row, q_step, k_batch, k_head, k_row, k_step, v_batch, v_head, v_row, "
        "v_step, mask_batch, mask_head, mask_row, mask_step, state_batch, state_head, state_parts"
    ),
    macros=(
        f"{SIZE_MACROS} SOFT_CAP? BLOCK WARPS_M WARPS_L SPLITS SPLIT_TILES ALONE_TILES Q_CHUNK K_CHUNK V_CHUNK CAUSAL "
        f"STATE_ROWS {MASK_MACROS} RESULT_TILES STATES_READY {PAGE_MACROS}"
    ),
    inputs="q k v k_scales? v_scales? mask sinks? states partial pages?",
    threads=lambda macros: 32 * macros["WARPS_M"] * macros["WARPS_L"],
    shared_bytes=None,
    files=(
        "mask.cuh tensor_cores.cuh attention_blocks.cuh attention_places.cuh attention_common.cuh attention_tile.cuh "
        "attention_plain_tile.cuh attention_store.cuh"
    ),
    computed="pages",
)

ATTENTION_OVER_CODES = replace(
    ATTENTION,
    macros=f"{ATTENTION.macros} {PAGE_CODE_MACROS}",
    files=(
        "mask.cuh tensor_cores.cuh grouped_codes.cuh attention_blocks.cuh attention_places.cuh attention_common.cuh "
        "attention_tile.cuh attention_coded_tile.cuh attention_store.cuh"
    ),
)


@dataclass(frozen=True)
class _Costs(FamilyConstants, family="attention_tiles"):
    """What decides how many blocks of threads share the positions of a row.

    Attributes:
        split_tiles: Blocks of positions that are worth a block of threads.
        alone_tiles: Those that one block of threads computes sooner than several would put their parts together.
    """

    split_tiles: int
    alone_tiles: int


@dataclass(frozen=True)
class _Division:
    """How the work is divided.

    Attributes:
        problem: What is to be computed.
        block: Positions of a step.
        warps_m, warps_l: How warps share the rows and the positions of a step.
        splits: Blocks of threads that share the positions of a row.
    """

    problem: Attention
    block: int
    warps_m: int
    warps_l: int
    splits: int

    @property
    def tile_rows(self) -> int:
        return 16 * self.warps_m

    @property
    def row_tiles(self) -> int:
        return ceil_div(self.problem.shared * self.problem.rows, self.tile_rows)

    @property
    def state_rows(self) -> int:
        """Rows of the mask that are summed up together, here and by the kernels beside this one."""
        return min(self.problem.rows, self.tile_rows, 64)

    @property
    def width(self) -> int:
        """Columns of a tile of values."""
        return padded(self.problem.value_size)

    @property
    def shared_bytes(self) -> int:
        query, values = padded(self.problem.size), self.width
        ring = _STAGES * self.block * max(_pitch(query), _pitch(values)) * 2
        return max(ring, self.tile_rows * _pitch(query) * 2, self.tile_rows * self.splits * 4)


@lowering_of(Attention)
def lower_attention(problem: Attention, group: Group, lowering: Lowering) -> list[Step]:
    """``softmax(q @ k.T * scale + mask) @ v`` for each head, without storing the scores.

    Raises:
        OpRefusal: Data types differ, or there are too many masks.
    """
    _check(problem)
    coded, in_pages = is_coded(problem.k) or is_coded(problem.v), are_coded_pages(problem)
    if coded and not (suits_coded_pages(problem) or suits_codes(problem, lowering.device, _block(problem))):
        return _after(numbers_of_codes(problem, lowering), _with_stored_caches(problem), group, lowering)
    copied = without_unlike_pages(problem)
    if copied:
        written = lower_shared(_fresh(problem), lowering)
        return _after([*written, *lower_shared(copied, lowering)], problem.stored(), group, lowering)
    caches = [operand.made for operand in (problem.k, problem.v) if isinstance(operand, Scattered)]
    if len(caches) == 1:  # keys or values alone are made ahead
        return _after(lower_shared(caches, lowering), _with_stored_caches(problem), group, lowering)
    if _fresh(problem) and not (share_fresh_rows(problem) and suits_fresh(problem)):
        return _after(lower_shared(_fresh(problem), lowering), _with_pages(problem, problem), group, lowering)
    coded = coded and not in_pages
    division = _divide(problem.stored() if coded else problem, lowering.device)
    around = AnchoredGroup.of(group, lowering)
    launches, states = mask_states(problem, lowering, division.state_rows, division.block)
    ready = _is_ready(problem, division, launches, states, lowering)
    alone = around.of_problem(_with_pages(problem.stored(), problem))
    made = [operand.made for operand in problem.operands if isinstance(operand, Computed | Scattered)] + _fresh(problem)
    producers = lower_shared(made, lowering)
    producers += numbers_of_codes(problem, lowering) if coded else written_codes(problem, lowering)
    options = [CallOption("", (*producers, _lower_tiles(division, alone, states, ready)))]
    blocks = MaskBlocks(states, division.state_rows, division.block, ready)
    paged = lower_paged(problem, around, blocks)
    elsewhere = coded or isinstance(problem.k, InPages)
    decode = None if elsewhere else lower_decode(problem, around, blocks)
    if coded:
        options.insert(0, CallOption(CLUSTERS, (lower_codes(problem, around, blocks),)))
    elif paged:
        options = [*paged, *options]
    elif decode is not None:
        options.insert(0, CallOption(CLUSTERS, (decode,)))
    elif not in_pages and is_for_warpgroups(problem, lowering.device):
        options.insert(0, CallOption(WARPGROUPS, (*producers, lower_prefill(problem, alone, blocks))))
    return [*launches, *choice_of(options)]


def _after(ahead: Sequence[Step], problem: Attention, group: Group, lowering: Lowering) -> list[Step]:
    """Launches ahead, and then those for the problem that these leave."""
    return [*ahead, *lower_attention(problem, replace(group, problem=problem), lowering)]


def _with_stored_caches(problem: Attention) -> Attention:
    """The same problem with all operands but queries in memory."""
    return problem.stored().with_operand(0, problem.q)


def _fresh(problem: Attention) -> list[Group]:
    """What is new among keys and values in pages."""
    operands = (operand for operand in (problem.k, problem.v) if isinstance(operand, Paged))
    return [operand.fresh for operand in operands if operand.fresh is not None]


def _with_pages(stored: Attention, problem: Attention) -> Attention:
    """A problem with the keys and values of another one that lie in pages, once all that is new is there."""
    for position, operand in enumerate(problem.operands):
        if isinstance(operand, Paged | CodedPages):
            stored = stored.with_operand(position, replace(operand, fresh=None))
    return stored


def _lower_tiles(division: _Division, around: AnchoredGroup, states: Argument, ready: bool) -> KernelCall:
    """The launch that every GPU can run; `ready` if the states were written before the launch ahead of it."""
    problem, lowering = division.problem, around.lowering
    tiles = division.row_tiles * problem.batch * problem.groups
    rows = tiles * division.splits * division.tile_rows if division.splits > 1 else 0
    parts_bytes = rows * (division.width + 2) * FLOAT32.size
    launch = Launch(
        ATTENTION_OVER_CODES if are_coded_pages(problem) else ATTENTION,
        grid=(division.row_tiles, division.splits, problem.batch * problem.groups),
        values=operand_values(problem, division.state_rows),
        macros={**_macros(division, lowering.device), "RESULT_TILES": tiles, "STATES_READY": int(ready)},
        inputs={**bindings(problem, states, parts_bytes, lowering), **scale_inputs(problem)},
        flops=problem.flops,
        prologues=pages(problem, lowering),
        shared_bytes=division.shared_bytes,
    )
    return around.launch(launch, around.pack_size(2))


def _is_ready(
    problem: Attention, division: _Division, launches: list[KernelCall], states: Argument, lowering: Lowering
) -> bool:
    """Whether what is looked at ahead of scores, states or else the mask, is there before the launch ahead begins."""
    mask = problem.mask
    if mask is None or (mask.is_constant and not has_states(problem, division.block)):
        return True
    looked_at = states.buffer if has_states(problem, division.block) else mask.tensor.index
    return not launches and bool(lowering.ask(is_settled, looked_at))


def _check(problem: Attention) -> None:
    """Refuses what these kernels do not compute."""
    if len(problem.dtypes) != 1 or not problem.dtypes <= {FLOAT16, BFLOAT16}:
        given = ", ".join(str(operand.number_type) for operand in (problem.q, problem.k, problem.v))
        raise OpRefusal(f"given query, key and value of {given}, expected all of float16 or all of bfloat16")


def _divide(problem: Attention, device: DeviceModel) -> _Division:
    """The division whose blocks of threads find room on the device.

    Raises:
        OpRefusal: None does: heads are too large.
    """
    rows = problem.shared * problem.rows
    block = _block(problem)
    warps_m, warps_l = _warps(rows, block)
    blocks = problem.batch * problem.groups * ceil_div(rows, 16 * warps_m)
    splits = _splits(ceil_div(problem.length, block), blocks, device)
    division = _Division(problem, block, warps_m, warps_l, splits)
    if division.shared_bytes > device.shared_bytes:
        raise OpRefusal(
            f"given heads of {problem.size} and {problem.value_size}, whose blocks take {division.shared_bytes} bytes "
            f"of shared memory, expected at most the {device.shared_bytes} that a block has on {device.name}"
        )
    return division


def _block(problem: Attention) -> int:
    """Positions of a step."""
    return 64 if max(padded(problem.size), padded(problem.value_size)) <= 128 else 32


def _chunk(operand: Operand) -> int:
    """Elements that are copied at a time along a row."""
    return CHUNK if operand.has_chunks(CHUNK) else 1


def _pitch(width: int) -> int:
    """Elements from one row of a tile to the next; see `place` in attention_common.cuh."""
    return width if width % 64 == 0 else width + CHUNK


def _warps(rows: int, block: int) -> tuple[int, int]:
    """Warps along the rows, 16 each, and along the positions of a block, at least 16 each."""
    if rows > 64:
        return (8, 1) if block == 64 else (4, 1)
    along_rows = 1 if rows <= 16 else 2 if rows <= 32 else 4
    return along_rows, max(1, min(4, block // 16) // along_rows)


def _splits(tiles: int, blocks: int, device: DeviceModel) -> int:
    """Blocks of threads for the positions of one tile of rows, where the rows alone leave the device idle."""
    return max(1, min(device.cores // blocks, ceil_div(tiles, _Costs.of(device).split_tiles)))


def _macros(division: _Division, device: DeviceModel) -> dict[str, object]:
    problem, costs = division.problem, _Costs.of(device)
    return {
        **size_macros(problem),
        "BLOCK": division.block,
        "WARPS_M": division.warps_m,
        "WARPS_L": division.warps_l,
        "SPLITS": division.splits,
        "SPLIT_TILES": costs.split_tiles,
        "ALONE_TILES": costs.alone_tiles,
        "Q_CHUNK": _chunk(problem.q),
        "K_CHUNK": _chunk(problem.k),
        "V_CHUNK": _chunk(problem.v),
        "CAUSAL": int(problem.causal),
        "STATE_ROWS": division.state_rows,
        **mask_macros(problem, division.block),
        **page_code_macros(problem),
    }
