"""What the compiler hands to the runtime: buffers, kernels and the steps that replay them.

A target emits the same steps with numbers of its own, as a code generator names virtual registers: kernels as
`Lowering` counts them, and for each tensor and scratch buffer a buffer of its own. `Placement` gives them memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import chain

from npu_compiler.artifact.extension import ArgumentExtension, LaunchExtension
from npu_compiler.records import changed
from npu_compiler.tensor.index_check import IndexCheck
from npu_compiler.tensor.layout import BufferSpec

__all__ = [
    "FAULTS",
    "Argument",
    "Buffer",
    "Call",
    "CallChoice",
    "CallOption",
    "ExecutionPlan",
    "KernelCall",
    "KernelSource",
    "LibraryCall",
    "Role",
    "Select",
    "Step",
    "change_calls",
    "choice_of",
    "options_of",
]


class Role(Enum):
    """Who owns a buffer's memory."""

    INPUT = "input"  # the caller
    OUTPUT = "output"  # made anew for each run, then the caller's
    WEIGHT = "weight"  # shared by every function of a program
    ARENA = "arena"  # the executor; holds all intermediate tensors
    FAULTS = "faults"  # the executor; the record of an index beyond its tensor, see `index_check`


FAULTS = -(1 << 31)
"""What an `Argument` that is not placed yet names to bind the record of faults; below every scratch buffer."""


@dataclass(frozen=True)
class Buffer:
    """A piece of device memory. `name` is the tensor's for inputs, outputs and weights, else empty."""

    role: Role
    name: str
    nbytes: int


