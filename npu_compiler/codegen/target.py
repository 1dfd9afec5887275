"""The one way in for a target: how it lays out tensors, and how it lowers a group to launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain

from npu_compiler.codegen.grouping import Group
from npu_compiler.codegen.operands import TensorArg
from npu_compiler.codegen.plan import KernelSource
from npu_compiler.errors import CompileError, MissingDependencyError
from npu_compiler.expr import Expr
from npu_compiler.layout import Layout
from npu_compiler.trace import TracedTensor

__all__ = [
    "Choice",
    "CodegenTarget",
    "Emitted",
    "Launch",
    "Library",
    "Lowering",
    "Option",
    "TARGETS",
    "choice_of",
    "target_named",
]


@dataclass(frozen=True)
class Launch:
    """A kernel launch as a target emits it: tensors by index, not yet placed in memory. See `plan.KernelCall`.

    `hurries`: where a device starts launches early, the next one may begin while this one still waits for those ahead.
    """

    label: str
    kernel: KernelSource
    args: tuple[TensorArg, ...]
    params: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    flops: int = 0
    nbytes: int = 0
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    hurries: bool = False


@dataclass(frozen=True)
class Library:
    """A call of the vendor's library as a target emits it. See `plan.LibraryCall`."""

    label: str
    routine: str
    args: tuple[TensorArg, ...]
    attrs: Mapping[str, object]
    flops: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Option:
    """One way to compute a group. See `plan.CallOption`."""

    requires: str
    launches: tuple[Launch | Library, ...]


@dataclass(frozen=True)
class Choice:
    """Several ways to compute a group, of which a device takes one; the preferred first. See `plan.CallChoice`.

    What other groups use too (`Lowering.common_scratch`) is written outside of a choice: an option may never run.
    """

    options: tuple[Option, ...]


Emitted = Launch | Library | Choice


def choice_of(options: Sequence[Option]) -> list[Emitted]:
    """A choice between options; where there is only one, its launches."""
    return [Choice(tuple(options))] if len(options) > 1 else [*options[0].launches]


@dataclass
class Lowering:
    """What a target may see and ask for while it lowers a function.

    Attributes:
        tensors: The trace's tensors, by index.
        scratch_sizes: Bytes of each scratch buffer asked for, by its index.
        common: The scratch buffers that several groups use, by what they hold.
        emitted: What was emitted for the groups ahead.
    """

    tensors: Sequence[TracedTensor]
    scratch_sizes: dict[int, int] = field(default_factory=dict)
    common: dict[Hashable, int] = field(default_factory=dict)
    emitted: list[Emitted] = field(default_factory=list)

    def scratch(self, nbytes: int) -> int:
        """A buffer that lives from the first to the last launch that binds it; its index serves as a tensor's."""
        index = -1 - len(self.scratch_sizes)
        self.scratch_sizes[index] = nbytes
        return index

    def common_scratch(self, content: Hashable, nbytes: int) -> tuple[int, bool]:
        """A scratch buffer for what several groups need, and whether nobody has asked for it before."""
        is_new = content not in self.common
        if is_new:
            self.common[content] = self.scratch(nbytes)
        return self.common[content], is_new

    def is_settled(self, buffer: int) -> bool:
        """Whether a scratch buffer is written when the next launch begins, however early: one since then waited."""
        waited = False
        for item in reversed(self.emitted):
            if any(arg.tensor == buffer and arg.writes for launch in _launches(item) for arg in launch.args):
                return waited
            waited = waited or _waits(item)
        return waited


def _launches(item: Emitted) -> tuple[Launch | Library, ...]:
    """All launches of all options."""
    return tuple(chain.from_iterable(o.launches for o in item.options)) if isinstance(item, Choice) else (item,)


def _waits(item: Emitted) -> bool:
    """Whether it lets the next launch begin only when all launches ahead of itself have finished."""
    if isinstance(item, Choice):
        return all(any(_waits(launch) for launch in option.launches) for option in item.options)
    return isinstance(item, Library) or not item.hurries


class CodegenTarget(ABC):
    """A kind of device, for the compiler.

    Attributes:
        name: What users call it, such as ``metal``.
        compute_dtypes: Names of the data types it computes in, the default first.
        storage_dtypes: Names of all data types that its memory may hold.
        pairs_columns: Whether a matmul's epilogue can combine two neighbouring columns (`Group.pairs`).
    """

    name: str
    compute_dtypes: tuple[str, ...]
    storage_dtypes: frozenset[str]
    pairs_columns: bool = False

    @abstractmethod
    def layout(self, shape: tuple[int, ...], role: str) -> Layout:
        """Where a tensor's elements lie. Roles: ``plain``, ``image`` [N, C, H, W], ``conv_weight`` [O, I, H, W]."""

    def takes_prologue(self, group: Group, position: int, expr: Expr) -> bool:
        """Whether it can compute an operand of a group's anchor, given by its position, inside the anchor's kernel."""
        return False

    def takes_producer(self, group: Group, position: int, produced: Group) -> bool:
        """Whether the launches of a group's anchor can make its operand at `position`, which `produced` makes."""
        return False

    def takes_added(self, group: Group, other: Group) -> bool:
        """Whether it can compute another group's anchor, whose result is added, in the kernel of a group's anchor."""
        return False

    def lower_shared(self, groups: Sequence[Group], lowering: Lowering) -> list[Emitted]:
        """The launches of elementwise groups that do not depend on each other; one, where the target can share it."""
        return [launch for group in groups for launch in self.lower(group, lowering)]

    @abstractmethod
    def lower(self, group: Group, lowering: Lowering) -> list[Emitted]:
        """The launches that compute a group.

        Raises:
            OpRefusal: The target cannot compute it; the message is the reason.
        """


TARGETS: Mapping[str, tuple[str, str]] = {
    "metal": ("npu_compiler.codegen.metal.target", "MetalTarget"),
    "cuda": ("cuda_compiler.target", "CUDATarget"),
}


def target_named(name: str) -> CodegenTarget:
    """The target of a name; its package is imported only now.

    Raises:
        CompileError: There is no such target.
        MissingDependencyError: Its package is not installed.
    """
    if name not in TARGETS:
        raise CompileError(f"given the target '{name}', expected one of {', '.join(TARGETS)}")
    module, attribute = TARGETS[name]
    try:
        target: CodegenTarget = getattr(import_module(module), attribute)()
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the target '{name}' needs the package '{error.name}', which is not installed"
        ) from error
    return target
