"""Lowers sorting: rows that a threadgroup holds are sorted there; of longer ones segments are, which are merged.

Where no more than a part of a segment is wanted, each segment keeps that, and what they keep is sorted again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from metal_compiler.anchors import single_launch
from metal_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.integers import power_of_two
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.sort import Sort
from npu_compiler.lowering.sort_steps import Sorting, SortKernels, sort_template
from npu_compiler.lowering.target import Lowering, lowering_of

__all__ = ["SORT", "SORT_MERGE", "SORT_PLACES", "SORT_SEGMENT", "lower_sort"]

_ENTRY_MACROS = "WIDE DESCENDING"
_ENTRIES = "sort_entries.metal"
_sorts = partial(
    sort_template,
    macros=f"{_ENTRY_MACROS} THREADS SEGMENT SEGMENTS RUN FROM_RUNS SOURCE_PARAMETERS? SOURCE_ARGUMENTS?",
    files=f"{_ENTRIES} sort_network.metal sort_segments.metal",
)
_PLACES_THREADS = 256
SORT = _sorts("sort")
SORT_SEGMENT = _sorts("sort_segment")
SORT_MERGE = sort_template("sort_merge", f"{_ENTRY_MACROS} THREADS ITEMS", _ENTRIES)
SORT_PLACES = sort_template("sort_places", _ENTRY_MACROS, _ENTRIES, threads=_PLACES_THREADS)
_THREADS = 256
_KERNELS = SortKernels(
    rows=SORT,
    segments=SORT_SEGMENT,
    merge=SORT_MERGE,
    places=SORT_PLACES,
    writer=KERNELS,
    finish=single_launch,
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


@lowering_of(Sort)
def lower_sort(sort: Sort, group: Group, lowering: Lowering) -> list[KernelCall]:
    """One launch for rows that a threadgroup holds; for longer ones as many as halve, or merge, what is left of them.

    Raises:
        OpRefusal: A tensor that the source or the epilogue reads is too large.
    """
    return _Sorting(sort, group, lowering, _KERNELS).lower()