class KernelSource:
    """A kernel as text: a whole translation unit, and `entry`, the function in it.

    The text is given in parts, which are lines on their own: kernels have most of these in common, so that a text is
    put together only for who reads it as a whole. How it is divided makes no difference between kernels.

    Attributes:
        entry: Name of the kernel.
        parts: The text, without the ends of lines between the parts.
    """

    def __init__(self, entry: str, *parts: str) -> None:
        self.entry, self.parts = entry, parts
        self._length = sum(map(len, parts)) + len(parts)

    @cached_property
    def text(self) -> str:
        """The whole text."""
        return "\n".join(self.parts)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of entry and text, in hexadecimal."""
        return hashlib.sha256("\0".join((self.entry, "\n".join(self.parts))).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KernelSource) or (self.entry, self._length) != (other.entry, other._length):
            return False
        if [*map(len, self.parts)] == [*map(len, other.parts)]:
            return self.parts == other.parts
        return self.text == other.text

    def __hash__(self) -> int:
        return hash((self.entry, self._length))

    def __repr__(self) -> str:
        return f"KernelSource({self.entry!r}, {self.text!r})"


@dataclass(frozen=True)
class Argument:
    """A buffer bound to a kernel: index into `ExecutionPlan.buffers` and a byte offset. `writes` marks an output.

    Until it is placed, `buffer` is the index of a tensor in the trace, of a scratch buffer (below 0), or `FAULTS`.
    `extension` is what the binding has on the program's target alone.
    """

    buffer: int
    offset: int = 0
    writes: bool = False
    extension: ArgumentExtension | None = None


@dataclass(frozen=True)
class KernelCall:
    """One launch. Arguments take binding indices 0, 1, ...; `params`, where not empty, takes the index after them.

    Attributes:
        label: What the launch computes, for people: the names of the nodes it covers.
        kernel: Index into `ExecutionPlan.kernels`; until it is placed, what `Lowering.kernel` gave.
        grid: Threadgroups (blocks) in x, y, z.
        block: Threads of a threadgroup in x, y, z.
        flops: Floating-point operations done.
        nbytes: Bytes that must move through device memory at the least.
        shared_bytes: Memory that a threadgroup's threads share, beyond what the kernel's text declares.
        extension: What the launch has on the program's target alone.
    """

    label: str
    kernel: int
    args: tuple[Argument, ...]
    params: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    flops: int = 0
    nbytes: int = 0
    shared_bytes: int = 0
    extension: LaunchExtension | None = None


@dataclass(frozen=True)
class LibraryCall:
    """A matmul or convolution handed to the vendor's library.

    Attributes:
        routine: Name of the routine in the target's own vocabulary.
        attrs: Its sizes, strides, data types and epilogue: numbers, strings and lists of them.
    """

    label: str
    routine: str
    args: tuple[Argument, ...]
    attrs: dict[str, object] = field(hash=False)
    flops: int = 0
    nbytes: int = 0


Call = KernelCall | LibraryCall


@dataclass(frozen=True)
class CallOption:
    """One way to do what a choice is about.

    Attributes:
        requires: What a device must offer, in the target's own vocabulary; empty for any device.
        calls: What is done, in order.
    """

    requires: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class CallChoice:
    """Several ways to compute the same tensors, the preferred first. One of them at least runs on any device.

    What only one of them writes is its own scratch, and may lie where another's does. What other steps use too
    (`Lowering.common_scratch`) is written outside of a choice, as an option may never run, or by each step anew.
    """

    options: tuple[CallOption, ...]

    @property
    def preferred(self) -> CallOption:
        return self.options[0]

    @property
    def label(self) -> str:
        return self.preferred.calls[0].label

    @property
    def args(self) -> tuple[Argument, ...]:
        """What any of the options binds."""
        return tuple(argument for option in self.options for call in option.calls for argument in call.args)

    @property
    def flops(self) -> int:
        return sum(call.flops for call in self.preferred.calls)

    @property
    def nbytes(self) -> int:
        return sum(call.nbytes for call in self.preferred.calls)


Step = KernelCall | LibraryCall | CallChoice


def choice_of(options: Sequence[CallOption]) -> list[Step]:
    """A choice between options; where there is only one, its calls."""
    return [CallChoice(tuple(options))] if len(options) > 1 else [*options[0].calls]


def options_of(step: Step) -> tuple[CallOption, ...]:
    """The ways to do a step; of a call there is one."""
    return step.options if isinstance(step, CallChoice) else (CallOption("", (step,)),)


def change_calls(step: Step, change: Callable[[Call], Call]) -> Step:
    """The step with each of its calls changed."""
    if not isinstance(step, CallChoice):
        return change(step)
    return CallChoice(tuple(CallOption(option.requires, tuple(map(change, option.calls))) for option in step.options))


Select = Callable[[CallChoice, Sequence[KernelSource]], int]  # the option to take, given the plan's kernels


@dataclass(frozen=True)
class ExecutionPlan:
    """One function of a program, ready to replay.

    Attributes:
        buffers: Everything that steps bind.
        kernels: The distinct kernels.
        steps: Launches, and choices between some, in order; each may rely on the ones before it being complete.
        inputs, outputs: What the caller gives and gets, in the model's order.
        state: Pairs (output name, input name): the output is the input's own buffer, updated in place.
        notes: What was assumed of the model, and what the compiler could not do and why, for `describe()`.
        structure: How the model nests its outputs, as JSON (see `output_structure`); empty for the usual way.
        checks: The indices that kernels check.
    """

    buffers: tuple[Buffer, ...]
    kernels: tuple[KernelSource, ...]
    steps: tuple[Step, ...]
    inputs: tuple[BufferSpec, ...]
    outputs: tuple[BufferSpec, ...]
    state: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    structure: str = ""
    checks: tuple[IndexCheck, ...] = ()

    @property
    def arena_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers if buffer.role is Role.ARENA)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The launches in order; of each choice that is left, those of the preferred option."""
        return tuple(chain.from_iterable(options_of(step)[0].calls for step in self.steps))

    def resolved(self, select: Select) -> ExecutionPlan:
        """The plan with one option in the place of each choice, and only the kernels that it then launches."""
        calls = chain.from_iterable(self._taken(step, select) for step in self.steps)
        return replace(self, steps=tuple(calls)).with_launched_kernels()

    def _taken(self, step: Step, select: Select) -> tuple[Call, ...]:
        return step.options[select(step, self.kernels)].calls if isinstance(step, CallChoice) else (step,)

    def with_launched_kernels(self) -> ExecutionPlan:
        """The plan with only the kernels that its steps launch, in the order in which they first do."""
        numbers: dict[int, int] = {}

        def renumbered(call: Call) -> Call:
            if not isinstance(call, KernelCall):
                return call
            number = numbers.setdefault(call.kernel, len(numbers))
            return call if number == call.kernel else changed(call, kernel=number)

        steps = tuple(change_calls(step, renumbered) for step in self.steps)
        return replace(self, kernels=tuple(self.kernels[number] for number in numbers), steps=steps)
