"""Lowers sorting: rows that a threadgroup holds are sorted there; of longer ones segments are, which are merged.

Where no more than a part of a segment is wanted, each segment keeps that, and what they keep is sorted again.
"""

from __future__ import annotations

from collections.abc import Mapping

from metal_compiler.anchors import anchor_epilogue, anchor_launch
from metal_compiler.dialect import METAL
from metal_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.integers import power_of_two
from npu_compiler.lowering.element import element_prologue
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.sort import Sort
from npu_compiler.lowering.sort_steps import Sorting, SortKernels
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch, Prologue

__all__ = ["SORT", "SORT_MERGE", "SORT_PLACES", "SORT_SEGMENT", "lower_sort"]

_ENTRY_MACROS = "WIDE DESCENDING"
_ENTRIES, _NETWORK = "sort_entries.metal", "sort_network.metal"
_SEGMENT_MACROS = f"{_ENTRY_MACROS} THREADS SEGMENT SEGMENTS RUN FROM_RUNS SOURCE_PARAMETERS? SOURCE_ARGUMENTS?"
_SEGMENT_FILES = f"{_ENTRIES} {_NETWORK} sort_segments.metal"


def _threads(macros: Mapping[str, object]) -> int:
    return int(str(macros["THREADS"]))


_PLACES_THREADS = 256
SORT = KernelTemplate(
    "sort",
    params="int rows, inner, length, count",
    macros=_SEGMENT_MACROS,
    inputs="runs? source?",
    computed="source",
    threads=_threads,
    files=_SEGMENT_FILES,
)
SORT_SEGMENT = KernelTemplate(
    "sort_segment",
    params="int rows, inner, length",
    macros=_SEGMENT_MACROS,
    inputs="runs? source?",
    outputs="kept",
    computed="source",
    threads=_threads,
    files=_SEGMENT_FILES,
)
SORT_MERGE = KernelTemplate(
    "sort_merge",
    params="int length, run",
    macros=f"{_ENTRY_MACROS} THREADS ITEMS",
    inputs="runs",
    outputs="merged",
    threads=_threads,
    files=_ENTRIES,
)
SORT_PLACES = KernelTemplate(
    "sort_places",
    params="int rows, inner, length, count",
    macros=_ENTRY_MACROS,
    inputs="runs",
    threads=_PLACES_THREADS,
    files=_ENTRIES,
)
_THREADS = 256
_KERNELS = SortKernels(
    rows=SORT,
    segments=SORT_SEGMENT,
    merge=SORT_MERGE,
    places=SORT_PLACES,
    writer=KERNELS,
    shared_bytes=1 << 14,
    least=512,
    merge_threads=256,
    merge_items=4,
    places_threads=_PLACES_THREADS,
)


class _Sorting(Sorting):
    """Entries of 128 or 64 bits, in threadgroup memory."""

    @property
    def entry_bytes(self) -> int:
        return 16 if self.sort.is_wide else 8

    @property
    def entry_macros(self) -> Mapping[str, object]:
        return {"WIDE": int(self.sort.is_wide), "DESCENDING": int(self.sort.descending)}

    def threads(self, entries: int) -> int:
        return max(32, min(_THREADS, entries // 2))

    def together(self, segment: int) -> int:
        return max(1, min(self.kernels.least // segment, power_of_two(self.sort.rows)))

    def source(self) -> Prologue:
        return element_prologue(self.sort.source, self.lowering, METAL)

    def finish(self, launch: Launch) -> None:
        self.calls.append(anchor_launch(launch, anchor_epilogue(self.group, self.lowering), self.lowering))


@lowering_of(Sort)
def lower_sort(sort: Sort, group: Group, lowering: Lowering) -> list[KernelCall]:
    """One launch for rows that a threadgroup holds; for longer ones as many as halve, or merge, what is left of them.

    Raises:
        OpRefusal: A tensor that the source or the epilogue reads is too large.
    """
    return _Sorting(sort, group, lowering, _KERNELS).lower()
