"""Several elementwise groups that do not depend on each other in one launch: each has its own blocks of threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from npu_compiler.artifact.plan import KernelCall
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.anchors import KernelWriter
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import flops_of, traffic_of
from npu_compiler.lowering.params import Params, ParamStruct, ints
from npu_compiler.lowering.positions import Positions
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["Part", "SharedText", "shared_launch"]


@dataclass(frozen=True)
class Part:
    """One group of a shared launch.

    Attributes:
        group: What it computes.
        positions: Its operands; the extent ``packs`` says how many threads it needs.
        text: The definition of its parameter struct, and of its function of the thread's index, the pointers that it
            binds and its parameters.
        struct: Name of that struct.
        function: Name of that function.
        kinds: Types of the pointers, that of the output first.
    """

    group: Group
    positions: Positions
    text: str
    struct: str
    function: str
    kinds: tuple[str, ...]

    @property
    def packs(self) -> int:
        return self.positions.extents["packs"]


@dataclass(frozen=True)
class SharedText:
    """What the text of a shared launch is made of.

    Attributes:
        declarations: The functions of all parts, and the parameter struct ``Params``.
        pointers: Type and name of each pointer that it binds.
        calls: Statements that hand a block of threads to the part that it belongs to; they return.
    """

    declarations: str
    pointers: tuple[tuple[str, str], ...]
    calls: str


def shared_launch(
    parts: Sequence[Part],
    lowering: Lowering,
    writer: KernelWriter,
    template: KernelTemplate,
    ids: tuple[str, str],
    print_text: Callable[[SharedText], tuple[Mapping[str, object], str]],
) -> KernelCall:
    """One launch, whose blocks are shared out among the parts in order.

    Args:
        parts: The parts.
        lowering: Where the trace's tensors are.
        writer: Writes the kernel.
        template: Its template, whose threads are a number.
        ids: Texts for the number of a block, and for that of a thread in it.
        print_text: Gives the macros and the functions of the kernel.
    """
    threads = template.threads
    assert isinstance(threads, int)
    counts = [ceil_div(part.packs, threads) for part in parts]
    ends = {f"end{number}": sum(counts[: number + 1]) for number in range(len(parts))}
    header = ParamStruct("Blocks", ints(*ends))
    members = "".join(f"    {part.struct} part{number};\n" for number, part in enumerate(parts))
    params = f"{header.declaration}struct Params {{\n    Blocks blocks;\n{members}}};"
    pointers = [(kind, f"p{number}_{i}") for number, part in enumerate(parts) for i, kind in enumerate(part.kinds)]
    text = SharedText("\n".join([*(part.text for part in parts), params]), tuple(pointers), _calls(parts, threads, ids))
    macros, functions = print_text(text)
    launch = Launch(template, (sum(counts), 1, 1), macros=macros, text=functions)
    packed = (part.positions.struct(part.struct).pack(part.positions.values) for part in parts)
    return KernelCall(
        label="; ".join(" + ".join(part.group.nodes) for part in parts),
        kernel=lowering.kernel(writer.source(launch, "")),
        args=tuple(argument for part in parts for argument in part.positions.arguments(part.group)),
        params=Params.joined((header.pack(ends), *packed)),
        grid=launch.grid,
        block=launch.threads,
        flops=sum(flops_of([part.group.expr], prod(part.group.shape)) for part in parts),
        nbytes=sum(traffic_of(part.group, lowering.tensors) for part in parts),
    )


def _calls(parts: Sequence[Part], threads: int, ids: tuple[str, str]) -> str:
    block, thread = ids
    lines = []
    for number, part in enumerate(parts):
        first = f"p.blocks.end{number - 1}" if number else "0"
        names = "".join(f"p{number}_{i}, " for i in range(len(part.kinds)))
        lines += [
            f"    if ({block} < p.blocks.end{number}) {{",
            f"        int index = ({block} - {first}) * {threads} + {thread};",
            f"        if (index < p.part{number}.packs) {{",
            f"            {part.function}(index, {names}p.part{number});",
            "        }",
            "        return;",
            "    }",
        ]
    return "\n".join(lines)
