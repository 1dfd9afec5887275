"""Lowers attention of many rows for compute capability 9.0, whose warpgroups multiply straight from shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuda_compiler.anchors import Epilogue, KernelText, LaunchShape, anchor_launch
from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.attention.mask import MaskBlocks, mask_macros
from cuda_compiler.attention.sizes import operand_values, size_macros
from cuda_compiler.devices import offers
from cuda_compiler.packing import pack_size
from cuda_compiler.tiles.wgmma import warpgroup_product
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import FLOAT32
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.positions import Positions
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.target import Lowering

__all__ = ["is_for_warpgroups", "lower_prefill"]

_PANEL = 64  # columns that lie side by side in shared memory
_MAX_SIZE = 128
_CHUNK = 8  # elements of 16 bytes
_FILES = (
    *("mask.cuh", "tensor_cores.cuh", "warpgroups.cuh"),
    *("attention_blocks.cuh", "attention_ring.cuh", "attention_rows.cuh", "attention_finish.cuh"),
)


@dataclass(frozen=True)
class _Costs:
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
    def split_tiles(self) -> int:
        """Blocks of positions that are worth a block of threads."""
        return self.device.constants("attention_prefill", _Costs).split_tiles

    @property
    def splits(self) -> int:
        """Blocks of threads for the positions of one tile of rows, where the rows alone leave the device idle."""
        blocks = ceil_div(self.problem.length, self.block)
        return max(1, min(self.device.cores // self.tiles, blocks // self.split_tiles))

    @property
    def threads(self) -> int:
        return 128 * (1 + self.warpgroups_m * self.warpgroups_l)

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


def is_for_warpgroups(problem: Attention, device: DeviceModel) -> bool:
    """Whether `lower_prefill` takes it: enough rows for a tile, heads of whole chunks, a list of blocks that fits."""
    sizes_fit = all(size % 16 == 0 and size <= _MAX_SIZE for size in (problem.size, problem.value_size))
    copied = all(operand.has_chunks(_CHUNK) for operand in (problem.q, problem.k, problem.v))
    enough = problem.shared * problem.rows > 64 and problem.scale > 0
    if not (enough and sizes_fit and copied and offers(device, WARPGROUPS)):
        return False
    return _divide(problem, device).shared_bytes <= device.shared_bytes


def lower_prefill(
    group: Group, lowering: Lowering, problem: Attention, positions: Positions, blocks: MaskBlocks
) -> KernelCall:
    """The launch that computes attention for which `is_for_warpgroups` holds.

    Args:
        group: What to compute, with its epilogue.
        lowering: Where the trace's tensors are.
        problem: The attention.
        positions: Operands of the epilogue.
        blocks: What each block of the mask does.
    """
    division = _divide(problem, lowering.device)
    parts = problem.k.argument
    if division.splits > 1:
        parts = Argument(lowering.scratch(division.parts_bytes()), writes=True)
    mask = problem.k if problem.mask is None else problem.mask
    dtype = problem.q.dtype.name
    products = [
        warpgroup_product(division.block, dtype, "multiply_keys"),
        warpgroup_product(problem.value_size, dtype, "multiply_values", a_in_registers=True, b_along_columns=True),
    ]
    return anchor_launch(
        KernelText(
            "attention_prefill",
            values=operand_values(problem, blocks.rows),
            macros={
                **_macros(division),
                "STATE_ROWS": blocks.rows,
                "STATE_BLOCK": blocks.positions,
                "STATES_READY": int(blocks.ready),
            },
            generated="\n".join(products),
            parts=_FILES,
        ),
        LaunchShape(
            blocks=division.tiles, threads=division.threads, splits=division.splits, shared_bytes=division.shared_bytes
        ),
        Epilogue(group, positions, pack_size(group, positions.operands, group.shape[-1])),
        lowering,
        inputs=(problem.q.argument, problem.k.argument, problem.v.argument, mask.argument, blocks.states, parts),
        flops=problem.flops,
    )


def _divide(problem: Attention, device: DeviceModel) -> _Division:
    """Tiles of 128 rows where they fill the device; else of 64, whose positions two warpgroups share."""
    whole = _Division(problem, device, warpgroups_m=2, warpgroups_l=1, block=128, stages=3)
    if whole.tiles < device.cores:
        return _Division(problem, device, warpgroups_m=1, warpgroups_l=2, block=64, stages=4)
    return whole if whole.shared_bytes <= device.shared_bytes else replace(whole, stages=2)


def _macros(division: _Division) -> dict[str, object]:
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
        **mask_macros(problem),
    }
