"""What the lowerings of matmul, convolution and pooling share: a kernel file with a generated epilogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from cuda_compiler.artifact.extensions import cluster_along_x
from cuda_compiler.early_launches import kernel_number
from cuda_compiler.maps import map_macros
from cuda_compiler.packing import epilogue
from cuda_compiler.skeleton import assemble
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import flops_of, traffic_of
from npu_compiler.lowering.params import ParamStruct
from npu_compiler.lowering.positions import Positions
from npu_compiler.lowering.target import Lowering

__all__ = ["Epilogue", "KernelText", "LaunchShape", "anchor_launch"]

_POSITIONS, _NAMES = "int batch, int row, int col, ", "batch, row, col, "


@dataclass(frozen=True)
class KernelText:
    """What the text of a kernel is made of, beside its epilogue.

    Attributes:
        entry: Name of the kernel and of its file.
        values: The kernel's own parameters, all of type int.
        macros: What the kernel's file expects to be defined.
        generated: Further functions that the kernel's file calls.
        parts: Files that it builds on.
        before: Files that the generated functions build on.
    """

    entry: str
    values: Mapping[str, int]
    macros: Mapping[str, object]
    generated: str = ""
    parts: Sequence[str] = ()
    before: Sequence[str] = ()


@dataclass(frozen=True)
class LaunchShape:
    """How a kernel is launched.

    Attributes:
        blocks, splits, layers: The grid in x, y and z.
        threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.
        cluster: Neighbouring blocks in x that run at once and reach each other's shared memory.
        hurries: Whether the next launch may begin before this one has waited.
    """

    blocks: int
    threads: int
    splits: int = 1
    layers: int = 1
    shared_bytes: int = 0
    cluster: int = 1
    hurries: bool = False


@dataclass(frozen=True)
class Epilogue:
    """What follows an anchor, printed once for all the kernels that a device may choose from.

    Attributes:
        group: What to compute.
        found: Its operands.
        size: Results that a thread stores together.
    """

    group: Group
    found: Positions
    size: int

    @cached_property
    def text(self) -> str:
        """The functions that fetch operands, and that compute and store results."""
        values = f"const float (&value)[{self.size * self.group.pairs}], "
        return epilogue(self.group, self.found, self.size, _POSITIONS, _NAMES, values)

    @cached_property
    def macros(self) -> Mapping[str, object]:
        """What a kernel's file needs to be told of it."""
        return {**map_macros(self.group, self.found.operands), "STORE_SIZE": self.size, "PAIRS": self.group.pairs}

    @cached_property
    def flops(self) -> int:
        """Its arithmetic."""
        return flops_of([self.group.expr], prod(self.group.shape))


def anchor_launch(
    kernel: KernelText,
    shape: LaunchShape,
    fused: Epilogue,
    lowering: Lowering,
    *,
    inputs: Sequence[Argument],
    flops: int,
) -> KernelCall:
    """A launch of a kernel with the epilogue of its group.

    Args:
        kernel: The kernel.
        shape: How it is launched.
        fused: The epilogue.
        lowering: Where the trace's tensors are.
        inputs: What the kernel binds before the output.
        flops: Arithmetic of the kernel, without the epilogue.
    """
    parameters = {**kernel.values, **fused.found.values}
    struct = ParamStruct("Params", tuple(("int", name) for name in parameters))
    generated = "\n".join((fused.text, kernel.generated))
    defined = {**fused.macros, **kernel.macros}
    source = assemble(kernel.entry, struct, defined, generated, before=kernel.before, after=kernel.parts)
    return KernelCall(
        label=" + ".join(fused.group.nodes),
        kernel=kernel_number(source, lowering, shape.hurries),
        args=(*inputs, *fused.found.arguments(fused.group)),
        params=struct.pack(parameters),
        grid=(shape.blocks, shape.splits, shape.layers),
        block=(shape.threads, 1, 1),
        flops=flops + fused.flops,
        nbytes=traffic_of(fused.group, lowering.tensors),
        shared_bytes=shape.shared_bytes,
        extension=cluster_along_x(shape.cluster),
    )
