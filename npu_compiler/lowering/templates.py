"""Kernel templates: what Python and a kernel file agree on, declared once beside the lowering that uses the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True, eq=False)
class KernelTemplate:
    """What Python and a kernel file agree on.

    Names of macros and of what is bound have spaces between them. One with a question mark behind it is one that only
    some launches have.

    Attributes:
        entry: Name of the kernel and of its file.
        params: The kernel's own parameters, as C declares them: ``int rows, columns; float scale``. Those of what is
            generated come behind them.
        macros: What the file, with those it builds on, expects to be defined.
        inputs: What it binds before the output, in order.
        outputs: What it binds behind them where it stores its results by itself, without an epilogue.
        threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.
        files: Files that it builds on, which come behind what is generated; spaces between them.
        before: Files that what is generated builds on.
        computed: The inputs that a `Prologue` may compute in the kernel.
        filled: Whether the file is a skeleton whose ``$placeholders`` are filled in, instead of macros being defined.
    """

    entry: str
    params: str = ""
    macros: str = ""
    inputs: str = ""
    outputs: str = ""
    threads: Amount = None
    shared_bytes: Amount = 0
    files: str = ""
    before: str = ""
    computed: str = ""
    filled: bool = False

    def check(self, launch: Launch) -> None:
        """Compares what a launch gives with what is declared here.

        Raises:
            CompileError: A parameter, a macro or a binding is missing or unknown, or the prologue has no place.
        """
        if not {*self.computed.split()}.difference(launch.inputs).issuperset(launch.prologues):
            raise CompileError(f"the kernel '{self.entry}' was given a prologue, and its template has no place for it")
        inputs = launch.inputs.keys() | launch.prologues.keys()
        given = launch.values.keys(), launch.defined.keys(), inputs, launch.outputs.keys()
        for (kind, (needed, known)), names in zip(self._declared.items(), given, strict=True):
            if not needed <= names <= known:
                odd = [f"without the {kind} '{name}'" for name in sorted(needed - names)]
                odd += [f"with the {kind} '{name}'" for name in sorted(names - known)]
                declared = ", ".join(sorted(known)) or "none"
                raise CompileError(f"the kernel '{self.entry}' was given {', '.join(odd)}; it declares {declared}")

    @cached_property
    def _declared(self) -> dict[str, tuple[frozenset[str], frozenset[str]]]:
        """What each launch must give and what it may give, in the order of what is given."""
        params = " ".join(name for _, name in self.fields)
        kinds = {"parameter": params, "macro": self.macros, "input": self.inputs, "output": self.outputs}
        return {
            kind: (frozenset(n for n in names.split() if n[-1] != "?"), frozenset(names.replace("?", "").split()))
            for kind, names in kinds.items()
        }

    @cached_property
    def fields(self) -> tuple[tuple[str, str], ...]:
        """The parameters, as pairs of type and name."""
        declarations = (declaration.split(maxsplit=1) for declaration in self.params.split(";") if declaration)
        return tuple((kind, name.strip()) for kind, names in declarations for name in names.split(","))

    def values_among(self, known: Mapping[str, int]) -> dict[str, int]:
        """Those of some numbers that are parameters of the kernel: of a problem more is known than each kernel asks."""
        return {name: known[name] for _, name in self.fields if name in known}

    def macros_among(self, known: Mapping[str, object]) -> dict[str, object]:
        """Those of some macros that the files expect: of what is known each kernel asks a part."""
        _, declared = self._declared["macro"]
        return {name: value for name, value in known.items() if name in declared}

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        """The inputs, in order."""
        return tuple(self.inputs.replace("?", "").split())


@dataclass(frozen=True)
class Prologue:
    """What computes an operand in the kernel, and what it needs.

    Attributes:
        operands: What it reads.
        values: Its parameters, beside those of the operands.
        macros: What is defined for the kernel's file.
        text: Functions that the kernel calls.
        files: Files that these build on.
        flops: Arithmetic, of all blocks that do it.
    """

    operands: tuple[Operands, ...]
    values: Mapping[str, int] = field(default_factory=dict)
    macros: Mapping[str, object] = field(default_factory=dict)
    text: str = ""
    files: tuple[str, ...] = ()
    flops: int = 0

    @cached_property
    def parameters(self) -> Mapping[str, int]:
        """All its parameters."""
        return {**self.values, **{name: value for operands in self.operands for name, value in operands.fields}}

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
        prologues: What computes inputs in the kernel, by name.
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
    prologues: Mapping[str, Prologue] = field(default_factory=dict)
    block: tuple[int, int, int] | None = None
    shared_bytes: int | None = None
    extension: LaunchExtension | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        self.template.check(self)

    @property
    def defined(self) -> Mapping[str, object]:
        """All macros, those of the prologues last."""
        return {**self.macros, **self.prologue_macros} if self.prologues else self.macros

    @property
    def prologue_macros(self) -> dict[str, object]:
        """What is defined for the prologues."""
        return {name: value for each in self.prologues.values() for name, value in each.macros.items()}

    @property
    def threads(self) -> tuple[int, int, int]:
        """Threads of a block in x, y and z."""
        return self.block or (self._amount("threads", self.template.threads), 1, 1)

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a block."""
        own = self.shared_bytes
        return self._amount("shared_bytes", self.template.shared_bytes if own is None else own)

    def _amount(self, name: str, amount: Amount) -> int:
        if amount is None:
            raise CompileError(
                f"the kernel '{self.template.entry}' was given no {name}, which its template leaves open"
            )
        return amount(self.macros) if callable(amount) else amount
