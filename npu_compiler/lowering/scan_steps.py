"""A scan by one launch or two: what targets share of it.

Groups of threads walk over rows, or over columns that lie beside each other. Where several share one that is long, a
launch ahead sums up their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.integers import ceil_div, power_of_two
from npu_compiler.lowering.anchors import KernelWriter
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.element import ELEMENT_MACROS, element_prologue
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.scan import Scan
from npu_compiler.lowering.scan_text import scan_functions, state_bytes
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["ScanKernels", "scan_calls", "scan_templates"]

_COLUMN_SLICES = 8
_LANES = 32
_FEW_TILES = 4  # for which one group of threads takes no longer than two launches do
_MOST_CHUNKS = 512
_STATE_BYTES = 8  # beyond which a thread keeps fewer states


def scan_templates(macros: str, of_results: str, files: str, params: str = "") -> tuple[KernelTemplate, KernelTemplate]:
    """The kernels that sum up parts of columns and that give the results, `ScanKernels.totals` and `ScanKernels.scan`.

    Args:
        macros: What a target's files are told of how threads share the work: ``LANES``, ``SLICES``, perhaps ``ROWS``.
        of_results: What the second one is told beside that.
        files: Those that both build on.
        params: Further parameters, with a comma ahead.
    """
    totals = KernelTemplate(
        "scan_totals",
        params=f"int columns, length, inner, chunk{params}",
        macros=f"{macros} {ELEMENT_MACROS}",
        inputs="source?",
        outputs="totals",
        computed="source",
        threads=lambda given: given["LANES"] * given["SLICES"] * given.get("ROWS", 1),
        files=files,
    )
    results = f"{totals.macros} {of_results}"
    return totals, replace(totals, entry="scan", macros=results, inputs="source? totals", outputs="")


@dataclass(frozen=True)
class ScanKernels:
    """A target's kernels, and their sizes.

    Attributes:
        scan: Gives the results.
        totals: Sums up parts of columns.
        writer: Writes them.
        finish: Makes a call of a launch, with the epilogue of a scan's group.
        most_slices: Threads of a column, at most.
        several: Threads of a group that has several rows.
        items, few_items: Elements of a thread in a tile; where a state is large.
    """

    scan: KernelTemplate
    totals: KernelTemplate
    writer: KernelWriter
    finish: Callable[[Launch, Group, Lowering], KernelCall]
    most_slices: int
    several: int
    items: int
    few_items: int


@dataclass(frozen=True)
class _Division:
    """How threads share the work.

    Attributes:
        lanes: Neighbouring columns of a group of threads; 1 where columns are contiguous.
        slices: Threads of a column.
        rows: Columns of a group that are not neighbours.
        items: Elements of a thread in a tile.
        chunk: Elements of a column that a group walks over.
        chunks: How many groups share a column.
    """

    lanes: int
    slices: int
    rows: int
    items: int
    chunk: int
    chunks: int


def scan_calls(scan: Scan, group: Group, lowering: Lowering, kernels: ScanKernels) -> list[KernelCall]:
    """One launch; ahead of it another that sums up chunks, where several groups of threads share a column.

    Args:
        scan: The problem.
        group: What the last launch computes.
        lowering: Where the launches are collected.
        kernels: The target's.

    Raises:
        OpRefusal: A tensor that the source or the epilogue reads is too large.
    """
    division, dialect = _divide(scan, lowering.device, kernels), kernels.writer.dialect
    prologue, functions = element_prologue(scan.source, lowering, dialect), scan_functions(scan, dialect)
    totals = lowering.scratch(state_bytes(scan) * (scan.columns * division.chunks if division.chunks > 1 else 1))
    values = {
        "columns": scan.columns, "length": scan.length, "inner": scan.shape[2],
        "chunk": division.chunk, "chunks": division.chunks,
    }  # fmt: skip
    macros = {
        "LANES": division.lanes, "SLICES": division.slices, "ROWS": division.rows, "ITEMS": division.items,
        "element_t": dialect.register(scan.source.dtype), "value_t": dialect.register(scan.value.dtype),
    }  # fmt: skip

    def launch(template: KernelTemplate, inputs: dict[str, Argument], outputs: dict[str, Argument]) -> Launch:
        return Launch(
            template,
            grid=(ceil_div(scan.columns, division.lanes * division.rows), division.chunks, 1),
            values=template.values_among(values),
            macros=template.macros_among(macros),
            inputs=inputs,
            outputs=outputs,
            flops=scan.flops,
            text=functions,
            prologues={"source": prologue},
        )

    calls = [kernels.finish(launch(kernels.scan, {"totals": Argument(totals)}, {}), group, lowering)]
    if division.chunks > 1:
        ahead = launch(kernels.totals, {}, {"totals": Argument(totals, writes=True)})
        label = f"totals for {scan.result.name}"
        calls.insert(0, kernels.writer.launch_alone(ahead, label, calls[0].nbytes // 2, lowering))
    return calls


def _divide(scan: Scan, device: DeviceModel, kernels: ScanKernels) -> _Division:
    items = kernels.items if state_bytes(scan) <= _STATE_BYTES else kernels.few_items
    if scan.shape[2] == 1:
        lanes, slices = 1, max(32, min(kernels.most_slices, power_of_two(ceil_div(scan.length, items))))
        rows = max(1, kernels.several // slices)
    else:
        lanes, slices, rows = _LANES, min(_COLUMN_SLICES, ceil_div(scan.length, items)), 1
    tiles, groups = ceil_div(scan.length, slices * items), ceil_div(scan.columns, lanes * rows)
    wanted = 1 if tiles < _FEW_TILES else max(1, min(tiles, _MOST_CHUNKS, 4 * device.cores // groups))
    walked = ceil_div(tiles, wanted)
    return _Division(lanes, slices, rows, items, walked * slices * items, ceil_div(tiles, walked))
