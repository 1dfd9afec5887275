"""Lowers sorting: rows that a block holds are sorted there; of longer ones segments are, which are merged.

Where no more than a part of a segment is wanted, each segment keeps that, and what they keep is sorted again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cuda_compiler.anchors import anchor_epilogue, anchor_launch
from cuda_compiler.dialect import CUDA
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.integers import ceil_div, power_of_two
from npu_compiler.lowering.element import ELEMENT_MACROS, element_prologue
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.positions import epilogue_positions
from npu_compiler.lowering.problems.forms import Computed
from npu_compiler.lowering.problems.sort import Sort
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["SORT", "SORT_MERGE", "SORT_PLACES", "SORT_SEGMENT", "SORT_SELECT", "lower_sort"]

_ENTRY_MACROS = "WIDE PACKED key_t? DESCENDING THREADS"
_ENTRIES, _NETWORK = "sort_entries.cuh", "sort_network.cuh"
_SEGMENT_MACROS = f"{_ENTRY_MACROS} ITEMS SEGMENT SEGMENTS RUN FROM_RUNS SOURCE_PARAMETERS? SOURCE_ARGUMENTS?"
_SEGMENT_FILES = f"{_NETWORK} sort_registers.cuh sort_segments.cuh"


def _threads(macros: Mapping[str, object]) -> int:
    return int(str(macros["THREADS"]))


SORT = KernelTemplate(
    "sort",
    params="int rows, inner, length, count",
    macros=_SEGMENT_MACROS,
    inputs="source? runs?",
    computed="source",
    threads=_threads,
    before=_ENTRIES,
    files=_SEGMENT_FILES,
)
SORT_SEGMENT = KernelTemplate(
    "sort_segment",
    params="int rows, inner, length",
    macros=_SEGMENT_MACROS,
    inputs="source? runs?",
    outputs="kept",
    computed="source",
    threads=_threads,
    before=_ENTRIES,
    files=_SEGMENT_FILES,
)
SORT_SELECT = KernelTemplate(
    "sort_select",
    params="int inner, length",
    macros=f"{_ENTRY_MACROS} RUN ITEMS {ELEMENT_MACROS}",
    inputs="source",
    outputs="kept",
    computed="source",
    threads=_threads,
    before=_ENTRIES,
    files=_NETWORK,
)
SORT_MERGE = KernelTemplate(
    "sort_merge",
    params="int length, run",
    macros=f"{_ENTRY_MACROS} ITEMS",
    inputs="runs",
    outputs="merged",
    threads=_threads,
    before=_ENTRIES,
)
SORT_PLACES = KernelTemplate(
    "sort_places",
    params="int rows, inner, length, count",
    macros=_ENTRY_MACROS,
    inputs="runs",
    threads=_threads,
    before=_ENTRIES,
)
_SHARED_BYTES = 1 << 15  # of entries that a block sorts
_LEAST_SEGMENTS = 1024  # entries of a block that has several rows
_ITEMS = 8  # entries of a thread that sorts them
_PACKED_LENGTH = 1 << 16  # the longest rows whose entries have 32 bits
_THREADS = 512
_MERGE_THREADS, _MERGE_ITEMS = 256, 8
_PLACES_THREADS = 256
_SELECTED = 128  # the longest run that is found by a bound
_FEW_ITEMS, _MANY_ITEMS = 8, 16  # elements of a thread that looks for a bound


@dataclass
class _Sorting:
    """The launches of a sort, one after another.

    Attributes:
        sort: The problem.
        group: What its last launch computes.
        lowering: Where they are collected.
        length: What is left of each row.
        runs: Where that is; None while it is the source's elements.
        calls: The launches.
    """

    sort: Sort
    group: Group
    lowering: Lowering
    length: int
    runs: int | None = None
    calls: list[KernelCall] = field(default_factory=list)

    @property
    def is_packed(self) -> bool:
        """Whether entries have 32 bits; what a launch computes itself is compared in all of its precision."""
        source = self.sort.source
        is_half = source.dtype in (FLOAT16, BFLOAT16) and not isinstance(source, Computed)
        return is_half and self.sort.length <= _PACKED_LENGTH

    @property
    def entry_bytes(self) -> int:
        return 16 if self.sort.is_wide else 4 if self.is_packed else 8

    def keep(self, launch_of: Launch, length: int, output: int) -> None:
        """Adds a launch after which so much is left of each row."""
        label = f"{launch_of.template.entry.removeprefix('sort_')} for {self.sort.result.name}"
        moved = (self.length + length) * self.sort.rows * self.entry_bytes
        self.calls.append(KERNELS.launch_alone(launch_of, label, moved, self.lowering))
        self.length, self.runs = length, output

    def scratch(self, length: int) -> int:
        return self.lowering.scratch(self.sort.rows * length * self.entry_bytes)

    def macros(self, threads: int) -> dict[str, object]:
        sort = self.sort
        key = {"key_t": CUDA.storage[sort.source.dtype.name]} if self.is_packed else {}
        kind = {"WIDE": int(sort.is_wide), "PACKED": int(self.is_packed), **key}
        return {**kind, "DESCENDING": int(sort.descending), "THREADS": threads}

    def values(self, template: KernelTemplate) -> dict[str, int]:
        sort = self.sort
        known = {"rows": sort.rows, "inner": sort.inner, "length": self.length, "count": sort.count}
        return template.values_among(known)


@lowering_of(Sort)
def lower_sort(sort: Sort, group: Group, lowering: Lowering) -> list[KernelCall]:
    """One launch for rows that a block holds; for longer ones as many as halve, or merge, what is left of them.

    Raises:
        OpRefusal: A tensor that the source or the epilogue reads is too large.
    """
    made = _Sorting(sort, group, lowering, sort.length)
    most = _SHARED_BYTES // made.entry_bytes
    if sort.length > most < 2 * sort.run:
        _merge(made, most)
    else:
        while made.length > most:
            _keep_less(made, most)
        segment = power_of_two(max(2, made.length))
        together = max(1, 32 // segment, min(_LEAST_SEGMENTS // segment, power_of_two(sort.rows)))
        _finish(made, _segments(made, SORT, segment, together, sort.run, (ceil_div(sort.rows, together), 1, 1)))
    return made.calls


def _finish(made: _Sorting, launch: Launch) -> None:
    fused = anchor_epilogue(made.group, epilogue_positions(made.group, made.lowering, "sum"), 1)
    made.calls.append(anchor_launch(launch, fused, made.lowering))


def _segments(
    made: _Sorting, template: KernelTemplate, segment: int, together: int, run: int,
    grid: tuple[int, int, int], output: int | None = None,
) -> Launch:  # fmt: skip
    """A launch that sorts segments of rows, or several rows at a time."""
    threads = max(32, segment * together // _ITEMS)
    macros = {
        **made.macros(threads), "ITEMS": segment * together // threads, "SEGMENT": segment, "SEGMENTS": together,
        "RUN": run, "FROM_RUNS": int(made.runs is not None),
    }  # fmt: skip
    if made.runs is None:
        prologues = {"source": element_prologue(made.sort.source, made.lowering, CUDA)}
        inputs = {}
    else:
        prologues, inputs = {}, {"runs": Argument(made.runs)}
    outputs = {} if output is None else {"kept": Argument(output, writes=True)}
    values, flops = made.values(template), made.sort.flops
    return Launch(template, grid, values, macros, inputs, outputs, flops, prologues=prologues)


def _keep_less(made: _Sorting, most: int) -> None:
    """Of each segment what may be wanted; where that is little, by a bound for it."""
    sort, run = made.sort, made.sort.run
    if made.runs is not None or run > _SELECTED:
        segments = ceil_div(made.length, most)
        output = made.scratch(segments * run)
        grid = (sort.rows, segments, 1)
        made.keep(_segments(made, SORT_SEGMENT, most, 1, run, grid, output), segments * run, output)
        return
    busy = sort.rows * made.length >= made.lowering.device.cores * made.lowering.device.core_threads * _MANY_ITEMS
    items = _MANY_ITEMS if busy else _FEW_ITEMS
    segments = ceil_div(made.length, _THREADS * items)
    output = made.scratch(segments * run)
    launch = Launch(
        SORT_SELECT,
        (sort.rows, segments, 1),
        made.values(SORT_SELECT),
        {**made.macros(_THREADS), "RUN": run, "ITEMS": items},
        outputs={"kept": Argument(output, writes=True)},
        flops=sort.flops,
        prologues={"source": element_prologue(sort.source, made.lowering, CUDA)},
    )
    made.keep(launch, segments * run, output)


def _merge(made: _Sorting, segment: int) -> None:
    """Whole segments in order, which are merged in pairs until there is one run for each row."""
    sort, segments = made.sort, ceil_div(made.length, segment)
    length, run = segments * segment, segment
    both = [made.scratch(length), made.scratch(length)]
    grid = (sort.rows, segments, 1)
    made.keep(_segments(made, SORT_SEGMENT, segment, 1, segment, grid, both[0]), length, both[0])
    while run < length:
        source, target = both
        launch = Launch(
            SORT_MERGE,
            (sort.rows, ceil_div(length, _MERGE_THREADS * _MERGE_ITEMS), 1),
            {"length": length, "run": run},
            {**made.macros(_MERGE_THREADS), "ITEMS": _MERGE_ITEMS},
            {"runs": Argument(source)},
            {"merged": Argument(target, writes=True)},
            flops=2 * sort.rows * length,
        )
        made.keep(launch, length, target)
        both, run = [target, source], 2 * run
    assert made.runs is not None
    grid = (ceil_div(sort.rows * sort.count, _PLACES_THREADS), 1, 1)
    inputs = {"runs": Argument(made.runs)}
    _finish(made, Launch(SORT_PLACES, grid, made.values(SORT_PLACES), made.macros(_PLACES_THREADS), inputs))
