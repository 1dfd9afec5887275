"""Lowers scans: blocks walk over rows, or over neighbouring columns; several share one that is long."""

from __future__ import annotations

from dataclasses import dataclass

from cuda_compiler.anchors import anchor_epilogue, anchor_launch
from cuda_compiler.dialect import CUDA
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.integers import ceil_div, power_of_two
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.element import ELEMENT_MACROS, element_prologue
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.positions import epilogue_positions
from npu_compiler.lowering.problems.scan import Scan
from npu_compiler.lowering.scan_text import scan_functions, state_bytes
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["SCAN", "SCAN_TOTALS", "lower_scan"]

_MACROS = f"LANES SLICES ROWS {ELEMENT_MACROS}"
SCAN_TOTALS = KernelTemplate(
    "scan_totals",
    params="int columns, length, inner, chunk",
    macros=_MACROS,
    inputs="source?",
    outputs="totals",
    computed="source",
    threads=lambda macros: macros["LANES"] * macros["SLICES"] * macros["ROWS"],
    files="scan_states.cuh",
)
SCAN = KernelTemplate(
    "scan",
    params=SCAN_TOTALS.params,
    macros=f"{_MACROS} ITEMS element_t value_t",
    inputs="source totals",
    computed="source",
    threads=SCAN_TOTALS.threads,
    files="scan_states.cuh",
)
_MOST_SLICES = 512
_COLUMN_SLICES = 8
_LANES = 32
_BLOCK = 128  # threads that blocks of several rows have
_ITEMS = 8
_STATE_BYTES = 8  # beyond which a thread keeps fewer states
_FEW_TILES = 4  # for which one block takes no longer than two launches do
_MOST_CHUNKS = 512


@dataclass(frozen=True)
class _Division:
    """How threads share the work.

    Attributes:
        lanes: Neighbouring columns of a block; 1 where columns are contiguous.
        slices: Threads of a column.
        rows: Columns of a block that are not neighbours.
        items: Elements of a thread in a tile.
        chunk: Elements of a column that a block walks over.
        chunks: How many blocks share a column.
    """

    lanes: int
    slices: int
    rows: int
    items: int
    chunk: int
    chunks: int


@lowering_of(Scan)
def lower_scan(scan: Scan, group: Group, lowering: Lowering) -> list[KernelCall]:
    """One launch; ahead of it another that sums up chunks, where several blocks share a column.

    Raises:
        OpRefusal: A tensor that the source or the epilogue reads is too large.
    """
    division = _divide(scan, lowering.device)
    prologue, functions = element_prologue(scan.source, lowering, CUDA), scan_functions(scan, CUDA)
    totals = lowering.scratch(state_bytes(scan) * (scan.columns * division.chunks if division.chunks > 1 else 1))
    grid = (ceil_div(scan.columns, division.lanes * division.rows), division.chunks, 1)
    values = {"columns": scan.columns, "length": scan.length, "inner": scan.shape[2], "chunk": division.chunk}
    macros = {"LANES": division.lanes, "SLICES": division.slices, "ROWS": division.rows}
    launch = Launch(
        SCAN,
        grid=grid,
        values=values,
        macros={
            **macros,
            "ITEMS": division.items,
            "element_t": CUDA.register(scan.source.dtype),
            "value_t": CUDA.register(scan.value.dtype),
        },
        inputs={"totals": Argument(totals)},
        flops=scan.flops,
        text=functions,
        prologues={"source": prologue},
    )
    calls = [anchor_launch(launch, anchor_epilogue(group, epilogue_positions(group, lowering, "sum"), 1), lowering)]
    if division.chunks > 1:
        ahead = Launch(
            SCAN_TOTALS,
            grid=grid,
            values=values,
            macros=macros,
            outputs={"totals": Argument(totals, writes=True)},
            flops=scan.flops,
            text=functions,
            prologues={"source": prologue},
        )
        calls.insert(0, KERNELS.launch_alone(ahead, f"totals for {scan.result.name}", calls[0].nbytes // 2, lowering))
    return calls


def _divide(scan: Scan, device: DeviceModel) -> _Division:
    items = _ITEMS if state_bytes(scan) <= _STATE_BYTES else _ITEMS // 2
    if scan.shape[2] == 1:
        lanes, slices = 1, max(32, min(_MOST_SLICES, power_of_two(ceil_div(scan.length, items))))
        rows = max(1, _BLOCK // slices)
    else:
        lanes, slices, rows = _LANES, min(_COLUMN_SLICES, ceil_div(scan.length, items)), 1
    tiles, blocks = ceil_div(scan.length, slices * items), ceil_div(scan.columns, lanes * rows)
    wanted = 1 if tiles < _FEW_TILES else max(1, min(tiles, _MOST_CHUNKS, 4 * device.cores // blocks))
    walked = ceil_div(tiles, wanted)
    return _Division(lanes, slices, rows, items, walked * slices * items, ceil_div(tiles, walked))
