"""Lowers several elementwise groups that do not depend on each other to one launch: each has its own blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from cuda_compiler.dialect import CUDA
from cuda_compiler.maps import MAP_THREADS, elementwise_positions
from cuda_compiler.packing import Positions, epilogue
from cuda_compiler.skeleton import assemble
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import flops_of, output_argument, traffic_of
from npu_compiler.lowering.params import ParamStruct
from npu_compiler.lowering.target import Lowering

__all__ = ["lower_shared"]


@dataclass(frozen=True)
class _Part:
    """One group of a shared launch.

    Attributes:
        text: A namespace ``partN`` with its parameter struct and its function ``finish``.
        arguments: What it binds, the output first.
        kinds: Their types.
        params: Its parameters.
        packs: How many packs of elements it computes, a thread each.
    """

    text: str
    arguments: tuple[Argument, ...]
    kinds: tuple[str, ...]
    params: bytes
    packs: int


def lower_shared(groups: Sequence[Group], lowering: Lowering) -> list[KernelCall]:
    """One launch, whose blocks are shared out among the groups in order."""
    parts = [_part(group, number, lowering) for number, group in enumerate(groups)]
    counts = [-(-part.packs // MAP_THREADS) for part in parts]
    ends = {f"end{number}": sum(counts[: number + 1]) for number in range(len(parts))}
    header = ParamStruct("Blocks", tuple(("int", name) for name in ends))
    members = "".join(f"    part{number}::Params part{number};\n" for number in range(len(parts)))
    declared = [f"{kind} p{number}_{i}" for number, part in enumerate(parts) for i, kind in enumerate(part.kinds)]
    declaration = f"{header.declaration}struct Params {{\n    Blocks blocks;\n{members}}};"
    generated = "\n".join([*(part.text for part in parts), declaration, _dispatch(parts, counts, declared)])
    macros = {
        "SHARED_PARAMETERS": ", ".join(declared) + ",",
        "SHARED_ARGUMENTS": "".join(f"{name.split()[-1]}, " for name in declared),
    }
    return [
        KernelCall(
            label="; ".join(" + ".join(group.nodes) for group in groups),
            kernel=lowering.kernel(assemble("shared", None, macros, generated)),
            args=tuple(argument for part in parts for argument in part.arguments),
            params=header.pack(ends) + b"".join(part.params for part in parts),
            grid=(sum(counts), 1, 1),
            block=(MAP_THREADS, 1, 1),
            flops=sum(flops_of([group.expr], prod(group.shape)) for group in groups),
            nbytes=sum(traffic_of(group, lowering.tensors) for group in groups),
        )
    ]


def _part(group: Group, number: int, lowering: Lowering) -> _Part:
    found, size = elementwise_positions(group, lowering)
    values = {**found.extents, **dict(found.operands.fields)}
    struct = ParamStruct("Params", tuple(("int", name) for name in values))
    body = epilogue(group, found, size, "int index, ", "index, ")
    text = f"namespace part{number} {{\n{struct.declaration}{body}\n}}"
    arguments = (output_argument(group), *(argument for argument, _ in found.operands.pointers))
    return _Part(text, arguments, _kinds(group, found), struct.pack(values), found.extents["packs"])


def _kinds(group: Group, found: Positions) -> tuple[str, ...]:
    storage = CUDA.storage[group.output.dtype.name]
    return (f"{storage}*", *(CUDA.pointer_to(dtype) for _, dtype in found.operands.pointers))


def _dispatch(parts: Sequence[_Part], counts: Sequence[int], declared: Sequence[str]) -> str:
    """The device function ``compute`` that hands a block to the group it belongs to."""
    lines = [f"__device__ __forceinline__ void compute({', '.join(declared)}, const Params& p)", "{"]
    for number, part in enumerate(parts):
        first = f"p.blocks.end{number - 1}" if number else "0"
        names = "".join(f"p{number}_{i}, " for i in range(len(part.kinds)))
        lines += [
            f"    if (int(blockIdx.x) < p.blocks.end{number}) {{",
            f"        int index = (int(blockIdx.x) - {first}) * {MAP_THREADS} + int(threadIdx.x);",
            f"        if (index < p.part{number}.packs) {{",
            f"            part{number}::finish(index, {names}p.part{number});",
            "        }",
            "        return;",
            "    }",
        ]
    return "\n".join([*lines, "}"])
