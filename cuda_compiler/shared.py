"""Lowers several elementwise groups that do not depend on each other to one launch: each has its own blocks."""

from __future__ import annotations

from collections.abc import Sequence

from cuda_compiler.dialect import CUDA
from cuda_compiler.epilogues import epilogue
from cuda_compiler.maps import MAP_THREADS, elementwise_positions
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.shared import Part, SharedText, shared_launch
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate

__all__ = ["SHARED", "lower_shared"]

SHARED = KernelTemplate("shared", macros="SHARED_PARAMETERS SHARED_ARGUMENTS", threads=MAP_THREADS)
_IDS = ("int(blockIdx.x)", "int(threadIdx.x)")


def lower_shared(groups: Sequence[Group], lowering: Lowering) -> list[KernelCall]:
    """One launch, whose blocks are shared out among the groups in order; none of no groups."""
    parts = [_part(group, number, lowering) for number, group in enumerate(groups)]
    return [shared_launch(parts, lowering, KERNELS, SHARED, _IDS, _printed)] if parts else []


def _part(group: Group, number: int, lowering: Lowering) -> Part:
    """A namespace ``partN`` with a parameter struct and a function ``finish``."""
    found, size = elementwise_positions(group, lowering)
    body = epilogue(group, found, size, "int index, ", "index, ")
    text = f"namespace part{number} {{\n{found.struct().declaration}{body}\n}}"
    kinds = (f"{CUDA.storage[group.output.dtype.name]}*", *(CUDA.pointer_to(p.dtype) for p in found.operands.pointers))
    return Part(group, found, text, f"part{number}::Params", f"part{number}::finish", kinds)


def _printed(text: SharedText) -> tuple[dict[str, object], str]:
    """The device function ``compute`` hands a block to the group it belongs to."""
    declared = [f"{kind} {name}" for kind, name in text.pointers]
    compute = f"{CUDA.inline} void compute({', '.join(declared)}, const Params& p)"
    macros: dict[str, object] = {
        "SHARED_PARAMETERS": ", ".join(declared) + ",",
        "SHARED_ARGUMENTS": "".join(f"{name}, " for _, name in text.pointers),
    }
    return macros, "\n".join((text.declarations, compute, "{", text.calls, "}"))
