"""A sort by launches one after another: what targets share of it.

Rows that a group of threads holds are sorted there; of longer ones segments are, of which as much is kept as may be
wanted, or which are merged where that is most of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.integers import ceil_div, power_of_two
from npu_compiler.lowering.anchors import KernelWriter
from npu_compiler.lowering.element import element_prologue
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.sort import Sort
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Amount, KernelTemplate, Launch, Prologue

__all__ = ["SortKernels", "Sorting", "sort_template", "threads_told"]


def threads_told(macros: Mapping[str, object]) -> int:
    """The threads of a group that its kernel is told of."""
    return int(str(macros["THREADS"]))


_LENGTHS = "int rows, inner, length"
_DECLARED = {
    "sort": (f"{_LENGTHS}, count", "source? runs?", ""),
    "sort_segment": (_LENGTHS, "source? runs?", "kept"),
    "sort_select": ("int inner, length", "source", "kept"),
    "sort_merge": ("int length, run", "runs", "merged"),
    "sort_places": (f"{_LENGTHS}, count", "runs", ""),
}
"""Parameters, inputs and outputs of each kernel."""


def sort_template(
    entry: str, macros: str, files: str, before: str = "", threads: Amount = threads_told
) -> KernelTemplate:
    """A kernel of a sort: what targets share of its declaration, and what is a target's own."""
    params, inputs, outputs = _DECLARED[entry]
    computed = "source" if "source" in inputs else ""
    return KernelTemplate(entry, params, macros, inputs, outputs, threads, 0, files, before, computed)


@dataclass(frozen=True)
class SortKernels:
    """A target's kernels, and their sizes.

    Attributes:
        rows: Sorts rows, several at a time.
        segments: Sorts segments of rows.
        merge: Merges pairs of runs.
        places: Gives the places of the first entries of sorted rows.
        writer: Writes them.
        finish: Makes a call of a launch, with the epilogue of a sort's group.
        shared_bytes: Of entries that a group of threads sorts.
        least: Entries of a group that has several rows.
        merge_threads, merge_items: Threads of a group that merges, and entries of each.
        places_threads: Threads of a group that gives places.
    """

    rows: KernelTemplate
    segments: KernelTemplate
    merge: KernelTemplate
    places: KernelTemplate
    writer: KernelWriter
    finish: Callable[[Launch, Group, Lowering], KernelCall]
    shared_bytes: int
    least: int
    merge_threads: int
    merge_items: int
    places_threads: int


