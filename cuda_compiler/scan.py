"""Lowers scans: blocks walk over rows, or over neighbouring columns; several share one that is long."""

from __future__ import annotations

from cuda_compiler.anchors import single_launch
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.lowering.element import ELEMENT_MACROS
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.scan import Scan
from npu_compiler.lowering.scan_steps import ScanKernels, scan_calls
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate

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
_KERNELS = ScanKernels(SCAN, SCAN_TOTALS, KERNELS, single_launch, most_slices=512, several=128, items=8, few_items=4)


@lowering_of(Scan)
def lower_scan(scan: Scan, group: Group, lowering: Lowering) -> list[KernelCall]:
    """As `scan_calls`."""
    return scan_calls(scan, group, lowering, _KERNELS)
