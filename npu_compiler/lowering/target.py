"""The one way in for a target: how it lays out tensors, and how it lowers a group to steps of a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import isfunction
from typing import Any, TypeVar

from npu_compiler.artifact.plan import KernelSource, Step
from npu_compiler.errors import CompileError
from npu_compiler.ir import TensorSpec
from npu_compiler.lowering.device_model import GENERIC, DeviceModel, DeviceModels, Launches
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.plugins import entry_points_of, load, modules_of
from npu_compiler.tensor.layout import Layout
from npu_compiler.tensor.symbolic import OpRefusal
from npu_compiler.tensor.trace import TracedTensor

__all__ = ["Answer", "CodegenTarget", "LowerProblem", "Lowering", "lowering_of", "target_named", "target_names"]

_GROUP, _DEFAULTS = "npu.targets", "npu.defaults"
_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Answer:
    """What a target was told of a tensor or a scratch buffer that depends on the groups ahead.

    Attributes:
        question: Gives the answer for a buffer.
        buffer: Its index.
        answer: What it gave.
        is_buffer: Whether the answer is itself the index of a scratch buffer.
    """

    question: Callable[[int, Lowering], Any]
    buffer: int
    answer: Any
    is_buffer: bool = False


@dataclass
class Lowering:
    """What a target may see and ask for while it lowers a function.

    Attributes:
        tensors: The trace's tensors, by index.
        device: The device that choices are made for.
        scratch_sizes: Bytes of each scratch buffer asked for, by its index.
        common: The scratch buffers that several groups use, by what they hold.
        emitted: What was emitted so far.
        asked: How often a target asked for what depends on the groups ahead, other than by `ask`.
        answers: What it was told by `ask`.
        kernels: The distinct kernels, with their numbers.
        records: What the target itself remembers while it lowers the function, by kind; see `record`.

    Groups of the same form are lowered once (`repeats`). So of `tensors` a target looks at those that a group names,
    and of what computes them only at what kind of source that is; and what it records must hold for equal kernels. The
    number of a check is a parameter, or all of the kernels' text and parameters are the same for groups of no others.
    """

    tensors: Sequence[TracedTensor]
    device: DeviceModel = GENERIC
    scratch_sizes: dict[int, int] = field(default_factory=dict)
    common: dict[Hashable, int] = field(default_factory=dict)
    emitted: list[Step] = field(default_factory=list)
    asked: int = 0
    answers: list[Answer] = field(default_factory=list)
    kernels: dict[KernelSource, int] = field(default_factory=dict)
    records: dict[type, Any] = field(default_factory=dict)

    @property
    def steps(self) -> Sequence[Step]:
        """What was emitted for the groups ahead."""
        self.asked += 1
        return self.emitted

    def kernel(self, source: KernelSource) -> int:
        """The number that a `KernelCall` knows a kernel by."""
        return self.kernels.setdefault(source, len(self.kernels))

    def record(self, kind: type[_Record]) -> _Record:
        """What the target remembers of a kind of its own: one object a function, made by `kind()` when first asked."""
        found: _Record = self.records.setdefault(kind, kind())
        return found

    def scratch(self, nbytes: int) -> int:
        """A buffer that lives from the first to the last call that binds it; its index serves as a tensor's."""
        index = -1 - len(self.scratch_sizes)
        self.scratch_sizes[index] = nbytes
        return index

    def ask(self, question: Callable[[int, Lowering], Any], buffer: int) -> Any:
        """What a question about a tensor or a scratch buffer is answered with, given what was emitted so far.

        For other groups of the form that is asked again: where the answer is the same, so are their steps.
        """
        asked = self.asked
        self.answers.append(Answer(question, buffer, question(buffer, self)))
        self.asked = asked
        return self.answers[-1].answer

    def common_scratch(self, content: Hashable, tensor: int, nbytes: int, everywhere: bool = False) -> tuple[int, bool]:
        """A scratch buffer for what several groups need of a tensor, and whether nobody has asked for it before.

        Args:
            content: What it holds, without the tensor.
            tensor: Index of the tensor that it is about.
            nbytes: Its size.
            everywhere: Whether it is the same whatever tensor it is about, each group writing it anew.
        """

        def key(index: int) -> Hashable:
            return content, None if everywhere else index

        found = self.common.get(key(tensor))
        if found is not None:
            self.answers.append(Answer(lambda index, now: now.common.get(key(index)), tensor, found, True))
            return found, False
        self.asked += 1
        made = self.common[key(tensor)] = self.scratch(nbytes)
        return made, True


LowerProblem = Callable[[Any, Group, Lowering], Sequence[Step]]
_F = TypeVar("_F", bound=LowerProblem)


def lowering_of(problem: type[Problem]) -> Callable[[_F], _F]:
    """Marks the function of a target's package that lowers a group around a kind of problem."""

    def mark(function: _F) -> _F:
        setattr(function, _MARK, problem)
        return function

    return mark


