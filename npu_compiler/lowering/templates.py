"""Kernel templates: what Python and a kernel file agree on, declared once beside the lowering that uses the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from npu_compiler.artifact.extension import LaunchExtension
from npu_compiler.artifact.plan import Argument
from npu_compiler.errors import CompileError
from npu_compiler.lowering.operands import Operands

__all__ = ["Amount", "KernelTemplate", "Launch", "Prologue"]

Amount = int | Callable[[Mapping[str, Any]], int] | None
"""A number; or how it follows from the macros; or None where each launch says it."""


@dataclass(frozen=True)
class KernelTemplate:
    """What Python and a kernel file agree on.

    A name of a macro or an input with a question mark behind it is one that only some launches have.

    Attributes:
        entry: Name of the kernel and of its file.
        params: The kernel's own parameters, pairs of type and name; those of what is generated come behind them.
        macros: What the file, with those it builds on, expects to be defined.
        inputs: What it binds before the output.
        outputs: What it binds behind them where it stores its results by itself, without an epilogue.
        threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.
        files: Files that it builds on, which come behind what is generated.
        before: Files that what is generated builds on.
        computed: The input that a `Prologue` may compute in the kernel; empty where there is no place for one.
        filled: Whether the file is a skeleton whose ``$placeholders`` are filled in, instead of macros being defined.
    """

    entry: str
    params: tuple[tuple[str, str], ...] = ()
    macros: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    threads: Amount = None
    shared_bytes: Amount = 0
    files: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    computed: str = ""
    filled: bool = False

    def check(self, launch: Launch) -> None:
        """Compares what a launch gives with what is declared here.

        Raises:
            CompileError: A parameter, a macro or an input is missing or unknown, or there is no place for the prologue.
        """
        self._compare("parameter", launch.values, self._param_names)
        self._compare("macro", launch.defined, self._macro_names)
        self._compare("input", launch.inputs, self._input_names[launch.prologue is not None])
        self._compare("output", launch.outputs, self._output_names)
        if launch.prologue is not None and not self.computed:
            raise CompileError(f"the kernel '{self.entry}' was given a prologue, and its template has no place for one")

    def values_among(self, known: Mapping[str, int]) -> dict[str, int]:
        """Those of some numbers that are parameters of the kernel: of a problem more is known than each kernel asks."""
        return {name: known[name] for _, name in self.params if name in known}

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        """The inputs, in order."""
        return tuple(name.removesuffix("?") for name in self.inputs)

    @cached_property
    def _param_names(self) -> tuple[frozenset[str], frozenset[str]]:
        return _needed_and_known(name for _, name in self.params)

    @cached_property
    def _macro_names(self) -> tuple[frozenset[str], frozenset[str]]:
        return _needed_and_known(self.macros)

    @cached_property
    def _input_names(self) -> tuple[tuple[frozenset[str], frozenset[str]], ...]:
        """Without a prologue, and with one."""
        return _needed_and_known(self.inputs), _needed_and_known(name for name in self.inputs if name != self.computed)

    @cached_property
    def _output_names(self) -> tuple[frozenset[str], frozenset[str]]:
        return _needed_and_known(self.outputs)

    def _compare(self, kind: str, given: Mapping[str, object], names: tuple[frozenset[str], frozenset[str]]) -> None:
        needed, known = names
        keys = given.keys()
        if needed <= keys <= known:
            return
        missing, unknown = sorted(needed - keys), sorted(keys - known)
        odd = [f"without the {kind} '{name}'" for name in missing] + [f"with the {kind} '{name}'" for name in unknown]
        raise CompileError(
            f"the kernel '{self.entry}' was given {', '.join(odd)}; its template declares {', '.join(sorted(known))}"
        )


def _needed_and_known(names: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    given = tuple(names)
    return frozenset(n for n in given if not n.endswith("?")), frozenset(n.removesuffix("?") for n in given)


@dataclass(frozen=True)
class Prologue:
    """What computes an operand in the kernel, and what it needs.

    Attributes:
        operands: What it reads.
        values: Its parameters.
        macros: What is defined for the kernel's file.
        text: Functions that the kernel calls.
        files: Files that these build on.
        flops: Arithmetic, of all blocks that do it.
    """

    operands: tuple[Operands, ...]
    values: Mapping[str, int]
    macros: Mapping[str, object] = field(default_factory=dict)
    text: str = ""
    files: tuple[str, ...] = ()
    flops: int = 0

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The tensors that it reads."""
        return tuple(argument for operands in self.operands for argument, _ in operands.pointers)


@dataclass(frozen=True)
class Launch:
    """A template with all that one launch gives it.

    Attributes:
        template: The template.
        grid: Blocks in x, y and z.
        values: The kernel's own parameters.
        macros: What is defined for its files.
        inputs: What is bound before the output, by name.
        outputs: What is bound behind them, where nothing is generated for what the kernel stores.
        flops: Arithmetic of the kernel itself.
        text: Functions that its file calls, beside those of the epilogue.
        files: Files that it builds on, beside the template's.
        prologue: What computes the template's `computed` input.
        block: Threads of a block in x, y and z, where the template leaves that open.
        shared_bytes: Dynamic shared memory of a block, where the template leaves that open.
        extension: What only the target's launches have.
        share: The part of a group's results that it computes.

    Raises:
        CompileError: The template declares other parameters, macros or inputs.
    """

    template: KernelTemplate
    grid: tuple[int, int, int]
    values: Mapping[str, int] = field(default_factory=dict)
    macros: Mapping[str, object] = field(default_factory=dict)
    inputs: Mapping[str, Argument] = field(default_factory=dict)
    outputs: Mapping[str, Argument] = field(default_factory=dict)
    flops: int = 0
    text: str = ""
    files: Sequence[str] = ()
    prologue: Prologue | None = None
    block: tuple[int, int, int] | None = None
    shared_bytes: int | None = None
    extension: LaunchExtension | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        self.template.check(self)

    @property
    def defined(self) -> Mapping[str, object]:
        """All macros, those of the prologue last."""
        return self.macros if self.prologue is None else {**self.macros, **self.prologue.macros}

    @property
    def threads(self) -> tuple[int, int, int]:
        """Threads of a block in x, y and z."""
        return self.block or (self._amount("threads", self.template.threads), 1, 1)

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a block."""
        if self.shared_bytes is not None:
            return self.shared_bytes
        return self._amount("shared_bytes", self.template.shared_bytes)

    def _amount(self, name: str, amount: Amount) -> int:
        if amount is None:
            entry = self.template.entry
            raise CompileError(f"the kernel '{entry}' was given no {name}, which its template leaves to each launch")
        return amount(self.macros) if callable(amount) else amount
