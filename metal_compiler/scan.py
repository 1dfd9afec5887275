"""Lowers scans: threadgroups walk over columns that lie beside each other; several share one that is long."""

from __future__ import annotations

from metal_compiler.anchors import single_launch
from metal_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.scan import Scan
from npu_compiler.lowering.scan_steps import ScanKernels, scan_calls, scan_templates
from npu_compiler.lowering.target import Lowering, lowering_of

__all__ = ["SCAN", "SCAN_TOTALS", "lower_scan"]

SCAN_TOTALS, SCAN = scan_templates("LANES SLICES", "ITEMS value_t", "scan_states.metal", params=", chunks")
_KERNELS = ScanKernels(SCAN, SCAN_TOTALS, KERNELS, single_launch, most_slices=256, several=32, items=4, few_items=4)


@lowering_of(Scan)
def lower_scan(scan: Scan, group: Group, lowering: Lowering) -> list[KernelCall]:
    """As `scan_calls`."""
    return scan_calls(scan, group, lowering, _KERNELS)
