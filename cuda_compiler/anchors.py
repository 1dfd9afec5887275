"""What the lowerings of matmul, convolution and pooling share: a kernel file with a generated epilogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from cuda_compiler.maps import map_macros
from cuda_compiler.packing import Positions, epilogue
from cuda_compiler.skeleton import assemble
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import flops_of, output_argument, traffic_of
from npu_compiler.lowering.params import ParamStruct
from npu_compiler.lowering.target import Lowering
from npu_compiler.tensor.trace import Anchor

__all__ = ["anchor_launch", "anchor_source"]

_POSITIONS, _NAMES = "int batch, int row, int col, ", "batch, row, col, "


def anchor_source(group: Group) -> Anchor:
    """The anchor that a group was built around."""
    assert group.anchor is not None
    assert isinstance(group.anchor.source, Anchor)
    return group.anchor.source


def anchor_launch(
    entry: str,
    group: Group,
    lowering: Lowering,
    found: Positions,
    *,
    size: int,
    inputs: Sequence[Argument],
    values: Mapping[str, int],
    macros: Mapping[str, object],
    flops: int,
    blocks: int,
    threads: int,
    splits: int = 1,
    layers: int = 1,
    shared_bytes: int = 0,
    cluster: int = 1,
    hurries: bool = False,
    generated: str = "",
    parts: Sequence[str] = (),
    before: Sequence[str] = (),
) -> KernelCall:
    """A launch of the kernel `entry`, with the group's epilogue.

    Args:
        entry: Name of the kernel and of its file.
        group: What to compute.
        lowering: Where the trace's tensors are.
        found: The operands of the epilogue.
        size: Results that a thread stores together.
        inputs: What the kernel binds before the output.
        values: The kernel's own parameters.
        macros: What the kernel's file expects to be defined.
        flops: Arithmetic of the kernel, without the epilogue.
        blocks, splits, layers: The grid in x, y and z.
        threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.
        cluster: Neighbouring blocks in x that run at once and reach each other's shared memory.
        hurries: Whether the next launch may begin before this one has waited.
        generated: Further functions that the kernel's file calls.
        parts: Files that it builds on.
        before: Files that the generated functions build on.
    """
    parameters = {**values, **found.extents, **dict(found.operands.fields)}
    struct = ParamStruct("Params", tuple(("int", name) for name in parameters))
    defined = {**map_macros(group, found.operands), "STORE_SIZE": size, "PAIRS": group.pairs, **macros}
    store = epilogue(group, found, size, _POSITIONS, _NAMES, f"const float (&value)[{size * group.pairs}], ")
    kernel = assemble(entry, struct, defined, "\n".join((store, generated)), before=before, after=parts)
    return KernelCall(
        label=" + ".join(group.nodes),
        kernel=lowering.kernel(kernel, hurries),
        args=(*inputs, output_argument(group), *(argument for argument, _ in found.operands.pointers)),
        params=struct.pack(parameters),
        grid=(blocks, splits, layers),
        block=(threads, 1, 1),
        flops=flops + flops_of([group.expr], prod(group.shape)),
        nbytes=traffic_of(group, lowering.tensors),
        shared_bytes=shared_bytes,
        cluster=(cluster, 1, 1),
    )
