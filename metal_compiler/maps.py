"""Lowers groups without anchor: elementwise kernels and row kernels, generated from their expression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from metal_compiler.row_phases import phase_extents, phases_text
from metal_compiler.skeleton import assemble, fill, pointer_parameters
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.lowering.dialect import Dialect
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import (
    elementwise_body,
    elementwise_operands,
    flops_of,
    output_argument,
    row_operands,
    row_program,
    traffic_of,
)
from npu_compiler.lowering.operands import Operands
from npu_compiler.lowering.params import ParamStruct
from npu_compiler.lowering.target import Lowering

__all__ = ["lower_elementwise", "lower_rows", "lower_shared"]

_THREADS = 256
_MAX_GRID = 65535
_AXES = ("i0", "i1", "i2", "i3", "i4", "i5", "i6", "i7")


def lower_elementwise(group: Group, lowering: Lowering, dialect: Dialect) -> list[KernelCall]:
    """One thread an element, over a grid of up to three dimensions; further ones are unpacked from z."""
    operands = elementwise_operands(group, lowering.tensors, _AXES)
    axes = _AXES[len(_AXES) - len(operands.sizes) :]
    outer, (height, width) = operands.sizes[:-2], (1, 1, *operands.sizes)[-2:]
    sizes = {"size_x": width, "size_y": height, "size_z": prod(outer)}
    lines, extents = _unpack("int(position.z)", axes[:-2], outer)
    if len(axes) > 1:
        lines.append(f"    int {axes[-2]} = int(position.y);")
    lines.append(f"    int {axes[-1]} = int(position.x);")
    fields = tuple(("uint", name) for name in sizes) + _int_fields(operands, extents)
    body = fill(
        "elementwise.metal",
        storage=dialect.storage[group.output.dtype.name],
        pointers=pointer_parameters(operands, dialect, 1),
        params=1 + len(operands.pointers),
        positions="\n".join(lines),
        body=elementwise_body(group, operands, dialect),
    )
    block_x = min(_THREADS, _power_of_two(width))
    block_y = min(_THREADS // block_x, _power_of_two(height))
    grid = (-(-width // block_x), -(-height // block_y), prod(outer))
    kernel = _Kernel("elementwise", fields, sizes | extents, body)
    return [_launch(group, lowering, operands, kernel, grid, (block_x, block_y, 1))]


def lower_rows(group: Group, lowering: Lowering, dialect: Dialect) -> list[KernelCall]:
    """One threadgroup a row; as many threads as the row keeps busy."""
    operands = row_operands(group, lowering.tensors, (*_AXES, "c"))
    program = row_program(group, operands, dialect, hoisting=False)
    rows = prod(operands.sizes[:-1])
    longest = max(program.width, *(phase.extent for phase in program.phases))
    threads = 32 if longest <= 128 else 128 if longest <= 1024 else 256
    lines, extents = _unpack("row", _AXES[len(_AXES) - len(operands.sizes) + 1 :], operands.sizes[:-1])
    values = {"rows": rows, "width": program.width, **phase_extents(program)}
    fields = tuple(("int", name) for name in values) + _int_fields(operands, extents)
    storage = dialect.storage[group.output.dtype.name]
    store = f"{program.place.condition}out[{program.place.address}] = {storage}({program.value});"
    body = fill(
        "rows.metal",
        threads=threads,
        storage=storage,
        pointers=pointer_parameters(operands, dialect, 1),
        params=1 + len(operands.pointers),
        positions="\n".join(lines),
        phases=phases_text(program, threads, dialect),
        body="\n".join((program.body, f"        {store}")),
    )
    grid = (min(rows, _MAX_GRID), -(-rows // _MAX_GRID), 1)
    kernel = _Kernel("rows", fields, values | extents, body)
    return [_launch(group, lowering, operands, kernel, grid, (threads, 1, 1))]


def lower_shared(groups: Sequence[Group], lowering: Lowering, dialect: Dialect) -> list[KernelCall]:
    """Several elementwise groups in one launch: each has its own threadgroups, of one element a thread."""
    parts = [_Part.of(group, number, lowering, dialect) for number, group in enumerate(groups)]
    counts = [-(-prod(part.operands.sizes) // _THREADS) for part in parts]
    firsts = [sum(counts[:number]) for number in range(len(parts))]
    header = ParamStruct("Blocks", tuple(("int", f"first{number}") for number in range(len(parts))))
    arguments = [argument for part in parts for argument in part.arguments]
    members = "".join(f"    Part{number} part{number};\n" for number in range(len(parts)))
    calls, binding = [], 0
    signature = []
    for number, part in enumerate(parts):
        names = [f"b{binding + i}" for i in range(len(part.arguments))]
        signature += [
            f"    {kind} {name} [[buffer({binding + i})]],\n"
            for i, (kind, name) in enumerate(zip(part.kinds, names, strict=True))
        ]
        passed = "".join(f"{name}, " for name in names)
        condition = f"if (block >= p.blocks.first{number}) " if number else ""
        call = f"part{number}((block - p.blocks.first{number}) * {_THREADS} + lane, {passed}p.part{number});"
        calls.append(f"{condition}{{\n        {call}\n    }}")
        binding += len(part.arguments)
    body = fill(
        "shared.metal",
        declarations="\n".join([header.declaration, *(part.text for part in parts)]),
        members=members,
        pointers="".join(signature),
        params=binding,
        calls="    " + " else ".join(reversed(calls)),
    )
    values = {f"first{number}": first for number, first in enumerate(firsts)}
    return [
        KernelCall(
            label="; ".join(" + ".join(group.nodes) for group in groups),
            kernel=lowering.kernel(assemble("shared", None, body)),
            args=tuple(arguments),
            params=header.pack(values) + b"".join(part.params for part in parts),
            grid=(sum(counts), 1, 1),
            block=(_THREADS, 1, 1),
            flops=sum(flops_of([group.expr], prod(group.shape)) for group in groups),
            nbytes=sum(traffic_of(group, lowering.tensors) for group in groups),
        )
    ]


@dataclass(frozen=True)
class _Part:
    """One group of a shared launch, as a function of the element's number.

    Attributes:
        operands: Its operands.
        arguments: What it binds, the output first.
        kinds: Their types.
        text: Its parameter struct and its function.
        params: Its parameters.
    """

    operands: Operands
    arguments: tuple[Argument, ...]
    kinds: tuple[str, ...]
    text: str
    params: bytes

    @classmethod
    def of(cls, group: Group, number: int, lowering: Lowering, dialect: Dialect) -> _Part:
        operands = elementwise_operands(group, lowering.tensors, _AXES)
        axes = _AXES[len(_AXES) - len(operands.sizes) :]
        lines, extents = _unpack("element", axes, operands.sizes)
        storage = dialect.storage[group.output.dtype.name]
        pointers = [dialect.pointer_to(dtype) for _, dtype in operands.pointers]
        kinds = (f"device {storage}*", *pointers)
        names = ("out", *(f"e{i}" for i in range(len(pointers))))
        declared = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, names, strict=True))
        values = {"count": prod(operands.sizes), **extents, **dict(operands.fields)}
        params = ParamStruct(f"Part{number}", tuple(("int", name) for name in values))
        text = (
            f"{params.declaration}\n"
            f"inline void part{number}(int element, {declared}, constant Part{number}& p)\n{{\n"
            "    if (element >= p.count) {\n        return;\n    }\n"
            + "\n".join([*lines, elementwise_body(group, operands, dialect)])
            + "\n}\n"
        )
        arguments = (output_argument(group), *(argument for argument, _ in operands.pointers))
        return cls(operands, arguments, kinds, text, params.pack(values))


def _unpack(linear: str, axes: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[list[str], dict[str, int]]:
    """Statements that split a linear index into positions, and the sizes they need as parameters."""
    lines: list[str] = []
    extents: dict[str, int] = {}
    rest = linear
    for axis, size in list(zip(axes, sizes, strict=True))[:0:-1]:
        extents[f"extent_{axis}"] = size
        lines.append(f"    int {axis} = {rest} % p.extent_{axis};")
        lines.append(f"    int above_{axis} = {rest} / p.extent_{axis};")
        rest = f"above_{axis}"
    if axes:
        lines.append(f"    int {axes[0]} = {rest};")
    return lines, extents


def _int_fields(operands: Operands, extents: dict[str, int]) -> tuple[tuple[str, str], ...]:
    return tuple(("int", name) for name in extents) + tuple(("int", name) for name, _ in operands.fields)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class _Kernel:
    """A generated kernel.

    Attributes:
        entry: Its name.
        fields: Type and name of each parameter, those of its operands included.
        values: Values of the parameters that its operands do not bring.
        body: Its text.
    """

    entry: str
    fields: tuple[tuple[str, str], ...]
    values: Mapping[str, int]
    body: str


def _launch(
    group: Group,
    lowering: Lowering,
    operands: Operands,
    kernel: _Kernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
) -> KernelCall:
    params = ParamStruct("Params", kernel.fields)
    return KernelCall(
        label=" + ".join(group.nodes),
        kernel=lowering.kernel(assemble(kernel.entry, params, kernel.body)),
        args=(output_argument(group), *(argument for argument, _ in operands.pointers)),
        params=params.pack({**kernel.values, **dict(operands.fields)}),
        grid=grid,
        block=block,
        flops=flops_of([group.expr], prod(group.shape)),
        nbytes=traffic_of(group, lowering.tensors),
    )
