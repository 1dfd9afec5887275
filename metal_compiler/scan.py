"""Lowers scans: threadgroups walk over columns that lie beside each other; several share one that is long."""

from __future__ import annotations

from dataclasses import dataclass

from metal_compiler.anchors import anchor_epilogue, anchor_launch
from metal_compiler.dialect import METAL
from metal_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.integers import ceil_div, power_of_two
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.element import ELEMENT_MACROS, element_prologue
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.scan import Scan
from npu_compiler.lowering.scan_text import scan_functions, state_bytes
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["SCAN", "SCAN_TOTALS", "lower_scan"]

_MACROS = f"LANES SLICES {ELEMENT_MACROS}"
SCAN_TOTALS = KernelTemplate(
    "scan_totals",
    params="int columns, length, inner, chunk, chunks",
    macros=_MACROS,
    inputs="source?",
    outputs="totals",
    computed="source",
    threads=lambda macros: macros["LANES"] * macros["SLICES"],
    files="scan_states.metal",
)
SCAN = KernelTemplate(
    "scan",
    params=SCAN_TOTALS.params,
    macros=f"{_MACROS} ITEMS value_t",
    inputs="totals source?",
    computed="source",
    threads=SCAN_TOTALS.threads,
    files="scan_states.metal",
)
_MOST_SLICES = 256
_COLUMN_SLICES = 8
_LANES = 32
_ITEMS = 4
_FEW_TILES = 4  # for which one threadgroup takes no longer than two launches do
_MOST_CHUNKS = 512


@dataclass(frozen=True)
class _Division:
    """How threads share the work.

    Attributes:
        lanes: Neighbouring columns of a threadgroup.
        slices: Threads of a column.
        chunk: Elements of a column that a threadgroup walks over.
        chunks: How many threadgroups share a column.
    """

    lanes: int
    slices: int
    chunk: int
    chunks: int


@lowering_of(Scan)
def lower_scan(scan: Scan, group: Group, lowering: Lowering) -> list[KernelCall]:
    """One launch; ahead of it another that sums up chunks, where several threadgroups share a column.

    Raises:
        OpRefusal: A tensor that the source or the epilogue reads is too large.
    """
    division = _divide(scan, lowering.device)
    prologue, functions = element_prologue(scan.source, lowering, METAL), scan_functions(scan, METAL)
    totals = lowering.scratch(state_bytes(scan) * (scan.columns * division.chunks if division.chunks > 1 else 1))
    grid = (ceil_div(scan.columns, division.lanes), division.chunks, 1)
    values = {
        "columns": scan.columns, "length": scan.length, "inner": scan.shape[2],
        "chunk": division.chunk, "chunks": division.chunks,
    }  # fmt: skip
    macros = {"LANES": division.lanes, "SLICES": division.slices}
    launch = Launch(
        SCAN,
        grid=grid,
        values=values,
        macros={**macros, "ITEMS": _ITEMS, "value_t": METAL.register(scan.value.dtype)},
        inputs={"totals": Argument(totals)},
        flops=scan.flops,
        text=functions,
        prologues={"source": prologue},
    )
    calls = [anchor_launch(launch, anchor_epilogue(group, lowering), lowering)]
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
    if scan.shape[2] == 1:
        lanes, slices = 1, max(32, min(_MOST_SLICES, power_of_two(ceil_div(scan.length, _ITEMS))))
    else:
        lanes, slices = _LANES, min(_COLUMN_SLICES, ceil_div(scan.length, _ITEMS))
    tiles, groups = ceil_div(scan.length, slices * _ITEMS), ceil_div(scan.columns, lanes)
    wanted = 1 if tiles < _FEW_TILES else max(1, min(tiles, _MOST_CHUNKS, 4 * device.cores // groups))
    walked = ceil_div(tiles, wanted)
    return _Division(lanes, slices, walked * slices * _ITEMS, ceil_div(tiles, walked))
