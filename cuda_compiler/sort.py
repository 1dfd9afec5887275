"""Lowers sorting: rows that a block holds are sorted there; of longer ones segments are, which are merged.

Where no more than a part of a segment is wanted, each segment keeps that, and what they keep is sorted again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from cuda_compiler.anchors import single_launch
from cuda_compiler.dialect import CUDA
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.integers import ceil_div, power_of_two
from npu_compiler.lowering.element import ELEMENT_MACROS
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.forms import Computed
from npu_compiler.lowering.problems.sort import Sort
from npu_compiler.lowering.sort_steps import Sorting, SortKernels, sort_template
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import Launch

__all__ = ["SORT", "SORT_MERGE", "SORT_PLACES", "SORT_SEGMENT", "SORT_SELECT", "lower_sort"]

_ENTRY_MACROS = "WIDE PACKED key_t? DESCENDING THREADS"
_ENTRIES, _NETWORK = "sort_entries.cuh", "sort_network.cuh"
_sorts = partial(
    sort_template,
    macros=f"{_ENTRY_MACROS} ITEMS SEGMENT SEGMENTS RUN FROM_RUNS SOURCE_PARAMETERS? SOURCE_ARGUMENTS?",
    files=f"{_NETWORK} sort_registers.cuh sort_segments.cuh",
    before=_ENTRIES,
)
SORT = _sorts("sort")
SORT_SEGMENT = _sorts("sort_segment")
SORT_SELECT = sort_template("sort_select", f"{_ENTRY_MACROS} RUN ITEMS {ELEMENT_MACROS}", _NETWORK, _ENTRIES)
SORT_MERGE = sort_template("sort_merge", f"{_ENTRY_MACROS} ITEMS", "", _ENTRIES)
SORT_PLACES = sort_template("sort_places", _ENTRY_MACROS, "", _ENTRIES)
_ITEMS = 8  # entries of a thread that sorts them
_PACKED_LENGTH = 1 << 16  # the longest rows whose entries have 32 bits
_THREADS = 512
_SELECTED = 128  # the longest run that is found by a bound
_FEW_ITEMS, _MANY_ITEMS = 8, 16  # elements of a thread that looks for a bound
_KERNELS = SortKernels(
    rows=SORT,
    segments=SORT_SEGMENT,
    merge=SORT_MERGE,
    places=SORT_PLACES,
    writer=KERNELS,
    finish=single_launch,
    shared_bytes=1 << 15,
    least=1024,
    merge_threads=256,
    merge_items=8,
    places_threads=256,
)


class _Sorting(Sorting):
    """Entries of 128, 64 or 32 bits, in registers; of a long row little is selected by a bound."""

    @property
    def is_packed(self) -> bool:
        """Whether entries have 32 bits; what a launch computes itself is compared in all of its precision."""
        source = self.sort.source
        is_half = source.dtype in (FLOAT16, BFLOAT16) and not isinstance(source, Computed)
        return is_half and self.sort.length <= _PACKED_LENGTH

    @property
    def entry_bytes(self) -> int:
        return 16 if self.sort.is_wide else 4 if self.is_packed else 8

    @property
    def entry_macros(self) -> Mapping[str, object]:
        sort = self.sort
        key = {"key_t": CUDA.storage[sort.source.dtype.name]} if self.is_packed else {}
        kind = {"WIDE": int(sort.is_wide), "PACKED": int(self.is_packed), **key}
        return {**kind, "DESCENDING": int(sort.descending)}

    def threads(self, entries: int) -> int:
        return max(32, entries // _ITEMS)

    def together(self, segment: int) -> int:
        return max(1, 32 // segment, min(self.kernels.least // segment, power_of_two(self.sort.rows)))

    def keep_less(self, most: int) -> None:
        """Where what may be wanted is little, by a bound for it."""
        sort, run, device = self.sort, self.sort.run, self.lowering.device
        if self.runs is not None or run > _SELECTED:
            super().keep_less(most)
            return
        busy = sort.rows * self.length >= device.cores * device.core_threads * _MANY_ITEMS
        items = _MANY_ITEMS if busy else _FEW_ITEMS
        segments = ceil_div(self.length, _THREADS * items)
        output = self.scratch(segments * run)
        launch = Launch(
            SORT_SELECT,
            (sort.rows, segments, 1),
            self.values(SORT_SELECT),
            self.macros(SORT_SELECT, THREADS=_THREADS, RUN=run, ITEMS=items),
            outputs={"kept": Argument(output, writes=True)},
            flops=sort.flops,
            prologues={"source": self.source()},
        )
        self.keep(launch, segments * run, output)


@lowering_of(Sort)
def lower_sort(sort: Sort, group: Group, lowering: Lowering) -> list[KernelCall]:
    """One launch for rows that a block holds; for longer ones as many as halve, or merge, what is left of them.

    Raises:
        OpRefusal: A tensor that the source or the epilogue reads is too large.
    """
    return _Sorting(sort, group, lowering, _KERNELS).lower()
