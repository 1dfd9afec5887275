"""Lowers groups without anchor that do not reduce: generated elementwise kernels."""

from __future__ import annotations

from cuda_compiler.dialect import CUDA
from cuda_compiler.epilogues import epilogue
from cuda_compiler.packing import pack_positions, pack_size
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.anchors import Epilogue, pointer_macros
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import elementwise_operands
from npu_compiler.lowering.operands import Operands
from npu_compiler.lowering.positions import AXES, Positions
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["ELEMENTWISE", "MAP_THREADS", "elementwise_positions", "lower_elementwise", "map_macros"]

MAP_THREADS = 256
ELEMENTWISE = KernelTemplate("elementwise", params="int packs", threads=MAP_THREADS)


def lower_elementwise(group: Group, lowering: Lowering) -> list[KernelCall]:
    """One thread a pack of neighbouring elements."""
    found, size = elementwise_positions(group, lowering)
    text = epilogue(group, found, size, "int index, ", "index, ")
    launch = Launch(ELEMENTWISE, (ceil_div(found.extents["packs"], MAP_THREADS), 1, 1), found.extents)
    return [KERNELS.launch(launch, Epilogue(group, found, text, map_macros(group, found.operands)), lowering)]


def elementwise_positions(group: Group, lowering: Lowering) -> tuple[Positions, int]:
    """How the number of a pack, ``index``, becomes a position, and the size of packs; ``packs`` is their number."""
    operands = elementwise_operands(group, lowering.tensors, AXES)
    size = pack_size(group, operands, operands.sizes[-1])
    return pack_positions("index", operands, operands.sizes, size), size


def map_macros(group: Group, operands: Operands) -> dict[str, object]:
    """What every kernel with an epilogue needs to be told."""
    return {
        "OUT_T": CUDA.storage[group.output.dtype.name],
        **pointer_macros("EPILOGUE", operands, CUDA),
    }
