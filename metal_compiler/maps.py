"""Lowers groups without anchor: elementwise kernels and row kernels, generated from their expression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from metal_compiler.row_phases import phase_extents, phases_text
from metal_compiler.skeleton import assemble, fill, pointer_parameters
from npu_compiler.artifact.plan import KernelCall, KernelSource
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
from npu_compiler.lowering.positions import AXES, Positions, unpack
from npu_compiler.lowering.shared import Part, SharedText, shared_launch
from npu_compiler.lowering.target import Lowering

__all__ = ["lower_elementwise", "lower_rows", "lower_shared"]

_THREADS = 256
_MAX_GRID = 65535


def lower_elementwise(group: Group, lowering: Lowering, dialect: Dialect) -> list[KernelCall]:
    """One thread an element, over a grid of up to three dimensions; further ones are unpacked from z."""
    operands = elementwise_operands(group, lowering.tensors, AXES)
    axes = AXES[len(AXES) - len(operands.sizes) :]
    outer, (height, width) = operands.sizes[:-2], (1, 1, *operands.sizes)[-2:]
    sizes = {"size_x": width, "size_y": height, "size_z": prod(outer)}
    extents: dict[str, int] = {}
    lines = unpack("int(position.z)", axes[:-2], outer, extents)
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
    operands = row_operands(group, lowering.tensors, (*AXES, "c"))
    program = row_program(group, operands, dialect, hoisting=False)
    rows = prod(operands.sizes[:-1])
    longest = max(program.width, *(phase.extent for phase in program.phases))
    threads = 32 if longest <= 128 else 128 if longest <= 1024 else 256
    extents: dict[str, int] = {}
    lines = unpack("row", AXES[len(AXES) - len(operands.sizes) + 1 :], operands.sizes[:-1], extents)
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
    parts = [_part(group, number, lowering, dialect) for number, group in enumerate(groups)]
    return [shared_launch(parts, lowering, _THREADS, ("int(group.x)", "int(thread_index)"), _shared_kernel)]


def _part(group: Group, number: int, lowering: Lowering, dialect: Dialect) -> Part:
    """A parameter struct ``PartN`` and a function ``partN``."""
    operands = elementwise_operands(group, lowering.tensors, AXES)
    axes = AXES[len(AXES) - len(operands.sizes) :]
    extents = {"packs": prod(operands.sizes)}
    lines = unpack("index", axes, operands.sizes, extents)
    found = Positions(operands, tuple(lines), extents, axes[-1])
    pointers = [dialect.pointer_to(dtype) for _, dtype in operands.pointers]
    kinds = (f"device {dialect.storage[group.output.dtype.name]}*", *pointers)
    names = ("out", *(f"e{i}" for i in range(len(pointers))))
    declared = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, names, strict=True))
    head = f"inline void part{number}(int index, {declared}, constant Part{number}& p)"
    body = [head, "{", *lines, elementwise_body(group, operands, dialect), "}"]
    text = "\n".join((found.struct(f"Part{number}").declaration, *body))
    return Part(group, found, text, f"Part{number}", f"part{number}", kinds)


def _shared_kernel(text: SharedText) -> KernelSource:
    bound = (f"    {kind} {name} [[buffer({i})]],\n" for i, (kind, name) in enumerate(text.pointers))
    parts = {"declarations": text.declarations, "pointers": "".join(bound), "params": len(text.pointers)}
    return assemble("shared", None, fill("shared.metal", **parts, calls=text.calls))


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