_MARK = "lowering_of"


@cache
def _lowerings_in(package: str) -> Mapping[type[Problem], LowerProblem]:
    """By the kind of problem the function that `lowering_of` marks for it in the modules of a package."""
    values = [value for module in modules_of(package) for value in vars(module).values()]
    functions = [value for value in values if isfunction(value) and hasattr(value, _MARK)]
    return {getattr(function, _MARK): function for function in functions}


class CodegenTarget(ABC):
    """A kind of device, for the compiler.

    Attributes:
        name: What users call it, such as ``metal``.
        compute_dtypes: Names of the data types it computes in, the default first.
        storage_dtypes: Names of all data types that its memory may hold, but for those whose codes these hold.
        package: Whose functions lower problems, as `lowering_of` marks them; empty where it overrides `lower`.
        launch_flops: Arithmetic of a large product that takes as long as one more small launch.
        shared_elements: Results of an elementwise kernel that may share its launch: a larger one fills the device by
            itself.
        devices: The devices that it knows, whose data then say the two numbers above; None where it does not tell
            them apart.
        device: The one that programs are compiled for.
    """

    name: str
    compute_dtypes: tuple[str, ...]
    storage_dtypes: frozenset[str]
    launch_flops: int = 1 << 25
    package: str = ""
    shared_elements: int = 1 << 20
    devices: DeviceModels | None = None
    device: DeviceModel = GENERIC

    def __init__(self, device: str | DeviceModel | None = None) -> None:
        """Args:
        device: Name of the device that programs are compiled for, or a model of it; the target's default when omitted.

        Raises:
            CompileError: The target knows no such device.
        """
        if isinstance(device, DeviceModel):
            self.device = device
        elif self.devices is not None:
            self.device = self.devices.named(device, self.name)
        elif device is not None:
            raise CompileError(
                f"given the device {device!r:.60}, the target '{self.name}' does not tell devices apart; leave it out"
            )
        if self.devices is not None:
            launches = Launches.of(self.device)
            self.launch_flops, self.shared_elements = launches.flops, launches.elements

    @abstractmethod
    def layout(self, shape: tuple[int, ...], role: str) -> Layout:
        """Where a tensor's elements lie. Roles: ``plain``, ``image`` [N, C, ...], ``conv_weight`` [O, I, ...].

        Images and weights are those of lines, planes and volumes: three, four or five dimensions.
        """

    def loads(self, group: Group, position: int, operand: Operand) -> bool:
        """Whether the launches of a group's problem can load an operand in the form it has; see `problems.forms`.

        What they cannot load is computed first, and stored.

        Args:
            group: The group, the operands of its problem in the forms decided so far.
            position: The operand's, or the number of operands for what is added to the problem's result, and for that.
            operand: The form in question: `Computed`, `GroupedCodes`, `Dequantised`, `Scattered`, `Produced`,
                `Unscaled`, `Added` or `Paired`.
        """
        return False

    def multiplies_codes(self, image: TensorSpec, weight: TensorSpec, groups: int) -> bool:
        """Whether a convolution takes an image [N, C, H, W] and a filter [O, C / groups, KH, KW] of codes as they are.

        Elsewhere numbers are made of the codes first.
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
        lower = _lowerings_in(self.package).get(type(group.problem)) if self.package else None
        if lower is None:
            raise OpRefusal(f"the target '{self.name}' has no kernel for {type(group.problem).__name__}")
        return [*lower(group.problem, group, lowering)]

    def lower_map(self, group: Group, lowering: Lowering) -> Sequence[Step]:
        """The steps that compute a group without a problem: an elementwise expression, or one that reduces rows."""
        raise OpRefusal(f"the target '{self.name}' has no kernel for expressions")


def target_names() -> tuple[str, ...]:
    """What the installed targets are called: the names of the entry points in the group ``npu.targets``."""
    return tuple(entry_points_of(_GROUP))


def target_named(name: str | None = None, device: str | DeviceModel | None = None) -> CodegenTarget:
    """The target of a name; its package is imported only now.

    Args:
        name: What it is called; when omitted, the one that the entry point ``target`` in ``npu.defaults`` names.
        device: The device of it that programs are compiled for; its default when omitted.

    Raises:
        CompileError: There is no such target, or no such device, or what its package calls a target is none.
        MissingDependencyError: Its package is not installed.
    """
    if name is None:
        return _target("target", _DEFAULTS, device)
    if not isinstance(name, str) or name not in target_names():
        raise CompileError(f"given the target {name!r:.60}, expected one of {', '.join(target_names())}")
    return _target(name, _GROUP, device)


def _target(entry: str, group: str, device: str | DeviceModel | None) -> CodegenTarget:
    target = load(group, entry)
    if not (isinstance(target, type) and issubclass(target, CodegenTarget)):
        raise CompileError(
            f"the entry point '{entry}' in '{group}' names {target!r:.80}, expected a subclass of CodegenTarget"
        )
    return target() if device is None else target(device)
