"""Lowers groups without anchor: elementwise kernels and row kernels, generated from their expression."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from metal_compiler.dialect import METAL
from metal_compiler.row_phases import phase_extents, phases_text
from metal_compiler.skeleton import KERNELS
from metal_compiler.tiles.tiling import MAX_GRID
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.integers import ceil_div, power_of_two
from npu_compiler.lowering.anchors import Epilogue, pointer_parameters
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import (
    elementwise_body,
    elementwise_operands,
    row_operands,
    row_program,
)
from npu_compiler.lowering.positions import AXES, Positions, inner_axes, unpack
from npu_compiler.lowering.shared import Part, SharedText, shared_launch
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["lower_elementwise", "lower_rows", "lower_shared"]

_THREADS = 256
_IDS = ("int(group.x)", "int(thread_index)")

ELEMENTWISE = KernelTemplate("elementwise", params="int size_x, size_y, size_z", filled=True)
ROWS = KernelTemplate(
    "rows",
    params="int rows, width",
    macros="threads phases",
    threads=lambda blanks: blanks["threads"],
    filled=True,
)
SHARED = KernelTemplate("shared", macros="declarations pointers params calls", threads=_THREADS, filled=True)


def lower_elementwise(group: Group, lowering: Lowering) -> list[KernelCall]:
    """One thread an element, over a grid of up to three dimensions; further ones are unpacked from z."""
    operands = elementwise_operands(group, lowering.tensors, AXES)
    axes = inner_axes(len(operands.sizes))
    outer, (height, width) = operands.sizes[:-2], (1, 1, *operands.sizes)[-2:]
    sizes = {"size_x": width, "size_y": height, "size_z": prod(outer)}
    extents = dict(sizes)
    lines = unpack("int(position.z)", axes[:-2], outer, extents)
    if len(axes) > 1:
        lines.append(f"    int {axes[-2]} = int(position.y);")
    lines.append(f"    int {axes[-1]} = int(position.x);")
    found = Positions(operands, tuple(lines), extents, axes[-1])
    block_x = min(_THREADS, power_of_two(width))
    block_y = min(_THREADS // block_x, power_of_two(height))
    grid = (ceil_div(width, block_x), ceil_div(height, block_y), prod(outer))
    launch = Launch(ELEMENTWISE, grid, sizes, block=(block_x, block_y, 1))
    return [KERNELS.launch(launch, Epilogue(group, found, elementwise_body(group, operands, METAL)), lowering)]


def lower_rows(group: Group, lowering: Lowering) -> list[KernelCall]:
    """One threadgroup a row; as many threads as the row keeps busy."""
    operands = row_operands(group, lowering.tensors, (*AXES, "c"))
    program = row_program(group, operands, METAL, hoisting=False)
    rows = prod(operands.sizes[:-1])
    longest = max(program.width, *(phase.extent for phase in program.phases))
    threads = 32 if longest <= 128 else 128 if longest <= 1024 else 256
    sizes = {"rows": rows, "width": program.width}
    extents = {**sizes, **phase_extents(program)}
    lines = unpack("row", inner_axes(len(operands.sizes) - 1), operands.sizes[:-1], extents)
    found = Positions(operands, tuple(lines), extents, "c")
    storage = METAL.storage[group.output.dtype.name]
    store = f"        {program.place.condition}out[{program.place.address}] = {storage}({program.value});"
    grid = (min(rows, MAX_GRID), ceil_div(rows, MAX_GRID), 1)
    launch = Launch(ROWS, grid, sizes, {"threads": threads, "phases": phases_text(program, threads)})
    return [KERNELS.launch(launch, Epilogue(group, found, f"{program.body}\n{store}"), lowering)]


def lower_shared(groups: Sequence[Group], lowering: Lowering) -> list[KernelCall]:
    """Several elementwise groups in one launch: each has its own threadgroups, of one element a thread."""
    parts = [_part(group, number, lowering) for number, group in enumerate(groups)]
    return [shared_launch(parts, lowering, KERNELS, SHARED, _IDS, _printed)]


def _part(group: Group, number: int, lowering: Lowering) -> Part:
    """A parameter struct ``PartN`` and a function ``partN``."""
    operands = elementwise_operands(group, lowering.tensors, AXES)
    axes = inner_axes(len(operands.sizes))
    extents = {"packs": prod(operands.sizes)}
    lines = unpack("index", axes, operands.sizes, extents)
    found = Positions(operands, tuple(lines), extents, axes[-1])
    out = f"device {METAL.storage[group.output.dtype.name]}*"
    kinds = (out, *(METAL.pointer_to(dtype) for _, dtype in operands.pointers))
    pointers = pointer_parameters(operands, METAL)
    head = f"inline void part{number}(int index, {out} out, {pointers}constant Part{number}& p)"
    body = [head, "{", *lines, elementwise_body(group, operands, METAL), "}"]
    text = "\n".join((found.struct(f"Part{number}").declaration, *body))
    return Part(group, found, text, f"Part{number}", f"part{number}", kinds)


def _printed(text: SharedText) -> tuple[dict[str, object], str]:
    bound = "".join(f"    {kind} {name} [[buffer({i})]],\n" for i, (kind, name) in enumerate(text.pointers))
    parts = {"declarations": text.declarations, "pointers": bound, "params": len(text.pointers), "calls": text.calls}
    return parts, ""
