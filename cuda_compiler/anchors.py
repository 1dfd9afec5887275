"""The epilogue of a matmul, convolution, pooling or attention: what happens to a result between register and memory."""

from __future__ import annotations

from cuda_compiler.dialect import CUDA
from cuda_compiler.maps import map_macros
from cuda_compiler.packing import epilogue
from cuda_compiler.skeleton import KERNELS
from npu_compiler.lowering.anchors import Epilogue
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.positions import Positions

__all__ = ["anchor_epilogue", "anchor_launch"]

_POSITIONS, _NAMES = "int batch, int row, int col, ", "batch, row, col, "

anchor_launch = KERNELS.launch


def anchor_epilogue(group: Group, found: Positions, size: int) -> Epilogue:
    """The functions that fetch operands, and that compute and store `size` neighbouring results of a thread."""
    assert group.anchor is not None
    values = f"const {CUDA.register(group.anchor.dtype)} (&value)[{size * group.pairs}], "
    text = epilogue(group, found, size, _POSITIONS, _NAMES, values)
    macros = {**map_macros(group, found.operands), "STORE_SIZE": size, "PAIRS": group.pairs}
    return Epilogue(group, found, text, macros)