@dataclass
class Sorting(ABC):
    """The launches of a sort; a target says what is its own.

    Attributes:
        sort: The problem.
        group: What its last launch computes.
        lowering: Where they are collected.
        kernels: The target's.
        length: What is left of each row.
        runs: Where that is; None while it is the source's elements.
        calls: The launches.
    """

    sort: Sort
    group: Group
    lowering: Lowering
    kernels: SortKernels
    length: int = field(init=False)
    runs: int | None = field(default=None, init=False)
    calls: list[KernelCall] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.length = self.sort.length

    @property
    @abstractmethod
    def entry_bytes(self) -> int:
        """Of an entry in memory."""

    @property
    @abstractmethod
    def entry_macros(self) -> Mapping[str, object]:
        """What kernels are told of entries."""

    @abstractmethod
    def threads(self, entries: int) -> int:
        """Threads that sort so many entries together."""

    @abstractmethod
    def together(self, segment: int) -> int:
        """Rows that a group of threads sorts together, each as a segment of so many entries."""

    def source(self) -> Prologue:
        """The function that gives an element of what is sorted."""
        return element_prologue(self.sort.source, self.lowering, self.kernels.writer.dialect)

    def finish(self, launch: Launch) -> None:
        """Adds the last launch, which has the group's epilogue."""
        self.calls.append(self.kernels.finish(launch, self.group, self.lowering))

    def lower(self) -> list[KernelCall]:
        """All launches: one for rows that a group of threads holds."""
        sort, most = self.sort, self.kernels.shared_bytes // self.entry_bytes
        if sort.length > most < 2 * sort.run:
            self._merge(most)
            return self.calls
        while self.length > most:
            self.keep_less(most)
        segment = power_of_two(max(2, self.length))
        together = self.together(segment)
        self.finish(self._segments(self.kernels.rows, segment, together, sort.run, ceil_div(sort.rows, together)))
        return self.calls

    def keep_less(self, most: int) -> None:
        """Of each segment of `most` entries what may be wanted."""
        segments, run = ceil_div(self.length, most), self.sort.run
        self._keep_segments(most, run, segments, self.scratch(segments * run))

    def keep(self, launch: Launch, length: int, output: int) -> None:
        """Adds a launch after which so much is left of each row."""
        label = f"{launch.template.entry.removeprefix('sort_')} for {self.sort.result.name}"
        moved = (self.length + length) * self.sort.rows * self.entry_bytes
        self.calls.append(self.kernels.writer.launch_alone(launch, label, moved, self.lowering))
        self.length, self.runs = length, output

    def scratch(self, length: int) -> int:
        """Memory for so many entries of each row."""
        return self.lowering.scratch(self.sort.rows * length * self.entry_bytes)

    def macros(self, template: KernelTemplate, **sizes: object) -> dict[str, object]:
        """What a kernel is told, of all that there is to tell."""
        return template.macros_among({**self.entry_macros, **sizes})

    def values(self, template: KernelTemplate) -> dict[str, int]:
        """The parameters of a kernel."""
        sort = self.sort
        known = {"rows": sort.rows, "inner": sort.inner, "length": self.length, "count": sort.count}
        return template.values_among(known)

    def _segments(
        self, template: KernelTemplate, segment: int, together: int, run: int, groups: int, output: int | None = None
    ) -> Launch:
        """A launch that sorts so many segments of each row, or several rows at a time, which leaves no `output`."""
        threads = self.threads(segment * together)
        macros = self.macros(
            template,
            THREADS=threads,
            ITEMS=segment * together // threads,
            SEGMENT=segment,
            SEGMENTS=together,
            RUN=run,
            FROM_RUNS=int(self.runs is not None),
        )
        grid = (groups, 1, 1) if output is None else (self.sort.rows, groups, 1)
        prologues = {"source": self.source()} if self.runs is None else {}
        inputs = {} if self.runs is None else {"runs": Argument(self.runs)}
        outputs = {} if output is None else {"kept": Argument(output, writes=True)}
        values, flops = self.values(template), self.sort.flops
        return Launch(template, grid, values, macros, inputs, outputs, flops, prologues=prologues)

    def _keep_segments(self, segment: int, run: int, segments: int, output: int) -> None:
        launch = self._segments(self.kernels.segments, segment, 1, run, segments, output)
        self.keep(launch, segments * run, output)

    def _merge(self, segment: int) -> None:
        """Whole segments in order, which are merged in pairs until there is one run for each row."""
        sort, kernels, segments = self.sort, self.kernels, ceil_div(self.length, segment)
        length, run = segments * segment, segment
        both = [self.scratch(length), self.scratch(length)]
        self._keep_segments(segment, segment, segments, both[0])
        while run < length:
            source, target = both
            launch = Launch(
                kernels.merge,
                (sort.rows, ceil_div(length, kernels.merge_threads * kernels.merge_items), 1),
                {"length": length, "run": run},
                self.macros(kernels.merge, THREADS=kernels.merge_threads, ITEMS=kernels.merge_items),
                {"runs": Argument(source)},
                {"merged": Argument(target, writes=True)},
                flops=2 * sort.rows * length,
            )
            self.keep(launch, length, target)
            both, run = [target, source], 2 * run
        assert self.runs is not None
        grid = (ceil_div(sort.rows * sort.count, kernels.places_threads), 1, 1)
        macros = self.macros(kernels.places, THREADS=kernels.places_threads)
        inputs = {"runs": Argument(self.runs)}
        self.finish(Launch(kernels.places, grid, self.values(kernels.places), macros, inputs))
