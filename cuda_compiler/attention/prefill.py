"""Lowers attention of many rows for compute capability 9.0, whose warpgroups multiply straight from shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.artifact.extensions import TensorMap
from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.attention.mask import MASK_MACROS, MaskBlocks, mask_macros
from cuda_compiler.attention.pages import PAGE_MACROS, are_tables_settled, pages
from cuda_compiler.attention.sizes import SIZE_MACROS, bindings, operand_values, size_macros
from cuda_compiler.devices import offers
from cuda_compiler.packing import CHUNK, CHUNK_BYTES
from cuda_compiler.tiles.wgmma import warpgroup_product
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import FLOAT32
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import Paged
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["ATTENTION_PREFILL", "is_for_warpgroups", "lower_prefill"]

_PANEL = 64  # columns that lie side by side in shared memory
_MAX_SIZE = 128

ATTENTION_PREFILL = KernelTemplate(
    "attention_prefill",
    params=(
        "int rows, q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, mask_batch, "
        "mask_head, mask_row, state_batch, state_head, state_parts"
    ),
    macros=(
        f"{SIZE_MACROS} LAYERS RESULT_TILES BLOCK STAGES WARPGROUPS_M WARPGROUPS_L SPLITS SPLIT_TILES CAUSAL "
        f"MASK_STEP MASK_CHUNKS {MASK_MACROS} STATE_ROWS STATE_BLOCK STATES_READY PAGES_READY {PAGE_MACROS}"
    ),
    inputs="q k v mask sinks? states partial pages?",
    threads=lambda macros: 128 * (1 + macros["WARPGROUPS_M"] * macros["WARPGROUPS_L"]),
    shared_bytes=None,
    files=(
        "mask.cuh tensor_cores.cuh warpgroups.cuh barriers.cuh copy_engine.cuh attention_blocks.cuh "
        "attention_places.cuh attention_ring.cuh attention_rows.cuh attention_finish.cuh"
    ),
    computed="pages",
)


@dataclass(frozen=True)
class _Costs(FamilyConstants, family="attention_prefill"):
    """How many blocks of positions are worth a block of threads."""

    split_tiles: int


@dataclass(frozen=True)
class _Division:
    """How the work is divided.

    Attributes:
        problem: What is to be computed.
        device: What it is computed on.
        warpgroups_m: Warpgroups along the rows, 64 each.
        warpgroups_l: Warpgroups that take turns at the blocks of positions.
        block: Positions of a block.
        stages: Blocks of keys, and of values, in shared memory at a time.
    """

    problem: Attention
    device: DeviceModel
    warpgroups_m: int
    warpgroups_l: int
    block: int
    stages: int

    @property
    def layers(self) -> int:
        return self.problem.batch * self.problem.groups

    @property
    def tiles(self) -> int:
        """Tiles of rows, of all heads of keys."""
        return ceil_div(self.problem.shared * self.problem.rows, 64 * self.warpgroups_m) * self.layers

    @property
    def tiles_alone(self) -> int:
        """Tiles that decide how each is divided: of texts in pages those of one, which is the same in any company."""
        return self.tiles // self.problem.batch if isinstance(self.problem.k, Paged) else self.tiles

    @property
    def split_tiles(self) -> int:
        """Blocks of positions that are worth a block of threads."""
        return _Costs.of(self.device).split_tiles

    @property
    def splits(self) -> int:
        """Blocks of threads for the positions of one tile of rows, where the rows alone leave the device idle."""
        blocks = ceil_div(self.problem.length, self.block)
        return max(1, min(self.device.cores // self.tiles_alone, blocks // self.split_tiles))

    @property
    def shared_bytes(self) -> int:
        """Panels of 128 bytes a line, then barriers and the list of open blocks; see attention_ring.cuh."""
        queries, values = ceil_div(self.problem.size, _PANEL), ceil_div(self.problem.value_size, _PANEL)
        lines = queries * 64 * self.warpgroups_m + (queries + values) * self.stages * self.block
        return lines * 128 + (1 + 4 * self.stages) * 8 + 8 + ceil_div(self.problem.length, self.block) * 4

    def parts_bytes(self) -> int:
        """What all splits of all tiles leave in memory."""
        numbers = self.problem.value_size // 2 + 4  # of a thread
        return self.tiles * self.splits * numbers * 128 * self.warpgroups_m * FLOAT32.size

    def maps(self) -> dict[str, Argument]:
        """How the copy engine sees keys and values: a block of positions, a panel of columns at a time."""
        return {name: _map(operand, self.block) for name, operand in (("k", self.problem.k), ("v", self.problem.v))}


def _map(operand: Operand, block: int) -> Argument:
    """Lines of one position each, by heads and by elements of the batch or by pages; what these share is there once."""
    batch, heads, length, size = operand.shape
    outer, head, row, _ = operand.strides
    if isinstance(operand, Paged):
        length, outer = operand.page, operand.stride
        inside = (length - 1) * row + (heads - 1) * head + size
        batch = (prod(operand.tensor.layout.alloc_shape) - operand.offset - inside) // outer + 1
    item = operand.dtype.size
    sizes = size, length, heads if head else 1, batch if outer else 1
    strides = tuple((step or CHUNK) * item for step in (row, head, outer))
    return replace(operand.argument, extension=TensorMap(operand.dtype, sizes, strides, (_PANEL, block, 1, 1)))


def is_for_warpgroups(problem: Attention, device: DeviceModel) -> bool:
    """Whether `lower_prefill` takes it: enough rows for a tile, heads of whole chunks, a list of blocks that fits."""
    sizes_fit = all(size % 16 == 0 and size <= _MAX_SIZE for size in (problem.size, problem.value_size))
    operands = problem.q, problem.k, problem.v
    copied = all(operand.has_chunks(CHUNK) for operand in operands)
    copied &= all(operand.stride % CHUNK == 0 for operand in operands if isinstance(operand, Paged))
    # A map of lines has steps from one to the next, and none that go back.
    copied &= all(operand.strides[2] > 0 and min(operand.strides) >= 0 for operand in (problem.k, problem.v))
    enough = problem.shared * problem.rows > 64 and problem.scale > 0 and not problem.cap
    if not (enough and sizes_fit and copied and offers(device, WARPGROUPS)):
        return False
    return _divide(problem, device).shared_bytes <= device.shared_bytes


def lower_prefill(problem: Attention, around: AnchoredGroup, blocks: MaskBlocks) -> KernelCall:
    """The launch that computes attention for which `is_for_warpgroups` holds.

    Args:
        problem: The attention.
        around: The same, with its epilogue.
        blocks: What each block of the mask does.
    """
    division, lowering = _divide(problem, around.device), around.lowering
    parts_bytes = division.parts_bytes() if division.splits > 1 else 0
    dtype = problem.q.dtype.name
    products = [
        warpgroup_product(division.block, dtype, "multiply_keys"),
        warpgroup_product(problem.value_size, dtype, "multiply_values", a_in_registers=True, b_along_columns=True),
    ]
    launch = Launch(
        ATTENTION_PREFILL,
        grid=(division.tiles, division.splits, 1),
        values=ATTENTION_PREFILL.values_among(operand_values(problem, blocks.rows)),
        macros={
            **_macros(division, blocks.positions),
            "STATE_ROWS": blocks.rows,
            "STATE_BLOCK": blocks.positions,
            "STATES_READY": int(blocks.ready),
            "PAGES_READY": int(blocks.ready and are_tables_settled(problem, lowering)),
        },
        inputs={**bindings(problem, blocks.states, parts_bytes, lowering), **division.maps()},
        flops=problem.flops,
        text="\n".join(products),
        prologues=pages(problem, lowering),
        shared_bytes=division.shared_bytes,
    )
    return around.launch(launch, around.pack_size())


def _divide(problem: Attention, device: DeviceModel) -> _Division:
    """Tiles of 128 rows where they fill the device; else of 64, whose positions two warpgroups share."""
    whole = _Division(problem, device, warpgroups_m=2, warpgroups_l=1, block=128, stages=3)
    if whole.tiles_alone < device.cores or (isinstance(problem.k, Paged) and problem.k.page % whole.block):
        return _Division(problem, device, warpgroups_m=1, warpgroups_l=2, block=64, stages=4)
    return whole if whole.shared_bytes <= device.shared_bytes else replace(whole, stages=2)


def _macros(division: _Division, states: int) -> dict[str, object]:
    """With blocks of so many positions whose states are known."""
    problem = division.problem
    return {
        **size_macros(problem),
        "LAYERS": division.layers,
        "RESULT_TILES": division.tiles,
        "BLOCK": division.block,
        "STAGES": division.stages,
        "WARPGROUPS_M": division.warpgroups_m,
        "WARPGROUPS_L": division.warpgroups_l,
        "SPLITS": division.splits,
        "SPLIT_TILES": division.split_tiles,
        "CAUSAL": int(problem.causal),
        "MASK_STEP": 1 if problem.mask is None else problem.mask.strides[3],
        "MASK_CHUNKS": int(problem.mask is not None and problem.mask.has_chunks(CHUNK_BYTES)),
        **mask_macros(problem, states),
    }
