"""The one way in for a target: how it lays out tensors, and how it lowers a group to steps of a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from npu_compiler.artifact.plan import Call, KernelCall, KernelSource, Step, options_of
from npu_compiler.errors import CompileError
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.plugins import entry_points_of, load
from npu_compiler.tensor.layout import Layout
from npu_compiler.tensor.symbolic import OpRefusal
from npu_compiler.tensor.trace import TracedTensor

__all__ = ["CodegenTarget", "LowerProblem", "Lowering", "target_named", "target_names"]

_GROUP = "npu.targets"


@dataclass
class Lowering:
    """What a target may see and ask for while it lowers a function.

    Attributes:
        tensors: The trace's tensors, by index.
        scratch_sizes: Bytes of each scratch buffer asked for, by its index.
        common: The scratch buffers that several groups use, by what they hold.
        steps: What was emitted for the groups ahead.
        kernels: The distinct kernels, with their numbers.
        hurrying: Kernels that, where a device starts launches early, let the next one begin while they still wait for
            those ahead.
    """

    tensors: Sequence[TracedTensor]
    scratch_sizes: dict[int, int] = field(default_factory=dict)
    common: dict[Hashable, int] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    kernels: dict[KernelSource, int] = field(default_factory=dict)
    hurrying: set[int] = field(default_factory=set)

    def kernel(self, source: KernelSource, hurries: bool = False) -> int:
        """The number that a `KernelCall` knows a kernel by; `hurries`: see `hurrying`."""
        number = self.kernels.setdefault(source, len(self.kernels))
        if hurries:
            self.hurrying.add(number)
        return number

    def scratch(self, nbytes: int) -> int:
        """A buffer that lives from the first to the last call that binds it; its index serves as a tensor's."""
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
        for step in reversed(self.steps):
            if any(argument.buffer == buffer and argument.writes for argument in step.args):
                return False
            if all(any(map(self._waits, option.calls)) for option in options_of(step)):
                return True
        return False

    def _waits(self, call: Call) -> bool:
        """Whether it lets the next launch begin only when all launches ahead of itself have finished."""
        return not (isinstance(call, KernelCall) and call.kernel in self.hurrying)


LowerProblem = Callable[[Any, Group, Lowering], Sequence[Step]]


class CodegenTarget(ABC):
    """A kind of device, for the compiler.

    Attributes:
        name: What users call it, such as ``metal``.
        compute_dtypes: Names of the data types it computes in, the default first.
        storage_dtypes: Names of all data types that its memory may hold, but for those whose codes these hold.
        problems: What lowers a group around each kind of problem, given the problem, the group and the lowering.
        launch_flops: Arithmetic of a large product that takes as long as one more small launch.
    """

    name: str
    compute_dtypes: tuple[str, ...]
    storage_dtypes: frozenset[str]
    launch_flops: int = 1 << 25
    problems: Mapping[type[Problem], LowerProblem] = MappingProxyType({})

    @abstractmethod
    def layout(self, shape: tuple[int, ...], role: str) -> Layout:
        """Where a tensor's elements lie. Roles: ``plain``, ``image`` [N, C, H, W], ``conv_weight`` [O, I, H, W]."""

    def loads(self, group: Group, position: int, operand: Operand) -> bool:
        """Whether the launches of a group's problem can load an operand in the form it has; see `problems.forms`.

        What they cannot load is computed first, and stored.

        Args:
            group: The group, the operands of its problem in the forms decided so far.
            position: The operand's, or the number of operands for what is added to the problem's result, and for that.
            operand: The form in question: `Computed`, `Dequantised`, `Scattered`, `Added` or `Paired`.
        """
        return False

    def lower_shared(self, groups: Sequence[Group], lowering: Lowering) -> list[Step]:
        """The steps of elementwise groups that do not depend on each other; one, where the target can share it."""
        return [step for group in groups for step in self.lower(group, lowering)]

    def lower(self, group: Group, lowering: Lowering) -> list[Step]:
        """The steps that compute a group.

        Raises:
            OpRefusal: The target cannot compute it; the message is the reason.
        """
        if group.problem is None:
            return [*self.lower_map(group, lowering)]
        if type(group.problem) not in self.problems:
            raise OpRefusal(f"the target '{self.name}' has no kernel for {type(group.problem).__name__}")
        return [*self.problems[type(group.problem)](group.problem, group, lowering)]

    def lower_map(self, group: Group, lowering: Lowering) -> Sequence[Step]:
        """The steps that compute a group without a problem: an elementwise expression, or one that reduces rows."""
        raise OpRefusal(f"the target '{self.name}' has no kernel for expressions")


def target_names() -> tuple[str, ...]:
    """What the installed targets are called: the names of the entry points in the group ``npu.targets``."""
    return tuple(entry_points_of(_GROUP))


def target_named(name: str) -> CodegenTarget:
    """The target of a name; its package is imported only now.

    Raises:
        CompileError: There is no such target, or what its package calls one is none.
        MissingDependencyError: Its package is not installed.
    """
    if not isinstance(name, str) or name not in target_names():
        raise CompileError(f"given the target {name!r:.60}, expected one of {', '.join(target_names())}")
    target = load(_GROUP, name)
    if not (isinstance(target, type) and issubclass(target, CodegenTarget)):
        raise CompileError(
            f"the entry point '{name}' in '{_GROUP}' names {target!r:.80}, expected a subclass of CodegenTarget"
        )
    return target()
