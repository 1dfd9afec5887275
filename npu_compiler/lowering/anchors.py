"""Launches of kernel files, with what is generated for a group: what all languages have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from math import prod

from npu_compiler.artifact.plan import Argument, KernelCall, KernelSource
from npu_compiler.lowering.dialect import Dialect
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import flops_of, traffic_of
from npu_compiler.lowering.operands import Operands
from npu_compiler.lowering.params import ParamStruct, ints
from npu_compiler.lowering.positions import Positions
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch, Prologue

__all__ = ["Epilogue", "KernelWriter", "definitions", "function"]
__all__ += ["pointer_arguments", "pointer_macros", "pointer_parameters"]


@dataclass(frozen=True)
class Epilogue:
    """What a kernel does for a group with its own results, between register and memory; without a problem, all it does.

    It is printed once for all kernels that a device may choose from.

    Attributes:
        group: What to compute.
        found: Its operands.
        text: The functions that compute and store results.
        macros: What any kernel's file needs to be told of them.
    """

    group: Group
    found: Positions
    text: str
    macros: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> Mapping[str, int]:
        """Those of the functions."""
        return self.found.values

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """What a kernel binds for the group: the output, then the operands."""
        return self.found.arguments(self.group)

    @cached_property
    def flops(self) -> int:
        """Its arithmetic."""
        groups = self.group, *self.group.followers
        return sum(flops_of([group.expr], prod(group.shape)) for group in groups)


class KernelWriter(ABC):
    """Makes launches of a target's kernel files.

    Attributes:
        package: The target's package, whose folder ``kernels`` holds the files.
        dialect: The language that they are written in.
        prologue_last: Whether what a prologue reads is bound behind what the epilogue reads, and so are its parameters;
            else it takes the place of the input that it computes.
    """

    package: str
    dialect: Dialect
    prologue_last: bool = False

    def file(self, name: str) -> str:
        """The text of a kernel file."""
        return _file(self.package, name)

    @abstractmethod
    def source(self, launch: Launch, declaration: str, fused: Epilogue | None = None) -> KernelSource:
        """A whole translation unit.

        Args:
            launch: What the kernel's file is given.
            declaration: That of the parameter struct.
            fused: What the kernel does with its results; None where its file stores them by itself.
        """

    def number(self, launch: Launch, source: KernelSource, lowering: Lowering) -> int:
        """The number that a `KernelCall` knows a kernel by."""
        return lowering.kernel(source)

    def launch(self, launch: Launch, fused: Epilogue, lowering: Lowering) -> KernelCall:
        """A launch that computes a group."""
        nbytes = round(traffic_of(fused.group, lowering.tensors) * launch.share)
        return self._call(launch, fused, " + ".join(fused.group.nodes), nbytes, lowering)

    def launch_alone(self, launch: Launch, label: str, nbytes: int, lowering: Lowering) -> KernelCall:
        """A launch of a kernel without an epilogue, which stores its results to the launch's outputs."""
        return self._call(launch, None, label, nbytes, lowering)

    def _call(self, launch: Launch, fused: Epilogue | None, label: str, nbytes: int, lowering: Lowering) -> KernelCall:
        generated: list[Prologue | Epilogue] = [*launch.prologues.values()]
        if fused is not None:
            generated.insert(0 if self.prologue_last else len(generated), fused)
        values = {**launch.values, **{name: value for each in generated for name, value in each.parameters.items()}}
        params = _struct(launch.template, tuple(values))
        stored = launch.outputs.values() if fused is None else fused.arguments
        return KernelCall(
            label=label,
            kernel=self.number(launch, self.source(launch, params.declaration, fused), lowering),
            args=(*self._inputs(launch), *stored, *self._read_last(launch)),
            params=params.pack(values),
            grid=launch.grid,
            block=launch.threads,
            flops=launch.flops + round(sum(each.flops for each in generated) * launch.share),
            nbytes=nbytes,
            shared_bytes=launch.shared,
            extension=launch.extension,
        )

    def _read_last(self, launch: Launch) -> list[Argument]:
        """What prologues read, where that is bound last."""
        prologues = launch.prologues.values() if self.prologue_last else ()
        return [read for each in prologues for read in each.arguments]

    def _inputs(self, launch: Launch) -> list[Argument]:
        """What is bound before the output, in the order of the template."""
        found: list[Argument] = []
        for name in launch.template.input_names:
            if name in launch.inputs:
                found.append(launch.inputs[name])
            elif name in launch.prologues and not self.prologue_last:
                found += launch.prologues[name].arguments
        return found


@cache
def _file(package: str, name: str) -> str:
    return files(package).joinpath("kernels", name).read_text(encoding="utf-8")


@lru_cache(maxsize=1024)  # most launches of a template have the same parameters
def _struct(template: KernelTemplate, names: tuple[str, ...]) -> ParamStruct:
    """The parameters that a template declares, then what else there is among `names`."""
    own = {name for _, name in template.fields}
    return ParamStruct("Params", (*template.fields, *ints(*(name for name in names if name not in own))))


def definitions(macros: Mapping[str, object]) -> str:
    """The lines that define macros."""
    return "".join([f"#define {name} {value}".rstrip() + "\n" for name, value in macros.items()])


def function(head: str, statements: Iterable[str], result: str) -> str:
    """A function that returns a result after some statements."""
    return "\n".join([head, "{", *statements, f"    return {result};", "}"])


def pointer_parameters(operands: Operands, dialect: Dialect) -> str:
    """Parameters for the operands' pointers ``e0``, ``e1``... (after their prefix), each with a comma after it."""
    kinds = (dialect.pointer_to(dtype, argument.writes) for argument, dtype in operands.pointers)
    return "".join(f"{kind} {operands.prefix}e{number}, " for number, kind in enumerate(kinds))


def pointer_macros(name: str, operands: Operands, dialect: Dialect) -> dict[str, object]:
    """The macros ``name_PARAMETERS`` and ``name_ARGUMENTS``, by which a kernel's file declares and passes pointers."""
    parameters, arguments = pointer_parameters(operands, dialect), pointer_arguments(operands)
    return {f"{name}_PARAMETERS": parameters, f"{name}_ARGUMENTS": arguments}


def pointer_arguments(operands: Operands) -> str:
    """The pointers themselves, each with a comma after it."""
    return "".join(f"{operands.prefix}e{number}, " for number in range(len(operands.pointers)))
