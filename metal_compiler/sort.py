"""Lowers sorting: rows that a threadgroup holds are sorted there; of longer ones segments are, which are merged.

Where no more than a part of a segment is wanted, each segment keeps that, and what they keep is sorted again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from metal_compiler.anchors import anchor_epilogue, anchor_launch
from metal_compiler.dialect import METAL
from metal_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.integers import ceil_div, power_of_two
from npu_compiler.lowering.element import element_prologue
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.sort import Sort
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

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
_SHARED_BYTES = 1 << 14  # of entries that a threadgroup sorts
_LEAST_SEGMENTS = 512  # entries of a threadgroup that has several rows
_THREADS = 256
_MERGE_THREADS, _MERGE_ITEMS = 256, 4


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
    def entry_bytes(self) -> int:
        return 16 if self.sort.is_wide else 8

    def keep(self, launch_of: Launch, length: int, output: int) -> None:
        """Adds a launch after which so much is left of each row."""
        label = f"{launch_of.template.entry.removeprefix('sort_')} for {self.sort.result.name}"
        moved = (self.length + length) * self.sort.rows * self.entry_bytes
        self.calls.append(KERNELS.launch_alone(launch_of, label, moved, self.lowering))
        self.length, self.runs = length, output

    def scratch(self, length: int) -> int:
        return self.lowering.scratch(self.sort.rows * length * self.entry_bytes)

    @property
    def macros(self) -> dict[str, object]:
        return {"WIDE": int(self.sort.is_wide), "DESCENDING": int(self.sort.descending)}

    def values(self, template: KernelTemplate) -> dict[str, int]:
        sort = self.sort
        known = {"rows": sort.rows, "inner": sort.inner, "length": self.length, "count": sort.count}
        return template.values_among(known)


@lowering_of(Sort)
def lower_sort(sort: Sort, group: Group, lowering: Lowering) -> list[KernelCall]:
    """One launch for rows that a threadgroup holds; for longer ones as many as halve, or merge, what is left of them.

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
        together = max(1, min(_LEAST_SEGMENTS // segment, power_of_two(sort.rows)))
        _finish(made, _segments(made, SORT, segment, together, sort.run, (ceil_div(sort.rows, together), 1, 1)))
    return made.calls


def _finish(made: _Sorting, launch: Launch) -> None:
    made.calls.append(anchor_launch(launch, anchor_epilogue(made.group, made.lowering), made.lowering))


def _segments(
    made: _Sorting, template: KernelTemplate, segment: int, together: int, run: int,
    grid: tuple[int, int, int], output: int | None = None,
) -> Launch:  # fmt: skip
    """A launch that sorts segments of rows, or several rows at a time."""
    threads = max(32, min(_THREADS, segment * together // 2))
    macros = {
        **made.macros, "THREADS": threads, "SEGMENT": segment, "SEGMENTS": together, "RUN": run,
        "FROM_RUNS": int(made.runs is not None),
    }  # fmt: skip
    if made.runs is None:
        prologues = {"source": element_prologue(made.sort.source, made.lowering, METAL)}
        inputs = {}
    else:
        prologues, inputs = {}, {"runs": Argument(made.runs)}
    outputs = {} if output is None else {"kept": Argument(output, writes=True)}
    values, flops = made.values(template), made.sort.flops
    return Launch(template, grid, values, macros, inputs, outputs, flops, prologues=prologues)


def _keep_less(made: _Sorting, most: int) -> None:
    """Of each segment what may be wanted."""
    sort, run = made.sort, made.sort.run
    segments = ceil_div(made.length, most)
    output, grid = made.scratch(segments * run), (sort.rows, segments, 1)
    made.keep(_segments(made, SORT_SEGMENT, most, 1, run, grid, output), segments * run, output)


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
            {**made.macros, "THREADS": _MERGE_THREADS, "ITEMS": _MERGE_ITEMS},
            {"runs": Argument(source)},
            {"merged": Argument(target, writes=True)},
            flops=2 * sort.rows * length,
        )
        made.keep(launch, length, target)
        both, run = [target, source], 2 * run
    assert made.runs is not None
    grid = (ceil_div(sort.rows * sort.count, _PLACES_THREADS), 1, 1)
    inputs = {"runs": Argument(made.runs)}
    _finish(made, Launch(SORT_PLACES, grid, made.values(SORT_PLACES), made.macros, inputs))
