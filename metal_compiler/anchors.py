"""The epilogue of a matmul, convolution or pooling kernel: what happens to a result between register and memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from metal_compiler.dialect import METAL
from metal_compiler.skeleton import assemble, kernel_file, pointer_parameters
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.lowering.dialect import Printer
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import flops_of, output_argument, traffic_of
from npu_compiler.lowering.operands import Operands
from npu_compiler.lowering.params import ParamStruct
from npu_compiler.lowering.positions import Positions, epilogue_positions
from npu_compiler.lowering.target import Lowering

__all__ = ["AnchorKernel", "KernelText", "Prologue", "anchor_kernel"]

_DEFAULTS = re.compile(r"#ifndef GENERATED.*?#endif\n", re.DOTALL)
"""The part of a kernel file that lets it compile by itself; here stands what is generated."""


@dataclass(frozen=True)
class Prologue:
    """Statements that compute an operand, and what they need.

    Attributes:
        operands: The tensors they read.
        values: Parameters, with their values.
        definitions: Macros, the statements among them.
        flops: Arithmetic of one threadgroup.
        functions: What the kernel's files call.
    """

    operands: Operands
    values: Mapping[str, int]
    definitions: Mapping[str, object]
    flops: int
    functions: str = ""


@dataclass(frozen=True)
class AnchorKernel:
    """A kernel with its epilogue, ready to be launched.

    Attributes:
        kernel: Its number; see `Lowering.kernel`.
        params: Its parameters.
        operands: The tensors that the epilogue and the prologue read.
        values: Values of the parameters that these add.
        output: The tensor that the kernel writes.
        nbytes: Bytes that must move, the operands of the kernel itself included.
        generated_flops: Arithmetic of the epilogue, and of the prologue once.
    """

    group: Group
    kernel: int
    params: ParamStruct
    operands: tuple[Argument, ...]
    values: Mapping[str, int]
    output: Argument
    nbytes: int
    generated_flops: int

    def launch(
        self,
        inputs: Sequence[Argument],
        values: Mapping[str, int],
        grid: tuple[int, int, int],
        threads: int,
        flops: int,
        share: float = 1.0,
    ) -> KernelCall:
        """One launch.

        Args:
            inputs: The operands of the kernel itself, bound first.
            values: The kernel's own parameters.
            grid: Threadgroups.
            threads: Threads of a threadgroup.
            flops: Arithmetic of the kernel itself.
            share: The part of the group's results that this launch computes.
        """
        return KernelCall(
            label=" + ".join(self.group.nodes),
            kernel=self.kernel,
            args=(*inputs, self.output, *self.operands),
            params=self.params.pack({**values, **self.values}),
            grid=grid,
            block=(threads, 1, 1),
            flops=flops + round(self.generated_flops * share),
            nbytes=round(self.nbytes * share),
        )


@dataclass(frozen=True)
class KernelText:
    """What the text of a kernel is made of, beside its epilogue.

    Attributes:
        entry: Name of the kernel and of its file.
        inputs: How many operands it binds before the output.
        fields: Names of the kernel's own parameters, all of type int.
        macros: What the kernel's file expects to be defined.
        parts: Files that it builds on.
    """

    entry: str
    inputs: int
    fields: Sequence[str]
    macros: Mapping[str, object]
    parts: Sequence[str] = ()


def anchor_kernel(
    kernel: KernelText,
    group: Group,
    lowering: Lowering,
    prologues: Sequence[Prologue] = (),
) -> AnchorKernel:
    """Assembles a kernel out of its file and what is generated for its group.

    Args:
        kernel: The kernel.
        group: What to compute.
        lowering: Where the trace's tensors are.
        prologues: What makes its operands, for kernels that have a place for it.

    Raises:
        OpRefusal: An operand is too large.
    """
    found = epilogue_positions(group, lowering, "value", sized=True)
    operands = found.operands
    pointers = [*operands.pointers, *(pointer for each in prologues for pointer in each.operands.pointers)]
    macros = {**kernel.macros, **_macros(group, operands, prologues, kernel.inputs)}
    values = {**found.values, **{name: value for each in prologues for name, value in each.values.items()}}
    params = ParamStruct("Params", tuple(("int", name) for name in (*kernel.fields, *values)))
    files = (*kernel.parts, f"{kernel.entry}.metal")
    functions = [_functions(group, found), *(each.functions for each in prologues if each.functions)]
    text = [*functions, *(_DEFAULTS.sub("", kernel_file(name)) for name in files)]
    defined = "".join(f"#define {name} {value}".rstrip() + "\n" for name, value in macros.items())
    return AnchorKernel(
        group=group,
        kernel=lowering.kernel(assemble(kernel.entry, params, "\n".join(text), defined)),
        params=params,
        operands=tuple(argument for argument, _ in pointers),
        values=values,
        output=output_argument(group),
        nbytes=traffic_of(group, lowering.tensors),
        generated_flops=flops_of([group.expr], prod(group.shape)) + sum(each.flops for each in prologues),
    )


def _macros(group: Group, operands: Operands, prologues: Sequence[Prologue], inputs: int) -> dict[str, object]:
    """What the files need to be told of output, epilogue and prologue; the output is bound behind the inputs."""
    first = inputs + 1
    behind, before = first + len(operands.pointers), ""
    for each in prologues:
        before += pointer_parameters(each.operands, behind)
        behind += len(each.operands.pointers)
    return {
        "PAIRS": group.pairs,
        "OUT_BUFFER": inputs,
        "EPILOGUE_BUFFERS": pointer_parameters(operands, first).replace("\n", " "),
        "EPILOGUE_PARAMETERS": _parameters(operands),
        "EPILOGUE_ARGUMENTS": "".join(f"e{number}, " for number in range(len(operands.pointers))),
        "PROLOGUE": 0,
        "PROLOGUE_BUFFERS": before.replace("\n", " "),
        "PARAMS_BUFFER": behind,
        "out_t": METAL.storage[group.output.dtype.name],
        "result_t": METAL.register(group.expr.dtype),
        **{name: value for each in prologues for name, value in each.definitions.items()},
    }


def _functions(group: Group, found: Positions) -> str:
    """The functions that `store.metal` and the kernels call."""
    operands = found.operands
    printer = Printer(METAL, operands.names)
    result = printer.value(group.expr)
    positions = "int batch, int row, int col"
    values = "float value, float value1" if group.pairs == 2 else "float value"
    lines = [
        f"METAL_FUNC {METAL.register(group.expr.dtype)} epilogue("
        f"{values}, {positions}, {_parameters(operands)}constant Params& p)",
        "{",
        *found.statements,
        *printer.lines,
        f"    return {result};",
        "}",
        f"METAL_FUNC int output_index({positions}, constant Params& p)",
        "{",
        *found.statements,
        f"    return {operands.output};",
        "}",
    ]
    return "\n".join(lines)


def _parameters(operands: Operands) -> str:
    pointers = (METAL.pointer_to(dtype) for _, dtype in operands.pointers)
    return "".join(f"{pointer} e{number}, " for number, pointer in enumerate(pointers))
